"""Items from files: JSON lines of one schema, or of a shape that shapes.py brings into it.

The schema: id, task, and either prompt or turns; answer, tests, entry_point and meta where the task has them.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dropmatch.bench.results import parse_json
from dropmatch.bench.tasks.item import Item
from dropmatch.bench.tasks.registry import TASKS, Kind
from dropmatch.bench.tasks.shapes import to_schema
from dropmatch.bench.tasks.sources import find_files
from dropmatch.errors import ConfigError, DataError, UnknownNameError

_TYPE_NAMES = {str: "a string", list: "a list", dict: "an object"}


def load_items(source: str | Path, count: int | None = None, *, start: int = 0, task: str | None = None) -> list[Item]:
    """The items of a file from item `start` on: `count` of them, or all.

    source: a .jsonl, .jsonl.gz, .json (a list) or .parquet file, or a name of sources.py; task: for questions in
    FastChat's form whose category does not tell, also in front of the source, "alpaca:question.jsonl".
    Raises DataError naming file and line.
    """
    prefix, colon, rest = str(source).partition(":")
    if task is None and colon and prefix in (*TASKS, "spec_bench"):
        source, task = rest, prefix
    if start < 0 or (count is not None and count < 0):
        raise ConfigError(f"count={count}, start={start} is not allowed. Neither may be negative.")
    if task is not None and task != "spec_bench" and task not in TASKS:
        raise UnknownNameError("task", task, [*TASKS, "spec_bench"])
    if count == 0:
        return []
    items: list[Item] = []
    places: dict[str, str] = {}
    files = find_files(source)
    for where, record in (pair for path in files for pair in _readable(path)):
        item = _item(record, where, len(items), task)
        if item.id in places:
            raise DataError(f"{where}: the id {item.id!r} is taken already ({places[item.id]}).")
        places[item.id] = where
        items.append(item)
        if count is not None and len(items) == start + count:
            break
    if not items:
        raise DataError(f"{files[0]} has no items. It should hold one JSON object a line.")
    wanted = start + (1 if count is None else count)
    if len(items) < wanted:
        asked = f"{wanted} were asked for" if start == 0 else f"those from {start} on, up to {wanted}, were asked for"
        raise DataError(f"{files[0]} has {len(items)} items, and {asked}.")
    return items[start:]


def _readable(path: Path) -> Iterator[tuple[str, object]]:
    """`_records`, with a DataError where the file may not be read."""
    try:
        yield from _records(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). Give a file that you may read.") from error


def _records(path: Path) -> Iterator[tuple[str, object]]:
    """Where each record stands, for people, and what it holds."""
    if path.suffix == ".parquet":
        for number, row in enumerate(_parquet_rows(path), start=1):
            yield f"{path}, row {number}", row
    elif path.suffix == ".json":
        whole = parse_json(path.read_bytes(), str(path), "The file must be one JSON list.", has_nan=True)
        if not isinstance(whole, list):
            raise DataError(f"{path}: not a JSON list.")
        for number, entry in enumerate(whole, start=1):
            yield f"{path}, entry {number}", entry
    else:
        with _opened(path) as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield where, parse_json(line, where, "Each line must be one JSON object.", has_nan=True)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DataError(f"{path}: not a whole gzip file ({error}).") from error


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _parquet_rows(path: Path) -> list[object]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ConfigError(f"Reading {path} needs pyarrow. Install it with `pip install dropmatch[eval]`.") from error
    try:
        rows: list[object] = read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({error}).") from error
    return rows


def _item(given: object, where: str, number: int, asked_task: str | None) -> Item:
    if not isinstance(given, dict):
        raise DataError(f"{where}: the field 'id' is missing: this is no JSON object.")
    try:
        record = to_schema(given, number, asked_task)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{where}: a field is missing or of another kind than it should be ({error}).") from error
    if record is None:
        _require(given, "id", str, where)
        _require(given, "task", str, where)
        raise AssertionError("to_schema takes what has an id and a task")
    for key in ("id", "task"):
        _require(record, key, str, where)
    if record["task"] not in TASKS:
        raise DataError(f"{where}: {UnknownNameError('task', record['task'], TASKS)}")
    if asked_task is not None and record["task"] != asked_task and record["task"].split("/")[0] != asked_task:
        raise DataError(f"{where}: an item of {record['task']!r}, and {asked_task!r} was asked for.")
    task = TASKS[record["task"]]
    _check_turns(record, where)
    for key, kind in task.fields.items():
        _require(record, key, kind, where)
    if (fault := task.fault(record)) is not None:
        raise DataError(f"{where}: {fault}.")
    try:
        turns = task.word(record)
    except TypeError as error:  # a list of something else than strings
        raise DataError(f"{where}: a field holds something else than it should ({error}).") from error
    try:
        "".join([record["id"], *turns]).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{where}: the text holds {half!r}, half of a character. Write it whole, or in UTF-8."
        ) from None
    return Item(record["id"], record["task"], turns, record, task.stop, task.max_new_tokens)


def _check_turns(record: Mapping[str, Any], where: str) -> None:
    if "turns" not in record:
        _require(record, "prompt", str, where)
        return
    _require(record, "turns", list, where)
    if not record["turns"] or not all(isinstance(turn, str) for turn in record["turns"]):
        raise DataError(f"{where}: the field 'turns' must be a list of at least one string.")
    if "prompt" in record:
        raise DataError(f"{where}: both 'prompt' and 'turns' are given. Keep one of them.")


def _require(record: Mapping[str, Any], name: str, kind: Kind, where: str) -> None:
    """name: a field, or field.field of an inner object."""
    value: Any = record
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, kind):
        raise DataError(f"{where}: the field {name!r} is missing or not {_TYPE_NAMES[kind]}.")
