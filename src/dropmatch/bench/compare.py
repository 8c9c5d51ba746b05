"""Acceptance rules side by side on the same prompts: what they keep, what it costs the answers, how fast they are.

Quality is measured in batches: rows of all methods that share dropout settings run in one engine, and equal prompts
are prefilled once. Speed is measured apart, at batch 1, prompt by prompt with the methods in turn, so that a machine
that drifts drifts for all. Each finished row goes to a journal; a stopped run goes on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dropmatch.api import Decoder
from dropmatch.bench.arms import PLAIN, ArmSpec
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import with_lines, write_whole
from dropmatch.bench.summary import summarize
from dropmatch.bench.tasks import Item, score_all
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.engine import Chunk, Round
from dropmatch.core.stats import EngineStats
from dropmatch.errors import DataError
from dropmatch.hf.calibration import settle_p_drop
from dropmatch.provenance import collect

FORMAT = 1
_Key = tuple[str, str, str]  # method, item, digest of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """How a comparison is run. max_new_tokens: None takes each task's own cap. batch: rows decoded together.
    speed_items: prompts that are timed at batch 1 (0: none), repeats times each, for at most speed_tokens tokens.
    strips: items whose single tokens are written out as text, for reports."""

    max_new_tokens: int | None = None
    batch: int = 16
    temperature: float = 0.0
    seed: int = 0
    speed_items: int = 0
    repeats: int = 1
    speed_tokens: int = 128
    strips: int = 4


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

    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the next user turn."""
        users = self.item.turns[: len(self.texts) + 1]
        pairs = itertools.zip_longest(users, self.texts)
        said = [(("user", user), ("assistant", answer)) for user, answer in pairs]
        return [{"role": role, "content": text} for role, text in itertools.chain(*said) if text is not None]


