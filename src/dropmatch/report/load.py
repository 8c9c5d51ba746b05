"""Reads a results file for a report, and says which key is missing or wrong before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropmatch.bench.comparison import read_compare
from dropmatch.bench.fields import MAYBE, NUMBER, Fields

_SETTINGS = {"target": str, "draft": (str, type(None)), "dtype": str, "k": int, "p_drop": (int, float, str)}
_ARM = {"rule": str, "draft_length": int, "items": dict}
_PROMPT = {"task": str, "turns": list}
_ROW: dict[str, Any] = {
    **dict.fromkeys(("arm", "rule", "task"), str),
    **dict.fromkeys(("n", "draft_length", "lossy_tokens", "emitted"), int),
    **dict.fromkeys(("tau", "tau_low", "tau_high", "lossy_share", "length_mean"), NUMBER),
    **dict.fromkeys(("lossy_prob_mean", "lossy_prob_median", "logprob_mean", "logprob_difference"), MAYBE),
    **dict.fromkeys(("repetition", "length_ratio", "diverged_share", "first_divergence_median"), MAYBE),
    **dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high"), MAYBE),
    **dict.fromkeys(("accuracy_difference", "difference_low", "difference_high"), MAYBE),
    **dict.fromkeys(("gained", "lost", "p_value", "tokens_per_second", "judge_over_target"), MAYBE),
    **dict.fromkeys(("over_plain", "over_lossless"), (dict, type(None))),
    "acceptance_by_position": list,
    "metrics": dict,
    "pareto": bool,
}


def load_results(path: Path) -> dict[str, Any]:
    """A results file of `dropmatch compare` with all that a report shows.

    Raises DataError naming the file and the position, kind or key that is wrong."""
    result = read_compare(path)
    fields = Fields(str(path), "The file is damaged; write it again with `dropmatch compare`.")
    fields.check("", result, {"summary": list, "speed": (dict, type(None)), "provenance": dict})
    fields.check("settings", result["settings"], _SETTINGS)
    fields.check("provenance", result["provenance"], {"command": str, "date": str})
    for item, prompt in result["prompts"].items():
        fields.check(f"prompts[{item!r}]", prompt, _PROMPT)
        fields.entries(f"prompts[{item!r}].turns", prompt["turns"], str)
    for name, arm in result["arms"].items():
        at = f"arms[{name!r}]"
        fields.check(at, arm, _ARM)
        for item in result["prompts"]:
            if item not in arm["items"]:
                raise fields.error(f"{at}.items[{item!r}] is missing")
        for item, record in arm["items"].items():
            if item not in result["prompts"]:
                raise fields.error(f"prompts[{item!r}] is missing, though {at} has an answer to it")
            fields.record(f"{at}.items[{item!r}]", record)
            fields.check(f"{at}.items[{item!r}]", record, {"score": dict})
            fields.check(f"{at}.items[{item!r}].score", record["score"], {"correct": (bool, type(None))})
    if not result["summary"]:
        raise fields.error("'summary' has no rows")
    for i, row in enumerate(result["summary"]):
        _check_row(fields, f"summary[{i}]", row, result)
    if result["speed"] is not None:
        _check_speed(fields, result["speed"], result["prompts"])
    return result


def _check_row(fields: Fields, at: str, row: Any, result: Mapping[str, Any]) -> None:
    fields.check(at, row, _ROW)
    if row["arm"] not in result["arms"]:
        raise fields.error(f"{at}.arm is {row['arm']!r}, which is none of arms")
    fields.entries(f"{at}.acceptance_by_position", row["acceptance_by_position"], NUMBER)
    fields.entries(f"{at}.metrics", list(row["metrics"].values()), NUMBER)
    for value, *bounds in (
        ("accuracy", "accuracy_low", "accuracy_high"),
        ("accuracy_difference", "difference_low", "difference_high", "gained", "lost", "p_value"),
    ):
        if row[value] is not None:
            fields.check(at, row, dict.fromkeys(bounds, NUMBER))
    for key in ("over_plain", "over_lossless"):
        if row[key] is not None:
            fields.check(f"{at}.{key}", row[key], dict.fromkeys(("median", "min", "max"), NUMBER))


def _check_speed(fields: Fields, speed: Mapping[str, Any], prompts: Mapping[str, Any]) -> None:
    """Seconds and tokens of each timed prompt under each rule, from which speeds' intervals are made."""
    fields.check("speed", speed, {"items": list, "arms": dict})
    fields.entries("speed.items", speed["items"], str)
    for item in speed["items"]:
        if item not in prompts:
            raise fields.error(f"prompts[{item!r}] is missing, though it was timed")
    for name, arm in speed["arms"].items():
        at = f"speed.arms[{name!r}]"
        fields.check(at, arm, {"seconds": dict, "tokens": dict})
        fields.check(f"{at}.seconds", arm["seconds"], dict.fromkeys(speed["items"], list))
        fields.check(f"{at}.tokens", arm["tokens"], dict.fromkeys(speed["items"], int))
        for item in speed["items"]:
            fields.entries(f"{at}.seconds[{item!r}]", arm["seconds"][item], NUMBER)
            if not arm["seconds"][item] or min(*arm["seconds"][item], arm["tokens"][item]) <= 0:
                raise fields.error(f"{at} has no time or no token of {item!r}")
