"""The results file of a comparison: how it is written, and what is checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropmatch.bench.fields import Fields
from dropmatch.bench.results import read_json, with_lines, write_whole
from dropmatch.errors import DataError

FORMAT = 1
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


def check_answer(fields: Fields, at: str, record: Any) -> None:
    """Whether scoring and the summary can be made of a record."""
    fields.record(at, record)
    fields.check(at, record, _TAKEN)
    fields.entries(f"{at}.texts", record["texts"], str)
    for key in ("drafted_at", "accepted_at"):
        fields.entries(f"{at}.{key}", record[key], int)
