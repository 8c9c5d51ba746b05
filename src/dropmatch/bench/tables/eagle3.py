"""Tables of bench eagle3: by tree depth (Table 7), and far from the head's training text (Table 10)."""

from __future__ import annotations

from collections.abc import Sequence

from dropmatch.bench.figures import share, spread
from dropmatch.bench.tables import published
from dropmatch.bench.tables.markdown import Named, Result, block, grid, made_by, options, pair, part, percent, tau

_BASE = "lossless"
_DRAFTERS = {"eagle3": "EAGLE-3", "ngram": "n-grams", "draft-model": "draft model"}


def all_parts(named: Named) -> str:
    """Both tables."""
    return f"{depths(named)}\n{domains(named)}"


def depths(named: Named) -> str:
    """Table 7: EAGLE-3 with and without DropMatch by depth."""
    result, name = named
    lines = []
    for row in part(result, "depths", name):
        method = "EAGLE-3" if row["rule"] == _BASE else f"EAGLE-3, `{row['rule']}`"
        paper = published.TREES.get(row["task"], {}).get((row["rule"] != _BASE, row["paper_depth"]))
        lines.append(
            [
                row["task"],
                method,
                str(row["paper_depth"]),
                str(row["n"]),
                spread(row["over_plain"]),
                tau(row),
                share(row, "accuracy", "accuracy_low", "accuracy_high"),
                share(row, "accuracy_difference", "difference_low", "difference_high", sign="+"),
                percent(row["lossy_share"]),
                *(("", "", "") if paper is None else (f"{paper[0]:.2f}x", f"{paper[1]:.2f}", f"{paper[2]:.2f}")),
            ]
        )
    head = ["task", "method", "L", "n", "over plain", "tau", "accuracy", "less lossless (95%)", "lossy tokens"]
    head += ["paper: over plain", "tau", "quality"]
    settings = result["settings"]
    chain = ", ".join(f"`{row['rule']}` {tau(row)}" for row in result.get("chain", ()))
    chains = f" Chains of {settings['lengths'][0]} levels in the place of trees: tau {chain}." if chain else ""
    return block(
        grid(head, lines, left=2),
        "L counts as the paper does: the tree has a level more. Speed over plain decoding at batch 1, median over "
        f"{settings['speed_items']} timed prompts (minimum-maximum); tau with its 95% bootstrap interval over prompts; "
        f"accuracy in per cent with Wilson's 95% interval, the difference paired by prompt.{chains} {_run(result)} "
        "Paper: Table 7, Llama-3.3-70B, 80 prompts; its quality is accuracy, MT-bench score and win rate. "
        f"{made_by(result, name)}",
    )


def domains(named: Named) -> str:
    """Table 10: tau of each drafter on prompts like the head's training text, and on others."""
    result, name = named
    settings = result["settings"]
    lines = []
    for row in part(result, "domains", name):
        is_far = row["domain"] == "other"
        paper = published.FAR.get((row["drafter"], row["rule"] != _BASE)) if is_far else None
        lines.append(
            [
                _DRAFTERS.get(row["drafter"], row["drafter"]),
                row["rule"],
                row["domain"],
                str(row["n"]),
                tau(row),
                percent(row["lossy_share"]),
                *(("", "") if paper is None else (f"{paper[1]:.2f}", f"{paper[0]:.2f}")),
            ]
        )
    head = ["drafter", "rule", "prompts", "n", "tau", "lossy tokens", "paper: tau", "score"]
    return block(
        grid(head, lines, left=3),
        f"tau with its 95% bootstrap interval over prompts, at {settings['lengths'][0]} levels. Own "
        f"prompts: {_kinds(settings['items'])}; other: {_kinds(settings['other_items'])}. {_run(result)} Paper: "
        f"Table 10, KoMT-bench, L=7. {made_by(result, name)}",
    )


def _kinds(items: Sequence[str]) -> str:
    """The data sets of items by the first part of their ids."""
    return ", ".join(dict.fromkeys(item.split("/")[0] for item in items))


def _run(result: Result) -> str:
    settings = result["settings"]
    return (
        f"At most {settings['max_new_tokens']} tokens each, trees of at most {settings['tree_tokens']} nodes and "
        f"{settings['top_k']} children, {options(settings)}; pair: {pair(settings)}; "
        f"torch {result['provenance']['torch']}."
    )