def run_compare(
    decoder: Decoder,
    items: Sequence[Item],
    arms: Sequence[ArmSpec],
    settings: CompareSettings,
    *,
    described: Mapping[str, Any],
    data: Sequence[str],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Run, score and write a comparison. Returns what was written.

    described: further settings for the results file, such as the models' names; data: where the prompts come from. An
    interrupt leaves the journal, and the same call goes on from it. Answers in a results file that is there already
    are taken over where models, settings and prompts are the same, so that rules and prompts can be added to it; speed
    is measured anew. restart: neither. Raises ConfigError, DataError.
    """
    provenance = collect(device=str(decoder.target.device))
    arms = [replace(arm, dropout=settle(decoder, arm)) for arm in arms]
    same = {  # what an earlier run must share for its answers to stand for this one's
        **described,
        "k": decoder.dropout.num_paths,
        "p_drop": decoder.dropout.p_drop,
        "heads": decoder.dropout.heads,
        "dtype": str(decoder.target.dtype),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }
    written = {
        **same,
        "data": list(data),
        "rules": list(dict.fromkeys(arm.rule for arm in arms)),
        "lengths": sorted({arm.draft_length for arm in arms if not arm.is_plain}),
        "arm_dropout": {a.name: {"k": a.dropout.num_paths, "p_drop": a.dropout.p_drop} for a in arms if not a.is_plain},
        "batch": settings.batch,
        "speed_items": settings.speed_items,
        "repeats": settings.repeats,
        "speed_tokens": settings.speed_tokens,
        "items": [item.id for item in items],
    }
    earlier = {} if restart else _earlier_records(output, same)
    with Journal(output, same, restart=restart) as journal:
        kept = {(e["arm"], e["item"], e["prompt"]): e["record"] for e in journal.entries if "record" in e}
        records = {**earlier, **kept}
        measure_quality(decoder, items, arms, settings, journal, records)
        speed = _measure_speed(decoder, items, arms, settings, journal)
        result: dict[str, Any] = {
            "kind": "compare",
            "format": FORMAT,
            "settings": written,
            "prompts": {item.id: {"task": item.task, "turns": list(item.turns)} for item in items},
            "arms": score_records(items, arms, records),
            "speed": speed,
        }
        result = {**result, "summary": summarize(result), "provenance": provenance}
        write_compare(result, output)
        journal.remove()
    return result


def settle(decoder: Decoder, arm: ArmSpec) -> DropoutConfig:
    """The method's dropout with p_drop="auto" replaced by a number."""
    return settle_p_drop(decoder.target, decoder.tokenizer, arm.dropout, rule=arm.made)[0]


def write_compare(result: Mapping[str, Any], output: Path) -> None:
    """Write a comparison with one record a line, so that a large file stays readable and diffs stay small."""
    arms = ",\n".join(
        f" {json.dumps(name)}: {{"
        + "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in arm.items() if key != "items")
        + '"items": {\n'
        + ",\n".join(f"  {json.dumps(item)}: {json.dumps(r, allow_nan=False)}" for item, r in arm["items"].items())
        + "\n }}"
        for name, arm in result["arms"].items()
    )
    others = {key: value for key, value in result.items() if key != "arms"}
    write_whole(with_lines(others, "arms", f"{{\n{arms}\n }}"), output)


def _earlier_records(output: Path, same: Mapping[str, Any]) -> dict[_Key, dict[str, Any]]:
    """Answers of a finished comparison with the same settings."""
    if not output.exists():
        return {}
    result = read_compare(output)
    if any(result["settings"].get(name) != value for name, value in json.loads(json.dumps(same)).items()):
        return {}
    prompts = {item: prompt_digest(prompt["turns"]) for item, prompt in result["prompts"].items()}
    return {
        (name, item, prompts[item]): {key: value for key, value in record.items() if key != "score"}
        for name, arm in result["arms"].items()
        for item, record in arm["items"].items()
    }


def read_compare(path: Path) -> dict[str, Any]:
    """A results file of `run_compare`. Raises DataError naming the file if it is none."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}). Name another file, or remove this one.") from error
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind != "compare" or result.get("format") != FORMAT:
        what = f"results of kind {kind!r}" if kind else "no results of a known kind"
        if kind == "compare":
            what = f"a comparison of format {result.get('format')!r}"
        raise DataError(
            f"{path} holds {what}; a comparison of format {FORMAT} is needed. Name a file of `dropmatch compare`."
        )
    missing = [key for key in ("settings", "prompts", "arms") if not isinstance(result.get(key), dict)]
    if missing:
        raise DataError(f"{path}: {missing[0]!r} is missing. The file is damaged; measure again.")
    return result


def prompt_digest(turns: Sequence[str]) -> str:
    """Tells prompts apart that go by one id."""
    return hashlib.sha256(json.dumps(list(turns)).encode()).hexdigest()[:16]


def score_records(
    items: Sequence[Item], arms: Sequence[ArmSpec], by_key: Mapping[_Key, dict[str, Any]]
) -> dict[str, Any]:
    """The "arms" of a results file: each method's records with their scores."""
    records = {
        (arm.name, item.id): by_key[arm.name, item.id, prompt_digest(item.turns)] for arm in arms for item in items
    }
    pairs = [(arm, item) for arm in arms for item in items]
    scores = score_all([item for _, item in pairs], [records[arm.name, item.id]["texts"] for arm, item in pairs])
    scored: dict[str, Any] = {}
    for (arm, item), score in zip(pairs, scores, strict=True):
        entry = scored.setdefault(arm.name, {"rule": arm.rule, "draft_length": arm.draft_length, "items": {}})
        entry["items"][item.id] = {
            **records[arm.name, item.id],
            "score": {"correct": score.correct, "metrics": score.metrics, "extracted": score.extracted},
        }
    return scored


# -- quality --------------------------------------------------------------------------------------------------------


def measure_quality(
    decoder: Decoder,
    items: Sequence[Item],
    arms: Sequence[ArmSpec],
    settings: CompareSettings,
    journal: Journal,
    records: dict[_Key, dict[str, Any]],
) -> None:
    """Fill records with the answers that they lack."""
    stripped = {item.id for item in items[: settings.strips]}
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
                record = _record(answer, decoder if answer.item.id in stripped else None)
                name, item, digest = answer.arm.name, answer.item.id, prompt_digest(answer.item.turns)
                journal.add({"arm": name, "item": item, "prompt": digest, "record": record})
                records[name, item, digest] = record
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
            seed=settings.seed,
            stream=answer.stream,
            logprobs=True,
        )
        flying[engine.add(_encode(decoder, answer), params)] = (answer, [])

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


