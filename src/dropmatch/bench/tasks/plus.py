"""HumanEval+: the functions of HumanEval on many more inputs, against the canonical solution (EvalPlus).

The answer only gets the inputs. What the canonical solution returns on them is compared outside its sandbox.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dropmatch.bench.sandbox import Limits, Outcome, run_calls
from dropmatch.bench.tasks.code import completed_program, entry_point_fault, extract_code
from dropmatch.bench.tasks.item import Item, Score, one_answer
from dropmatch.errors import DataError

_CANONICAL = Limits(cpu_seconds=120, wall_seconds=300.0, memory_bytes=4 << 30)
_FLOAT_TOLERANCE = 1e-6  # of floats where the set names none
_RELATIVE_TOLERANCE = 1e-7


def plus_fault(record: Mapping[str, Any]) -> str | None:
    """Without inputs any code would pass."""
    if not record["base_input"] and not record["plus_input"]:
        return "'base_input' and 'plus_input' are both empty"
    return entry_point_fault(record)


def score_plus(item: Item, answers: Sequence[str]) -> Score:
    """correct if all results are right; metrics: base on HumanEval's own inputs alone, plus on all.

    Raises DataError if the canonical solution itself fails.
    """
    record = item.record
    entry_point, prompt = record["entry_point"], record["prompt"]
    code = extract_code(one_answer(item, answers), entry_point)
    base, plus = record["base_input"], record["plus_input"]
    inputs = [*base, *plus]
    expected = _expected(prompt + record["answer"], entry_point, json.dumps(inputs), item.id)
    limits = Limits(
        cpu_seconds=10 + math.ceil(4 * expected.seconds),
        wall_seconds=60 + 16 * expected.seconds,
        memory_bytes=_CANONICAL.memory_bytes,
    )
    outcome = run_calls(completed_program(prompt, code, entry_point), entry_point, inputs, limits=limits)
    tolerance = record.get("atol", 0)
    right = [
        got.error is None
        and (
            _is_root(arguments, got.value, tolerance)
            if entry_point == "find_zero"
            else is_same(got.value, want.value, tolerance)
        )
        for arguments, got, want in zip(inputs, outcome.calls, expected.calls, strict=False)
    ]
    right += [False] * (len(inputs) - len(right))  # a program that was ended returned no more
    is_base, is_plus = all(right[: len(base)]), all(right)
    metrics = {"base": float(is_base), "plus": float(is_plus), "timeout": float(outcome.status == "timeout")}
    return Score(is_plus, metrics, code)


@lru_cache(maxsize=512)
def _expected(program: str, entry_point: str, inputs: str, name: str) -> Outcome:
    """What the canonical solution returns. inputs: as JSON."""
    outcome = run_calls(program, entry_point, json.loads(inputs), limits=_CANONICAL)
    error = next((call.error for call in outcome.calls if call.error is not None), None)
    if not outcome.passed or error:
        raise DataError(f"{name}: the canonical solution fails on the set's own inputs ({error or outcome.detail}).")
    return outcome


def is_same(got: Any, want: Any, tolerance: float) -> bool:
    """Equal, or numbers within tolerances that are asked for or that floats have anyway."""
    if got == want:
        return True
    if tolerance == 0 and _is_float(want):
        tolerance = _FLOAT_TOLERANCE
    if tolerance == 0 or type(got) is not type(want):
        return False
    if isinstance(want, list | tuple) and len(got) != len(want):
        return False
    try:
        return bool(np.allclose(got, want, rtol=_RELATIVE_TOLERANCE, atol=tolerance))
    except (TypeError, ValueError):
        return False  # no numbers


def _is_float(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, float) for one in value)
    return isinstance(value, float)


def _is_root(arguments: Sequence[Any], got: Any, tolerance: float) -> bool:
    """HumanEval/32 asks for any zero of a polynomial, lowest coefficient first."""
    if type(got) not in (int, float) or not math.isfinite(got):
        return False
    return bool(abs(sum(c * got**i for i, c in enumerate(arguments[0]))) <= tolerance)
