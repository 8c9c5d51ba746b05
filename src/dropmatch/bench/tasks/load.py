"""Items from files: JSON lines of one schema.

Fields: id, task, and either prompt or turns; answer, tests, entry_point and meta where the task has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dropmatch.bench.tasks.item import Item
from dropmatch.bench.tasks.registry import TASKS
from dropmatch.errors import DataError, UnknownNameError

_TYPE_NAMES = {str: "a string", list: "a list", dict: "an object", int: "a whole number"}


def load_items(source: str | Path, count: int | None = None, *, start: int = 0) -> list[Item]:
    """The items of a file from item `start` on: `count` of them, or all. Raises DataError naming file and line."""
    if count == 0:
        return []
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the folder that holds it with --data.")
    items: list[Item] = []
    lines: dict[str, int] = {}
    for number, record in _records(path):
        if count is not None and len(items) == start + count:
            break
        item = _item(record, f"{path}, line {number}")
        if item.id in lines:
            raise DataError(f"{path}, line {number}: the id {item.id!r} stands in line {lines[item.id]} too.")
        lines[item.id] = number
        items.append(item)
    if not items:
        raise DataError(f"{path} has no items. It should hold one JSON object a line.")
    wanted = start + (1 if count is None else count)
    if len(items) < wanted:
        asked = f"{wanted} were asked for" if start == 0 else f"those from number {start} up to {wanted} were asked for"
        raise DataError(f"{path} has {len(items)} items, and {asked}.")
    return items[start:]


def _records(path: Path) -> Iterator[tuple[int, object]]:
    """Line numbers from 1 and what the lines hold. Blank lines are passed over."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parsed(line, f"{path}, line {number}")


def _parsed(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}). Each line must be one JSON object.") from error


def _item(record: object, where: str) -> Item:
    if not isinstance(record, dict):
        raise DataError(f"{where}: the field 'id' is missing: this is no JSON object.")
    for key in ("id", "task"):
        _require(record, key, str, where)
    if record["task"] not in TASKS:
        raise DataError(f"{where}: {UnknownNameError('task', record['task'], TASKS)}")
    task = TASKS[record["task"]]
    if "turns" not in record:
        _require(record, "prompt", str, where)
    else:
        _require(record, "turns", list, where)
        if not record["turns"] or not all(isinstance(turn, str) for turn in record["turns"]):
            raise DataError(f"{where}: the field 'turns' must be a list of at least one string.")
        if "prompt" in record:
            raise DataError(f"{where}: both 'prompt' and 'turns' are given. Keep one of them.")
    for key, kind in task.fields.items():
        _require(record, key, kind, where)
    return Item(record["id"], record["task"], task.word(record), record, task.stop, task.max_new_tokens)


def _require(record: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> None:
    """name: a field, or field.field of an inner object."""
    value: Any = record
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(_TYPE_NAMES[one].removeprefix("a ").removeprefix("an ") for one in kinds)
        article = "an" if names.startswith("o") else "a"
        raise DataError(f"{where}: the field {name!r} is missing or not {article} {names}.")
