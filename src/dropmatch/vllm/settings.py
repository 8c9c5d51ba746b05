"""What the operator and single requests may ask for, checked where it is read. Knows no vLLM object.

The operator writes a JSON object under "dropmatch" in --additional-config; a request writes fields that begin with
`dropmatch_` in vllm_xargs (offline: SamplingParams.extra_args).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, get_args

from dropmatch.config import DropoutConfig, MaskSharing, PDrop, check_choice
from dropmatch.core.acceptance import AcceptanceRule, AnyOf, Guard, Need, RuleOptions, make_rule, reads_rows
from dropmatch.core.closed_form import ExpectedHead, ExpectedJS, ExpectedMajority
from dropmatch.errors import ConfigError, UnknownNameError

KEY = "dropmatch"
PREFIX = "dropmatch_"
RULES = (
    "dropmatch",
    "dropmatch-expected",
    "dropmatch-naive",
    "dropmatch-paper",
    "exact",
    "expected-head",
    "expected-js",
    "expected-majority",
    "head",
    "js",
    "lossless",
    "majority",
)
"""Rules that need no more than vLLM's flat rows show. They may be joined by '+'."""
AskChoice = Literal["auto", "all", "open"]
REQUEST_FIELDS = ("rule", "p_drop", "k", "guard", "off")
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Settings of a server; each field is a key of the JSON object.

    rule: one of RULES, or several joined by '+'. k: number of dropout paths K. p_drop: chance that a coordinate is
    dropped; "auto" measures the model's radius at start. guard: least target probability of a token that differs from
    the target's own (0: off); guard_ratio: the same, relative to the target's best token. js_min_centroid_prob,
    include_plain_argmax, head_chance: see `RuleOptions`. mask_sharing: see `DropoutConfig`. seed: keys the masks of
    requests without a seed of their own. memory_mb: cap in MiB on the memory that judging takes for a moment.
    point_mass: let 'js' take a drafter without a distribution for a point mass on its token, which is another rule.
    ask: "all" asks the heads about every drafted token and never waits for the device; "open" only where a rule is
    undecided, which waits once a step; "auto" is "open" on CPUs and "all" elsewhere.
    """

    rule: str = "dropmatch"
    k: int = 5
    p_drop: PDrop = 0.3
    guard: float = 0.0
    guard_ratio: float = 0.0
    js_min_centroid_prob: float = 0.0
    include_plain_argmax: bool = False
    head_chance: float = 0.5
    mask_sharing: MaskSharing = "position"
    seed: int = 0
    memory_mb: int = 256
    point_mass: bool = False
    ask: AskChoice = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str):
            raise ConfigError(f"rule={self.rule!r} is not allowed. Give the name of a rule: {', '.join(RULES)}.")
        for name in ("k", "memory_mb", "seed"):
            _check_count(name, getattr(self, name), 0 if name == "seed" else 1)
        for name in ("include_plain_argmax", "point_mass"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not allowed. Give true or false.")
        for name in ("guard", "guard_ratio", "js_min_centroid_prob"):
            _check_share(name, getattr(self, name))
        if not (_is_number(self.head_chance) and 0.0 < float(self.head_chance) <= 1.0):
            raise ConfigError(f"head_chance={self.head_chance!r} is not allowed. Give a number in (0, 1].")
        check_choice("mask_sharing", self.mask_sharing, get_args(MaskSharing))
        check_choice("ask", self.ask, get_args(AskChoice))
        self.dropout(self.k, self.p_drop)
        self.settings()

    def dropout(self, k: int, p_drop: PDrop) -> DropoutConfig:
        return DropoutConfig(num_paths=k, p_drop=p_drop, mask_sharing=self.mask_sharing)

    def options(self, guard: float | None = None) -> RuleOptions:
        return RuleOptions(
            js_min_centroid_prob=self.js_min_centroid_prob,
            include_plain_argmax=self.include_plain_argmax,
            guard_prob=self.guard if guard is None else guard,
            guard_ratio=self.guard_ratio,
            head_chance=self.head_chance,
        )

    def settings(self) -> RequestSettings:
        """What holds for a request that asks for nothing itself."""
        return _settings(self, self.rule, self.k, self.p_drop, None)

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * _MIB


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How one request is judged. rule: None leaves the request to vLLM's own lossless verification."""

    rule: AcceptanceRule | None
    dropout: DropoutConfig

    @property
    def needs_distribution(self) -> bool:
        """Whether the drafter's distribution takes part."""
        return self.rule is not None and (
            Need.DIVERGENCE in self.rule.needs or any(isinstance(part, ExpectedJS) for part in parts_of(self.rule))
        )

    @property
    def needs_weight(self) -> bool:
        """Whether rows of the LM head's weight are read."""
        return self.rule is not None and reads_rows(self.rule)

    @property
    def is_greedy_only(self) -> bool:
        """Whether the rule is defined at temperature 0 alone."""
        kinds = (ExpectedHead, ExpectedMajority)
        return self.rule is not None and any(isinstance(part, kinds) for part in parts_of(self.rule))


