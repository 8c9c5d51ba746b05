"""Grade-school arithmetic: the number that an answer ends in.

The two ways to extract it and the comparison are those of lm-evaluation-harness for GSM8K, so that figures compare:
flexible takes the last thing that looks like a number, strict what follows "####".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.bench.tasks.item import Item, Score, one_answer

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = (re.compile(r","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


def strict_number(answer: str) -> str | None:
    """The first number after "####", or None."""
    found = _STRICT.search(answer)
    return found[1] if found else None


def flexible_number(answer: str) -> str | None:
    """The last number of the text as it is written, with currency signs and commas, or None."""
    found = _FLEXIBLE.findall(answer)
    return found[-1] if found else None


def same_number(extracted: str | None, reference: str) -> bool:
    """Whether two numbers read the same but for commas, dollar signs and a last full stop; "18.00" is not "18"."""
    return extracted is not None and _bare(extracted) == _bare(reference)


def _bare(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def number_fault(record: Mapping[str, Any]) -> str | None:
    """A reference without a digit is no number, and an empty one equals a lone comma."""
    answer = record.get("answer")
    is_number = answer is None or (isinstance(answer, str) and re.search(r"\d", answer))
    return None if is_number else f"the field 'answer' must hold a number, and it is {answer!r}"


def score_number(item: Item, answers: Sequence[str]) -> Score:
    """correct is the flexible match; strict is reported beside it. correct is None where the item has no answer."""
    answer = one_answer(item, answers)
    extracted, reference = flexible_number(answer), item.record.get("answer")
    if reference is None:
        return Score(None, {}, extracted)
    flexible, strict = same_number(extracted, reference), same_number(strict_number(answer), reference)
    return Score(flexible, {"flexible": float(flexible), "strict": float(strict)}, extracted)
