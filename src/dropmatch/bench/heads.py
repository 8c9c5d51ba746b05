"""Does a shortlist of tokens decide as the whole vocabulary does? Asked at the same positions of real decoding.

Every time the rule asks the dropout heads, both kinds answer under the same masks; decoding follows the full heads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import dropmatch
from dropmatch.bench.results import write_result
from dropmatch.bench.tasks import Item
from dropmatch.config import PDrop, SamplingParams
from dropmatch.core.head import HeadEnsemble, MCDropoutHead
from dropmatch.errors import ConfigError
from dropmatch.ops.divergence import log_probs
from dropmatch.provenance import collect


@dataclass(slots=True)
class Comparison:
    """One position: what differs, the rank under the plain head of the least likely token that a head produces, and
    the seconds both kinds took for the whole call."""

    same_tokens: bool
    same_majority: bool
    same_js: bool
    radius_error: float
    worst_rank: int
    full_seconds: float
    shortlist_seconds: float


class ComparingHead(MCDropoutHead):
    """Answers with the full heads and keeps the shortlist's answers beside them."""

    comparisons: list[Comparison]

    def ask_shortlist(
        self, hidden: Tensor, keys: Tensor, plain: Tensor, draft_logits: Tensor | None, *, with_js: bool
    ) -> HeadEnsemble:
        if draft_logits is None or not with_js:
            raise ConfigError("This comparison needs a draft model and a rule with divergences, such as 'dropmatch'.")
        started = time.perf_counter()
        draft = log_probs(draft_logits)
        full = self(
            hidden,
            keys,
            pick=lambda logits, index: logits.argmax(-1),
            with_js=True,
            draft_log_probs=lambda index: draft[index],
        )
        between = time.perf_counter()
        listed = super().ask_shortlist(hidden, keys, plain, draft_logits, with_js=True)
        ended = time.perf_counter()
        rank = 1 + (plain[:, None] > plain.gather(-1, full.tokens)[..., None]).sum(-1).amax(-1)
        self.comparisons += _compare(full, listed, rank, between - started, ended - between)
        return full


def _compare(
    full: HeadEnsemble, listed: HeadEnsemble, rank: Tensor, full_seconds: float, seconds: float
) -> list[Comparison]:
    assert full.radius is not None
    assert full.js_draft is not None
    assert listed.radius is not None
    assert listed.js_draft is not None
    columns = (
        (full.tokens == listed.tokens).all(-1),
        full.majority == listed.majority,
        (full.js_draft <= full.radius) == (listed.js_draft <= listed.radius),
        (listed.radius / full.radius.clamp(min=1e-9) - 1.0).abs(),
        rank,
    )
    return [
        Comparison(bool(tokens), bool(majority), bool(js), float(error), int(place), full_seconds, seconds)
        for tokens, majority, js, error, place in zip(*(column.tolist() for column in columns), strict=True)
    ]


def run_heads(
    items: Sequence[Item],
    *,
    target: str,
    draft: str | None,
    draft_length: int,
    max_new_tokens: int,
    num_paths: int,
    p_drop: PDrop | None,
    shortlist_size: int,
    dtype: str,
    device: str,
    output: Path,
) -> dict[str, Any]:
    """Decode the items with `dropmatch`, compare at every position asked, and write the results file."""
    decoder = dropmatch.load(
        target,
        draft,
        num_paths=num_paths,
        p_drop=p_drop,
        heads="shortlist",
        draft_length=draft_length,
        dtype=dtype,
        device=device,
    )
    decoder.dropout = replace(decoder.dropout, shortlist_size=shortlist_size)
    if shortlist_size >= decoder.target.vocab_size:
        raise ConfigError(
            f"shortlist_size={shortlist_size} is no less than the vocabulary of {decoder.target.vocab_size} tokens."
        )
    provenance = collect(device=str(decoder.target.device))
    comparisons: list[Comparison] = []
    target_seconds, rounds = 0.0, 0
    for item in items:
        engine = decoder.engine()
        head = ComparingHead(engine.target.head, decoder.dropout)
        head.comparisons = comparisons
        engine.head = head
        run = decoder.run([item.prompt], SamplingParams(max_new_tokens=max_new_tokens, eos_ids=()), engine=engine)
        target_seconds += run.stats.time.target
        rounds += run.stats.requests.rounds
    if not comparisons:
        raise ConfigError("The heads were never asked: the drafter always agreed. Give more prompts.")
    result = {
        "kind": "bench-heads",
        "settings": {
            "target": target,
            "draft": draft,
            "draft_length": draft_length,
            "max_new_tokens": max_new_tokens,
            "k": num_paths,
            "p_drop": decoder.dropout.p_drop,
            "shortlist_size": shortlist_size,
            "dtype": str(decoder.target.dtype),
            "items": [item.id for item in items],
        },
        "summary": {
            "positions": len(comparisons),
            "same_tokens": _share(comparisons, "same_tokens"),
            "same_majority": _share(comparisons, "same_majority"),
            "same_js": _share(comparisons, "same_js"),
            "median_radius_error": statistics.median(c.radius_error for c in comparisons),
            "worst_rank": max(c.worst_rank for c in comparisons),
            "full_ms_median": 1e3 * statistics.median(c.full_seconds for c in comparisons),
            "shortlist_ms_median": 1e3 * statistics.median(c.shortlist_seconds for c in comparisons),
            "target_ms_mean": 1e3 * target_seconds / rounds,
        },
        "provenance": provenance,
    }
    write_result(result, output)
    return result


def _share(comparisons: Sequence[Comparison], name: str) -> float:
    return sum(bool(getattr(comparison, name)) for comparison in comparisons) / len(comparisons)
