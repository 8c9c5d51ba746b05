"""Tasks of lm-evaluation-harness that read local JSON-lines files: their folder, and the functions that they name.

A task file says DATA_DIR where the folder of the data belongs, since `datasets` wants it absolute, and names functions
of a module `utils_local` beside it. `write_tasks` fills in the folder and writes that module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dropmatch.errors import ConfigError, DataError

PLACEHOLDER = "DATA_DIR"
FUNCTIONS = "utils_local"
_MODULE = '''"""Functions that the task files beside this one name. Written by `dropmatch lm-eval-tasks`."""

from pathlib import Path

from dropmatch.integrations.local_tasks import ifeval_docs, ifeval_inst_acc, ifeval_results, with_examples

__all__ = ["ifeval_docs", "ifeval_inst_acc", "ifeval_results", "mmlu_5shot"]
DATA_DIR = Path({folder!r})


def mmlu_5shot(doc):
    """The question behind the five solved ones of its subject."""
    return with_examples(doc, DATA_DIR / "mmlu_dev5.jsonl")
'''


def write_tasks(templates: Path, data: Path, output: Path) -> list[str]:
    """Copy task files to a folder with the data's place filled in. Returns their names.

    The module of functions is copied where the templates bring their own. Raises ConfigError if a folder is missing,
    holds no task files, or output is not empty."""
    missing = next((folder for folder in (templates, data) if not folder.is_dir()), None)
    if missing is not None:
        raise ConfigError(f"{missing} is no folder.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already and not empty. Name a new folder.")
    sources = sorted(templates.glob("*.yaml"))
    if not sources:
        raise ConfigError(f"{templates} holds no task files (*.yaml).")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output} cannot be made ({error.strerror}). Name a folder that is yours.") from error
    folder = str(data.resolve())
    for source in sources:
        (output / source.name).write_text(source.read_text("utf-8").replace(PLACEHOLDER, folder), encoding="utf-8")
    own = templates / f"{FUNCTIONS}.py"
    module = own.read_text("utf-8").replace(PLACEHOLDER, folder) if own.exists() else _MODULE.format(folder=folder)
    (output / own.name).write_text(module, encoding="utf-8")
    return [source.stem for source in sources]


def with_examples(doc: Mapping[str, Any], examples: Path) -> str:
    """A multiple-choice question behind solved ones of its own subject, under one heading.

    doc: with prompt, the heading in its first paragraph, and meta.subject; examples: file of the same shape with
    answers. Raises DataError if it has none of that subject."""
    subject = doc["meta"]["subject"]
    solved = _examples(examples).get(subject)
    if solved is None:
        raise DataError(f"{examples} has no examples of the subject {subject!r}.")
    heading, _, question = doc["prompt"].partition("\n\n")
    return "\n\n".join([heading, *solved, question])


@cache
def _examples(path: Path) -> dict[str, list[str]]:
    """Solved questions by subject, without their headings."""
    solved: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        question = record["prompt"].partition("\n\n")[2]
        solved.setdefault(record["meta"]["subject"], []).append(f"{question} {record['answer']}")
    return solved


def ifeval_docs(dataset: Any) -> Any:
    """Documents as lm-eval's own IFEval reads them: key, instructions and their arguments beside the prompt."""
    fields = ("key", "instruction_id_list", "kwargs")
    return dataset.map(lambda doc: {name: doc["meta"][name] for name in fields})


def ifeval_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """lm-eval's four IFEval metrics of one answer."""
    _need_sentence_data()
    from lm_eval.tasks.ifeval.utils import process_results

    return dict(process_results(doc, results))


def ifeval_inst_acc(items: Sequence[Sequence[bool]]) -> float:
    """Share of instructions followed, over all prompts."""
    flat = [followed for item in items for followed in item]
    return sum(flat) / len(flat)


@cache
def _need_sentence_data() -> None:
    """lm-eval's checks load NLTK's sentence splitter, and would fetch it from the network."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(
            "IFEval needs NLTK's punkt_tab data. Run `python -m nltk.downloader punkt_tab`, or point NLTK_DATA at a "
            "folder that has tokenizers/punkt_tab."
        ) from None
