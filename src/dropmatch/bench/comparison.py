"""The results file of a comparison: how it is written, and what is checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropmatch.bench.arms import GENERATE
from dropmatch.bench.bases import well_based
from dropmatch.bench.fields import MAYBE, NUMBER, Fields
from dropmatch.bench.results import read_json, with_lines, write_whole
from dropmatch.errors import DataError

FORMAT = 1
_SETTINGS = {"target": str, "draft": (str, type(None)), "dtype": str, "k": int, "p_drop": (int, float, str)}
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
_TAKEN = {
    **dict.fromkeys(("texts", "drafted_at", "accepted_at"), list),
    **dict.fromkeys(("rounds", "drafted", "accepted"), int),
}


def write_compare(result: Mapping[str, Any], output: Path) -> None:
    """Write a comparison with one record a line, so that a large file stays readable and diffs stay small."""
    arms = ",\n".join(
        f" {json.dumps(name)}: {{"
        + "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in arm.items() if key != "items")
        + '"items": {\n'
        + ",\n".join(f"  {json.dumps(item)}: {json.dumps(r, allow_nan=False)}" for item, r in arm["items"].items())
        + "\n }}"
        for name, arm in result["arms"].items()
    )
    others = {key: value for key, value in result.items() if key != "arms"}
    write_whole(with_lines(others, "arms", f"{{\n{arms}\n }}"), output)


def read_compare(path: Path) -> dict[str, Any]:
    """A results file of `run_compare`. Raises DataError naming the file if it is none."""
    result: dict[str, Any] = read_json(path, "Name another file, or remove this one.")
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind != "compare" or result.get("format") != FORMAT:
        what = f"results of kind {kind!r}" if kind else "no results of a known kind"
        if kind == "compare":
            what = f"a comparison of format {result.get('format')!r}"
        raise DataError(
            f"{path} holds {what}; a comparison of format {FORMAT} is needed. Name a file of `dropmatch compare`."
        )
    missing = [key for key in ("settings", "prompts", "arms") if not isinstance(result.get(key), dict)]
    if missing:
        raise DataError(f"{path}: {missing[0]!r} is missing. The file is damaged; measure again.")
    fields = Fields(str(path), "The file is damaged; measure again.")
    for item, prompt in result["prompts"].items():
        fields.check(f"prompts[{item!r}]", prompt, {"task": str, "turns": list})
        fields.entries(f"prompts[{item!r}].turns", prompt["turns"], str)
    for name, arm in result["arms"].items():
        fields.check(f"arms[{name!r}]", arm, {"rule": str, "draft_length": int, "items": dict})
    return result


def read_finished(path: Path) -> dict[str, Any]:
    """A results file of `run_compare` with all that tables and reports show. Figures of its summary that older versions
    set against another base are None.

    Raises DataError naming the file and the position, kind or key that is wrong."""
    result = read_compare(path)
    fields = Fields(str(path), "The file is damaged; write it again with `dropmatch compare`.")
    fields.check("", result, {"summary": list, "speed": (dict, type(None)), "provenance": dict})
    fields.check("settings", result["settings"], _SETTINGS)
    fields.check("provenance", result["provenance"], {"command": str, "date": str})
    for name, arm in result["arms"].items():
        for item in result["prompts"]:
            if item not in arm["items"]:
                raise fields.error(f"arms[{name!r}].items[{item!r}] is missing")
        for item, record in arm["items"].items():
            at = f"arms[{name!r}].items[{item!r}]"
            if item not in result["prompts"]:
                raise fields.error(f"prompts[{item!r}] is missing, though arms[{name!r}] has an answer to it")
            fields.record(at, record)
            fields.check(at, record, {"score": dict})
            fields.check(f"{at}.score", record["score"], {"correct": (bool, type(None))})
    if not result["summary"]:
        raise fields.error("'summary' has no rows")
    for i, row in enumerate(result["summary"]):
        _check_row(fields, f"summary[{i}]", row, result)
    if result["speed"] is not None:
        check_speed(fields, result["speed"], result["prompts"])
    return {**result, "summary": well_based(result["summary"])}


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
    for key in ("over_plain", "over_lossless", "over_generate"):
        if row.get(key) is not None:  # older files have no over_generate
            fields.check(f"{at}.{key}", row[key], dict.fromkeys(("median", "min", "max"), NUMBER))


def check_answer(fields: Fields, at: str, record: Any) -> None:
    """Whether scoring and the summary can be made of a record."""
    fields.record(at, record)
    fields.check(at, record, _TAKEN)
    fields.entries(f"{at}.texts", record["texts"], str)
    for key in ("drafted_at", "accepted_at"):
        fields.entries(f"{at}.{key}", record[key], int)
    if len(record["drafted_at"]) != len(record["accepted_at"]):
        raise fields.error(f"{at} counts drafted and kept tokens at unlike numbers of places")
    if record["rounds"] < 1 or not record["tokens"]:
        raise fields.error(f"{at} has no round or no token")


def check_speed(fields: Fields, speed: Mapping[str, Any], prompts: Mapping[str, Any]) -> None:
    """Whether a speed pass has seconds, tokens and the split of time of each timed prompt under each method."""
    fields.check("speed", speed, {"items": list, "arms": dict})
    fields.entries("speed.items", speed["items"], str)
    for item in speed["items"]:
        if item not in prompts:
            raise fields.error(f"prompts[{item!r}] is missing, though it was timed")
    for name, arm in speed["arms"].items():
        at = f"speed.arms[{name!r}]"
        fields.check(at, arm, {"seconds": dict, "tokens": dict, "time": dict})
        if name != GENERATE:
            fields.check(f"{at}.time", arm["time"], {"target_s": NUMBER, "judge_s": NUMBER})
        fields.check(f"{at}.seconds", arm["seconds"], dict.fromkeys(speed["items"], list))
        fields.check(f"{at}.tokens", arm["tokens"], dict.fromkeys(speed["items"], int))
        for item in speed["items"]:
            fields.entries(f"{at}.seconds[{item!r}]", arm["seconds"][item], NUMBER)
            if not arm["seconds"][item] or min(*arm["seconds"][item], arm["tokens"][item]) <= 0:
                raise fields.error(f"{at} has no time or no token of {item!r}")
