"""DropMatch as a decoding method of `model.generate`, through transformers' `custom_generate` seam.

    decode = dropmatch.hf.decoder(draft=draft_model, rule="dropmatch", tokenizer=tokenizer)
    model.generate(**inputs, max_new_tokens=100, custom_generate=decode)

The caller's GenerationConfig, logits processors and stopping criteria hold; model and configs stay as they are. For a
callable, `generate` drops `assistant_model`, `streamer` and `tokenizer` on the way and refuses `stop_strings`: they are
bound here instead. A processor must be a function of one row's ids: it is asked about drafted tokens too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import generation
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dropmatch.config import DropoutConfig, EngineConfig, PDrop, SamplingParams
from dropmatch.core.acceptance import AcceptanceRule, as_rule
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.interfaces import Drafter
from dropmatch.core.sequence import Decode
from dropmatch.core.stats import EngineStats
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import settle_p_drop
from dropmatch.hf.model import HFModel

# warper -> (its parameter, the field of SamplingParams), in the order in which `generate` and the engine apply them
_NATIVE_WARPERS = {
    generation.TemperatureLogitsWarper: ("temperature", "temperature"),
    generation.TopKLogitsWarper: ("top_k", "top_k"),
    generation.TopPLogitsWarper: ("top_p", "top_p"),
    generation.MinPLogitsWarper: ("min_p", "min_p"),
}
_REFUSED_PROCESSORS = {
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "TopHLogitsWarper": "top_h",
    # these look at the whole batch, or keep a state from one token to the next
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
_REFUSED_SETTINGS = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "prompt_lookup_num_tokens",
)
# what `generate` itself adds; the engine has a cache of its own
_OWN_INPUTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position")
_CACHES = ("cache", "past_key_values")


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
        self._known: list[tuple[Any, torch.dtype]] = []  # models that passed the probe
        self._settled: list[tuple[Any, DropoutConfig]] = []
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
        _check_config(config)
        _check_inputs(input_ids, model_kwargs)
        if self._streamer is not None and len(input_ids) > 1:
            raise ConfigError(f"A streamer shows one row, and {len(input_ids)} were given. Leave the streamer out.")
        prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
        processors, sampling = _processors(logits_processor, config)
        criteria, max_length = _criteria(stopping_criteria, config)
        padding_id = _padding_id(config, has_criteria=bool(criteria or self._stop), num_rows=len(prompts))
        target = self._wrap(model)
        engine = SpeculativeEngine(
            target,
            self._drafter(target, max_length),
            rule=self._rule,
            dropout=self._settled_dropout(target),
            config=EngineConfig(draft_length=self._draft_length, max_batch=len(prompts)),
            decode=self._decode(),
        )
        seed = self._seed
        if seed is None:  # so that torch.manual_seed governs sampling here as it does in generate
            seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        try:
            for b, prompt in enumerate(prompts):
                padding = input_ids[b, : input_ids.shape[1] - len(prompt)]
                engine.add(
                    prompt,
                    SamplingParams(
                        max_new_tokens=max_length - input_ids.shape[1],
                        eos_ids=_eos_ids(config),
                        stop=self._stop,
                        seed=seed,
                        stream=b if config.do_sample else 0,
                        processors=tuple(_with_padding(_of_row(p, padding), padding) for p in processors),
                        stop_checks=tuple(_stop_check(c, padding) for c in criteria),
                        **sampling,
                    ),
                )
            rows = self._run(engine, input_ids)
        finally:
            if self._streamer is not None:  # also after an error: a reader in another thread waits for the end
                self._streamer.end()
        self.stats = engine.stats
        sequences = _padded(input_ids, rows, padding_id)
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
        return rows

    def _wrap(self, model: Any) -> HFModel:
        """The model behind an empty cache of its own; probed at its first call only."""
        is_known = any(known is model and dtype == model.dtype for known, dtype in self._known)
        wrapped = HFModel(model, probe=not is_known)
        if not is_known:
            self._known.append((model, model.dtype))
        return wrapped

    def _settled_dropout(self, target: HFModel) -> DropoutConfig:
        for model, settled in self._settled:
            if model is target.model:
                return settled
        settled, _ = settle_p_drop(target, self._tokenizer, self._dropout, rule=as_rule(self._rule))
        self._settled.append((target.model, settled))
        return settled

    def _drafter(self, target: HFModel, max_length: int) -> Drafter:
        if isinstance(self._draft, str):
            return NgramDrafter(target.device)
        draft = self._wrap(self._draft)
        if draft.max_positions is not None and draft.max_positions < max_length:
            raise ConfigError(
                f"Rows may grow to {max_length} tokens, and the draft model has {draft.max_positions} positions. "
                "Lower max_new_tokens, or use draft='ngram'."
            )
        return DraftModelDrafter(draft, target.vocab_size)

    def _decode(self) -> Decode | None:
        if self._tokenizer is None:
            return None
        return lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False)


def decoder(
    draft: Any = "ngram",
    *,
    rule: str | AcceptanceRule = "dropmatch",
    num_paths: int = 5,
    p_drop: PDrop = 0.3,
    draft_length: int = 5,
    tokenizer: Any = None,
    streamer: Any = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
) -> GenerateDecoder:
    """A decoding method for `model.generate(..., custom_generate=decoder(...))`.

    draft: a transformers model that shares the target's tokenizer, or "ngram". rule: an acceptance rule by name or
    object; "lossless" and "exact" change no output. tokenizer: needed for `stop` strings and p_drop="auto".
    stop, streamer: take the place of generate's own `stop_strings` and `streamer`, which do not reach a callable.
    seed: keys masks and noise; None takes sampling seeds from torch's global generator.
    Raises ConfigError, also at a `generate` call that asks for what cannot be honoured.
    """
    if draft != "ngram" and not hasattr(draft, "get_output_embeddings"):
        raise ConfigError(f"draft={draft!r} is not allowed. Give a loaded transformers model, or 'ngram'.")
    if isinstance(stop, str) or not all(stop):
        raise ConfigError(f"stop={stop!r} is not allowed. Give a list of strings that are not empty.")
    if stop and tokenizer is None:
        raise ConfigError("stop strings need the tokenizer. Give decoder(..., tokenizer=tokenizer).")
    if isinstance(p_drop, str) and tokenizer is None:
        raise ConfigError("p_drop='auto' needs the tokenizer. Give decoder(..., tokenizer=tokenizer).")
    made_rule = as_rule(rule)
    dropout = DropoutConfig(num_paths=num_paths, p_drop=p_drop)
    EngineConfig(draft_length=draft_length, seed=seed or 0)  # a bad value shows here, not at the first call
    return GenerateDecoder(draft, made_rule, dropout, draft_length, tokenizer, streamer, stop, seed)


def _check_config(config: Any) -> None:
    if config.num_beams not in (None, 1):
        raise ConfigError(f"num_beams={config.num_beams} is not supported. Speculative decoding keeps one beam.")
    for name in _REFUSED_SETTINGS:
        value = getattr(config, name, None)
        if value:
            raise ConfigError(f"{name}={value!r} is not supported by this decoding method. Leave it out.")


def _check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse what the model would have been given besides token ids: it would be ignored here."""
    if model_kwargs.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not supported: drafts are token ids. Give input_ids.")
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ConfigError(f"{name} holds tokens already, which is not supported. Give the whole input_ids instead.")
    for name, value in model_kwargs.items():
        if value is not None and name not in _OWN_INPUTS and name not in _CACHES:
            raise ConfigError(f"{name} is not supported by this decoding method, which gives the model ids only.")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        mask = torch.ones_like(input_ids) if mask is None else mask
        expected = mask.long().cumsum(-1) - 1
        if positions.dim() != 2 or bool(((positions != expected) & mask.bool()).any()):
            raise ConfigError("position_ids other than 0, 1, 2, ... are not supported. Leave them out.")


