"""The Python API for everyone who does not want to assemble an engine: load, generate, stream.

    decoder = dropmatch.load("default")
    for piece in decoder.stream("Write a haiku about dropout."):
        print(piece.text, end="")

A `Decoder` holds the loaded models; each call runs an engine of its own over them, with caches of its own, so that
calls may overlap and one that is given up leaves nothing behind.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig, EngineConfig, Heads, PDrop, SamplingParams, check_choice
from dropmatch.core.acceptance import AcceptanceRule, RuleOptions, as_rule
from dropmatch.core.engine import Chunk, SpeculativeEngine
from dropmatch.core.interfaces import Drafter
from dropmatch.core.reasons import Reason
from dropmatch.core.sequence import FinishReason
from dropmatch.core.stats import EngineStats, RequestStats
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.drafters.random_tokens import RandomDrafter
from dropmatch.eagle3.checkpoint import TargetFacts, load_head, read_settings
from dropmatch.eagle3.drafter import TREE_TOKENS, TREE_TOP_K, Eagle3Drafter
from dropmatch.eagle3.find import SHIPPED, find_head, require_shipped_head, shipped_head
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import settle_p_drop
from dropmatch.hf.fast_linears import speed_up_linears
from dropmatch.hf.int4 import quantize_int4
from dropmatch.hf.int8 import quantize_int8
from dropmatch.hf.loading import check_tokenizers, load_model, load_tokenizer
from dropmatch.hf.model import HFModel
from dropmatch.hf.pairs import PAIRS, ensure_pair

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int] | Tensor
DraftWeights = Literal["own", "int4", "int8"]

# On the small pair's target 0.3 saturates the radius, so that Eq. 6 would keep almost anything.
_P_DROP: dict[str, PDrop] = {"small": "auto"}
_MODEL_FREE = ("none", "ngram", "random")
# A CPU pays for every node of a tree, so the small pair drafts small ones: most nodes, children per node.
_TREES = {"small": (16, 4)}


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request. tokens: generated ids, cut at the stop; reasons: why each was kept; logprobs: the target's
    log-probability of each where asked for; text: without special tokens and without the stop string."""

    text: str
    tokens: list[int]
    reasons: list[Reason]
    logprobs: list[float] | None
    finish_reason: FinishReason
    prompt_tokens: int
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Run:
    """All generations of one call, in the order of the prompts, with the pooled statistics and the time split."""

    generations: list[Generation]
    stats: EngineStats


