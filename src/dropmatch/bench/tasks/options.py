"""Multiple choice with free reasoning before the letter, so that there is text to accept drafts in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.bench.tasks.item import Item, Score, one_answer

_SAID = re.compile(r"\banswer\s+is\b[\s:*_`($\\]*(?:boxed\{|text\{)*\(?([A-J])\b(?!')", re.IGNORECASE)
_ALONE = re.compile(r"^[\s*_`(]*([A-J])[\s*_`).:]*$", re.MULTILINE)


def word_options(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The question with its options, and how to answer."""
    question = str(record["prompt"]).removesuffix("Answer:").rstrip()
    return (
        f"{question}\n\nThink step by step, in a few short sentences. "
        'End with one line that says "The answer is X", where X is the letter of the right option.',
    )


def extract_letter(answer: str) -> str | None:
    """The letter of the last "the answer is X", else of the last line that is a letter alone, else None."""
    # a small letter is only taken where the sentence names it: "the answer is a bit unclear" is no answer
    said = [letter for letter in _SAID.findall(answer) if letter.isupper()]
    found = said or _ALONE.findall(answer)
    return str(found[-1]) if found else None


def option_fault(record: Mapping[str, Any]) -> str | None:
    """A reference that is no letter is never met."""
    answer = record["answer"]
    is_letter = re.fullmatch("[A-J]", answer.strip().upper())
    return None if is_letter else f"the field 'answer' must be one letter of A to J, and it is {answer!r}"


def score_option(item: Item, answers: Sequence[str]) -> Score:
    """Exact match of the letter. An answer without one is wrong; metrics tell how often that happens."""
    extracted = extract_letter(one_answer(item, answers))
    return Score(
        extracted == item.record["answer"].strip().upper(), {"has_letter": float(extracted is not None)}, extracted
    )
