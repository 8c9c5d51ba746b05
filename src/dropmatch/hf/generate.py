"""DropMatch as a decoding method of `model.generate`, through transformers' `custom_generate` seam.

    decode = dropmatch.hf.decoder(draft=draft_model, rule="dropmatch", tokenizer=tokenizer)
    model.generate(**inputs, max_new_tokens=100, custom_generate=decode)

The caller's GenerationConfig, logits processors and stopping criteria hold; model and configs stay as they are. For a
callable, `generate` drops `assistant_model`, `streamer` and `tokenizer` on the way: they are bound here instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import generation
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import AcceptanceRule
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.interfaces import Drafter
from dropmatch.core.sequence import Decode
from dropmatch.core.stats import EngineStats
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import settle_p_drop
from dropmatch.hf.model import HFModel

_NATIVE_WARPERS = (
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.MinPLogitsWarper,
)
_OTHER_WARPERS = ("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper")
_BATCHED_PROCESSORS = ("PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
_NATIVE_CRITERIA = (generation.MaxLengthCriteria, generation.EosTokenCriteria)
_REFUSED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class GenerateDecoder:
    """A callable for `model.generate(custom_generate=...)`. Make it with `decoder`. stats: of the latest call."""

    def __init__(
        self,
        draft: Any,
        rule: str | AcceptanceRule,
        dropout: DropoutConfig,
        draft_length: int,
        tokenizer: Any,
        streamer: Any,
        stop: Sequence[str],
        seed: int | None,
    ) -> None:
        self._draft = draft
        self._rule = rule
        self._dropout = dropout
        self._draft_length = draft_length
        self._tokenizer = tokenizer
        self._streamer = streamer
        self._stop = tuple(stop)
        self._seed = seed
        self._wrapped: dict[int, HFModel] = {}
        self._settled: dict[int, DropoutConfig] = {}
        self.stats = EngineStats()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls. input_ids: [B, S], left-padded. Returns ids [B, S + longest], right-padded, or a
        GenerateDecoderOnlyOutput if the config asks for a dict. Raises ConfigError for what cannot be honoured."""
        config = generation_config
        _check_config(config, model_kwargs)
        if self._streamer is not None and len(input_ids) > 1:
            raise ConfigError(f"A streamer shows one row, and {len(input_ids)} were given. Leave the streamer out.")
        prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
        target = self._wrap(model)
        engine = SpeculativeEngine(
            target,
            self._drafter(target),
            rule=self._rule,
            dropout=self._settled_dropout(target),
            config=EngineConfig(draft_length=self._draft_length, max_batch=len(prompts)),
            decode=self._decode(),
        )
        seed = self._seed
        if seed is None:  # so that torch.manual_seed governs sampling here as it does in generate
            seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        processors = _processors(logits_processor, config)
        criteria = [c for c in stopping_criteria if not isinstance(c, _NATIVE_CRITERIA)]
        eos_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        try:
            for b, prompt in enumerate(prompts):
                padding = input_ids[b, : input_ids.shape[1] - len(prompt)]
                engine.add(
                    prompt,
                    SamplingParams(
                        max_new_tokens=config.max_length - input_ids.shape[1],
                        eos_ids=tuple(eos for eos in eos_ids if eos is not None),
                        stop=self._stop,
                        seed=seed,
                        stream=b if config.do_sample else 0,
                        processors=tuple(_with_padding(p, padding) for p in processors),
                        stop_checks=tuple(_stop_check(c, padding) for c in criteria),
                        **_sampling(config),
                    ),
                )
            rows = self._run(engine, input_ids)
        finally:  # whatever happened, the wrapped models hold no rows for the next call
            engine.cancel_all()
        self.stats = engine.stats
        sequences = _padded(input_ids, rows, config)
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

    def _run(self, engine: SpeculativeEngine, input_ids: Tensor) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in input_ids]
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        while engine.has_work:
            for chunk in engine.step():
                rows[chunk.request] += chunk.tokens
                if self._streamer is not None:
                    self._streamer.put(torch.tensor(chunk.tokens))
        if self._streamer is not None:
            self._streamer.end()
        return rows

    def _wrap(self, model: Any) -> HFModel:
        """The model behind a ragged cache; probed once, at the first call."""
        known = self._wrapped.get(id(model))
        if known is None or known.model is not model:
            known = self._wrapped[id(model)] = HFModel(model)
        return known

    def _settled_dropout(self, target: HFModel) -> DropoutConfig:
        key = id(target.model)
        if key not in self._settled:
            self._settled[key], _ = settle_p_drop(target, self._tokenizer, self._dropout)
        return self._settled[key]

    def _drafter(self, target: HFModel) -> Drafter:
        if self._draft == "ngram":
            return NgramDrafter(target.device)
        return DraftModelDrafter(self._wrap(self._draft), target.vocab_size)

    def _decode(self) -> Decode | None:
        if self._tokenizer is None:
            return None
        return lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False)


