"""Reads a results file for a report, and says which key is missing or wrong before anything is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dropmatch.bench.compare import read_compare
from dropmatch.core.reasons import Reason
from dropmatch.errors import DataError

_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_SETTINGS = {"target": str, "draft": (str, type(None)), "dtype": str, "k": int, "p_drop": (int, float, str)}
_ARM = {"rule": str, "draft_length": int, "items": dict}
_PROMPT = {"task": str, "turns": list}
_RECORD = {"tokens": list, "text": str, "reasons": list, "logprobs": list, "lossy": list, "judged": list, "score": dict}
_LOSSY = {"index": int, "token": int, "best_token": int, "prob": _NUMBER, "best_prob": _NUMBER, "reason": str}
_ROW: dict[str, Any] = {
    **dict.fromkeys(("arm", "rule", "task"), str),
    **dict.fromkeys(("n", "draft_length", "lossy_tokens", "emitted"), int),
    **dict.fromkeys(("tau", "tau_low", "tau_high", "lossy_share", "length_mean"), _NUMBER),
    **dict.fromkeys(("lossy_prob_mean", "lossy_prob_median", "logprob_mean", "logprob_difference"), _MAYBE),
    **dict.fromkeys(("repetition", "length_ratio", "diverged_share", "first_divergence_median"), _MAYBE),
    **dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high"), _MAYBE),
    **dict.fromkeys(("accuracy_difference", "difference_low", "difference_high"), _MAYBE),
    **dict.fromkeys(("gained", "lost", "p_value", "tokens_per_second", "judge_over_target"), _MAYBE),
    **dict.fromkeys(("over_plain", "over_lossless"), (dict, type(None))),
    "acceptance_by_position": list,
    "metrics": dict,
    "pareto": bool,
}
_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    _NUMBER: "a finite number",
    _MAYBE: "a finite number or null",
    (str, type(None)): "text or null",
    (int, float, str): "a finite number or text",
    (bool, type(None)): "true, false or null",
    (dict, type(None)): "an object or null",
}


def load_results(path: Path) -> dict[str, Any]:
    """A results file of `dropmatch compare` with all that a report shows.

    Raises DataError naming the file and the position, kind or key that is wrong."""
    result = read_compare(path)
    _fields(path, "", result, {"summary": list, "speed": (dict, type(None)), "provenance": dict})
    _fields(path, "settings", result["settings"], _SETTINGS)
    _fields(path, "provenance", result["provenance"], {"command": str, "date": str})
    for item, prompt in result["prompts"].items():
        _fields(path, f"prompts[{item!r}]", prompt, _PROMPT)
        _entries(path, f"prompts[{item!r}].turns", prompt["turns"], str)
    for name, arm in result["arms"].items():
        at = f"arms[{name!r}]"
        _fields(path, at, arm, _ARM)
        for item in result["prompts"]:
            if item not in arm["items"]:
                raise _error(path, f"{at}.items[{item!r}] is missing")
        for item, record in arm["items"].items():
            if item not in result["prompts"]:
                raise _error(path, f"prompts[{item!r}] is missing, though {at} has an answer to it")
            _check_record(path, f"{at}.items[{item!r}]", record)
    if not result["summary"]:
        raise _error(path, "'summary' has no rows")
    for i, row in enumerate(result["summary"]):
        _check_row(path, f"summary[{i}]", row, result)
    if result["speed"] is not None:
        _check_speed(path, result["speed"], result["prompts"])
    return result


def _check_row(path: Path, at: str, row: Any, result: Mapping[str, Any]) -> None:
    _fields(path, at, row, _ROW)
    if row["arm"] not in result["arms"]:
        raise _error(path, f"{at}.arm is {row['arm']!r}, which is none of arms")
    _entries(path, f"{at}.acceptance_by_position", row["acceptance_by_position"], _NUMBER)
    _entries(path, f"{at}.metrics", list(row["metrics"].values()), _NUMBER)
    for value, *bounds in (
        ("accuracy", "accuracy_low", "accuracy_high"),
        ("accuracy_difference", "difference_low", "difference_high", "gained", "lost", "p_value"),
    ):
        if row[value] is not None:
            _fields(path, at, row, dict.fromkeys(bounds, _NUMBER))
    for key in ("over_plain", "over_lossless"):
        if row[key] is not None:
            _fields(path, f"{at}.{key}", row[key], dict.fromkeys(("median", "min", "max"), _NUMBER))


def _check_speed(path: Path, speed: Mapping[str, Any], prompts: Mapping[str, Any]) -> None:
    """Seconds and tokens of each timed prompt under each rule, from which speeds' intervals are made."""
    _fields(path, "speed", speed, {"items": list, "arms": dict})
    _entries(path, "speed.items", speed["items"], str)
    for item in speed["items"]:
        if item not in prompts:
            raise _error(path, f"prompts[{item!r}] is missing, though it was timed")
    for name, arm in speed["arms"].items():
        at = f"speed.arms[{name!r}]"
        _fields(path, at, arm, {"seconds": dict, "tokens": dict})
        _fields(path, f"{at}.seconds", arm["seconds"], dict.fromkeys(speed["items"], list))
        _fields(path, f"{at}.tokens", arm["tokens"], dict.fromkeys(speed["items"], int))
        for item in speed["items"]:
            _entries(path, f"{at}.seconds[{item!r}]", arm["seconds"][item], _NUMBER)
            if not arm["seconds"][item] or min(*arm["seconds"][item], arm["tokens"][item]) <= 0:
                raise _error(path, f"{at} has no time or no token of {item!r}")


