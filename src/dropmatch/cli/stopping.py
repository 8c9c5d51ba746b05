"""How a command stops at Ctrl-C. Imports next to nothing: it is there before anything else is."""

from __future__ import annotations

import sys
from typing import NoReturn

EXIT_CODE = 130  # as shells have it: 128 and the number of SIGINT


class Stopped(SystemExit):
    """A command that Ctrl-C ended, and that has said so."""


def stop(text: str) -> NoReturn:
    """Say what is left and end the command."""
    print(f"\n{text}", file=sys.stderr, flush=True)
    raise Stopped(EXIT_CODE) from None


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C lies behind an error: a module that is interrupted as it is imported may raise one of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
