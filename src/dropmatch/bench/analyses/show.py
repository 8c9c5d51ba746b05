"""The terminal as the analyses write to it."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDTH = 150  # of files and pipes, which tell none; wide enough that no table is cut


def console() -> Console:
    """Standard output, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)