def decoder(
    draft: Any = "ngram",
    *,
    rule: str | AcceptanceRule = "dropmatch",
    num_paths: int = 5,
    p_drop: float | Literal["auto"] = 0.3,
    draft_length: int = 5,
    tokenizer: Any = None,
    streamer: Any = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
) -> GenerateDecoder:
    """A decoding method for `model.generate(..., custom_generate=decoder(...))`.

    draft: a transformers model that shares the target's tokenizer, or "ngram". rule: an acceptance rule by name or
    object; "lossless" and "exact" change no output. tokenizer: needed for `stop` strings and p_drop="auto". streamer: a
    transformers streamer. seed: keys masks and noise; None takes sampling seeds from torch's global generator.
    """
    if isinstance(draft, str) and draft != "ngram":
        raise ConfigError(f"draft={draft!r} is not allowed. Give a loaded transformers model, or 'ngram'.")
    if stop and tokenizer is None:
        raise ConfigError("stop strings need the tokenizer. Give decoder(..., tokenizer=tokenizer).")
    if p_drop == "auto" and tokenizer is None:
        raise ConfigError("p_drop='auto' needs the tokenizer. Give decoder(..., tokenizer=tokenizer).")
    dropout = DropoutConfig(num_paths=num_paths, p_drop=p_drop)
    return GenerateDecoder(draft, rule, dropout, draft_length, tokenizer, streamer, stop, seed)


def _check_config(config: Any, model_kwargs: dict[str, Any]) -> None:
    if config.num_beams not in (None, 1):
        raise ConfigError(f"num_beams={config.num_beams} is not supported. Speculative decoding keeps one beam.")
    for name in _REFUSED_OUTPUTS:
        if getattr(config, name, False):
            raise ConfigError(f"{name}=True is not supported by this decoding method. Leave it out.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not supported: drafts are token ids. Give input_ids.")


def _sampling(config: Any) -> dict[str, Any]:
    """SamplingParams fields of a GenerationConfig that samples."""
    if not config.do_sample:
        return {}
    temperature = 1.0 if config.temperature is None else config.temperature
    return {
        "temperature": float(temperature),
        "top_k": config.top_k or 0,
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "min_p": config.min_p or 0.0,
    }


def _processors(processors: Any, config: Any) -> list[Callable[..., Tensor]]:
    """Logits processors less the warpers that the engine applies itself."""
    kept = []
    for processor in processors:
        name = type(processor).__name__
        if name in _OTHER_WARPERS or name in _BATCHED_PROCESSORS:
            raise ConfigError(
                f"{name} is not supported by this decoding method. Available for sampling: temperature, top_k, top_p, "
                "min_p; any logits processor that looks at one row."
            )
        if not (config.do_sample and isinstance(processor, _NATIVE_WARPERS)):
            kept.append(processor)
    return kept


def _with_padding(processor: Callable[..., Tensor], padding: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Show a processor the row as `generate` would: with its left padding, in float32."""

    def process(ids: Tensor, logits: Tensor) -> Tensor:
        full = torch.cat([padding.to(ids.device).expand(len(ids), -1), ids], dim=-1)
        return processor(full, logits.float()).to(logits.dtype)

    return process


def _stop_check(criterion: Callable[..., Tensor], padding: Tensor) -> Callable[[list[int]], bool]:
    def check(ids: list[int]) -> bool:
        full = torch.cat([padding, torch.tensor(ids, device=padding.device)])[None]
        return bool(torch.as_tensor(criterion(full, None)).all())

    return check


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Rows without their left padding. Raises ConfigError where padding is not on the left."""
    if attention_mask is None:
        rows: list[list[int]] = input_ids.tolist()
        return rows
    mask = attention_mask.bool()
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ConfigError("attention_mask has zeros right of ones. Pad on the left: tokenizer.padding_side = 'left'.")
    return [ids[keep].tolist() for ids, keep in zip(input_ids, mask, strict=True)]


def _padded(input_ids: Tensor, rows: list[list[int]], config: Any) -> Tensor:
    """Prompts as given, with the new tokens behind and padding where a row is shorter."""
    longest = max(len(row) for row in rows)
    padding = config.pad_token_id
    if padding is None:
        padding = 0  # only reached by rows that ended at an EOS, and generate sets the pad id wherever there is an EOS
    new = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], dtype=torch.int64)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=-1)