def _encode(decoder: Decoder, answer: _Answer) -> list[int]:
    if getattr(decoder.tokenizer, "chat_template", None) is not None:
        return decoder.encode(answer.messages())
    return decoder.encode("\n\n".join(message["content"] for message in answer.messages()) + "\n\n", chat=False)


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


def _record(answer: _Answer, decoder: Decoder | None) -> dict[str, Any]:
    """The results file's entry. decoder: writes out the single tokens, where that is wanted."""
    pieces = {} if decoder is None else {"pieces": _pieces(decoder, answer.tokens)}
    lossy = answer.lossy if decoder is None else [_with_best_piece(decoder, token) for token in answer.lossy]
    return {
        "text": "\n\n".join(answer.texts),
        "texts": answer.texts,
        "tokens": answer.tokens,
        **pieces,
        "reasons": answer.reasons,
        "logprobs": answer.logprobs,
        "finish": answer.finish,
        **answer.counts,
        "drafted_at": answer.drafted_at,
        "accepted_at": answer.accepted_at,
        "lossy": lossy,
        "judged": [entry for entry in answer.judged if entry[0] is None or entry[0] < len(answer.tokens)],
    }


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


# -- speed ----------------------------------------------------------------------------------------------------------


def _measure_speed(
    decoder: Decoder, items: Sequence[Item], arms: Sequence[ArmSpec], settings: CompareSettings, journal: Journal
) -> dict[str, Any] | None:
    timed = list(items[: settings.speed_items])
    if not timed:
        return None
    methods = list(arms)
    if not any(arm.is_plain for arm in methods):
        methods.insert(0, replace(methods[0], rule=PLAIN, draft_length=0))
    entries = [e["speed"] for e in journal.entries if "speed" in e]
    done = {(e["arm"], e["item"], e["repeat"]) for e in entries}
    with ProgressMeter("speed", len(methods) * len(timed) * settings.repeats, len(done)) as meter:
        if len(done) < meter.total:
            for method in methods:  # warm up
                _time_one(decoder, timed[0], method, settings, 8)
        for repeat, (i, item) in itertools.product(range(settings.repeats), enumerate(timed)):
            # each prompt starts at another method, so that none always runs first
            start = (i + repeat) % len(methods)
            for method in methods[start:] + methods[:start]:
                if (method.name, item.id, repeat) in done:
                    continue
                seconds, tokens, stats = _time_one(decoder, item, method, settings, settings.speed_tokens)
                entry = {
                    "arm": method.name,
                    "item": item.id,
                    "repeat": repeat,
                    "seconds": seconds,
                    "tokens": tokens,
                    "time": stats.time.to_json(),
                }
                journal.add({"speed": entry})
                entries.append(entry)
                meter.advance()
    return {
        "items": [item.id for item in timed],
        "repeats": settings.repeats,
        "max_new_tokens": settings.speed_tokens,
        "arms": {method.name: _speed_of(method, entries) for method in methods},
    }


def _speed_of(method: ArmSpec, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine = [entry for entry in entries if entry["arm"] == method.name]
    seconds: dict[str, list[float]] = {}
    for entry in mine:
        seconds.setdefault(entry["item"], []).append(entry["seconds"])
    return {
        "seconds": seconds,
        "tokens": {entry["item"]: entry["tokens"] for entry in mine},
        "time": {key: sum(entry["time"][key] for entry in mine) for key in mine[0]["time"]},
    }


def _time_one(
    decoder: Decoder, item: Item, arm: ArmSpec, settings: CompareSettings, max_new_tokens: int
) -> tuple[float, int, EngineStats]:
    """Seconds of one whole call at batch 1, prefill included, its tokens, and its statistics."""
    ids = _encode(decoder, _Answer(item, arm, 0))
    config = EngineConfig(draft_length=arm.draft_length, max_length=decoder.config.max_length)
    engine = decoder.engine(rule=arm.made, config=config, dropout=arm.dropout, drafter=None if arm.is_plain else "own")
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=settings.temperature, stop=item.stop, seed=settings.seed
    )
    started = time.perf_counter()
    done = decoder.run([ids], params, engine=engine)
    return time.perf_counter() - started, len(done.generations[0].tokens), done.stats
