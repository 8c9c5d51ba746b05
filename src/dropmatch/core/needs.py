"""Evidence that acceptance rules ask for. A leaf, so that rules in any module can name theirs."""

from __future__ import annotations

from enum import Enum


class Need(Enum):
    """Evidence that a rule asks for, known before the first step.

    TARGET_HIDDEN, DRAFT_HIDDEN: the target's, the draft model's hidden states behind the drafted tokens themselves."""

    HEADS = "heads"
    DIVERGENCE = "divergence"
    CENTROID_PROB = "centroid_prob"
    TARGET_HIDDEN = "target_hidden"
    DRAFT_HIDDEN = "draft_hidden"
