"""How a comparison is run, and what two runs must share for the answers of one to stand for the other's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmatch.api import Decoder
from dropmatch.bench.arms import ArmSpec
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.errors import ConfigError
from dropmatch.hf.model import HFModel
from dropmatch.provenance import weights_digest

# settings that files of older versions do not have
NEWER = ("target_digest", "draft_digest", "tree_tokens", "tree_top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """How a comparison is run. max_new_tokens: None takes each task's own cap. batch: rows decoded together.
    speed_items: prompts of each task that are timed at batch 1 (0: none), repeats times each, for at most speed_tokens
    tokens; with_generate: beside transformers' own generate.
    strips: items whose single tokens are written out as text, for reports."""

    max_new_tokens: int | None = None
    batch: int = 16
    temperature: float = 0.0
    seed: int = 0
    speed_items: int = 0
    repeats: int = 1
    speed_tokens: int = 128
    with_generate: bool = False
    strips: int = 4

    def __post_init__(self) -> None:
        if self.with_generate and not self.speed_items:
            raise ConfigError("generate is timed beside the rules, and speed_items=0 times nothing. Give 1 or more.")


def seed_of(arm: ArmSpec, settings: CompareSettings) -> int:
    """The method's own seed, else that of the run."""
    return settings.seed if arm.seed is None else arm.seed


def shared_settings(decoder: Decoder, settings: CompareSettings, described: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run must share for its answers to stand for this one's, as it reads back from a file."""
    shared: dict[str, Any] = json.loads(
        json.dumps(
            {
                **described,
                "k": decoder.dropout.num_paths,
                "p_drop": decoder.dropout.p_drop,
                "heads": decoder.dropout.heads,
                "dtype": str(decoder.target.dtype),
                "max_new_tokens": settings.max_new_tokens,
                "temperature": settings.temperature,
                "seed": settings.seed,
                **weights_of(decoder),
                **_trees_of(decoder),
            }
        )
    )
    return shared


def weights_of(decoder: Decoder) -> dict[str, str | None]:
    """Digests of target and draft weights, so that a model trained further is not taken for the one of that name."""
    drafter, draft = decoder.drafter, None
    if isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, HFModel):
        draft = _model_digest(drafter.model.model)
    elif isinstance(drafter, Eagle3Drafter):
        digest = hashlib.sha256()
        for name, tensor in sorted(drafter.head.state_dict().items()):
            sample = tensor.flatten()[:: max(1, tensor.numel() // 64)]
            digest.update(f"{name} {tuple(tensor.shape)} {sample.tolist()}".encode())
        draft = digest.hexdigest()[:16]
    return {"target_digest": _model_digest(decoder.target.model), "draft_digest": draft}


def _trees_of(decoder: Decoder) -> dict[str, int]:
    """Sizes of the trees that an EAGLE-3 head drafts; nothing for other drafters."""
    drafter = decoder.drafter
    if not isinstance(drafter, Eagle3Drafter):
        return {}
    return {"tree_tokens": drafter.tree_tokens, "tree_top_k": drafter.top_k}


def _model_digest(model: Any) -> str | None:
    """Of a folder by what lies in it, of a model of the hub by its commit."""
    folder = Path(model.config.name_or_path)
    if folder.is_dir():
        return weights_digest(folder)
    commit: str | None = getattr(model.config, "_commit_hash", None)
    return commit
