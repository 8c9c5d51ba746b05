"""What an EAGLE-3 checkpoint's config.json says, in either family, as one set of switches. Reads dicts; loads nothing.

Families: "official" is a flat Llama config with `draft_vocab_size` (the yuhuili/EAGLE3-* checkpoints and what follows
them); "speculators" nests the layer's config below `transformer_layer_config` (RedHatAI's *-speculator.eagle3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dropmatch.errors import ConfigError, IntegrityError, UnsupportedModelError

Family = Literal["official", "speculators"]

_LARGEST = 2**24  # no true size comes near; a hostile one must not reach an allocation
_LARGEST_NUMBER = 1e30  # float32 ends soon above
_MOST_LAYERS = 64
_FEWEST_TARGET_LAYERS = 7  # below, the three default taps are not distinct
_DEFAULT_BASE = 10000.0  # what heads without rope_theta were trained with, whatever their target uses


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Sizes and switches of a draft head.

    tap_layers: decoder layers of the target whose INPUT the head reads, or None for the default three.
    rope: parameters in transformers' form (rope_type, rope_theta and what the type needs).
    norm_before_residual: the residual of the first layer is the normalised feature. norm_before_fc: one RMSNorm over
    all taps, fc_norm: one for each. norm_output: the final norm's output, not its input, is the next feature.
    has_qk_norm: queries and keys are normalised per head (Qwen3).
    """

    family: Family
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_positions: int
    rope: Mapping[str, Any]
    tap_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def num_taps(self) -> int:
        return 3 if self.tap_layers is None else len(self.tap_layers)

    @property
    def is_reduced(self) -> bool:
        """The draft vocabulary is a part of the target's."""
        return self.draft_vocab_size != self.vocab_size

    def taps_of(self, num_target_layers: int) -> tuple[int, ...]:
        """Layers of a target to tap. Raises UnsupportedModelError if the target does not have them."""
        if self.tap_layers is None:
            return default_taps(num_target_layers)
        bad = next((tap for tap in self.tap_layers if not 0 <= tap < num_target_layers), None)
        if bad is not None:
            raise UnsupportedModelError(
                f"The EAGLE-3 head reads the input of layer {bad}, and the target's layers are 0 to "
                f"{num_target_layers - 1}. Use the head's own target; if its ids follow another convention, set "
                "tap_offset."
            )
        return self.tap_layers


