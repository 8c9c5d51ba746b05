"""Tables of single dropout heads: analyze heads (Tables 1 to 3) and analyze similarity (Figure 3)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from typing import Any

from dropmatch.bench.figures import number, share
from dropmatch.bench.tables import published
from dropmatch.bench.tables.markdown import (
    Named,
    Result,
    block,
    grid,
    made_by,
    options,
    pair,
    part,
    percent,
    tokens_each,
)
from dropmatch.errors import DataError

_HEAD = re.compile(r"head (\d+) p=(\S+)")
_KINDS = {"js": "kept by Eq. 6", "majority": "kept by Eq. 7", "rejected": "rejected"}


def all_parts(named: Named) -> str:
    """Every table that the file has."""
    parts = {"accuracy": accuracy, "votes": votes, "divergence": divergence}
    if not any(named[0].get(key) for key in parts):
        raise DataError(f"{named[1]} has none of {', '.join(parts)}.")
    return "\n".join(render(named) for key, render in parts.items() if named[0].get(key))


def accuracy(named: Named) -> str:
    """Table 1: accuracy of each head alone by drop probability."""
    result, name = named
    rows, K = part(result, "accuracy", name), result["settings"]["k"]
    heads: dict[float, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if match := _HEAD.fullmatch(row["arm"]):
            heads.setdefault(float(match[2]), {})[int(match[1])] = row
    title = ["", "mean", *(f"head {i + 1}" for i in range(K)), "text of the target", "paper: mean", "heads 1 to 5"]
    lines = [_model_row(row, K) for row in rows if row["arm"] in published.MODEL_ACCURACY]
    for rate, by_path in heads.items():
        every = list(by_path.values())
        paper = published.HEAD_ACCURACY.get(rate, ()) if K == published.NUM_PATHS else ()
        lines.append(
            [
                f"p_drop={rate:g}",
                f"{100 * statistics.fmean(row['accuracy'] for row in every):.1f}",
                *(_accuracy(by_path[i]) if i in by_path else "" for i in range(1, K + 1)),
                percent(statistics.fmean(row["same_text_as_target"] for row in every), 0),
                f"{statistics.fmean(paper):.1f}" if paper else "",
                ", ".join(f"{value:.1f}" for value in paper),
            ]
        )
    worst = min((row for by_path in heads.values() for row in by_path.values()), key=lambda row: row["difference"])
    return block(
        grid(title, lines),
        "Accuracy in per cent with Wilson's 95% interval; every head decodes alone. Text of the target: share of "
        "answers that equal the target's token by token. Lowest difference to the target, paired by prompt: "
        f"{worst['arm']}, {share(worst, 'difference', 'difference_low', 'difference_high', sign='+')} points, "
        f"p={worst['p_value']:.2g} (one test of {sum(map(len, heads.values()))}). {_run(result)} Paper: Table 1, "
        f"HumanEval, Llama-3.1-70B with 8B. {made_by(result, name)}",
    )


def _model_row(row: Mapping[str, Any], K: int) -> list[str]:
    title = {"target": "target, no dropout", "draft": "draft model alone"}[row["arm"]]
    same, paper = percent(row["same_text_as_target"], 0), published.MODEL_ACCURACY[row["arm"]]
    return [title, _accuracy(row), *[""] * K, same, f"{paper:.1f}", ""]


def _accuracy(row: Mapping[str, Any]) -> str:
    return share(row, "accuracy", "accuracy_low", "accuracy_high")


def votes(named: Named) -> str:
    """Table 2: how many heads name the same token."""
    result, name = named
    K = result["settings"]["k"]
    paper = published.VOTES if K == published.NUM_PATHS else {}
    lines = [
        [
            f"{row['size']} of {K}",
            str(row["positions"]),
            percent(row["share"], 2),
            number(row["centroid_prob_mean"], ".3f"),
            number(row["target_prob_mean"], ".3f"),
            percent(row["is_target_token"]),
            *((f"{paper[row['size']][0]:.2f}%", f"{paper[row['size']][1]:.3f}") if row["size"] in paper else ("", "")),
        ]
        for row in part(result, "votes", name)
    ]
    head = ["majority", "positions", "share", "its probability, centroid", "target", "is the target's token"]
    return block(
        grid([*head, "paper: share", "probability"], lines),
        "Positions of the target's own answers at which the largest group of heads that name one token has that size; "
        "mean probability of that token under the heads' centroid and under the undropped target (the paper does not "
        f"say which it means). p_drop={result['settings']['p_drop']}. {_run(result)} Paper: Table 2, HumanEval. "
        f"{made_by(result, name)}",
    )


def divergence(named: Named) -> str:
    """Table 3: divergences by the reason a drafted token was kept for."""
    result, name = named
    lines = [
        [
            _KINDS[row["kept_by"]],
            str(row["tokens"]),
            percent(row["share"]),
            *(number(row[key], ".4f") for key in ("js_draft_mean", "js_draft_median", "radius_mean", "radius_median")),
            *(f"{value:.4f}" for value in published.DIVERGENCE.get(row["kept_by"], ())),
            *([] if row["kept_by"] in published.DIVERGENCE else ["", ""]),
        ]
        for row in part(result, "divergence", name)
    ]
    head = ["", "tokens", "share", "JS(draft, centroid), mean", "median", "radius, mean", "median"]
    return block(
        grid([*head, "paper: JS to the draft", "to the heads"], lines),
        "Nats, at drafted tokens that a round of `dropmatch-paper` reached; radius: the largest JS(head, centroid). "
        f"L={result['settings']['draft_length']}, p_drop={result['settings']['p_drop']}. {_run(result)} Paper: Table "
        f"3. {made_by(result, name)}",
    )


def similarity(named: Named) -> str:
    """Figure 3: how alike the heads' whole texts are, a matrix a drop probability."""
    result, name = named
    settings, K = result["settings"], result["settings"]["k"]
    pieces = []
    for row in result["similarity"]:
        measures = [measure for measure in ("cosine", "entailment") if row[measure] is not None]
        lines = [
            [title, *(" / ".join(f"{row[key][j]:.3f}" for key in keys) for j in range(K))]
            for title, keys in [("target", [f"{measure}_to_target" for measure in measures])]
        ]
        lines[:0] = [
            [f"head {i + 1}", *(" / ".join(f"{row[measure][i][j]:.3f}" for measure in measures) for j in range(K))]
            for i in range(K)
        ]
        between = " / ".join(number(row[f"{measure}_between_heads"], ".3f") for measure in measures)
        pieces += [
            *grid([f"p_drop={row['p_drop']:g}", *(f"head {i + 1}" for i in range(K))], lines),
            "",
            f"Between different heads at p_drop={row['p_drop']:g}: {between or 'one head only'}; all heads gave the "
            f"same tokens to {percent(row['same_text'])} of the prompts.",
            "",
        ]
    has_entailment = any(row["entailment"] is not None for row in result["similarity"])
    cut = f" {settings['pairs_cut']} pairs were cut for the classifier." if settings.get("pairs_cut") else ""
    with_nli = " / share of prompts on which both texts entail each other" if has_entailment else ""
    nli = f", `{settings['nli']}`" if settings.get("nli") else ""
    return block(
        pieces[:-1],
        f"Means over {len(settings['items'])} prompts: cosine of sentence embeddings{with_nli}. Every head answers "
        f"alone. Models that compare: `{settings.get('encoder', 'not named')}`{nli}; {settings['texts_cut']} texts "
        f"were cut to the encoder's {settings['encoder_max_tokens']} tokens.{cut} {_run(result)} The paper's Figure 3 "
        f"shows such matrices as pictures, at p_drop 0.1 and 0.3 on Spec-Bench. {made_by(result, name)}",
    )


def _run(result: Result) -> str:
    settings = {key: value for key, value in result["settings"].items() if key != "p_drop"}  # differs by table
    data = f" of {', '.join(settings['data'])}" if settings.get("data") else ""
    return (
        f"{len(settings['items'])} prompts{data}, {tokens_each(settings)}, {options(settings)}; pair: "
        f"{pair(settings)}; torch {result['provenance']['torch']}."
    )
