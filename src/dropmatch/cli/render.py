"""What the terminal shows: tokens coloured by reason, and tables of statistics. Knows rich, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from dropmatch.core.reasons import Reason
from dropmatch.core.stats import EngineStats

STYLES = {
    Reason.EXACT: "",
    Reason.RATIO: "",
    Reason.JS: "black on cyan",
    Reason.MAJORITY: "black on green",
    Reason.HEAD: "black on yellow",
    Reason.JUDGE: "black on red",
    Reason.BONUS: "dim",
    Reason.RECOVERED: "magenta",
}
_RIVAL = "black on blue"  # any rule of another paper; only one of them runs at a time


def coloured(tokens: Sequence[int], reasons: Sequence[Reason], decode: Callable[[list[int]], str]) -> Text:
    """The text of tokens, each in the colour of the reason it was kept for."""
    text = Text()
    shown = ""
    for i, reason in enumerate(reasons):
        whole = decode(list(tokens[: i + 1]))
        if whole.endswith("\ufffd") and i + 1 < len(tokens):
            continue  # half a character: it is shown with the token that completes it
        text.append(whole[len(shown) :], STYLES.get(reason, _RIVAL))
        shown = whole
    return text


def legend() -> Text:
    """Which colour means what."""
    text = Text("kept because: ")
    for reason, style in STYLES.items():
        if reason is not Reason.RATIO:
            text.append(reason.label, style)
            text.append(" ")
    return text


def reason_shares(stats: EngineStats) -> str:
    """Shares of emitted tokens by reason, largest first."""
    counts = stats.requests.reasons
    total = sum(counts.values())
    return " ".join(f"{reason.label} {count / total:.0%}" for reason, count in counts.most_common())


def stats_table(stats: EngineStats) -> Table:
    """The figures of one run, one a row."""
    requests, time = stats.requests, stats.time
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("tokens", f"{requests.emitted}")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.2f} (prefill of {time.prefill:.2f} s apart)")
    table.add_row("tau", f"{requests.tau:.2f} tokens a round, the bonus included; {requests.rounds} rounds")
    if requests.drafted:
        rates = [a / d for a, d in zip(requests.accepted_at, requests.drafted_at, strict=True)]
        table.add_row("kept by position", " ".join(f"{rate:.0%}" for rate in rates))
        table.add_row("reasons", reason_shares(stats))
        worst = min((token.prob for token in requests.lossy), default=None)
        note = "" if worst is None else f"; the least likely had target probability {worst:.3f}"
        table.add_row("lossy tokens", f"{len(requests.lossy)} of {requests.emitted}{note}")
    parts = {"draft": time.draft, "target": time.target, "head and rule": time.judge, "rest": time.rest}
    decode = time.decode or 1.0
    table.add_row("time", ", ".join(f"{name} {part / decode:.0%}" for name, part in parts.items()))
    if requests.drafted:
        table.add_row("predicted speed-up", f"{stats.predicted_speedup:.2f}x plain decoding")
    if hint := stats.hint():
        table.add_row("hint", Text(hint, "yellow"))
    return table