def _processors(processors: Any, config: Any) -> tuple[list[Callable[..., Tensor]], dict[str, Any]]:
    """What each row's logits go through, and the SamplingParams fields that stand for the warpers at the end."""
    before = list(processors)
    for processor in before:
        name = type(processor).__name__
        if name in _REFUSED_PROCESSORS:
            raise ConfigError(
                f"{_REFUSED_PROCESSORS[name]} ({name}) is not supported by this decoding method. Available for "
                "sampling: temperature, top_k, top_p, min_p; and any logits processor that looks at one row."
            )
    if not config.do_sample:
        return before, {}
    sampling: dict[str, Any] = {"temperature": 1.0}
    order = list(_NATIVE_WARPERS)
    if before and isinstance(before[-1], generation.LogitNormalization):
        before.pop()  # changes no probability
    # Only a run in the engine's own order is left to the engine: elsewhere a warper works as a processor, at its place.
    while before and type(before[-1]) in order and getattr(before[-1], "min_tokens_to_keep", 1) == 1:
        kind = type(before[-1])
        parameter, field = _NATIVE_WARPERS[kind]
        sampling[field] = getattr(before.pop(), parameter)
        order = order[: order.index(kind)]
    return before, sampling


def _criteria(stopping_criteria: Any, config: Any) -> tuple[list[Callable[..., Tensor]], int]:
    """Criteria that each row is asked about, and the length at which it ends. The engine knows the EOS ids itself."""
    kept, max_length = [], int(config.max_length)
    for criterion in stopping_criteria:
        if isinstance(criterion, generation.MaxLengthCriteria):
            max_length = min(max_length, criterion.max_length)
        elif not isinstance(criterion, generation.EosTokenCriteria) or (
            set(criterion.eos_token_id.tolist()) - set(_eos_ids(config))
        ):
            kept.append(criterion)
    return kept, max_length


def _eos_ids(config: Any) -> tuple[int, ...]:
    given = config.eos_token_id
    return tuple(int(eos) for eos in (given if isinstance(given, list | tuple) else [given]) if eos is not None)


def _padding_id(config: Any, *, has_criteria: bool, num_rows: int) -> int:
    """The pad token, or else the first EOS, as `generate` has it."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    if eos_ids := _eos_ids(config):
        return eos_ids[0]
    if has_criteria and num_rows > 1:
        raise ConfigError("Rows may end at different lengths, and there is no token to pad with. Set pad_token_id.")
    return 0  # never used: all rows have the same length


def _of_row(processor: Any, padding: Tensor) -> Any:
    """A processor that holds one number per row of the batch, cut to a row with this left padding."""
    if type(processor) is generation.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        return generation.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=len(padding))
    return processor


def _with_padding(processor: Callable[..., Tensor], padding: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Show a processor the row as `generate` would: with its left padding, in float32."""

    def process(ids: Tensor, logits: Tensor) -> Tensor:
        full = torch.cat([padding.to(ids.device).expand(len(ids), -1), ids], dim=-1)
        return processor(full, logits.float())

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


def _padded(input_ids: Tensor, rows: list[list[int]], padding_id: int) -> Tensor:
    """Prompts as given, with the new tokens behind and padding where a row is shorter."""
    longest = max(len(row) for row in rows)
    new = torch.tensor([[*row, *[padding_id] * (longest - len(row))] for row in rows], dtype=torch.int64)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=-1)
