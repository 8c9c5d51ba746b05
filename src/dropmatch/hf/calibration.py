"""p_drop="auto" for a loaded model: the radius is taken at positions of a built-in text, in one forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import AcceptanceRule, is_closed_form
from dropmatch.core.calibrate import PROBE_TEXT as PROBE_TEXT
from dropmatch.core.calibrate import PDropChoice, choose_p_drop
from dropmatch.hf.model import HFModel


def settle_p_drop(
    target: HFModel, tokenizer: Any, dropout: DropoutConfig, *, rule: AcceptanceRule | None = None
) -> tuple[DropoutConfig, PDropChoice | None]:
    """Replace p_drop="auto" or "auto-expected" by a number (see core.calibrate.choose_p_drop). target must hold no
    rows. rule: under one in closed form "auto" takes the expected radius.

    Returns the settled config and the evidence, which is None where p_drop was a number already.
    """
    if not isinstance(dropout.p_drop, str):
        return dropout, None
    expected = dropout.p_drop == "auto-expected" or (rule is not None and is_closed_form(rule))
    choice = choose_p_drop(target.head, probe_states(target, tokenizer), dropout, expected=expected)
    return replace(dropout, p_drop=choice.p_drop), choice


def probe_states(target: HFModel, tokenizer: Any) -> Tensor:
    """Inputs of the LM head [S, d] at all positions of the built-in text. target must hold no rows."""
    ids = list(tokenizer(PROBE_TEXT)["input_ids"])[: target.max_positions]
    hidden = target.add_rows([ids]).hidden[0]
    target.filter([])
    return hidden
