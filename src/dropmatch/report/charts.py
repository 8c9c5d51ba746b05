"""The pictures of a report, drawn by matplotlib: for the page as SVG whose colours follow it, for files as they are."""

from __future__ import annotations

import html
import io
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dropmatch.bench.arms import PLAIN
from dropmatch.bench.intervals import is_on_front, median_interval, ratio_interval
from dropmatch.bench.summary import speed_ratios
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError
from dropmatch.report.palette import FAINT, GREY, INK, LINES, MARKERS, SERIES, STYLES, SURFACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
MOST_POINTS = 500  # of one scatter; more cannot be told apart and would make the page heavy
_WIDTH = 4.1  # inches; text stays legible where a phone shows the picture
_LEGEND_ROW = 0.17
_LEGEND_WIDTH = 40  # characters
Row = Mapping[str, Any]
_Bar = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True, slots=True)
class Judged:
    """A drafted token that the heads were asked about. index: its place in the answer, -1 if it was not kept; js and
    radius in nats; prob: the target's undropped probability of it."""

    item: str
    index: int
    js: float
    radius: float
    reason: Reason
    prob: float | None


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture. name: of its file; title and words: for the page; points: of a scatter, in the order drawn."""

    name: str
    title: str
    words: str
    draw: Callable[[], Figure]
    points: tuple[Judged, ...] = ()


def require_matplotlib() -> None:
    """Raise ConfigError where it is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise ConfigError("A report needs matplotlib: pip install 'dropmatch[report]'.") from error


def count(number: int, name: str) -> str:
    """3 prompts, 1 prompt."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def task_charts(result: Mapping[str, Any], task: str) -> list[Chart]:
    """Quality against tau and speed, and acceptance by position, of one task's rows."""
    rows = [row for row in result["summary"] if row["task"] == task]
    graded = all(row["accuracy"] is not None for row in rows)
    quality = "Accuracy" if graded else "Log-probability"
    bars = {row["arm"]: _quality(result, row, graded) for row in rows}
    have = [row for row in rows if bars[row["arm"]] is not None]
    speeds = {row["arm"]: speed for row in have if (speed := _speed(result, row)) is not None}
    timed = [row for row in have if row["arm"] in speeds]
    arms = [row["arm"] for row in rows]
    charts = []
    front = "Filled: no rule here beats it in both figures."
    by = "" if not timed else f"those of speed by bootstrap over {count(len(_timed_of(result, task)), 'timed prompt')}"
    if have:
        charts.append(
            Chart(
                "quality-tau",
                f"{quality} against tau",
                f"Bars: 95% intervals. {front}",
                lambda: _trade(have, arms, bars, _taus(have), "tau", quality),
            )
        )
    if timed:
        charts.append(
            Chart(
                "quality-speed",
                f"{quality} against speed",
                f"Bars: 95% intervals, {by}. {front}",
                lambda: _trade(timed, arms, bars, speeds, "speed over plain decoding", quality),
            )
        )
    drafted = [row for row in rows if row["acceptance_by_position"]]
    if drafted:
        charts.append(
            Chart(
                "acceptance",
                "Acceptance by position",
                "Share of rounds with a draft of that length in which its token at each place was kept.",
                lambda: _acceptance(drafted, arms),
            )
        )
    return charts


def radius_charts(result: Mapping[str, Any]) -> list[tuple[str, Chart]]:
    """Divergence against radius for each rule that asked the heads, with its name."""
    charts = []
    for arm, entry in result["arms"].items():
        points = [
            Judged(item, index, js, radius, Reason(reason), prob)
            for item, record in entry["items"].items()
            for index, js, radius, reason, prob, *_ in record["judged"]
            if js is not None and radius is not None
        ]
        if points:
            shown = random.Random(0).sample(points, MOST_POINTS) if len(points) > MOST_POINTS else points
            share = "" if shown is points else f" {MOST_POINTS} of {len(points):,} drawn at random."
            shown = sorted(shown, key=lambda point: (point.reason != Reason.REJECTED, point.reason, point.radius))
            words = (
                "One point for each drafted token that the heads were asked about, by the rule's verdict, also behind "
                f"a rejection. On or under the line, Eq. 6 would keep it. Square-root axes.{share}"
            )
            charts.append((arm, Chart("js-radius", arm, words, _scatter_of(shown), tuple(shown))))
    return charts


