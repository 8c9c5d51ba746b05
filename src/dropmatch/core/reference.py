"""The acceptance rules for one position in plain Python floats: an oracle that reads like the paper, for tests.

Slow on purpose and shares no code with the tensor version.
Source: DropMatch (arXiv 2603.03333), Eq. 1-7 and Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = Sequence[float]


@dataclass(frozen=True)
class Position:
    """What the rules say about one drafted token. js_* in nats; reason: "js", "majority" or "reject" (Algorithm 1)."""

    js_draft: float
    js_heads: list[float]
    head_tokens: list[int]
    majority: int
    majority_count: int
    reason: str
    accept_naive: bool


def softmax(logits: Vector) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def js_divergence(p: Vector, q: Vector) -> float:
    """Nats."""
    terms = []
    for a, b in zip(p, q, strict=True):
        m = (a + b) / 2
        terms.append((a * math.log(a / m) if a > 0 else 0.0) + (b * math.log(b / m) if b > 0 else 0.0))
    return max(0.0, math.fsum(terms) / 2)


def path_logits(
    hidden: Vector, weight: Sequence[Vector], bias: Vector, mask: Sequence[bool], p_drop: float
) -> list[float]:
    """Eq. 1-3: one dropout path."""
    dropped = [h / (1.0 - p_drop) if kept else 0.0 for h, kept in zip(hidden, mask, strict=True)]
    return [
        math.fsum(w * h for w, h in zip(row, dropped, strict=True)) + b for row, b in zip(weight, bias, strict=True)
    ]


def judge_position(
    heads: Sequence[Vector], draft_probs: Vector, draft_token: int, *, tie: str = "centroid"
) -> Position:
    """Eq. 4-7 for one drafted token. heads: the K paths' logits."""
    K = len(heads)
    centroid_logits = [math.fsum(column) / K for column in zip(*heads, strict=True)]
    centroid = softmax(centroid_logits)
    js_heads = [js_divergence(softmax(head), centroid) for head in heads]
    js_draft = js_divergence(draft_probs, centroid)
    tokens = [max(range(len(head)), key=lambda v: (head[v], -v)) for head in heads]
    counts = {token: tokens.count(token) for token in tokens}
    if tie == "path":
        majority = max(counts, key=lambda token: (counts[token], -tokens.index(token)))
    else:
        majority = max(counts, key=lambda token: (counts[token], centroid[token], -token))
    if js_draft <= max(js_heads):
        reason = "js"
    elif draft_token == majority:
        reason = "majority"
    else:
        reason = "reject"
    return Position(js_draft, js_heads, tokens, majority, counts[majority], reason, draft_token in tokens)
