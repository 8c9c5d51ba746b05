"""Prompts without ground truth: a judge or a person says how good an answer is, not this module."""

from __future__ import annotations

from collections.abc import Sequence

from dropmatch.bench.tasks.item import Item, Score, one_answer


def score_nothing(item: Item, answers: Sequence[str]) -> Score:
    """correct is None: there is nothing to compare with."""
    one_answer(item, answers)
    return Score(None)
