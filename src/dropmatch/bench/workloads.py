"""Prompts for benchmarks, from JSON-lines files of one schema: id, task, prompt (or turns), answer, tests, meta."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dropmatch.errors import DataError


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a workload, as the chat template's user turn takes it."""

    id: str
    task: str
    prompt: str


_WORDING = {
    "humaneval": "Complete this Python function. Answer with the whole function in a code block.\n\n```python\n{}```",
    "gsm8k": "{}\nThink step by step, and give the answer as a number on the last line.",
}


def load_prompts(path: Path, count: int) -> list[Item]:
    """The first count items of a file. Raises DataError naming file and line."""
    if count == 0:
        return []
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the folder that holds it with --data.")
    items: list[Item] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if len(items) == count:
                break
            items.append(_item(line, f"{path}, line {number}"))
    if len(items) < count:
        raise DataError(f"{path} has {len(items)} items, and {count} were asked for.")
    return items


def _item(line: bytes, where: str) -> Item:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}). Each line must be one JSON object.") from error
    missing = [
        key for key in ("id", "task", "prompt") if not isinstance(record, dict) or not isinstance(record.get(key), str)
    ]
    if missing:
        raise DataError(f"{where}: the field {missing[0]!r} is missing or not a string.")
    wording = _WORDING.get(record["task"], "{}")
    return Item(record["id"], record["task"], wording.replace("{}", record["prompt"]))