def parts_of(rule: AcceptanceRule) -> tuple[AcceptanceRule, ...]:
    """The rules that a rule is made of."""
    if isinstance(rule, Guard):
        return parts_of(rule.rule)
    if isinstance(rule, AnyOf):
        return tuple(part for joined in rule.rules for part in parts_of(joined))
    return (rule,)


def parse_config(given: object) -> PluginConfig:
    """The operator's settings. Raises ConfigError with what is allowed for an unknown key, rule or value."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'"{KEY}" in --additional-config is {given!r}. Give a JSON object, such as '
            f'{{"{KEY}": {{"rule": "dropmatch", "k": 5, "p_drop": 0.3}}}}.'
        )
    names = [option.name for option in dataclasses.fields(PluginConfig)]
    for key in given:
        if key not in names:
            raise UnknownNameError(f'key of "{KEY}" in --additional-config:', str(key), names)
    return PluginConfig(**given)


def parse_request(config: PluginConfig, extra: Mapping[str, object] | None) -> RequestSettings:
    """One request's settings from its extra arguments. Raises ConfigError naming the field."""
    asked = {key: value for key, value in (extra or {}).items() if key.startswith(KEY)}
    if not asked:
        return config.settings()
    allowed = [PREFIX + name for name in REQUEST_FIELDS]
    for key in asked:
        if key not in allowed:
            raise UnknownNameError("field of vllm_xargs", key, allowed)
    if _read_flag(PREFIX + "off", asked.get(PREFIX + "off", False)):
        others = sorted(key for key in asked if key != PREFIX + "off")
        if others:
            raise ConfigError(f"{PREFIX}off switches the plugin off for this request. Leave out {', '.join(others)}.")
        return RequestSettings(None, config.dropout(config.k, config.p_drop))
    rule = asked.get(PREFIX + "rule", config.rule)
    if not isinstance(rule, str):
        raise ConfigError(f"{PREFIX}rule={rule!r} is not allowed. Give the name of a rule: {', '.join(RULES)}.")
    guard: Any = asked.get(PREFIX + "guard")
    if guard is not None:
        _check_share(PREFIX + "guard", guard)
    k: Any = asked.get(PREFIX + "k", config.k)
    p_drop: Any = asked.get(PREFIX + "p_drop", config.p_drop)
    if isinstance(k, float) and k.is_integer():  # JSON clients may send 5.0
        k = int(k)
    _check_count(PREFIX + "k", k, 1)
    if PREFIX + "p_drop" in asked and not (_is_number(p_drop) and 0.0 <= float(p_drop) < 1.0):
        raise ConfigError(f"{PREFIX}p_drop={p_drop!r} is not allowed. Give a number in [0, 1).")
    try:
        return _settings(config, rule, k, p_drop, guard)
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}rule={rule!r}, {PREFIX}k={k!r}: {error}") from None


@lru_cache(maxsize=1024)
def _settings(config: PluginConfig, rule: str, k: int, p_drop: PDrop, guard: float | None) -> RequestSettings:
    for part in (part.strip() for part in rule.split("+")):
        if part not in RULES:
            raise UnknownNameError("acceptance rule", part, RULES)
    made = None if rule.strip() == "lossless" else make_rule(rule, config.options(guard))
    return RequestSettings(made, config.dropout(k, p_drop))


def _read_flag(name: str, value: object) -> bool:
    if value in (True, "true", "1"):
        return True
    if value in (False, "false", "0"):
        return False
    raise ConfigError(f"{name}={value!r} is not allowed. Give true or false.")


def _check_count(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} is not allowed. Give a whole number of at least {low}.")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_share(name: str, value: Any) -> None:
    if not (_is_number(value) and 0.0 <= float(value) <= 1.0):
        raise ConfigError(f"{name}={value!r} is not allowed. Give a number in [0, 1]; 0 is off.")
