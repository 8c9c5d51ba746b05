"""The side of a peer's process that asks. Knows the lines that go to and fro, and no peer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dropmatch.errors import DropMatchError

CHILD = Path(__file__).with_name("child.py")
_SHOWN = 500  # characters of a peer's own messages that an error shows


class PeerError(DropMatchError):
    """A peer that failed, ended or did not answer in time."""


class PeerProcess:
    """A peer with the pair loaded, in a process of its own. Use as a context manager."""

    def __init__(self, name: str, command: Sequence[str], settings: Mapping[str, Any], *, timeout: float) -> None:
        """Start and load. command: the child's; settings: see `child`; timeout: seconds for any one answer.

        Raises PeerError, with what the peer said, if it cannot load."""
        self.name = name
        self.versions: dict[str, str] = {}
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed as the process ends
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8"
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{name} could not be started ({error}).") from error
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.versions = self._ask(settings, "versions")["versions"]
        except BaseException:
            self.close()
            raise

    def generate(self, ids: Sequence[int], max_new_tokens: int, length: int | None) -> list[int]:
        """New token ids. Raises PeerError, also where their number is not what was asked for: speeds could not be
        compared."""
        tokens = self._ask({"ids": list(ids), "max_new_tokens": max_new_tokens, "length": length}, "tokens")["tokens"]
        if not isinstance(tokens, list) or len(tokens) != max_new_tokens:
            count = len(tokens) if isinstance(tokens, list) else "no"
            raise PeerError(f"{self.name} gave {count} tokens, and {max_new_tokens} were asked for.")
        return tokens

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")  # no more will come

    def _ask(self, request: Mapping[str, Any], field: str) -> dict[str, Any]:
        """The answer to a request, which must have a field. Raises PeerError."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: its answer, or its end, says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"{self.name} gave no answer within {self._timeout:g} seconds.") from None
        if not line:
            raise PeerError(f"{self.name} ended without an answer. {self._said()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and "error" in answer:
            raise PeerError(f"{self.name} failed: {str(answer['error'])[:_SHOWN]}")
        if not isinstance(answer, dict) or field not in answer:
            raise PeerError(f"{self.name} gave {line[:_SHOWN]!r} in place of an answer.")
        return answer

    def _said(self) -> str:
        """The end of what it wrote to standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _SHOWN))
        text = self._errors.read().decode("utf-8", "replace").strip()
        return f"Its last words: {text}" if text else "It said nothing."
