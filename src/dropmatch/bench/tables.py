"""Markdown tables in README and docs, written from results files so that no number is typed by hand.

    python -m dropmatch.bench.tables README.md docs/results.md

A table stands between `<!-- results:begin FILE -->` and `<!-- results:end -->`, FILE being a results file relative to
the folder of the repository. Reads JSON only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dropmatch.bench.figures import number, share, spread
from dropmatch.errors import DataError

_BLOCK = re.compile(r"(<!-- results:begin (\S+) -->\n).*?(<!-- results:end -->)", re.DOTALL)


def render(text: str, root: Path) -> str:
    """The text with every table made anew. root: the folder that the results files' names start from."""
    return _BLOCK.sub(lambda match: f"{match[1]}{table(root / match[2], match[2])}{match[3]}", text)


def table(path: Path, name: str) -> str:
    """The table of one results file. Raises DataError if it is missing or not of a known kind."""
    if not path.is_file():
        raise DataError(f"{path} does not exist. Run the command that makes it, or correct its name in the document.")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg}).") from error
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind not in _TABLES:
        raise DataError(f"{path} holds {kind!r}. Tables are made of: {', '.join(_TABLES)}.")
    return _TABLES[kind](result, name)


def _quick(result: dict[str, Any], name: str) -> str:
    settings, provenance = result["settings"], result["provenance"]
    has_peers = any("over_generate" in row for row in result["summary"].values())
    ratios = ["over_generate", "over_plain", "over_lossless"][0 if has_peers else 1 :]
    titles = {"over_generate": "over `generate`", "over_plain": "over plain", "over_lossless": "over lossless"}
    head = [
        "",
        *(titles[ratio] for ratio in ratios),
        "decoding only, over lossless",
        "tau",
        "head and rule / target",
        "lossy tokens",
    ]
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for arm, row in result["summary"].items():
        cells = [arm]
        cells += [spread(row.get(key)) for key in ratios]
        cells.append(_decoding_over_lossless(result["arms"], arm))
        cells.append(f"{row['tau']:.2f}" if "tau" in row else "")
        cells.append(f"{row['judge_over_target']:.1%}" if "judge_over_target" in row else "")
        cells.append(f"{row['lossy_tokens']} of {row['emitted']}" if "lossy_tokens" in row else "")
        lines.append(_row(cells))
    options = [f"K={settings['k']}", f"p_drop={settings['p_drop']}"]
    for key, default in (("heads", "full"), ("draft_weights", "own"), ("min_confidence", 0.0)):
        if settings.get(key, default) != default:
            options.append(f"{key}={settings[key]}")
    draft = f" with {settings['draft']}" if settings["draft"] else ""
    lines += [
        "",
        f"Speed ratios within one run: median over {len(settings['items'])} prompts (minimum-maximum), "
        f"{settings['max_new_tokens']} tokens each, batch 1, whole calls with prefill; decoding "
        f"only is pooled over the prompts. "
        f"Pair: `{settings['target']}`{draft}; "
        f"{settings['dtype'].removeprefix('torch.')}, {', '.join(options)}; {provenance['cpu']}, "
        f"{provenance['num_threads']} threads, torch {provenance['torch']}. From `{name}`, made by",
        f"`{provenance['command']}`.",
    ]
    return "\n".join(lines) + "\n"


def _compare(result: dict[str, Any], name: str) -> str:
    """What the rules keep and what it costs the answers; speed only where it was timed."""
    rows = result["summary"]
    has_speed = any(row["over_lossless"] for row in rows)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    head = [
        "rule",
        *(["task"] if len(tasks) > 1 else []),
        "tau",
        "accuracy",
        "less lossless (95%)",
        "p",
        "lossy tokens",
    ]
    head += ["their probability", "log-probability", "length", "repeated 4-grams", "changed answers"]
    head += ["over plain", "over lossless"] if has_speed else []
    left = 2 if len(tasks) > 1 else 1
    lines = [_row(head), _row(["---"] * left + ["---:"] * (len(head) - left))]
    for row in rows:
        cells = [f"{row['arm']}{' *' if row['pareto'] else ''}", *([row["task"]] if len(tasks) > 1 else [])]
        cells.append(f"{row['tau']:.2f} ({row['tau_low']:.2f}-{row['tau_high']:.2f})")
        cells.append(share(row, "accuracy", "accuracy_low", "accuracy_high"))
        cells.append(share(row, "accuracy_difference", "difference_low", "difference_high", sign="+"))
        cells.append(number(row["p_value"], ".2g"))
        cells.append(f"{row['lossy_share']:.2%}")
        cells.append(number(row["lossy_prob_mean"], ".2f"))
        cells.append(number(row["logprob_mean"], ".3f"))
        cells.append(number(row["length_ratio"], ".3f"))
        cells.append(number(row["repetition"], ".1%"))
        cells.append(number(row["diverged_share"], ".0%"))
        if has_speed:
            cells += [spread(row["over_plain"]), spread(row["over_lossless"])]
        lines.append(_row(cells))
    settings, provenance = result["settings"], result["provenance"]
    lines += [
        "",
        f"{len(settings['items'])} prompts. Accuracy in per cent with Wilson's 95% interval; the difference to "
        "lossless is paired by prompt, p is McNemar's exact test; `*`: no rule beats it in both tau and accuracy. "
        f"Log-probability: mean per token of the text under the undropped target. Pair: `{settings['target']}`"
        f"{' with ' + settings['draft'] if settings['draft'] else ''}, {settings['dtype'].removeprefix('torch.')}, "
        f"K={settings['k']}, p_drop={settings['p_drop']} where a rule does not say; temperature "
        f"{settings['temperature']:g}; torch {provenance['torch']}. From `{name}`, made by",
        f"`{provenance['command']}`.",
    ]
    return "\n".join(lines) + "\n"


def _decoding_over_lossless(arms: dict[str, Any], arm: str) -> str:
    """Tokens per second of decoding, prefill left out, pooled over the prompts, as a ratio at the same draft length."""
    base = arms.get(f"lossless L={arm.split('=')[-1]}")
    if base is None or "=" not in arm or not arms[arm]["stats"]:
        return ""
    rates = [a["stats"]["emitted"] / a["stats"]["time"]["decode_s"] for a in (arms[arm], base)]
    return f"{rates[0] / rates[1]:.2f}x"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_TABLES: dict[str, Callable[[dict[str, Any], str], str]] = {"bench-quick": _quick, "compare": _compare}


def main(paths: list[str]) -> None:
    """Rewrite the tables of these documents in place."""
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8")
        path.write_text(render(text, Path.cwd()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
