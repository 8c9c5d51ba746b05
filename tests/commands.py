"""The command line run in this process, and what it left behind."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dropmatch.cli import main


class Done(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output as one strict JSON object."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


Command = Callable[..., Done]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `dropmatch ARGUMENTS` in this process."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main sets its own

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["dropmatch", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        shown = capsys.readouterr()
        return Done(code, shown.out, shown.err)

    return run
