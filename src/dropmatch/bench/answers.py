"""Answers of all methods to all prompts, decoded in batches, with what judges them: the quality half of a comparison.

Rows of all methods that share draft length and dropout settings run in one engine, and equal prompts are prefilled
once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dropmatch.api import Decoder
from dropmatch.bench.arms import ArmSpec
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.settings import CompareSettings, seed_of
from dropmatch.bench.takeover import Key, conditions, prompt_digest
from dropmatch.bench.tasks import Item
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.engine import Chunk, Round


@dataclass(slots=True)
class _Answer:
    """One item under one method, as far as it has come. turns: generations by turn."""

    item: Item
    arm: ArmSpec
    stream: int
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    judged: list[list[float | int | None]] = field(default_factory=list)
    lossy: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("rounds", "drafted", "accepted"), 0))
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    finish: str = ""


def measure_quality(
    decoder: Decoder,
    items: Sequence[Item],
    arms: Sequence[ArmSpec],
    settings: CompareSettings,
    journal: Journal,
    records: dict[Key, dict[str, Any]],
) -> None:
    """Fill records with the answers that they lack."""
    wanted = {(arm.name, item.id, prompt_digest(item.turns)) for arm in arms for item in items}
    with ProgressMeter("quality", len(wanted), len(wanted & records.keys())) as meter:
        # drafts of one length and dropout settings of one kind make one batch; an item's methods stand side by side
        for key, group in itertools.groupby(sorted(arms, key=_batch_key), key=_batch_key):
            members = list(group)
            answers = [
                _Answer(item, arm, stream)
                for stream, item in enumerate(items)
                for arm in members
                if (arm.name, item.id, prompt_digest(item.turns)) not in records
            ]
            if not answers:
                continue
            for answer, note in _decode_together(decoder, answers, members[0].dropout, key[0], settings):
                record, given = _record(answer), conditions(answer.item, settings.max_new_tokens)
                journal.add({"arm": answer.arm.name, "item": answer.item.id, **given, "record": record})
                records[answer.arm.name, answer.item.id, given["prompt"]] = record
                meter.advance(note=note)


def _batch_key(arm: ArmSpec) -> tuple[int, str]:
    return arm.draft_length, repr(arm.dropout)


def _decode_together(
    decoder: Decoder,
    answers: Iterable[_Answer],
    dropout: DropoutConfig,
    draft_length: int,
    settings: CompareSettings,
) -> Iterator[tuple[_Answer, str]]:
    """Each answer as it is finished, with the rate so far."""
    config = EngineConfig(
        draft_length=draft_length, max_batch=settings.batch, seed=settings.seed, max_length=decoder.config.max_length
    )
    engine = decoder.engine(config=config, dropout=dropout, drafter="own" if draft_length else None)
    flying: dict[int, tuple[_Answer, list[Chunk]]] = {}
    engine.observer = lambda round_: _note_judged(round_, flying)

    def add(answer: _Answer) -> None:
        params = SamplingParams(
            max_new_tokens=settings.max_new_tokens or answer.item.max_new_tokens,
            temperature=settings.temperature,
            stop=answer.item.stop,
            rule=answer.arm.made,
            seed=seed_of(answer.arm, settings),
            stream=answer.stream,
            logprobs=True,
        )
        flying[engine.add(encode_turn(decoder, answer.item, answer.texts), params)] = (answer, [])

    for answer in answers:
        add(answer)
    started, emitted = time.monotonic(), 0
    while engine.has_work:
        for chunk in engine.step():
            answer, chunks = flying[chunk.request]
            chunks.append(chunk)
            emitted += len(chunk.tokens)
            if chunk.finish_reason is None:
                continue
            del flying[chunk.request]
            _collect(answer, chunks)
            if len(answer.texts) < len(answer.item.turns):
                add(answer)
                continue
            yield answer, f"{emitted / (time.monotonic() - started):.1f} tokens/s"


def encode_turn(decoder: Decoder, item: Item, texts: Sequence[str] = ()) -> list[int]:
    """Ids of a conversation up to its next user turn. texts: the answers so far."""
    users = item.turns[: len(texts) + 1]
    said = [(("user", user), ("assistant", answer)) for user, answer in itertools.zip_longest(users, texts)]
    messages = [{"role": role, "content": text} for role, text in itertools.chain(*said) if text is not None]
    if getattr(decoder.tokenizer, "chat_template", None) is not None:
        return decoder.encode(messages)
    return decoder.encode("\n\n".join(message["content"] for message in messages) + "\n\n", chat=False)


def _note_judged(round_: Round, flying: Mapping[int, tuple[_Answer, list[Chunk]]]) -> None:
    """Keep divergence, radius and verdict of each drafted token that the heads were asked about."""
    v, verdict = round_.verification, round_.verdict
    seen = v.seen
    if seen is None:
        return
    b, n = seen.asked.nonzero(as_tuple=True)
    if len(b) == 0:
        return
    prob, _ = v.target_probs(seen.asked)
    on_path = torch.zeros_like(seen.asked).scatter_(1, verdict.path, True)
    columns = (b, v.tree.depth[b, n], on_path[b, n], verdict.reason[b, n])
    figures = torch.stack([seen.js_draft[b, n].float(), seen.radius[b, n].float(), prob[b, n]], dim=1).tolist()
    for (row, depth, kept, reason), (js, radius, p) in zip(
        zip(*(column.tolist() for column in columns), strict=True), figures, strict=True
    ):
        answer, chunks = flying[round_.requests[row]]
        before = len(answer.tokens) + sum(len(chunk.tokens) for chunk in chunks)
        answer.judged.append([before + depth - 1 if kept else -1, _figure(js), _figure(radius), reason, _figure(p)])


def _figure(value: float) -> float | None:
    return round(value, 6) if value == value and abs(value) != float("inf") else None


def _collect(answer: _Answer, chunks: Sequence[Chunk]) -> None:
    """Add a finished turn to its answer."""
    stats, before = chunks[-1].stats, len(answer.tokens)
    assert stats is not None
    answer.texts.append("".join(chunk.text for chunk in chunks))
    answer.tokens += [token for chunk in chunks for token in chunk.tokens]
    answer.reasons += [int(reason) for chunk in chunks for reason in chunk.reasons]
    answer.logprobs += [round(x, 4) for chunk in chunks for x in chunk.logprobs or ()]
    answer.finish = str(chunks[-1].finish_reason)
    for name in answer.counts:
        answer.counts[name] += getattr(stats, name)
    for mine, theirs in ((answer.drafted_at, stats.drafted_at), (answer.accepted_at, stats.accepted_at)):
        mine += [0] * (len(theirs) - len(mine))
        for i, count in enumerate(theirs):
            mine[i] += count
    for token in stats.to_json()["lossy"]:
        answer.lossy.append(
            {**token, "index": token["index"] + before, "prob": round(token["prob"], 6),
             "best_prob": round(token["best_prob"], 6)}
        )  # fmt: skip


def _record(answer: _Answer) -> dict[str, Any]:
    """The results file's entry."""
    return {
        "text": "\n\n".join(answer.texts),
        "texts": answer.texts,
        "tokens": answer.tokens,
        "reasons": answer.reasons,
        "logprobs": answer.logprobs,
        "finish": answer.finish,
        **answer.counts,
        "drafted_at": answer.drafted_at,
        "accepted_at": answer.accepted_at,
        "lossy": answer.lossy,
        "judged": [entry for entry in answer.judged if entry[0] is None or entry[0] < len(answer.tokens)],
    }


