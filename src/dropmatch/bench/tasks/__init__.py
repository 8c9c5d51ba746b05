"""Evaluation sets: items to decode, worded for a chat template, and scores of the answers.

    items = load_items("gsm8k.jsonl", 100)
    scores = score_all(items, [[decode(item.prompt)] for item in items])

Knows no model: answers are texts. docs/tasks.md lists the tasks with their wording, metric and source.
"""

from __future__ import annotations

from dropmatch.bench.tasks.item import Item, Score
from dropmatch.bench.tasks.load import load_items
from dropmatch.bench.tasks.scoring import pooled_metrics, score, score_all

__all__ = ["Item", "Score", "load_items", "pooled_metrics", "score", "score_all"]
