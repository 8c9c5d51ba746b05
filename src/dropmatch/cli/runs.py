"""What commands that measure share: their options, reading prompts and lists of numbers, and how they stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dropmatch.cli.stopping import stop
from dropmatch.errors import ConfigError

if TYPE_CHECKING:
    from dropmatch.bench.tasks import Item

Data = Annotated[
    list[str],
    typer.Option(help="JSON-lines file of prompts, or a named source such as hub:OWNER/NAME/FILE; may be repeated."),
]
Num = Annotated[int | None, typer.Option(min=1, help="Prompts of each file. Left out: all.")]
Start = Annotated[int, typer.Option(min=0, help="Prompts to skip at the start of each file.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Results file.")]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Left out: the task's own cap.")
]
Batch = Annotated[int, typer.Option(min=1, help="Rows decoded together.")]
QualityBatch = Annotated[int, typer.Option(min=1, help="Rows decoded together while quality is measured.")]
SpeedItems = Annotated[int, typer.Option(min=0, help="Prompts of each task to time at batch 1 (0: no timing).")]
Repeats = Annotated[int, typer.Option(min=1, help="Timings of each prompt.")]
SpeedTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a timed answer.")]
Restart = Annotated[bool, typer.Option(help="Throw away what an unfinished run of this output left.")]


def load_prompts(sources: list[str], num: int | None, start: int) -> list[Item]:
    """Prompts of all files, each id once."""
    from dropmatch.bench.tasks import load_items

    items: dict[str, Item] = {}
    origin: dict[str, str] = {}
    for source in sources:
        for item in load_items(source, num, start=start):
            if item.id in items:
                raise ConfigError(
                    f"{source}: the id {item.id!r} is taken already ({origin[item.id]}). Give each file once, or "
                    "rename one of the two prompts."
                )
            items[item.id], origin[item.id] = item, source
    return list(items.values())


def parse_lengths(text: str, *, name: str = "--lengths") -> list[int]:
    """ "5,10" -> [5, 10], each once. name: the option, for the message."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{name}={text!r} is not allowed. Give whole numbers of at least 1, such as 5,10.")
    return list(dict.fromkeys(lengths))


def parse_rates(text: str, *, name: str = "--rates", example: str = "0.1,0.3") -> list[float]:
    """ "0.1,0.3" -> [0.1, 0.3], each once. name: the option, for the message."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0.0 <= rate < 1.0 for rate in rates):
        raise ConfigError(f"{name}={text!r} is not allowed. Give numbers in [0, 1) between commas, such as {example}.")
    return list(dict.fromkeys(rates))


def split_words(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"], each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def file_names(sources: list[str]) -> list[str]:
    """Files as results files name them, without their folders."""
    return [Path(source).name for source in sources]


def describe(target: str, draft: str | None, data: list[str], **others: object) -> dict[str, object]:
    """Settings that only the command line knows, for the results file."""
    return {"target": target, "draft": draft, "data": file_names(data), **others}


def check_writable(output: Path) -> None:
    """Raise before minutes of measuring, not after them."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        is_possible = not output.is_dir() and os.access(output.parent, os.W_OK)
    except OSError:
        is_possible = False
    if not is_possible:
        raise ConfigError(f"--output={str(output)!r} cannot be written. Name a file in a folder that is yours.")


@contextmanager
def stoppable(output: Path | None = None, *, resumes: bool = True, kept: str = "") -> Iterator[None]:
    """Ctrl-C ends the command with exit code 130 and says what is left.

    output: the file that is then missing; kept: what is not lost, as a sentence.
    """
    try:
        yield
    except KeyboardInterrupt:
        advice = "Give the same command again to go on" if resumes else ""
        missing = "" if output is None else f"{output} is not written yet"
        rest = "; ".join(part for part in (advice, missing) if part)
        stop(" ".join(part for part in ("Stopped.", kept, f"{rest}." if rest else "") if part))


def say_written(output: Path) -> None:
    typer.secho(f"Written to {output}.", err=True)
