"""Tables of bench scaling: time per token along each axis, beside the floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dropmatch.bench.tables.markdown import Named, block, grid, machine, made_by, options, pair, part

AXES = {
    "context": "tokens of context",
    "vocabulary": "vocabulary",
    "k": "K",
    "length": "draft length",
    "batch": "batch",
}


def all_axes(named: Named) -> str:
    """Every axis in turn."""
    return "\n".join(axis(named, name) for name in part(named[0], "settings", named[1])["values"])


def axis(named: Named, name: str) -> str:
    """Time per token along one axis."""
    result, file = named
    settings = result["settings"]
    rows = [row for row in part(result, "rows", file) if row["axis"] == name]
    part({"rows": rows}, "rows", f"{file}, axis {name},")
    head = [AXES[name], "", "ms a token", "floor", "over the floor", "tau"]
    head += ["ms a step: draft", "target", "head and rule", "rest"]
    lines = [
        [
            f"{row['value']:,}",
            f"`{row['way']}`",
            f"{row['ms_a_token']:.1f} ({row['ms_min']:.1f}-{row['ms_max']:.1f})",
            f"{row['floor_ms']:.1f}",
            f"{row['over_floor']:.2f}",
            f"{row['tau']:.2f}",
            *(f"{row[f'{each}_ms_a_step']:.1f}" for each in ("draft", "target", "judge", "rest")),
        ]
        for row in rows
    ]
    base = ", ".join(f"{AXES[key]} {value}" for key, value in settings["base"].items() if key != name)
    left_out = [what for what in settings["left_out"] if f" at {name} " in what]
    missing = f" Left out, for lack of time: {', '.join(left_out)}." if left_out else ""
    shown = {**settings, "k": "as given"} if name == "k" else {**settings, "k": settings["base"]["k"]}
    return block(
        grid(head, lines, left=2),
        f"Decoding only, {settings['max_new_tokens']} tokens a row, median over passes (minimum-maximum); {base}. "
        "Floor: reading once the weights that a step needs, at the "
        f"{result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s measured in the same run. Pair: {pair(settings)}, "
        f"{options(shown)}; {machine(result)}.{missing} {made_by(result, file)}",
    )


FORMS: dict[str, Callable[[Named], str]] = {"": all_axes, **{name: partial(axis, name=name) for name in AXES}}
