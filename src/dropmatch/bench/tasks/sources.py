"""Where a named source has its files: on disk, or on the Hugging Face hub.

humaneval_plus      the file that $HUMANEVAL_OVERRIDE_PATH names, as for EvalPlus
komt_bench          LGAI-EXAONE/KoMT-Bench on the hub
livecodebench       the shards of release_v5 of livecodebench/code_generation_lite on the hub
hub:OWNER/NAME/FILE any file of a data set on the hub
"""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dropmatch.errors import ConfigError, DataError

PLUS_VARIABLE = "HUMANEVAL_OVERRIDE_PATH"
_ON_HUB = {
    "komt_bench": ("LGAI-EXAONE/KoMT-Bench", ("raw/question_ko.jsonl",)),
    "livecodebench": (
        "livecodebench/code_generation_lite",
        ("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl"),
    ),
}


def find_files(source: str | Path) -> list[Path]:
    """The files of a path or a named source, downloaded where they must be.

    Raises DataError if there is no such file or the hub cannot be reached, ConfigError if a variable is not set.
    """
    name = str(source)
    if name == "humaneval_plus":
        if not (path := os.environ.get(PLUS_VARIABLE)):
            raise ConfigError(
                f"The source humaneval_plus needs ${PLUS_VARIABLE}: set it to your HumanEvalPlus.jsonl or .jsonl.gz, "
                "which EvalPlus publishes, or give the path of that file."
            )
        return [_existing(Path(path))]
    if name in _ON_HUB and not Path(name).exists():
        repository, files = _ON_HUB[name]
        return [_from_hub(repository, file) for file in files]
    if name.startswith("hub:"):
        parts = name.removeprefix("hub:").split("/", 2)
        if len(parts) < 3:
            raise ConfigError(f"{name!r} names no file of the hub. Give hub:OWNER/NAME/FILE.")
        return [_from_hub(f"{parts[0]}/{parts[1]}", parts[2])]
    return [_existing(Path(source))]


def _existing(path: Path) -> Path:
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Give a file that you may read.") from error
    if not is_file:
        what = "is no file" if exists else "does not exist"
        raise DataError(
            f"{path} {what}. Give a file of items, {', '.join(['humaneval_plus', *_ON_HUB])} or hub:OWNER/NAME/FILE."
        )
    return path


def _from_hub(repository: str, file: str) -> Path:
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise DataError(
            f"{file} of the data set {repository} is neither in the local hub cache nor to be had from the hub "
            f"({type(error).__name__}). Download the file and give its path."
        ) from error
