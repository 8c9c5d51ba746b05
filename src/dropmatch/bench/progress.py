"""Progress of a long run on standard error: a bar in a terminal, a line now and then elsewhere (logs, pipes)."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 30.0


class ProgressMeter:
    """Counts steps of one kind of work and estimates the time left. Use as a context manager.

    name: what is done; total: steps in all; done: steps that an earlier run left done, which the estimate ignores.
    """

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self._first = done
        self._is_terminal = sys.stderr.isatty()
        self._started = self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, note="")

    def __enter__(self) -> ProgressMeter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count steps that are done. note: a figure to show beside them, such as tokens per second."""
        self.done += steps
        self._bar.update(self._task, completed=self.done, note=note)
        now = time.monotonic()
        if not self._is_terminal and (now - self._printed >= _SECONDS_BETWEEN_LINES or self.done == self.total):
            self._printed = now
            print(self.line(now - self._started, note), file=sys.stderr, flush=True)

    def line(self, seconds: float, note: str = "") -> str:
        """The state as one line. seconds: since this run began."""
        fresh = self.done - self._first
        left = f", about {_duration(seconds / fresh * (self.total - self.done))} left" if fresh else ""
        extra = f", {note}" if note else ""
        return f"{self.name}: {self.done}/{self.total}{left if self.done < self.total else ''}{extra}"


def _duration(seconds: float) -> str:
    """ "40 s", "12 min" or "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
