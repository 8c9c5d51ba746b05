"""Pieces that all tables share: rows in Markdown, figures with intervals, and what a caption says of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dropmatch.errors import DataError

Result = Mapping[str, Any]
Named = tuple[Result, str]  # a results file's content, and its name in the document


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table. left: columns of words, in front of those of figures."""
    return [_row(head), _row(["---"] * left + ["---:"] * (len(head) - left)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def block(lines: Iterable[str], *caption: str) -> str:
    """A table and its caption, whose sentences make one paragraph."""
    return "\n".join([*lines, "", *caption]) + "\n"


def tau(row: Mapping[str, Any]) -> str:
    """tau with its interval over prompts."""
    return f"{row['tau']:.2f} ({row['tau_low']:.2f}-{row['tau_high']:.2f})"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent; empty where there is none."""
    return "" if value is None else f"{value:.{digits}%}"


def made_by(result: Result, name: str) -> str:
    """The last sentence of a caption: the command that made the file, and those it took answers over from."""
    provenance = result["provenance"]
    earlier = [f"`{run['command']}`" for run in provenance.get("earlier", []) if "command" in run]
    extended = f"\nwhich extended what came of\n{', '.join(earlier)}" if earlier else ""
    return f"From `{name}`, made by\n`{provenance['command']}`{extended}."


def machine(result: Result) -> str:
    """What it ran on: a GPU by its name, else the processor and its threads."""
    provenance = result["provenance"]
    device = provenance.get("device")
    where = f"{provenance.get('cpu')}, {provenance.get('num_threads')} threads" if device in (None, "cpu") else device
    return f"{where}, torch {provenance['torch']}"


def pair(settings: Mapping[str, Any]) -> str:
    """Models and dtype."""
    draft = settings.get("draft")
    return f"`{settings['target']}`{f' with `{draft}`' if draft else ''}, {settings['dtype'].removeprefix('torch.')}"


def options(settings: Mapping[str, Any]) -> str:
    """K, p_drop, and what is not as usual."""
    shown = [f"K={settings['k']}"] + ([f"p_drop={settings['p_drop']}"] if "p_drop" in settings else [])
    for key, default in (("heads", "shortlist"), ("draft_weights", "own"), ("min_confidence", 0.0)):
        if settings.get(key, default) not in (default, None):
            shown.append(f"{key}={settings[key]}")
    return ", ".join(shown)


def tokens_each(settings: Mapping[str, Any]) -> str:
    """The cap on an answer."""
    cap = settings.get("max_new_tokens")
    return "each task's own cap on tokens" if cap is None else f"at most {cap} tokens each"


def part(result: Result, key: str, name: str) -> Any:
    """A part of a results file. Raises DataError where it was not measured."""
    if not result.get(key):
        raise DataError(f"{name} has no {key!r}: that part was not measured. Run it, or take the table out.")
    return result[key]
