"""What a task hands to a decoder and what scoring hands back. Knows no task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dropmatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Item:
    """One item of an evaluation set.

    turns: the user turns as worded for a chat template, each answered with the earlier ones in view;
    record: the fields of the file, which scoring reads; stop: strings that end an answer; max_new_tokens: of each turn.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    record: Mapping[str, Any] = field(repr=False)
    stop: tuple[str, ...]
    max_new_tokens: int

    @property
    def prompt(self) -> str:
        """The first user turn."""
        return self.turns[0]


@dataclass(frozen=True, slots=True)
class Score:
    """How an answer did. correct: None where there is no ground truth; metrics: figures between 0 and 1, or counts;
    extracted: what was taken out of the answer and judged (a number, a letter, code)."""

    correct: bool | None
    metrics: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


def one_answer(item: Item, answers: Sequence[str]) -> str:
    """The answer to an item of one turn, or to its last turn. Raises ConfigError unless each turn has one answer."""
    if isinstance(answers, str) or len(answers) != len(item.turns):
        given = "a string" if isinstance(answers, str) else f"{len(answers)} answers"
        raise ConfigError(f"{item.id} has {len(item.turns)} turns, and {given} came. Give a list of one text per turn.")
    return answers[-1]
