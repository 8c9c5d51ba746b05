"""A journal of finished work beside a results file, so that a run that is stopped goes on where it was.

One JSON object a line, flushed as it is written. The first line holds the settings: a journal of other settings is
refused. A last line cut short by a crash is dropped, since its work was not finished.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dropmatch.errors import ConfigError, DataError


class Journal:
    """Entries of an unfinished run, in a file that is closed as the with block ends.

    entries: those of earlier runs and of this one, in order."""

    def __init__(self, output: Path, settings: dict[str, Any], *, restart: bool = False) -> None:
        """Open the journal of a results file, or begin one. restart: throw an earlier one away.

        Raises ConfigError if it belongs to other settings, DataError naming file and line if it cannot be read.
        """
        self.path = output.with_name(output.name + ".journal")
        self.entries: list[dict[str, Any]] = []
        settings = json.loads(json.dumps(settings))  # as it reads back
        output.parent.mkdir(parents=True, exist_ok=True)
        if restart:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            head, self.entries, size = _read(self.path)
            if head is not None and head != settings:
                raise ConfigError(
                    f"{self.path} holds an unfinished run with other settings ({_difference(head, settings)}). "
                    "Give the settings of that run, another --output, or --restart to throw it away."
                )
            if head is not None:
                os.truncate(self.path, size)
                self._file = self.path.open("a", encoding="utf-8")
                return
        self._file = self.path.open("w", encoding="utf-8")
        self._write(settings)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, entry: dict[str, Any]) -> None:
        """Keep an entry, on disk too."""
        self.entries.append(entry)
        self._write(entry)

    def remove(self) -> None:
        """The results file is written: the journal has done its work."""
        self._file.close()
        self.path.unlink()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def _read(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
    """First line, the others, and how many bytes of whole lines there are."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}). Remove the file to begin again.") from error
        if not isinstance(entry, dict):
            raise DataError(f"{path}, line {number}: not a JSON object. Remove the file to begin again.")
        entries.append(entry)
    return (entries[0] if entries else None), entries[1:], sum(map(len, lines))


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    shown = [f"{name}: {_short(old.get(name))} then, {_short(new.get(name))} now" for name in names[:3]]
    return "; ".join(shown)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