def _check_record(path: Path, at: str, record: Any) -> None:
    _fields(path, at, record, _RECORD)
    _fields(path, f"{at}.score", record["score"], {"correct": (bool, type(None))})
    tokens = len(record["tokens"])
    for key in ("reasons", "logprobs", "pieces"):
        if key in record and (not isinstance(record[key], list) or len(record[key]) != tokens):
            raise _error(path, f"{at}.{key} is not a list of {tokens} entries, one for each token")
    for key, kind in (("tokens", int), ("reasons", int), ("logprobs", _NUMBER), ("pieces", str)):
        _entries(path, f"{at}.{key}", record.get(key, ()), kind)
    known = {int(reason) for reason in Reason}
    unknown = next((code for code in record["reasons"] if code not in known), None)
    if unknown is not None:
        raise _error(path, f"{at}.reasons has {unknown!r}, which is none of the codes 0 to {max(known)}")
    for i, token in enumerate(record["lossy"]):
        _fields(path, f"{at}.lossy[{i}]", token, _LOSSY)
        if not _is(token.get("best_piece", ""), str):
            raise _error(path, f"{at}.lossy[{i}].best_piece is not text")
    for i, entry in enumerate(record["judged"]):
        if (
            not isinstance(entry, list)
            or len(entry) < 5
            or not all(_is(value, kind) for value, kind in zip(entry, (int, _MAYBE, _MAYBE, int, _MAYBE), strict=False))
            or entry[3] not in known
            or entry[0] >= tokens
        ):
            raise _error(path, f"{at}.judged[{i}] is not [index, divergence, radius, reason, probability]")


def _fields(path: Path, at: str, value: Any, wanted: Mapping[str, Any]) -> None:
    """Check the keys of one object. at: its own key, empty for the whole file."""
    if not isinstance(value, dict):
        raise _error(path, f"{at} is not an object")
    for key, kinds in wanted.items():
        name = f"{at}.{key}" if at else repr(key)
        if key not in value:
            raise _error(path, f"{name} is missing")
        if not _is(value[key], kinds):
            raise _error(path, f"{name} is not {_NAMES[kinds]}")


def _entries(path: Path, at: str, values: Iterable[Any], kinds: Any) -> None:
    if not all(_is(value, kinds) for value in values):
        raise _error(path, f"{at} has an entry that is not {_NAMES[kinds]}")


def _is(value: Any, kinds: Any) -> bool:
    """Like isinstance, but true is no number, and neither are NaN and infinity."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) and not (isinstance(value, float) and not math.isfinite(value))


def _error(path: Path, fault: str) -> DataError:
    return DataError(f"{path}: {fault}. The file is damaged; write it again with `dropmatch compare`.")
