"""Ways to decode that are timed side by side on the same prompts: our own, and those of transformers.

Each generates a given number of tokens behind a prompt, EOS ignored, and is timed as a whole call, prefill included,
since transformers does not tell prefill apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dropmatch.api import Decoder
from dropmatch.bench.arms import GENERATE
from dropmatch.bench.figures import spread_of
from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.acceptance import make_rule
from dropmatch.core.stats import EngineStats
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.hf.loading import load_model
from dropmatch.hf.model import HFModel

WARM_UP = 8
"""Tokens that each way generates before it is timed."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode. run(ids, number of new tokens) -> new ids and, for our own, the statistics of the call."""

    name: str
    run: Callable[[list[int], int], tuple[list[int], EngineStats | None]]


def rotated(ways: Sequence[_T], start: int) -> list[_T]:
    """All ways, beginning with another one for another start, so that none always runs first."""
    start %= len(ways)
    return [*ways[start:], *ways[:start]]


def own_ways(decoder: Decoder, rules: Sequence[str], lengths: Sequence[int]) -> list[Way]:
    """`plain`, then each rule at each draft length, named like "lossless L=5"."""

    def way(name: str, rule: str, length: int, **options: Any) -> Way:
        config = EngineConfig(draft_length=length, max_length=decoder.config.max_length)

        def run(ids: list[int], num_new: int) -> tuple[list[int], EngineStats | None]:
            params = SamplingParams(max_new_tokens=num_new, eos_ids=())
            done = decoder.run([ids], params, engine=decoder.engine(rule=make_rule(rule), config=config, **options))
            return done.generations[0].tokens, done.stats

        return Way(name, run)

    return [
        way("plain", "exact", 0, drafter=None),
        *(way(f"{rule} L={length}", rule, length) for length in lengths for rule in rules),
    ]


def transformers_ways(decoder: Decoder, lengths: Sequence[int], *, with_schedule: bool = False) -> list[Way]:
    """transformers' own generate and, where a draft model is loaded, assisted generation at each constant draft length.

    with_schedule: also assisted generation with transformers' own number of tokens and schedule. The models are loaded
    anew, as transformers lays them out.
    """
    model = _as_loaded_by_transformers(decoder.target)
    ways = [_generating(decoder, model, GENERATE)]
    if isinstance(decoder.drafter, DraftModelDrafter) and isinstance(decoder.drafter.model, HFModel):
        assistant = _as_loaded_by_transformers(decoder.drafter.model)
        assisted = _generating(decoder, model, "transformers assisted", assistant_model=assistant)
        ways += [_at_constant_length(assisted, assistant, length) for length in lengths]
        if with_schedule:
            ways.append(_as_configured(assisted, assistant))
    return ways


def generate_way(decoder: Decoder) -> Way:
    """transformers' own generate alone, with the target loaded anew as transformers lays it out."""
    return _generating(decoder, _as_loaded_by_transformers(decoder.target), GENERATE)


def _generating(decoder: Decoder, model: Any, name: str, **options: Any) -> Way:
    def run(ids: list[int], num_new: int) -> tuple[list[int], EngineStats | None]:
        input_ids = torch.tensor([ids], device=decoder.target.device)
        with torch.inference_mode():
            out = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                **options,
            )
        return out[0, len(ids) :].tolist(), None

    return Way(name, run)


def _as_loaded_by_transformers(model: HFModel) -> Any:
    return load_model(model.model.name_or_path, dtype=model.dtype, device=str(model.device))


_SCHEDULE = ("num_assistant_tokens", "num_assistant_tokens_schedule")


def _at_constant_length(assisted: Way, assistant: Any, length: int) -> Way:
    """Assisted generation with a constant draft length, its confidence threshold left at transformers' default."""

    def run(ids: list[int], num_new: int) -> tuple[list[int], EngineStats | None]:
        return _run_with(assisted, assistant, (length, "constant"), ids, num_new)

    return Way(f"{assisted.name} L={length}", run)


def _as_configured(assisted: Way, assistant: Any) -> Way:
    """Assisted generation as configured. A schedule changes the assistant's settings as it goes, so each call begins
    with those that the model came with."""
    configured = tuple(getattr(assistant.generation_config, name) for name in _SCHEDULE)

    def run(ids: list[int], num_new: int) -> tuple[list[int], EngineStats | None]:
        return _run_with(assisted, assistant, configured, ids, num_new)

    return Way(f"{assisted.name}, default", run)


def _run_with(
    assisted: Way, assistant: Any, values: Sequence[Any], ids: list[int], num_new: int
) -> tuple[list[int], EngineStats | None]:
    """Run under a schedule and put the assistant's own back."""
    settings = assistant.generation_config
    before = [getattr(settings, name) for name in _SCHEDULE]
    try:
        for name, value in zip(_SCHEDULE, values, strict=True):
            setattr(settings, name, value)
        return assisted.run(ids, num_new)
    finally:
        for name, value in zip(_SCHEDULE, before, strict=True):
            setattr(settings, name, value)


Timings = Mapping[str, Sequence[float]]
"""Seconds of each repeat by prompt."""


def speed_over(seconds: Timings, tokens: Mapping[str, int], base: Timings, base_tokens: Mapping[str, int]) -> Any:
    """Speed over another way, prompt by prompt (median of the repeats each): median, minimum and maximum."""
    ratios = [
        tokens[item] / statistics.median(times) * statistics.median(base[item]) / base_tokens[item]
        for item, times in seconds.items()
    ]
    return spread_of(ratios)