# -- tokens written out ---------------------------------------------------------------------------------------------


def with_pieces(record: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """A record with its single tokens written out, and the target's own tokens where it lost them."""
    if "pieces" in record:
        return dict(record)
    lossy = [_with_best_piece(decoder, token) for token in record["lossy"]]
    return {**record, "pieces": _pieces(decoder, record["tokens"]), "lossy": lossy}


def _with_best_piece(decoder: Decoder, token: Mapping[str, Any]) -> dict[str, Any]:
    """A lossy token with the text of the target's own token in its place."""
    return {**token, "best_piece": decoder.tokenizer.decode([token["best_token"]], skip_special_tokens=False)}


def _pieces(decoder: Decoder, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; a character split over tokens goes to the last of them."""
    pieces, start, sent = [], 0, ""
    for end in range(1, len(tokens) + 1):
        text = decoder.tokenizer.decode(tokens[start:end], skip_special_tokens=False)
        whole = "" if text.endswith("\ufffd") else text
        pieces.append(whole[len(sent) :] if whole.startswith(sent) and whole else "")
        sent = whole or sent
        if whole and end - start >= 8:
            start = end - 1
            sent = decoder.tokenizer.decode(tokens[start:end], skip_special_tokens=False)
            if sent.endswith("\ufffd"):
                start, sent = end, ""
    return pieces
