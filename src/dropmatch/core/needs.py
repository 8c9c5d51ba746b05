"""Evidence that acceptance rules ask for. A leaf, so that rules in any module can name theirs."""

from __future__ import annotations

from enum import Enum


class Need(Enum):
    """Evidence that a rule asks for, known before the first step. DRAFT_HIDDEN: the draft model's own hidden states."""

    HEADS = "heads"
    DIVERGENCE = "divergence"
    CENTROID_PROB = "centroid_prob"
    DRAFT_HIDDEN = "draft_hidden"
