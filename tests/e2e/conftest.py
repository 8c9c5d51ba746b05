"""The command line for all tests from the outside."""

from __future__ import annotations

import pytest

from commands import Command, runner


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `dropmatch ARGUMENTS` in this process."""
    return runner(monkeypatch, capsys)
