"""Results files: JSON, written whole or not at all, and read with faults in plain words."""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dropmatch.errors import ConfigError, DataError


def write_result(result: dict[str, Any], output: Path) -> None:
    """Write a results file under a temporary name and rename it. Folders are made as needed."""
    write_whole(json.dumps(result, indent=1, allow_nan=False) + "\n", output)


def write_whole(text: str, output: Path) -> None:
    """Write a text file under a temporary name and rename it. Folders are made as needed.

    Raises ConfigError where it cannot be written, as on a full disk; what was there before is then still there.
    """
    partial = output.with_name(output.name + ".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written ({error.strerror}). Make room, or name another place."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def with_lines(head: Mapping[str, Any], key: str, body: str) -> str:
    """JSON of an object whose last key holds body, which is JSON with one record a line: a large file then stays
    readable, and its diffs small."""
    return json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}") + f",\n {json.dumps(key)}: {body}\n}}\n"


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds. advice: what to do where it cannot be read, as a sentence. Raises DataError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {advice}") from error
    return parse_json(data, str(path), advice)


def parse_json(data: bytes, where: str, advice: str, *, has_nan: bool = False) -> Any:
    """The value of a JSON text. where: its file, perhaps with a line; has_nan: take NaN and infinity, which Python
    writes though JSON does not have them. Raises DataError."""
    cause: Exception
    try:
        _check_text(data)
        return json.loads(data.decode("utf-8"), parse_constant=None if has_nan else _refuse_constant)
    except UnicodeDecodeError as error:
        fault, cause = f"not UTF-8 text ({error.reason} at byte {error.start})", error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in error.doc.strip() else ""
        fault, cause = f"not JSON ({error.msg} at {line}column {error.colno})", error
    except (ValueError, RecursionError) as error:
        fault, cause = "nested too deep" if isinstance(error, RecursionError) else str(error), error
    raise DataError(f"{where}: {fault}. {advice}") from cause


def _check_text(data: bytes) -> None:
    """Raise ValueError for what json's own messages would not make plain."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("not UTF-8 text but UTF-16; save it as UTF-8")
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("begins with a byte-order mark; save it as UTF-8 without one (without BOM)")
    if b"\0" in data:
        raise ValueError("holds zero bytes, as a crash of the machine can leave them, or is no UTF-8 text")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON (it holds {name})")
