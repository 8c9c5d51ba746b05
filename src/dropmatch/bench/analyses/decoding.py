"""Batched greedy decoding of many (method, prompt) jobs with a journal: what the analyses of whole texts share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dropmatch.api import Decoder
from dropmatch.bench.analyses.single_head import Head, HeadAlone
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.tasks import Item
from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.acceptance import TargetMatch
from dropmatch.core.engine import Chunk, Round, SpeculativeEngine
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError
from dropmatch.hf.model import HFModel

TARGET, DRAFT = "target", "draft"
ANSWER = {"arm": str, "item": str, "text": str, "tokens": list, "finish": str}  # of a journal


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt under one method. arm: its name; head: the dropout head that decodes, None for the engine's rule;
    stream: numbers the prompt, so that its masks differ from other prompts'."""

    arm: str
    item: Item
    stream: int
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """max_new_tokens: None takes each task's own cap. batch: rows decoded together."""

    max_new_tokens: int | None = None
    batch: int = 16
    draft_length: int = 5
    seed: int = 0


def fingerprint(items: Sequence[Item]) -> str:
    """Tells prompts apart that go by the same ids, so that a journal of others is not taken up."""
    return hashlib.sha256(json.dumps([[item.id, *item.turns] for item in items]).encode()).hexdigest()[:16]


def encode(decoder: Decoder, item: Item) -> list[int]:
    """Ids of an item's first turn, through the chat template where there is one."""
    return decoder.encode(item.prompt, chat=getattr(decoder.tokenizer, "chat_template", None) is not None)


def target_engine(decoder: Decoder, settings: DecodingSettings, rule: Any = None) -> SpeculativeEngine:
    """An engine over the target and its drafter. rule: lossless matching by default."""
    config = EngineConfig(
        draft_length=settings.draft_length,
        max_batch=settings.batch,
        seed=settings.seed,
        max_length=decoder.config.max_length,
    )
    return decoder.engine(rule=rule or TargetMatch(), config=config)


def draft_engine(decoder: Decoder, settings: DecodingSettings) -> SpeculativeEngine | None:
    """The draft model decoding alone; None where the drafter is no model."""
    drafter = decoder.drafter
    if not (isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, HFModel)):
        return None
    config = EngineConfig(draft_length=0, max_batch=settings.batch, max_length=decoder.config.max_length)
    return SpeculativeEngine(
        HFModel(drafter.model.model, probe=False),
        None,
        rule=TargetMatch(),
        config=config,
        decode=lambda ids: decoder.tokenizer.decode(ids, skip_special_tokens=True),
        eos_ids=decoder.eos_ids,
    )


def say_answers_taken_over(journal: Journal) -> None:
    """Tell how many answers of an earlier run are taken over."""
    journal.say_taken_over(f"{len(journal.found('arm', ANSWER))} answers")


def check_single_turn(items: Sequence[Item]) -> None:
    """Raises ConfigError for a conversation of several user turns."""
    for item in items:
        if len(item.turns) > 1:
            raise ConfigError(
                f"{item.id} has {len(item.turns)} user turns, and this analysis takes prompts of one. Give a data set "
                "such as humaneval or gsm8k."
            )


def decode_jobs(
    decoder: Decoder,
    engine: SpeculativeEngine,
    jobs: Sequence[Job],
    settings: DecodingSettings,
    journal: Journal,
    meter: ProgressMeter,
    *,
    observe: Callable[[Round, dict[int, Job]], None] | None = None,
    extra: Callable[[Job], dict[str, Any]] | None = None,
) -> None:
    """Decode all jobs and journal each as {"arm", "item", "text", "tokens", "finish"}, with what extra(job) adds.

    observe(round, jobs in flight by request) sees each round."""
    rule = HeadAlone()
    flying: dict[int, Job] = {}
    chunks: dict[int, list[Chunk]] = {}
    if observe is not None:
        engine.observer = lambda round_: observe(round_, flying)
    for job in jobs:
        params = SamplingParams(
            max_new_tokens=settings.max_new_tokens or job.item.max_new_tokens,
            stop=job.item.stop,
            rule=None if job.head is None else rule,
            seed=settings.seed,
            stream=job.stream,
        )
        request = engine.add(encode(decoder, job.item), params)
        flying[request], chunks[request] = job, []
        if job.head is not None:
            rule.heads[request] = job.head
    started, emitted = time.monotonic(), 0
    while engine.has_work:
        for chunk in engine.step():
            chunks[chunk.request].append(chunk)
            emitted += len(chunk.tokens)
            if chunk.finish_reason is None:
                continue
            job, parts = flying.pop(chunk.request), chunks.pop(chunk.request)
            rule.heads.pop(chunk.request, None)
            entry = {
                "arm": job.arm,
                "item": job.item.id,
                "text": "".join(part.text for part in parts),
                "tokens": [token for part in parts for token in part.tokens],
                "finish": str(chunk.finish_reason),
            }
            journal.add({**entry, **({} if extra is None else extra(job))})
            meter.advance(note=f"{emitted / (time.monotonic() - started):.1f} tokens/s")
