"""Pictures of how cost grows: time per token along each axis, with the floor under each way to decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropmatch.errors import ConfigError
from dropmatch.report.charts import FORMATS, Chart, require_matplotlib, write_chart
from dropmatch.report.palette import FAINT, INK, ORANGE, SKY, VERMILLION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_STYLES = {
    "plain": (INK, "s"),
    "lossless": (SKY, "o"),
    "dropmatch": (ORANGE, "D"),
    "dropmatch-paper": (VERMILLION, "^"),
}
_LABELS = {
    "context": "tokens of context",
    "vocabulary": "tokens of the vocabulary",
    "k": "K, dropout paths",
    "length": "draft length",
    "batch": "rows decoded together",
}


def scaling_charts(result: Mapping[str, Any]) -> list[Chart]:
    """One chart per axis that was measured."""
    charts = []
    for axis in result["settings"]["values"]:
        rows = [row for row in result["rows"] if row["axis"] == axis]
        if rows:
            words = "Solid: measured, with minimum and maximum over passes. Dotted: reading the weights alone."
            charts.append(Chart(f"scaling-{axis}", f"Time per token by {_LABELS[axis]}", words, _drawer(rows, axis)))
    return charts


def write_scaling_plots(result: Mapping[str, Any], folder: Path, forms: Sequence[str]) -> list[Path]:
    """Write each chart in each format (of FORMATS). Returns the files. Raises ConfigError for another format, where
    matplotlib is missing, or where they cannot be written."""
    require_matplotlib()
    check_forms(forms)
    contents = {
        folder / f"{chart.name}.{form}": write_chart(chart, form) for chart in scaling_charts(result) for form in forms
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"The pictures cannot be written to {folder} ({error.strerror}). Name another folder."
        ) from error
    return list(contents)


def check_forms(forms: Sequence[str]) -> None:
    """Raises ConfigError for a format that pictures cannot have."""
    unknown = [form for form in forms if form not in FORMATS]
    if unknown or not forms:
        raise ConfigError(f"Format {', '.join(unknown)!r} is not allowed. Give one or more of {', '.join(FORMATS)}.")


def _drawer(rows: Sequence[Row], axis: str) -> Any:
    return lambda: _draw(rows, axis)


def _draw(rows: Sequence[Row], axis: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        colour, marker = _STYLES[way]
        values, times = [row["value"] for row in mine], [row["ms_a_token"] for row in mine]
        spread = [
            [row["ms_a_token"] - row["ms_min"] for row in mine],
            [row["ms_max"] - row["ms_a_token"] for row in mine],
        ]
        axes.errorbar(values, times, yerr=spread, color=colour, marker=marker, markersize=4.5, linewidth=1.5, label=way)
        axes.plot(
            values, [row["floor_ms"] for row in mine],
            color=colour, linestyle=":", linewidth=1.5, label=f"{way}: floor",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["value"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_LABELS[axis])
    axes.set_ylabel("ms a token")
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, borderaxespad=0.2)
    return figure
