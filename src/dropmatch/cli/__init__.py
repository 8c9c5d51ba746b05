"""The command line; commands.py lists the commands. This module imports nothing but how commands stop, so that Ctrl-C
is answered in a line from the first moment on."""

from __future__ import annotations

from dropmatch.cli.stopping import Stopped, is_interrupt, stop


def main() -> None:
    """Run the command line; see `commands.run`. Ctrl-C ends it with one line and exit code 130, whatever it is at."""
    try:
        from dropmatch.cli.commands import run

        run()
    except Stopped:
        raise
    except BaseException as error:
        if not is_interrupt(error):
            raise
        stop("Stopped.")
