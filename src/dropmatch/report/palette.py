"""Colours and words of a report.

The colours start from Okabe and Ito's, which most colour-blind readers can tell apart; the light ones are darker here,
so that each has a contrast of 3 or more on the light and on the dark page. No meaning rests on colour alone: markers,
lines and underlines differ too.
"""

from __future__ import annotations

from dataclasses import dataclass

from dropmatch.core.reasons import Reason

INK, FAINT, SURFACE = "#1d2329", "#d5dae0", "#fdfdfe"
"""Text and axes, grid, background. A page puts its own colours in their place."""
GREY, ORANGE, SKY, GREEN = "#87909a", "#c58100", "#2a97cf", "#009e73"
OLIVE, BLUE, VERMILLION, PURPLE = "#9a8c1e", "#4f74e0", "#d55e00", "#c5639b"

SERIES = (ORANGE, SKY, GREEN, VERMILLION, PURPLE, BLUE, OLIVE)
MARKERS = "osD^vPX"
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class ReasonStyle:
    """How a reason looks and what it means. line, marker: CSS style of the underline of its tokens, and matplotlib's
    marker of its points, so that colour is not alone."""

    label: str
    words: str
    colour: str
    line: str = "solid"
    marker: str = "o"


STYLES: dict[Reason, ReasonStyle] = {
    Reason.REJECTED: ReasonStyle("rejected", "not kept", GREY, "dotted", "x"),
    Reason.EXACT: ReasonStyle("exact", "the target's own token", GREY),
    Reason.RATIO: ReasonStyle("ratio", "kept by lossless sampling", GREY, "dashed"),
    Reason.JS: ReasonStyle("js", "within the heads' radius (Eq. 6)", ORANGE),
    Reason.MAJORITY: ReasonStyle("majority", "the heads' most frequent token (Eq. 7)", BLUE, "solid", "^"),
    Reason.HEAD: ReasonStyle("head", "given by one of the heads (Eq. 4)", PURPLE, "solid", "D"),
    Reason.BONUS: ReasonStyle("bonus", "the target's, after a fully kept draft", SKY),
    Reason.RECOVERED: ReasonStyle("recovered", "the target's, after a rejection", SKY, "dashed"),
    Reason.EXPECTED_JS: ReasonStyle("expected-js", "Eq. 6 in closed form", ORANGE, "dashed"),
    Reason.EXPECTED_MAJORITY: ReasonStyle("expected-majority", "Eq. 7 in closed form", BLUE, "dashed", "^"),
    Reason.EXPECTED_HEAD: ReasonStyle("expected-head", "Eq. 4 in closed form", PURPLE, "dashed", "D"),
    Reason.JUDGE: ReasonStyle("judge", "a trained head finds it harmless", GREEN, "double", "s"),
}
for _reason in Reason:  # rules of other papers: one answer holds one or two of them, so one colour will do
    _name = _reason.label.replace("_", "-")
    STYLES.setdefault(_reason, ReasonStyle(_name, f"kept by {_name}", VERMILLION, "solid", "v"))