class Decoder:
    """A target, its tokenizer and a drafter, ready to decode. Made by `load`."""

    def __init__(
        self,
        target: HFModel,
        tokenizer: Any,
        drafter: Drafter | None,
        *,
        rule: AcceptanceRule,
        dropout: DropoutConfig,
        config: EngineConfig,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.rule = rule
        self.config = config
        self.dropout, self.p_drop_choice = settle_p_drop(target, tokenizer, dropout, rule=rule)
        self.eos_ids = _eos_ids(target.model, tokenizer)

    def encode(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """Token ids of a prompt. A string becomes a user message where the tokenizer has a chat template (chat=False
        takes it as plain text); a list of messages always goes through the template; ids are taken as they are."""
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        if isinstance(prompt, str):
            if not _is_unicode(prompt):
                raise ConfigError("The prompt is not valid Unicode text. Was it read in another encoding than UTF-8?")
            if not (has_template if chat is None else chat):
                return list(self.tokenizer(prompt)["input_ids"])
            messages: list[Any] = [{"role": "user", "content": prompt}]
        else:
            messages = _messages_or_ids(prompt)
            if isinstance(messages[0], int):
                return messages
        if not has_template:
            raise ConfigError("This tokenizer has no chat template. Give the prompt as plain text, with chat=False.")
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def engine(
        self,
        *,
        rule: str | AcceptanceRule | None = None,
        drafter: Drafter | Literal["own"] | None = "own",
        config: EngineConfig | None = None,
        dropout: DropoutConfig | None = None,
    ) -> SpeculativeEngine:
        """A new engine over the loaded models, with no requests. drafter=None decodes plainly."""
        return SpeculativeEngine(
            _with_own_cache(self.target),
            _with_own_state(self.drafter) if drafter == "own" else drafter,
            rule=self.rule if rule is None else rule,
            dropout=dropout or self.dropout,
            config=config or self.config,
            decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True),
            eos_ids=self.eos_ids,
        )

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        engine: SpeculativeEngine | None = None,
        chat: bool | None = None,
    ) -> Run:
        """Decode many prompts together and keep the statistics. chat: see `encode`."""
        if isinstance(prompts, str):
            raise ConfigError("run takes a list of prompts, and one text was given. Use generate, or run([prompt]).")
        engine = engine or self.engine()
        encoded = [self.encode(prompt, chat=chat) for prompt in prompts]
        collected: dict[int, list[Chunk]] = {}
        try:
            requests = [engine.add(ids, params) for ids in encoded]
            while engine.has_work:
                for chunk in engine.step():
                    collected.setdefault(chunk.request, []).append(chunk)
        finally:  # an engine of the caller's can be used again after an error
            engine.cancel_all()
        generations = [
            _generation(collected[request], len(ids)) for request, ids in zip(requests, encoded, strict=True)
        ]
        return Run(generations, engine.stats)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool | None = None, **options: Any
    ) -> Generation:
        """Decode one prompt. chat: see `encode`; options: fields of SamplingParams, such as max_new_tokens=100."""
        return self.run([prompt], _params(params, options), chat=chat).generations[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Decode one prompt, giving each round's tokens, reasons and text as they come. Arguments as for generate;
        bad ones raise here, not at the first chunk."""
        engine = self.engine()
        engine.add(self.encode(prompt, chat=chat), _params(params, options))
        return _chunks(engine)


def load(
    target: str,
    draft: str | None = None,
    *,
    rule: str | AcceptanceRule = "dropmatch",
    rule_options: RuleOptions | None = None,
    num_paths: int = 5,
    p_drop: PDrop | None = None,
    heads: Heads = "shortlist",
    draft_length: int = 5,
    draft_weights: DraftWeights = "own",
    min_confidence: float = 0.0,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    device_map: Any = None,
    pack_weights: bool = True,
    tree_tokens: int | None = None,
    tree_top_k: int | None = None,
    tap_offset: int | None = None,
    max_batch: int = 32,
    seed: int = 0,
) -> Decoder:
    """Load a target, its tokenizer and a drafter.

    target: a hub id, a local folder, a .gguf file, or a named pair ("default", "small"). draft: likewise a model that
    reads the same tokens, an EAGLE-3 head, "eagle3" for the head that dropmatch carries for a named pair, or "ngram",
    "random", "none"; None takes the pair's own drafter, or "ngram".
    rule: acceptance rule by name (see `dropmatch.rule_names()`) or object. p_drop: a number, "auto" or
    "auto-expected" (see `DropoutConfig`); None takes 0.3, or what a named pair needs.
    heads: "full" asks the dropout heads about every token (see `DropoutConfig`). draft_weights: "int4"
    rounds a draft model's weights to 4 bits for single rows, "int8" its weights and inputs to 8 bits for batches, both
    on a CPU. min_confidence: see `DraftModelDrafter`.
    pack_weights: multiply bfloat16 weights on a CPU by the fastest kernels at hand; such a model cannot be saved.
    tree_tokens, tree_top_k, tap_offset: of EAGLE-3 heads, whose trees are as deep as draft_length: most nodes (60),
    children per node (10; 1 drafts chains), and see `eagle3.settings.parse_settings`.
    dtype: "auto" takes the checkpoint's; device: "auto" takes CUDA if there is one; device_map: as for transformers.
    Rows end at the last position that both models have.
    Raises ConfigError, UnknownNameError, ModelNotFoundError, UnsupportedModelError, TokenizerMismatchError.
    """
    made_rule = as_rule(rule, rule_options)
    config = EngineConfig(draft_length=draft_length, max_batch=max_batch, seed=seed)
    chosen = _P_DROP.get(target, 0.3) if p_drop is None else p_drop
    dropout = DropoutConfig(num_paths=num_paths, p_drop=chosen, heads=heads)
    check_choice("draft_weights", draft_weights, get_args(DraftWeights))
    name = target
    head = require_shipped_head(target) if draft == SHIPPED else shipped_head(target) if draft is None else None
    if target in PAIRS:
        pair = ensure_pair(target)
        target = str(pair.target)
        draft = draft or (str(pair.draft) if pair.draft is not None else "ngram")
    draft = draft or "ngram"
    if head is None and draft not in _MODEL_FREE:
        head = find_head(draft)
    if (head or draft in _MODEL_FREE) and (draft_weights != "own" or min_confidence != 0.0):
        what = "is an EAGLE-3 head" if head else "has no weights"
        raise ConfigError(f"draft_weights and min_confidence are for draft models, and draft={draft!r} {what}.")
    if head is None and (tree_tokens, tree_top_k, tap_offset) != (None, None, None):
        raise ConfigError(f"tree_tokens, tree_top_k and tap_offset are for EAGLE-3 heads, and draft={draft!r} is none.")
    tokenizer = load_tokenizer(target)
    if head is None and draft not in _MODEL_FREE:
        check_tokenizers(tokenizer, load_tokenizer(draft))
    own_target = load_model(target, dtype=dtype, device=device, device_map=device_map)
    if pack_weights:
        speed_up_linears(own_target)
    target_model = _wrapped(own_target, head, tap_offset)
    positions = [target_model.max_positions]
    drafter: Drafter | None
    if head is not None:
        facts = TargetFacts.of(target_model)
        loaded = load_head(head, facts, dtype=target_model.dtype, device=target_model.device, tap_offset=tap_offset)
        nodes, children = _TREES.get(name, (TREE_TOKENS, TREE_TOP_K))
        drafter = Eagle3Drafter(
            loaded,
            target_model.vocab_size,
            tree_tokens=nodes if tree_tokens is None else tree_tokens,
            top_k=children if tree_top_k is None else tree_top_k,
        )
    elif draft == "none":
        drafter = None
    elif draft == "ngram":
        drafter = NgramDrafter(target_model.device)
    elif draft == "random":
        drafter = RandomDrafter(target_model.device, target_model.vocab_size)
    else:
        own_draft = load_model(draft, dtype=dtype, device=device, device_map=device_map)
        draft_model = _wrapped_draft(own_draft, draft_weights, pack_weights)
        drafter = DraftModelDrafter(draft_model, target_model.vocab_size, min_confidence=min_confidence)
        positions.append(draft_model.max_positions)
    return Decoder(
        target_model,
        tokenizer,
        drafter,
        rule=made_rule,
        dropout=dropout,
        config=replace(config, max_length=min((count for count in positions if count is not None), default=None)),
    )


def _is_unicode(text: str) -> bool:
    """False for text with lone surrogates, which Python makes of bytes that it could not decode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _messages_or_ids(prompt: Sequence[Any] | Tensor) -> list[Any]:
    """Chat messages as they are, or token ids as ints. Raises ConfigError for anything else."""
    items = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not items:
        raise ConfigError("The prompt is empty. Give text, chat messages, or at least one token id.")
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [int(item) for item in items]
    if not all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in items):
        raise ConfigError(
            f"A prompt cannot be made of {items[0]!r}. Give text, a list of messages with 'role' and 'content', or a "
            "list of token ids; several prompts go to run."
        )
    return items


