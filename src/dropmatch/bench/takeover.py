"""What of earlier runs may stand for this one's: answers in a journal or a results file, and that file's methods.

An answer or a timing is taken over where the settings, the prompt and what ends an answer are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.bench.arms import ArmSpec, parse_arms
from dropmatch.bench.comparison import check_answer, check_speed, read_compare
from dropmatch.bench.fields import Fields
from dropmatch.bench.journal import Journal, describe_difference
from dropmatch.bench.settings import NEWER, CompareSettings
from dropmatch.bench.tasks import Item
from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import RuleOptions
from dropmatch.errors import ConfigError

Key = tuple[str, str, str]  # method, item, digest of the prompt


def prompt_digest(turns: Sequence[str]) -> str:
    """Tells prompts apart that go by one id."""
    return hashlib.sha256(json.dumps(list(turns)).encode()).hexdigest()[:16]


def limits(item: Item, max_new_tokens: int | None) -> dict[str, Any]:
    """What ends an answer, beside the model."""
    return {"max_new_tokens": max_new_tokens or item.max_new_tokens, "stop": list(item.stop)}


def conditions(item: Item, max_new_tokens: int | None) -> dict[str, Any]:
    """What an answer or a timing of another run must share, beside the settings."""
    return {"prompt": prompt_digest(item.turns), **limits(item, max_new_tokens)}


def fits(entry: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether an entry is of the same prompt under the same limits, as far as older versions wrote them down."""
    return all(entry.get(name, value) == value for name, value in wanted.items())


def journal_records(journal: Journal, items: Sequence[Item], settings: CompareSettings) -> dict[Key, dict[str, Any]]:
    """Answers to these items that an earlier run left in its journal. Raises DataError naming a damaged line."""
    wanted = {item.id: conditions(item, settings.max_new_tokens) for item in items}
    records: dict[Key, dict[str, Any]] = {}
    for number, entry in enumerate(journal.entries):
        fields = journal.fields(number)
        if "record" not in entry:
            if "arm" in entry:
                raise fields.error("'record' is missing")
            continue
        fields.check("", entry, dict.fromkeys(("arm", "item", "prompt"), str))
        check_answer(fields, "record", entry["record"])
        if entry["item"] in wanted and fits(entry, wanted[entry["item"]]):
            records[entry["arm"], entry["item"], entry["prompt"]] = entry["record"]
    return records


def with_earlier_arms(
    arms: Sequence[ArmSpec], earlier: Mapping[str, Any], dropout: DropoutConfig, options: RuleOptions, *, where: Path
) -> list[ArmSpec]:
    """The methods that a comparison has, then those of `arms` that it has not. where: its file, for the message.

    Raises ConfigError for a rule that cannot be made."""
    made: list[ArmSpec] = []
    for arm in earlier["arms"].values():
        try:
            made += parse_arms([arm["rule"]], [arm["draft_length"] or 1], dropout, options)
        except ConfigError as error:
            raise ConfigError(
                f"{where} has the rule {arm['rule']!r}, which cannot be run: {error} Name another --output, or give "
                "--restart to write it anew."
            ) from error
    return list({arm.name: arm for arm in [*made, *arms]}.values())


def in_order_of(earlier: Mapping[str, Any], items: Sequence[Item]) -> list[Item]:
    """The prompts of a comparison in its order, then the others: a prompt's place numbers its dropout masks, so that
    its answers under new methods are those that one run of all methods would give."""
    place = {item: at for at, item in enumerate(earlier["prompts"])}
    return sorted(items, key=lambda item: place.get(item.id, len(place)))


def read_earlier(
    output: Path, same: Mapping[str, Any], items: Sequence[Item], settings: CompareSettings
) -> dict[str, Any] | None:
    """A finished comparison that this one extends. Raises ConfigError if it is another, DataError if it is damaged."""
    if not output.exists():
        return None
    result = read_compare(output)
    advice = "Name another --output, or give --restart to write this one anew."
    held = {name: value for name, value in result["settings"].items() if name in same}
    if difference := describe_difference(held, same, NEWER):
        raise ConfigError(f"{output} holds a comparison with other settings ({difference}). {advice}")
    by_id = {item.id: item for item in items}
    missing = [item for item in result["prompts"] if item not in by_id]
    if missing:
        raise ConfigError(
            f"{output} has {len(missing)} prompts that were not given, such as {missing[0]!r}. Give all of its "
            f"prompts; others may be added. {advice}"
        )
    for name, prompt in result["prompts"].items():
        wanted = conditions(by_id[name], settings.max_new_tokens)
        if not fits({**prompt, "prompt": prompt_digest(prompt["turns"])}, wanted):
            raise ConfigError(
                f"{output} has a prompt {name!r} with another text, cap on tokens or stop string than the one given. "
                f"{advice}"
            )
    fields = Fields(str(output), "The file is damaged. Remove it, or give --restart to write it anew.")
    for name, arm in result["arms"].items():
        for item in result["prompts"]:
            at = f"arms[{name!r}].items[{item!r}]"
            check_answer(fields, at, arm["items"].get(item))
    fields.check("", result, {"speed": (dict, type(None)), "provenance": dict})
    if result["speed"] is not None:
        check_speed(fields, result["speed"], result["prompts"])
    return result


def records_of(result: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """The answers of a results file, without their scores."""
    prompts = {item: prompt_digest(prompt["turns"]) for item, prompt in result["prompts"].items()}
    return {
        (name, item, digest): {key: value for key, value in arm["items"][item].items() if key != "score"}
        for name, arm in result["arms"].items()
        for item, digest in prompts.items()
    }