def _scatter_of(points: Sequence[Judged]) -> Callable[[], Figure]:
    return lambda: _scatter(points)


# -- drawing --------------------------------------------------------------------------------------------------------


def _figure(legend: int = 0) -> tuple[Figure, Axes]:
    """A figure with room for a legend of so many lines below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 2.9 + _LEGEND_ROW * legend), layout="constrained")
    return figure, figure.add_subplot()


def _style(arms: Sequence[str], arm: str, rule: str) -> tuple[str, str, str]:
    """Colour, marker and line of a rule; the same in every picture of a report."""
    if rule in ("plain", "lossless"):
        return (
            INK,
            "s" if rule == "plain" else "o",
            LINES[sum(1 for a in arms[: arms.index(arm)] if "lossless" in a) % 4],
        )
    i = arms.index(arm)
    return SERIES[i % len(SERIES)], MARKERS[(i + i // len(SERIES)) % len(MARKERS)], LINES[i // len(SERIES) % len(LINES)]


def _quality(result: Mapping[str, Any], row: Row, graded: bool) -> _Bar | None:
    """Value, low and high: accuracy in per cent, or the mean log-probability in nats a token."""
    if graded:
        return 100 * row["accuracy"], 100 * row["accuracy_low"], 100 * row["accuracy_high"]
    if row["logprob_mean"] is None:
        return None
    items = [
        record["logprobs"]
        for item, record in result["arms"][row["arm"]]["items"].items()
        if row["task"] in ("all", result["prompts"][item]["task"]) and record["logprobs"]
    ]
    low, high = ratio_interval([sum(x) for x in items], [len(x) for x in items])
    return row["logprob_mean"], low, high


def _taus(rows: Sequence[Row]) -> dict[str, _Bar]:
    return {row["arm"]: (row["tau"], row["tau_low"], row["tau_high"]) for row in rows}


def _speed(result: Mapping[str, Any], row: Row) -> _Bar | None:
    """Median speed over plain decoding with its interval over prompts, where it was timed."""
    speed = result["speed"]
    if row["over_plain"] is None or speed is None or not {row["arm"], PLAIN} <= speed["arms"].keys():
        return None
    timed = _timed_of(result, row["task"])
    if not timed:
        return None
    return row["over_plain"]["median"], *median_interval(speed_ratios(speed, row["arm"], PLAIN, timed))


def _timed_of(result: Mapping[str, Any], task: str) -> list[str]:
    return [item for item in result["speed"]["items"] if task in ("all", result["prompts"][item]["task"])]


def _trade(
    rows: Sequence[Row],
    arms: Sequence[str],
    bars: Mapping[str, _Bar | None],
    along: Mapping[str, _Bar],
    name: str,
    quality: str,
) -> Figure:
    """Quality against a figure of speed, with the front of rules that none beats in both."""
    figure, axes = _figure(_legend_lines(rows))
    points = [(along[row["arm"]], bars[row["arm"]] or (0.0, 0.0, 0.0)) for row in rows]
    marks = is_on_front([(x[0], y[0]) for x, y in points])
    front = sorted((x[0], y[0]) for (x, y), mark in zip(points, marks, strict=True) if mark)
    axes.plot([x for x, _ in front], [y for _, y in front], color=GREY, linewidth=1, linestyle="--", zorder=1)
    for row, (x, y), mark in zip(rows, points, marks, strict=True):
        colour, marker, _ = _style(arms, row["arm"], row["rule"])
        axes.errorbar(
            x[0], y[0],
            xerr=[[max(0.0, x[0] - x[1])], [max(0.0, x[2] - x[0])]],
            yerr=[[max(0.0, y[0] - y[1])], [max(0.0, y[2] - y[0])]],
            color=colour, marker=marker, markersize=7, linestyle="", elinewidth=1, markeredgewidth=1.5,
            markerfacecolor=colour if mark else SURFACE, label=_wrapped(row["arm"]),
        )  # fmt: skip
    axes.set_xlabel(name)
    axes.set_ylabel("accuracy, %" if quality == "Accuracy" else "log-probability, nats a token")
    _finish(figure, axes, _columns(rows))
    return figure


def _acceptance(rows: Sequence[Row], arms: Sequence[str]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(_legend_lines(rows))
    for row in rows:
        colour, marker, line = _style(arms, row["arm"], row["rule"])
        shares = [100 * share for share in row["acceptance_by_position"]]
        axes.plot(
            range(1, len(shares) + 1), shares,
            color=colour, marker=marker, linestyle=line, markersize=4.5, linewidth=1.5, label=_wrapped(row["arm"]),
        )  # fmt: skip
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("kept, %")
    axes.set_ylim(0, 103)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, _columns(rows))
    return figure


def _scatter(points: Sequence[Judged]) -> Figure:
    """Divergence (upward) against radius, both in nats, on square-root axes that show small values too. points: by
    reason."""
    import numpy as np

    reasons = list(dict.fromkeys(point.reason for point in points))
    labels = [f"{STYLES[reason].label} ({sum(point.reason == reason for point in points)})" for reason in reasons]
    columns = 3 if max(map(len, labels)) <= 14 else 2
    figure, axes = _figure(-(-len(reasons) // columns))
    most = max(max(point.radius, point.js) for point in points) * 1.08 or 1.0
    axes.plot([0, most], [0, most], color=GREY, linewidth=1, linestyle="--", zorder=1)
    for reason, legend in zip(reasons, labels, strict=True):
        mine = [point for point in points if point.reason == reason]
        is_kept = reason != Reason.REJECTED
        axes.plot(
            [point.radius for point in mine], [point.js for point in mine], gid=f"points-{int(reason)}",
            color=STYLES[reason].colour, marker=STYLES[reason].marker, markersize=4 if is_kept else 3.5,
            linestyle="", markeredgewidth=0 if is_kept else 0.9, alpha=0.75,
            label=legend,
        )  # fmt: skip
    for axis, label, limit in (
        ("x", "radius, nats", axes.set_xlim),
        ("y", "JS of draft and heads, nats", axes.set_ylim),
    ):
        set_scale = axes.set_xscale if axis == "x" else axes.set_yscale
        set_scale("function", functions=(lambda v: np.sqrt(np.maximum(v, 0)), np.square))
        limit(0, most)
        (axes.set_xlabel if axis == "x" else axes.set_ylabel)(label)
    ticks = [tick for tick in (0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6) if tick <= most]
    ticks = [tick for i, tick in enumerate(ticks) if i == 0 or (tick / most) ** 0.5 > 0.08 * i]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    _finish(figure, axes, columns)
    return figure


def _columns(rows: Sequence[Row]) -> int:
    return 2 if max(len(row["arm"]) for row in rows) <= 23 else 1


def _legend_lines(rows: Sequence[Row]) -> int:
    return -(-sum(_wrapped(row["arm"]).count("\n") + 1 for row in rows) // _columns(rows))


def _wrapped(name: str) -> str:
    """A rule's name in lines that a legend holds, broken before a setting or a joined rule."""
    lines = [""]
    for part in re.findall(rf".[^@+ ,]{{0,{_LEGEND_WIDTH - 1}}}", name, re.S):
        if lines[-1] and len(lines[-1] + part) > _LEGEND_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _finish(figure: Figure, axes: Axes, columns: int) -> None:
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, borderaxespad=0.2)


