"""A target wrapped for training: alone, with the hidden states of some of its layers on show."""

from __future__ import annotations

from dropmatch.api import Decoder
from dropmatch.config import DropoutConfig, EngineConfig
from dropmatch.core.acceptance import as_rule
from dropmatch.eagle3.settings import default_taps
from dropmatch.hf.loading import hide_progress_bars, load_model, load_tokenizer
from dropmatch.hf.model import HFModel
from dropmatch.hf.packages import PACKAGED_MODELS
from dropmatch.hf.pairs import PAIRS, ensure_pair


def public_name(target: str) -> str:
    """The name under which others find a target: the hub id of a named pair's, else as given."""
    name = PAIRS[target][0] if target in PAIRS else target
    return PACKAGED_MODELS[name].hub_id if name in PACKAGED_MODELS else name


def load_tapped(target: str, *, dtype: str = "auto", device: str = "auto") -> Decoder:
    """A decoder without a drafter whose target gives EAGLE-3's default taps. target: as for `dropmatch.load`.

    Raises UnsupportedModelError for targets with too few layers.
    """
    hide_progress_bars()
    name = str(ensure_pair(target).target) if target in PAIRS else target
    tokenizer = load_tokenizer(name)
    model = load_model(name, dtype=dtype, device=device)
    wrapped = HFModel(model, tap_layers=default_taps(model.config.get_text_config(decoder=True).num_hidden_layers))
    return Decoder(
        wrapped,
        tokenizer,
        None,
        rule=as_rule("exact"),
        dropout=DropoutConfig(),
        config=EngineConfig(max_length=wrapped.max_positions),
    )
