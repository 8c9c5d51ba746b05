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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dropmatch.api import Decoder
from dropmatch.bench.arms import PLAIN, ArmSpec, parse_arms
from dropmatch.bench.fields import NUMBER, Fields
from dropmatch.bench.journal import Journal, describe_difference
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import read_json, with_lines, write_whole
from dropmatch.bench.summary import summarize
from dropmatch.bench.tasks import Item, score_all
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import RuleOptions
from dropmatch.core.engine import Chunk, Round
from dropmatch.core.stats import EngineStats
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.errors import ConfigError, DataError
from dropmatch.hf.calibration import settle_p_drop
from dropmatch.hf.model import HFModel
from dropmatch.provenance import collect, weights_digest

FORMAT = 1
NEWER = ("target_digest", "draft_digest")  # settings that files of older versions do not have
_Key = tuple[str, str, str]  # method, item, digest of the prompt
_TAKEN = {
    **dict.fromkeys(("texts", "drafted_at", "accepted_at"), list),
    **dict.fromkeys(("rounds", "drafted", "accepted"), int),
}
_TIMING = {
    **dict.fromkeys(("arm", "item"), str),
    **dict.fromkeys(("repeat", "tokens"), int),
    "seconds": NUMBER,
    "time": dict,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """How a comparison is run. max_new_tokens: None takes each task's own cap. batch: rows decoded together.
    speed_items: prompts of each task that are timed at batch 1 (0: none), repeats times each, for at most speed_tokens
    tokens.
    strips: items whose single tokens are written out as text, for reports."""

    max_new_tokens: int | None = None
    batch: int = 16
    temperature: float = 0.0
    seed: int = 0
    speed_items: int = 0
    repeats: int = 1
    speed_tokens: int = 128
    strips: int = 4


_WARM_UP = 8  # tokens
_SPEED_SETTINGS = ("speed_items", "repeats", "speed_tokens")


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
    are taken over; it must have the same models and settings, and no prompt that is not among items. Its methods stay
    if they are among arms (see `with_earlier_arms`). Speed is measured anew, or kept from that file where speed_items
    is 0. restart: nothing is taken over. Raises ConfigError, DataError.
    """
    provenance = collect(device=str(decoder.target.device))
    arms = [replace(arm, dropout=settle(decoder, arm)) for arm in arms]
    same = shared_settings(decoder, settings, described)
    written = {
        **same,
        "data": list(data),
        "rules": list(dict.fromkeys(arm.rule for arm in arms)),
        "lengths": sorted({arm.draft_length for arm in arms if not arm.is_plain}),
        "arm_dropout": {a.name: {"k": a.dropout.num_paths, "p_drop": a.dropout.p_drop} for a in arms if not a.is_plain},
        "batch": settings.batch,
        "items": [item.id for item in items],
        **{name: getattr(settings, name) for name in _SPEED_SETTINGS},
    }
    earlier = None if restart else _earlier(output, same, items, settings)
    with Journal(output, same, restart=restart, newer=NEWER) as journal:
        records = {**(_records_of(earlier) if earlier else {}), **journal_records(journal, items, settings)}
        measure_quality(decoder, items, arms, settings, journal, records)
        for arm, item in itertools.product(arms, items[: settings.strips]):
            key = arm.name, item.id, prompt_digest(item.turns)
            records[key] = _with_pieces(records[key], decoder)
        speed = _measure_speed(decoder, items, arms, settings, journal)
        if speed is None and earlier is not None and earlier.get("speed") is not None:
            speed = earlier["speed"]
            written |= {name: earlier["settings"].get(name) for name in _SPEED_SETTINGS}
        result: dict[str, Any] = {
            "kind": "compare",
            "format": FORMAT,
            "settings": written,
            "prompts": {
                item.id: {"task": item.task, "turns": list(item.turns), **_limits(item, settings.max_new_tokens)}
                for item in items
            },
            "arms": score_records(items, arms, records),
            "speed": speed,
        }
        result = {**result, "summary": summarize(result), "provenance": provenance}
        write_compare(result, output)
        journal.remove()
    return result


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


def _model_digest(model: Any) -> str | None:
    """Of a folder by what lies in it, of a model of the hub by its commit."""
    folder = Path(model.config.name_or_path)
    if folder.is_dir():
        return weights_digest(folder)
    commit: str | None = getattr(model.config, "_commit_hash", None)
    return commit


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


def with_earlier_arms(
    arms: Sequence[ArmSpec], output: Path, dropout: DropoutConfig, options: RuleOptions
) -> list[ArmSpec]:
    """The methods that a results file has, then those of `arms` that it has not. Raises ConfigError, DataError."""
    if not output.exists():
        return list(arms)
    earlier: list[ArmSpec] = []
    for arm in read_compare(output)["arms"].values():
        try:
            earlier += parse_arms([arm["rule"]], [arm["draft_length"] or 1], dropout, options)
        except ConfigError as error:
            raise ConfigError(
                f"{output} has the rule {arm['rule']!r}, which cannot be run: {error} Name another --output, or give "
                "--restart to write it anew."
            ) from error
    return list({arm.name: arm for arm in [*earlier, *arms]}.values())


def _earlier(
    output: Path, same: Mapping[str, Any], items: Sequence[Item], settings: CompareSettings
) -> dict[str, Any] | None:
    """A finished comparison that this one extends. Raises ConfigError if it is another, DataError if it is damaged."""
    if not output.exists():
        return None
    result = read_compare(output)
    advice = "Name another --output, or give --restart to write this one anew."
    held = {name: value for name, value in result["settings"].items() if name in same}
    if difference := describe_difference(held, same, NEWER):
        raise ConfigError(f"{output} holds a comparison with other settings ({difference}). {advice}")
    by_id = {item.id: item for item in items}
    missing = [item for item in result["prompts"] if item not in by_id]
    if missing:
        raise ConfigError(
            f"{output} has {len(missing)} prompts that were not given, such as {missing[0]!r}. Give all of its "
            f"prompts; others may be added. {advice}"
        )
    for name, prompt in result["prompts"].items():
        asked = _asked(by_id[name], settings.max_new_tokens)
        if not _fits({**prompt, "prompt": prompt_digest(prompt["turns"])}, asked):
            raise ConfigError(
                f"{output} has a prompt {name!r} with another text, cap on tokens or stop string than the one given. "
                f"{advice}"
            )
    fields = Fields(str(output), "The file is damaged. Remove it, or give --restart to write it anew.")
    for name, arm in result["arms"].items():
        for item in result["prompts"]:
            at = f"arms[{name!r}].items[{item!r}]"
            _check_answer(fields, at, arm["items"].get(item))
    return result


def _records_of(result: Mapping[str, Any]) -> dict[_Key, dict[str, Any]]:
    """The answers of a results file, without their scores."""
    prompts = {item: prompt_digest(prompt["turns"]) for item, prompt in result["prompts"].items()}
    return {
        (name, item, digest): {key: value for key, value in arm["items"][item].items() if key != "score"}
        for name, arm in result["arms"].items()
        for item, digest in prompts.items()
    }


def journal_records(journal: Journal, items: Sequence[Item], settings: CompareSettings) -> dict[_Key, dict[str, Any]]:
    """Answers to these items that an earlier run left in its journal. Raises DataError naming a damaged line."""
    asked = {item.id: _asked(item, settings.max_new_tokens) for item in items}
    records: dict[_Key, dict[str, Any]] = {}
    for number, entry in enumerate(journal.entries):
        fields = Fields(journal.place(number), "Remove this line, or give --restart to begin again.")
        if "record" not in entry:
            if "arm" in entry:
                raise fields.error("'record' is missing")
            continue
        fields.check("", entry, dict.fromkeys(("arm", "item", "prompt"), str))
        _check_answer(fields, "record", entry["record"])
        if entry["item"] in asked and _fits(entry, asked[entry["item"]]):
            records[entry["arm"], entry["item"], entry["prompt"]] = entry["record"]
    return records


def _check_answer(fields: Fields, at: str, record: Any) -> None:
    """Whether scoring and the summary can be made of a record."""
    fields.record(at, record)
    fields.check(at, record, _TAKEN)
    fields.entries(f"{at}.texts", record["texts"], str)
    for key in ("drafted_at", "accepted_at"):
        fields.entries(f"{at}.{key}", record[key], int)


def _limits(item: Item, max_new_tokens: int | None) -> dict[str, Any]:
    """What ends an answer, beside the model."""
    return {"max_new_tokens": max_new_tokens or item.max_new_tokens, "stop": list(item.stop)}


def _asked(item: Item, max_new_tokens: int | None) -> dict[str, Any]:
    """What an answer or a timing of another run must share, beside the settings."""
    return {"prompt": prompt_digest(item.turns), **_limits(item, max_new_tokens)}


def _fits(entry: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether an entry is of the same prompt under the same limits, as far as older versions wrote them down."""
    return all(entry.get(name, value) == value for name, value in asked.items())


def read_compare(path: Path) -> dict[str, Any]:
    """A results file of `run_compare`. Raises DataError naming the file if it is none."""
    result: dict[str, Any] = read_json(path, "Name another file, or remove this one.")
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
    fields = Fields(str(path), "The file is damaged; measure again.")
    for item, prompt in result["prompts"].items():
        fields.check(f"prompts[{item!r}]", prompt, {"task": str, "turns": list})
        fields.entries(f"prompts[{item!r}].turns", prompt["turns"], str)
    for name, arm in result["arms"].items():
        fields.check(f"arms[{name!r}]", arm, {"rule": str, "draft_length": int, "items": dict})
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
                record, asked = _record(answer), _asked(answer.item, settings.max_new_tokens)
                journal.add({"arm": answer.arm.name, "item": answer.item.id, **asked, "record": record})
                records[answer.arm.name, answer.item.id, asked["prompt"]] = record
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
            seed=_seed_of(answer.arm, settings),
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


def _seed_of(arm: ArmSpec, settings: CompareSettings) -> int:
    return settings.seed if arm.seed is None else arm.seed


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


def _with_pieces(record: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
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


# -- speed ----------------------------------------------------------------------------------------------------------


def _measure_speed(
    decoder: Decoder, items: Sequence[Item], arms: Sequence[ArmSpec], settings: CompareSettings, journal: Journal
) -> dict[str, Any] | None:
    timed = _first_of_each_task(items, settings.speed_items)
    if not timed:
        return None
    methods = list(arms)
    if not any(arm.is_plain for arm in methods):
        methods.insert(0, replace(methods[0], rule=PLAIN, draft_length=0))
    entries = _earlier_timings(journal, timed, methods, settings)
    done = {(e["arm"], e["item"], e["repeat"]) for e in entries}
    with ProgressMeter("speed", len(methods) * len(timed) * settings.repeats, len(done)) as meter:
        if len(done) < meter.total:
            for method in methods:  # warm up
                _time_one(decoder, timed[0], method, settings, _WARM_UP)
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
                    **_asked(item, settings.speed_tokens),
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


def _first_of_each_task(items: Sequence[Item], number: int) -> list[Item]:
    """The first `number` prompts of each task, in the order given."""
    seen: Counter[str] = Counter()
    chosen = []
    for item in items:
        seen[item.task] += 1
        if seen[item.task] <= number:
            chosen.append(item)
    return chosen


def _earlier_timings(
    journal: Journal, timed: Sequence[Item], methods: Sequence[ArmSpec], settings: CompareSettings
) -> list[dict[str, Any]]:
    """Timings of an earlier run that this one would repeat: the same prompts, limits, methods and repeats."""
    asked = {item.id: _asked(item, settings.speed_tokens) for item in timed}
    names = {method.name for method in methods}
    entries = []
    for number, entry in enumerate(journal.entries):
        if "speed" not in entry:
            continue
        fields, timing = Fields(journal.place(number), "Remove this line, or give --restart."), entry["speed"]
        fields.check("speed", timing, _TIMING)
        fields.entries("speed.time", timing["time"].values(), NUMBER)
        wanted = asked.get(timing["item"])
        is_same = wanted is not None and all(timing.get(name) == value for name, value in wanted.items())
        if is_same and timing["arm"] in names and timing["repeat"] < settings.repeats:
            entries.append(timing)
    return entries


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
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        stop=item.stop,
        seed=_seed_of(arm, settings),
    )
    started = time.perf_counter()
    done = decoder.run([ids], params, engine=engine)
    return time.perf_counter() - started, len(done.generations[0].tokens), done.stats
