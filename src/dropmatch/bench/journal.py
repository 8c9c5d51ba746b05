"""A journal of finished work beside a results file, so that a run that is stopped goes on where it was.

One JSON object a line, flushed as it is written. The first line holds the settings: a journal of other settings is
refused. A last line cut short by a crash is dropped, since its work was not finished. One run at a time may write
to a journal.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dropmatch.bench.fields import NUMBER, Fields
from dropmatch.bench.results import parse_json
from dropmatch.errors import ConfigError, DataError


class Journal:
    """Entries of an unfinished run, in a file that is closed as the with block ends.

    entries: those of earlier runs and of this one, in order; left: when an earlier run wrote the last of its own, None
    without one."""

    def __init__(
        self, output: Path, settings: dict[str, Any], *, restart: bool = False, newer: Collection[str] = ()
    ) -> None:
        """Open the journal of a results file, or begin one. restart: throw an earlier one away; newer: settings that
        journals of older versions do not have, and that then fit.

        Raises ConfigError if it belongs to other settings, another run writes it now or it may not be read or written,
        DataError naming file and line if it is damaged.
        """
        self.path = output.with_name(output.name + ".journal")
        self.entries: list[dict[str, Any]] = []
        self.left: dt.datetime | None = None
        settings = json.loads(json.dumps(settings))  # as it reads back
        lock = self.path.with_name(self.path.name + ".lock")
        self._lock = FileLock(lock)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except OSError as error:  # Timeout is one too
            if not isinstance(error, Timeout) or not lock.exists():
                raise _unusable(lock, error) from error
            raise ConfigError(
                f"Another run is writing {self.path} now. Wait until it has ended, or name another --output."
            ) from None
        try:
            self._open(settings, output, restart=restart, newer=newer)
        except OSError as error:
            self._unlock()
            raise _unusable(self.path, error) from error
        except BaseException:
            self._unlock()
            raise

    def _open(self, settings: dict[str, Any], output: Path, *, restart: bool, newer: Collection[str]) -> None:
        if restart:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            head, self.entries, size = _read(self.path)
            if head is not None and (difference := describe_difference(head, settings, newer)):
                raise ConfigError(
                    f"{self.path} holds an unfinished run with other settings ({difference}). "
                    "Give the settings of that run, another --output, or --restart to throw it away."
                )
            if head is not None:
                if self.entries:
                    self.left = dt.datetime.fromtimestamp(self.path.stat().st_mtime, dt.UTC)
                os.truncate(self.path, size)
                self._file = self.path.open("a", encoding="utf-8")
                return
        self._file = self.path.open("w", encoding="utf-8")
        self._write(settings)

    def _unlock(self) -> None:
        with contextlib.suppress(PermissionError):  # Windows removes it itself, as the lock is let go
            Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self.entries:  # no work is lost, and other settings may come next
            self.path.unlink(missing_ok=True)
        self._unlock()

    def fields(self, number: int) -> Fields:
        """Checks of entry `number`, which name its line."""
        return Fields(f"{self.path}, line {number + 2}", "Remove this line, or give --restart to begin again.")

    def found(
        self, key: str, wanted: Mapping[str, Any], *, numbers: str = "", is_inner: bool = False
    ) -> list[dict[str, Any]]:
        """The entries that have a key, or with is_inner what stands under it. wanted: kinds of their own keys;
        numbers: one of these that holds numbers. Raises DataError naming the line of an entry that is not so."""
        found = []
        for number, entry in enumerate(self.entries):
            if key in entry:
                fields, value = self.fields(number), entry[key] if is_inner else entry
                fields.check(key if is_inner else "", value, wanted)
                if numbers:
                    fields.entries(f"{key}.{numbers}" if is_inner else numbers, value[numbers].values(), NUMBER)
                found.append(value)
        return found

    def say_taken_over(self, what: str) -> None:
        """Tell on standard error what this run takes over from an earlier one, if there was one. what: "12 answers"."""
        if self.left is not None:
            say_taken_over(self.path, f"left on {_minute(self.left)}", what)

    def add(self, entry: dict[str, Any]) -> None:
        """Keep an entry, on disk too."""
        self.entries.append(entry)
        self._write(entry)

    def remove(self) -> None:
        """The results file is written: the journal has done its work."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def _unusable(path: Path, error: OSError) -> ConfigError:
    why = f" ({error.strerror})" if error.strerror else ""
    return ConfigError(f"{path} cannot be read and written{why}. Make it yours or remove it, or name another --output.")


def _read(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
    """First line, the others, and how many bytes of whole lines there are."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        entry = parse_json(line, f"{path}, line {number}", "Remove the file to begin again.", has_nan=True)
        if not isinstance(entry, dict):
            raise DataError(f"{path}, line {number}: not a JSON object. Remove the file to begin again.")
        entries.append(entry)
    return (entries[0] if entries else None), entries[1:], sum(map(len, lines))


def say_taken_over(path: Path, state: str, what: str) -> None:
    """Tell on standard error what a run takes over from a file. state: how and when that was left."""
    print(f"Taken over from {path} ({state}): {what}.", file=sys.stderr, flush=True)


def _minute(time: dt.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any], newer: Collection[str] = ()) -> str:
    """Which settings differ and how, in words; empty if none does. newer: those that fit if the old ones lack them."""
    names = [
        name
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not (name in newer and name not in old)
    ]
    shown = [f"{name}: {_short(old.get(name))} then, {_short(new.get(name))} now" for name in names[:3]]
    return "; ".join(shown)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