# -- writing --------------------------------------------------------------------------------------------------------


def _settings() -> AbstractContextManager[None]:
    import matplotlib as mpl

    context: AbstractContextManager[None] = mpl.rc_context(
        {
            "svg.fonttype": "none",  # text stays text: it can be searched, and is smaller
            "svg.hashsalt": "dropmatch",  # ids that do not change from run to run
            "text.parse_math": False,  # a dollar in a name is a dollar
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "legend.fontsize": 8.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
            "axes.facecolor": "none",
        }
    )
    return context


def write_chart(chart: Chart, form: str) -> bytes:
    """A chart as the content of a file. form: one of FORMATS."""
    buffer = io.BytesIO()
    with _settings():
        when = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
        chart.draw().savefig(buffer, format=form, dpi=200, facecolor=SURFACE, metadata=when)
    return buffer.getvalue()


def inline_svg(chart: Chart, name: str) -> str:
    """A chart as an <svg> element for a page: the page's own colours and font, and ids that start with a name."""
    buffer = io.StringIO()
    with _settings():
        chart.draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    svg = re.sub(r'(id="|href="#|url\(#)', lambda found: f"{found[0]}{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", svg)
    for colour, variable in ((INK, "ink"), (FAINT, "line"), (SURFACE, "surface")):
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(chart.title)}" ', 1)