def load_draft_model(
    draft: str, decoder: Decoder, *, dtype: str = "auto", device: str = "auto", draft_weights: DraftWeights = "own"
) -> Decoder:
    """The same target with a draft model in its drafter's place. draft, draft_weights: as for `load`.

    Raises ModelNotFoundError, UnsupportedModelError, TokenizerMismatchError, UnknownNameError."""
    check_choice("draft_weights", draft_weights, get_args(DraftWeights))
    check_tokenizers(decoder.tokenizer, load_tokenizer(draft))
    model = _wrapped_draft(load_model(draft, dtype=dtype, device=device), draft_weights, pack_weights=True)
    limits = [limit for limit in (decoder.config.max_length, model.max_positions) if limit is not None]
    return Decoder(
        decoder.target,
        decoder.tokenizer,
        DraftModelDrafter(model, decoder.target.vocab_size),
        rule=decoder.rule,
        dropout=decoder.dropout,
        config=replace(decoder.config, max_length=min(limits, default=None)),
    )


def _wrapped_draft(model: Any, draft_weights: DraftWeights, pack_weights: bool) -> HFModel:
    """A draft model with its weights as asked for."""
    if draft_weights != "own":
        HFModel(model)  # the probe compares a forward over few tokens with one over many: exact weights only
    if draft_weights == "int4":
        quantize_int4(model)
    elif draft_weights == "int8":
        quantize_int8(model)
    elif pack_weights:
        speed_up_linears(model)
    return HFModel(model, probe=draft_weights == "own")


def _wrapped(model: Any, head: Path | None, tap_offset: int | None) -> HFModel:
    """The target, with the layers that an EAGLE-3 head reads on show."""
    if head is None:
        return HFModel(model)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return HFModel(model, tap_layers=read_settings(head, tap_offset=tap_offset).taps_of(num_layers))


def _with_own_cache(model: HFModel) -> HFModel:
    return HFModel(model.model, tap_layers=model.tap_layers, probe=False)  # the probe was passed when it was loaded


def _with_own_state(drafter: Drafter | None) -> Drafter | None:
    """The same drafter without any rows. One that is not ours is taken as it is."""
    if isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, HFModel):
        return DraftModelDrafter(
            _with_own_cache(drafter.model), drafter.vocab_size, min_confidence=drafter.min_confidence
        )
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3Drafter(drafter.head, drafter.vocab_size, tree_tokens=drafter.tree_tokens, top_k=drafter.top_k)
    return copy.deepcopy(drafter) if isinstance(drafter, NgramDrafter) else drafter


def _chunks(engine: SpeculativeEngine) -> Iterator[Chunk]:
    while engine.has_work:
        yield from engine.step()


def _params(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    unknown = [name for name in options if name not in SamplingParams.__dataclass_fields__]
    if unknown:
        allowed = ", ".join(sorted(SamplingParams.__dataclass_fields__))
        raise ConfigError(f"Unknown sampling option {unknown[0]!r}. Allowed: {allowed}.")
    return replace(params or SamplingParams(), **options)


def _generation(chunks: list[Chunk], prompt_tokens: int) -> Generation:
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    return Generation(
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.tokens],
        reasons=[reason for chunk in chunks for reason in chunk.reasons],
        logprobs=None if last.logprobs is None else [x for chunk in chunks for x in chunk.logprobs or ()],
        finish_reason=last.finish_reason,
        prompt_tokens=prompt_tokens,
        stats=last.stats,
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence ids of the generation config, or the tokenizer's one."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in ids if token is not None)
