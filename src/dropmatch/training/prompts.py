"""Prompts to train on: JSON lines with `prompt` (or `turns`, of which the first is taken), plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dropmatch.bench.results import parse_json
from dropmatch.errors import DataError


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One user turn. id and task: as the file says, or the line's number and ''."""

    id: str
    task: str
    text: str


def read_prompts(paths: Sequence[Path], *, exclude_tasks: Iterable[str] = ()) -> list[TrainingPrompt]:
    """All prompts of the files in their order, each text once. Raises DataError naming file and line."""
    excluded = set(exclude_tasks)
    prompts = [prompt for path in paths for prompt in _read(path) if prompt.task not in excluded]
    if not prompts:
        raise DataError(f"No prompts were found in {', '.join(map(str, paths))} (tasks left out: {sorted(excluded)}).")
    unique: dict[str, TrainingPrompt] = {}
    for prompt in prompts:
        unique.setdefault(prompt.text, prompt)
    return list(unique.values())


def _read(path: Path) -> list[TrainingPrompt]:
    if not path.is_file():
        raise DataError(
            f"{path} {'is no file' if path.exists() else 'does not exist'}. Give a JSON-lines file, plain or as .gz."
        )
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    lines = raw.splitlines()
    return [_prompt(line, f"{path}, line {number}", number) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt(line: bytes, where: str, number: int) -> TrainingPrompt:
    record = parse_json(line, where, "Each line must be one JSON object.")
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object.")
    turns = record.get("turns")
    text = record.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: neither 'prompt' nor 'turns' holds any text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the prompt is no valid Unicode text ({error.reason}). Mend or remove it.") from error
    return TrainingPrompt(str(record.get("id", number)), str(record.get("task", "")), text)
