"""The decoding methods that a comparison sets side by side, written as text: `dropmatch@p=0.2@k=20`.

A rule by name (or several joined by '+'), then settings of its own behind '@': p (drop probability or auto), k
(dropout paths), guard (least target probability of a lossy token), guard-ratio, heads (full or shortlist), L (draft
length), seed (of masks and sampling). What is left out comes from the command's own options. `plain` is decoding
without a draft and has no settings; `lossless` asks no dropout heads and keeps no lossy token, so it has a draft length
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dropmatch.config import DropoutConfig, check_seed
from dropmatch.core.acceptance import AcceptanceRule, RuleOptions, make_rule
from dropmatch.errors import ConfigError, UnknownNameError

PLAIN = "plain"
GENERATE = "transformers generate"
"""No method of ours: timed beside them."""
_SETTINGS = ("p", "k", "guard", "guard-ratio", "heads", "L", "seed")
_FEWER_SETTINGS: Mapping[str, Sequence[str]] = {PLAIN: (), "lossless": ("L",)}


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One method at one draft length. rule: as written, settings included; made: the rule itself; seed: None for
    that of the run."""

    rule: str
    draft_length: int
    made: AcceptanceRule
    dropout: DropoutConfig
    seed: int | None = None

    @property
    def name(self) -> str:
        return PLAIN if self.draft_length == 0 else f"{self.rule} L={self.draft_length}"

    @property
    def is_plain(self) -> bool:
        return self.draft_length == 0

    @property
    def is_lossless(self) -> bool:
        return self.rule == "lossless"


def split_list(text: str) -> list[str]:
    """Parts between commas that stand outside brackets: "a,b(x=1,y=2)" -> ["a", "b(x=1,y=2)"]."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def parse_arms(
    rules: Sequence[str], lengths: Sequence[int], dropout: DropoutConfig, options: RuleOptions
) -> list[ArmSpec]:
    """All rules at all draft lengths, each combination once. Raises ConfigError naming what cannot be read."""
    if not rules:
        raise ConfigError("No rule was given. Name at least one, such as lossless,dropmatch.")
    arms: list[ArmSpec] = []
    for rule in rules:
        made, own_dropout, own_length, seed = _parse(rule, dropout, options)
        if rule == PLAIN:
            arms.append(ArmSpec(rule, 0, made, own_dropout))
            continue
        name = "@".join(part for part in rule.split("@") if not part.startswith("L="))
        arms += [ArmSpec(name, length, made, own_dropout, seed) for length in ([own_length] if own_length else lengths)]
    return list({arm.name: arm for arm in arms}.values())


def _parse(
    text: str, dropout: DropoutConfig, options: RuleOptions
) -> tuple[AcceptanceRule, DropoutConfig, int | None, int | None]:
    """The rule, its dropout, draft length and seed; the last two are None where the run's own are meant."""
    name, *settings = text.split("@")
    length: int | None = None
    seed: int | None = None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _SETTINGS:
            raise UnknownNameError(f"setting of rule {name!r}", key, _SETTINGS)
        if key not in (allowed := _FEWER_SETTINGS.get(name, _SETTINGS)):
            which = f"Only @{' and @'.join(allowed)} is allowed." if allowed else "It takes no settings."
            raise ConfigError(f"{text!r}: {key!r} means nothing to {name} decoding. {which} Write {name!r}.")
        try:
            if key == "L":
                length = int(value)
                if length < 1:
                    raise ValueError
            elif key == "seed":
                seed = int(value)
                check_seed(seed)
            elif key == "guard":
                options = replace(options, guard_prob=float(value))
            elif key == "guard-ratio":
                options = replace(options, guard_ratio=float(value))
            else:
                dropout = replace(dropout, **_dropout_setting(key, value))
        except ValueError as error:
            why = f" {error}" if isinstance(error, ConfigError) else ""
            raise ConfigError(f"{text!r}: the value of {key!r} cannot be {value!r}.{why}") from None
    return make_rule("exact" if name == PLAIN else name, options), dropout, length, seed


def _dropout_setting(key: str, value: str) -> dict[str, Any]:
    if key == "k":
        return {"num_paths": int(value)}
    if key == "heads":
        return {"heads": value}
    return {"p_drop": value if value.startswith("auto") else float(value)}