def default_taps(num_target_layers: int) -> tuple[int, int, int]:
    """An early, a middle and a late layer: 30 layers -> (2, 15, 27)."""
    if num_target_layers < _FEWEST_TARGET_LAYERS:
        raise UnsupportedModelError(
            f"The target has {num_target_layers} layers; EAGLE-3's three default taps need {_FEWEST_TARGET_LAYERS}. "
            "Name the taps in the head's config (eagle_aux_hidden_state_layer_ids)."
        )
    return 2, num_target_layers // 2, num_target_layers - 3


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head. Raises UnsupportedModelError for speculators of other kinds."""
    kind = config.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise UnsupportedModelError(f"This is a speculators checkpoint of kind {kind!r}. Only 'eagle3' can be read.")
    names = config.get("architectures")
    is_named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return kind == "eagle3" or "draft_vocab_size" in config or is_named


def parse_settings(config: Mapping[str, Any], where: str, *, tap_offset: int | None = None) -> HeadSettings:
    """Read either family's config. where: names the file in messages.

    tap_offset: added to tap ids given below `eagle_config`, which count layer outputs (1 by default, so that they name
    the inputs of the next layers), or to those at the top level, which name inputs (0 by default).
    Raises IntegrityError naming the key, UnsupportedModelError for what cannot be run.
    """
    is_nested = "speculators_model_type" in config
    layer = config.get("transformer_layer_config") if is_nested else config
    if not isinstance(layer, Mapping):
        raise IntegrityError(f"{where}: 'transformer_layer_config' is missing or no object.")
    top, inner = _Fields(config, where), _Fields(layer, where)
    if (act := layer.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{where}: hidden_act {act!r} is not known; EAGLE-3 heads use 'silu'.")
    hidden_size, num_heads = inner.count("hidden_size"), inner.count("num_attention_heads")
    settings = HeadSettings(
        family="speculators" if is_nested else "official",
        hidden_size=hidden_size,
        target_hidden_size=top.count("target_hidden_size", hidden_size),
        intermediate_size=inner.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=inner.count("num_key_value_heads", num_heads),
        head_dim=inner.count("head_dim", hidden_size // num_heads),
        num_layers=inner.count("num_hidden_layers", 1, most=_MOST_LAYERS),
        vocab_size=inner.count("vocab_size"),
        draft_vocab_size=top.count("draft_vocab_size", inner.count("vocab_size")),
        rms_norm_eps=inner.number("rms_norm_eps", 1e-6),
        max_positions=inner.count("max_position_embeddings", 2048),
        rope=_rope(layer, where),
        tap_layers=_taps(config, where, tap_offset),
        # Speculators' trainer sets it and vLLM takes it as set; a head run the other way loses most of its acceptance.
        norm_before_residual=top.flag("norm_before_residual", is_nested),
        norm_before_fc=top.flag("norm_before_fc", False),
        fc_norm=top.flag("fc_norm", False),
        norm_output=top.flag("norm_output", False),
        has_qk_norm=layer.get("model_type") == "qwen3",
        attention_bias=inner.flag("attention_bias", False),
        mlp_bias=inner.flag("mlp_bias", False),
    )
    _check(settings, where, has_head_dim=layer.get("head_dim") is not None)
    return settings


def config_json(settings: HeadSettings, *, target_name: str | None, dtype: str) -> dict[str, Any]:
    """The config.json of settings, in their own family. Raises ConfigError for switches that it cannot express."""
    return _nested(settings, target_name, dtype) if settings.family == "speculators" else _flat(settings, dtype)


def _flat(settings: HeadSettings, dtype: str) -> dict[str, Any]:
    switches = {name: getattr(settings, name) for name in _SWITCHES if getattr(settings, name)}
    if switches or settings.num_layers > 1 or settings.has_qk_norm or settings.attention_bias or settings.mlp_bias:
        raise ConfigError(
            f"The official format cannot say {', '.join(switches) or 'extra layers, query norms or biases'}. "
            'Write the "speculators" format.'
        )
    rope_type = settings.rope["rope_type"]
    if rope_type not in ("default", "linear", "dynamic"):
        raise ConfigError(f'The official format has no rope of type {rope_type!r}. Write the "speculators" format.')
    scaling = {} if rope_type == "default" else {
        "rope_scaling": {"type": rope_type, "factor": settings.rope["factor"]}
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(settings),
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        "rope_theta": settings.rope["rope_theta"],
        **scaling,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **({} if settings.tap_layers is None else {"eagle_aux_hidden_state_layer_ids": list(settings.tap_layers)}),
    }


def _nested(settings: HeadSettings, target_name: str | None, dtype: str) -> dict[str, Any]:
    taps = None if settings.tap_layers is None else list(settings.tap_layers)
    own_width = settings.target_hidden_size if settings.target_hidden_size != settings.hidden_size else None
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": settings.draft_vocab_size,
        **{name: getattr(settings, name) for name in _SWITCHES},
        "embed_requires_grad": False,
        "target_hidden_size": own_width,
        "eagle_aux_hidden_state_layer_ids": taps,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "qwen3" if settings.has_qk_norm else "llama",
            **_sizes(settings),
            "head_dim": settings.head_dim,
            "rope_parameters": dict(settings.rope),
            "attention_bias": settings.attention_bias,
            "mlp_bias": settings.mlp_bias,
            "tie_word_embeddings": False,
        },
    }


_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _sizes(settings: HeadSettings) -> dict[str, Any]:
    own_dim = settings.head_dim * settings.num_heads != settings.hidden_size
    return {
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "num_hidden_layers": settings.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": settings.rms_norm_eps,
        "max_position_embeddings": settings.max_positions,
        "vocab_size": settings.vocab_size,
        **({"head_dim": settings.head_dim} if own_dim else {}),
    }


class _Fields:
    """Typed reads of a JSON object that name the key when they fail."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def count(self, key: str, default: int | None = None, *, most: int = _LARGEST) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise IntegrityError(f"{self._where}: {key!r} is {value!r}; a whole number from 1 to {most} is needed.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _LARGEST_NUMBER:
            raise IntegrityError(f"{self._where}: {key!r} is {value!r}; a positive number is needed.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise IntegrityError(f"{self._where}: {key!r} is {value!r}; true or false is needed.")
        return value


def _rope(layer: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rotary parameters in transformers' present form, from the present or the older keys."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise IntegrityError(f"{where}: 'rope_parameters' is {given!r}; one object of numbers is needed.")
    rope = {key: value for key, value in given.items() if key != "type"}
    rope["rope_type"] = given.get("rope_type", given.get("type", "default"))
    rope["rope_theta"] = given.get("rope_theta") or layer.get("rope_theta") or _DEFAULT_BASE
    _Fields(rope, where).number("rope_theta", _DEFAULT_BASE)
    return rope


def _taps(config: Mapping[str, Any], where: str, tap_offset: int | None) -> tuple[int, ...] | None:
    """Layers whose input is read. Two conventions exist: top-level ids name inputs, nested ids name outputs."""
    nested = {} if config.get("eagle_config") is None else config["eagle_config"]
    if not isinstance(nested, Mapping):
        raise IntegrityError(f"{where}: 'eagle_config' is {nested!r}; an object is needed.")
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(f"{where}: the head reads no inner layers, so it is no EAGLE-3 head.")
    key = "eagle_aux_hidden_state_layer_ids"
    is_top = config.get(key) is not None
    ids = config.get(key) if is_top else nested.get(key)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise IntegrityError(f"{where}: {key!r} is {ids!r}; a list of layer numbers is needed.")
    offset = tap_offset if tap_offset is not None else 0 if is_top else 1
    taps = tuple(i + offset for i in ids)
    if len(taps) > _MOST_LAYERS or len(set(taps)) < len(taps) or min(taps) < 0:
        raise IntegrityError(f"{where}: {key!r} is {ids!r} (offset {offset}); different layers from 0 on are needed.")
    return taps


def _check(settings: HeadSettings, where: str, *, has_head_dim: bool) -> None:
    if not has_head_dim and settings.hidden_size % settings.num_heads:
        raise IntegrityError(
            f"{where}: hidden_size {settings.hidden_size} cannot be cut into {settings.num_heads} heads, and there is "
            "no head_dim."
        )
    if settings.head_dim % 2:
        raise IntegrityError(f"{where}: head_dim {settings.head_dim} is odd; rotary positions need an even one.")
    if settings.num_heads % settings.num_kv_heads:
        raise IntegrityError(
            f"{where}: {settings.num_heads} attention heads cannot share {settings.num_kv_heads} key-value heads."
        )
    if settings.draft_vocab_size > settings.vocab_size:
        raise IntegrityError(
            f"{where}: draft_vocab_size {settings.draft_vocab_size} is above vocab_size {settings.vocab_size}."
        )
    if settings.norm_before_fc and settings.fc_norm:
        raise IntegrityError(f"{where}: 'norm_before_fc' and 'fc_norm' exclude each other.")
