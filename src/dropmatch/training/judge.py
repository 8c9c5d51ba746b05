"""Trains a judge for a pair: mine labels on an evaluation set's prompts, read hidden states, fit.

Labels go to a file of their own, which takes hours to make and a minute to use: a stopped run goes on where it was, a
later one takes over what is there, and heads of other features or splits are fitted to the same labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dropmatch.api import Decoder
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import with_lines, write_whole
from dropmatch.bench.settings import NEWER, weights_of
from dropmatch.bench.takeover import prompt_digest
from dropmatch.bench.tasks import Item, Score, score_all
from dropmatch.bench.tasks.numbers import same_number
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError, DataError
from dropmatch.hf.model import HFModel
from dropmatch.judge.artefact import save_judge
from dropmatch.judge.features import draft_token_states
from dropmatch.judge.fitting import fit_judge, require_scikit_learn
from dropmatch.judge.mining import Label, Mined, Miner, MiningPrompt
from dropmatch.provenance import collect

KIND, FORMAT = "judge-labels", 1
_BY_VERDICT = frozenset({"humaneval", "mbpp"})  # the tests pass, or they do not
_BY_NUMBER = frozenset({"gsm8k", "spec_bench/math_reasoning"})
_BY_LETTER = frozenset({"mmlu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MiningSettings:
    """How labels are made. max_new_tokens: of an answer, None takes each task's own. batch, draft_length: see `Miner`;
    they change the speed, and labels only where bfloat16 rounds a near-tie another way. label_share: the share of
    mismatches that are asked about; the others keep the target's token."""

    max_new_tokens: int | None = None
    batch: int = 8
    draft_length: int = 6
    label_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.label_share <= 1.0:
            raise ConfigError(f"label_share={self.label_share!r} is out of range. Give a share above 0 and up to 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How a head is fitted: see `fit_judge`. features: "DD-DT" or "DT". right_only: learn only from prompts that the
    target itself answers rightly, and to the end; a wrong answer often changes with any word (ours, not Auto-Judge's).
    """

    features: str = "DD-DT"
    validation: float = 0.1
    seed: int = 52
    refit: bool = False
    folds: int = 1
    right_only: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.validation < 1.0:
            raise ConfigError(
                f"validation={self.validation!r} is out of range. Give a share between 0 and 1, such as 0.1."
            )
        if self.folds < 1:
            raise ConfigError(f"folds={self.folds!r} is out of range. Give 1 for a single split, or more.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed!r} is out of range. Give a whole number from 0 to 2**32 - 1.")


class TaskGrader:
    """Compares answers as their tasks are graded: final numbers, option letters, or whether the tests pass. Both
    answers are the model's; `same` knows no ground truth, but for the tests of code. Equal texts are graded once."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = {item.id: item for item in items}
        self._scores: dict[tuple[str, str], Score] = {}

    def grade(self, answers: Sequence[tuple[str, str]]) -> list[Score]:
        new = [answer for answer in dict.fromkeys(answers) if answer not in self._scores]
        scores = score_all([self._items[key] for key, _ in new], [[text] for _, text in new])
        self._scores.update(zip(new, scores, strict=True))
        return [self._scores[answer] for answer in answers]

    def same(self, key: str, reference: object, other: object) -> bool:
        assert isinstance(reference, Score)
        assert isinstance(other, Score)
        task = self._items[key].task
        if task in _BY_VERDICT:
            return reference.correct == other.correct
        if task in _BY_LETTER or reference.extracted is None or other.extracted is None:
            return reference.extracted == other.extracted
        return same_number(other.extracted, reference.extracted)


def train_judge(
    decoder: Decoder,
    items: Sequence[Item],
    output: Path,
    labels: Path,
    *,
    mining: MiningSettings,
    fit: FitSettings,
    described: Mapping[str, Any],
    data: Sequence[str],
    restart: bool = False,
) -> dict[str, Any]:
    """Mine, fit and write a judge to the folder `output`. Returns what its judge.json says.

    labels: file of the mined labels. described: the models' names. Raises ConfigError, DataError.
    """
    require_scikit_learn()
    if fit.folds > len(items):
        raise ConfigError(f"{len(items)} prompts cannot be dealt into {fit.folds} folds. Give fewer, or more prompts.")
    provenance = collect(device=str(decoder.target.device))
    mined = mine_labels(decoder, items, labels, settings=mining, described=described, data=data, restart=restart)
    learned_from = answered_rightly(decoder, items, mined) if fit.right_only else mined
    features, draft_size = read_features(decoder, learned_from, fit.features)
    every = [(one.prompt.key, label) for one in learned_from for label in one.labels]
    head, report = fit_judge(
        features,
        [label.is_important for _, label in every],
        [key for key, _ in every],
        kind=fit.features,
        draft_size=draft_size,
        validation=fit.validation,
        seed=fit.seed,
        refit=fit.refit,
        folds=fit.folds,
        name=output.name,
    )
    info = {
        **described,
        "data": list(data),
        "tasks": sorted({item.task for item in items}),
        "items": [one.prompt.key for one in mined],
        "prompts": [prompt_digest(item.turns) for item in items],
        "split_seed": fit.seed,
        "right_only": fit.right_only,
        **report,
        "mining": {
            "max_new_tokens": mining.max_new_tokens,
            "label_share": mining.label_share,
            "rollouts": sum(one.rollouts for one in mined),
            "generated": sum(one.generated for one in mined),
            "answer_tokens": sum(len(one.reference) for one in mined),
            "answers_cut_off": sum(one.is_cut_off for one in mined),
        },
        "provenance": provenance,
    }
    save_judge(head, output, info)
    return info


def answered_rightly(decoder: Decoder, items: Sequence[Item], mined: Sequence[Mined]) -> list[Mined]:
    """Those of which the target's own answer has ended, and is right by the ground truth. Raises ConfigError if it is
    none."""
    texts = [str(decoder.tokenizer.decode(one.reference, skip_special_tokens=True)) for one in mined]
    scores = TaskGrader(items).grade([(one.prompt.key, text) for one, text in zip(mined, texts, strict=True)])
    right = [one for one, score in zip(mined, scores, strict=True) if score.correct and not one.is_cut_off]
    if not right:
        raise ConfigError(
            f"The target answered none of {len(mined)} prompts rightly. Mine more, or leave --right-only."
        )
    return right


def draft_model(decoder: Decoder) -> HFModel:
    """The drafter's model. Raises ConfigError where there is none."""
    drafter = decoder.drafter
    if not isinstance(drafter, DraftModelDrafter) or not isinstance(drafter.model, HFModel):
        raise ConfigError("A judge is trained for a draft model, and this decoder has none. Name one with --draft.")
    return drafter.model


# -- labels ---------------------------------------------------------------------------------------------------------


def mine_labels(
    decoder: Decoder,
    items: Sequence[Item],
    output: Path,
    *,
    settings: MiningSettings,
    described: Mapping[str, Any],
    data: Sequence[str],
    restart: bool = False,
) -> list[Mined]:
    """Labels of all items, in their order. Those in a labels file that is there already are taken over where models,
    settings and prompts are the same; the file is written anew where any were added."""
    draft = draft_model(decoder)
    known = _BY_VERDICT | _BY_NUMBER | _BY_LETTER
    stranger = next((item for item in items if item.task not in known or len(item.turns) != 1), None)
    if stranger is not None:
        raise ConfigError(
            f"{stranger.id}: answers of task {stranger.task!r} cannot be compared. Judges learn from prompts of one "
            f"turn of {', '.join(sorted(known))}."
        )
    same = {
        **described,
        "dtype": str(decoder.target.dtype),
        "max_new_tokens": settings.max_new_tokens,
        "label_share": settings.label_share,
        **weights_of(decoder),
    }
    prompts = {item.id: _prompt(decoder, item, settings) for item in items}
    old = {} if restart else _read_labels(output, same)
    with Journal(output, same, restart=restart, newer=NEWER) as journal:
        entries = {**old, **{entry["item"]: entry for entry in journal.entries}}
        done = {key: one for key, prompt in prompts.items() if (one := _mined(entries.get(key), prompt)) is not None}
        waiting = [prompt for key, prompt in prompts.items() if key not in done]
        if waiting:
            for one in _mine(decoder, draft, items, waiting, settings, len(done), len(items)):
                entry = _entry(one)
                journal.add(entry)
                entries[one.prompt.key], done[one.prompt.key] = entry, one
        if entries != old:
            _write_labels(output, same, data, list(entries.values()), collect(device=str(decoder.target.device)))
        journal.remove()
    return [done[item.id] for item in items]


def _mine(
    decoder: Decoder,
    draft: HFModel,
    items: Sequence[Item],
    waiting: Sequence[MiningPrompt],
    settings: MiningSettings,
    num_done: int,
    total: int,
) -> Iterator[Mined]:
    with ProgressMeter("prompts", total, num_done) as meter:
        miner = Miner(
            HFModel(decoder.target.model, probe=False),
            lambda: HFModel(draft.model, probe=False),
            TaskGrader(items),
            decode=lambda ids: str(decoder.tokenizer.decode(ids, skip_special_tokens=True)),
            eos_ids=decoder.eos_ids,
            batch=settings.batch,
            draft_length=settings.draft_length,
            max_length=decoder.config.max_length,
            is_asked=lambda key, position: _chance(key, position) < settings.label_share,
            on_rollout=lambda: meter.advance(0, note()),
        )

        def note() -> str:
            return f"{miner.rollouts} labels, {miner.generated} tokens written"

        for one in miner.run(waiting):
            yield one
            meter.advance(1, note())


def _chance(key: str, position: int) -> float:
    """A number in [0, 1) that hangs on nothing but the place."""
    return int.from_bytes(hashlib.sha256(f"{key}:{position}".encode()).digest()[:8]) / 2**64


def _prompt(decoder: Decoder, item: Item, settings: MiningSettings) -> MiningPrompt:
    has_template = getattr(decoder.tokenizer, "chat_template", None) is not None
    ids = decoder.encode(item.prompt) if has_template else decoder.encode(f"{item.prompt}\n\n", chat=False)
    return MiningPrompt(item.id, tuple(ids), settings.max_new_tokens or item.max_new_tokens, item.stop)


def _entry(mined: Mined) -> dict[str, Any]:
    labels = [[one.position, int(one.is_important), one.target_token, one.draft_token] for one in mined.labels]
    return {
        "item": mined.prompt.key,
        "prompt": _digest(mined.prompt),
        "reference": mined.reference,
        "response": mined.response,
        "labels": labels,
        "generated": mined.generated,
        "rollouts": mined.rollouts,
    }


def _digest(prompt: MiningPrompt) -> str:
    """Tells prompts apart that go by one name."""
    return hashlib.sha256(json.dumps([prompt.ids, prompt.max_new_tokens, prompt.stop]).encode()).hexdigest()[:16]


def _mined(entry: Mapping[str, Any] | None, prompt: MiningPrompt) -> Mined | None:
    """What an entry says, if it is of this very prompt. Raises DataError if it is damaged."""
    if entry is None or entry.get("prompt") != _digest(prompt):
        return None
    try:
        labels = [Label(at, bool(important), target, draft) for at, important, target, draft in entry["labels"]]
        return Mined(prompt, entry["reference"], entry["response"], labels, entry["generated"], entry["rollouts"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"The labels of {prompt.key} are damaged ({error!r}). Mine again with --restart.") from error


def _read_labels(path: Path, same: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a labels file by item. Raises DataError, and ConfigError if they were made with other settings."""
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}). Name another file, or remove this one.") from error
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind != KIND or result.get("format") != FORMAT:
        raise DataError(f"{path} holds {kind!r} and no labels of format {FORMAT}. Name another file.")
    settings = json.loads(json.dumps(same))
    try:
        held, entries = result["settings"], {entry["item"]: entry for entry in result["items"]}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}). Mine again with --restart.") from error
    known = (name for name in settings if name in held or name not in NEWER)
    other = next((name for name in known if held.get(name) != settings[name]), None)
    if other is not None:
        raise ConfigError(
            f"{path} holds labels of another {other} ({held.get(other)!r}, and now {settings[other]!r}). "
            "Name another file with --labels, or --restart to throw these away."
        )
    return entries


def _write_labels(
    output: Path,
    settings: Mapping[str, Any],
    data: Sequence[str],
    entries: Sequence[Any],
    provenance: Mapping[str, Any],
) -> None:
    """One prompt a line, so that a large file stays readable."""
    head = {"kind": KIND, "format": FORMAT, "settings": {**settings, "data": list(data)}, "provenance": provenance}
    items = ",\n".join("  " + json.dumps(entry) for entry in entries)
    write_whole(with_lines(head, "items", f"[\n{items}\n ]"), output)


# -- hidden states --------------------------------------------------------------------------------------------------


def read_features(decoder: Decoder, mined: Sequence[Mined], kind: str) -> tuple[np.ndarray[Any, Any], int]:
    """Features [M, D] float32 of all labels in order, and how many of the D numbers are the draft model's."""
    labelled = [one for one in mined if one.labels]
    if not labelled:
        raise ConfigError(f"No mismatch was labelled on {len(mined)} prompts. Mine more prompts.")
    target = HFModel(decoder.target.model, probe=False)
    models = [HFModel(draft_model(decoder).model, probe=False), target] if kind == "DD-DT" else [target]
    rows = []
    with ProgressMeter("hidden states", len(labelled)) as meter:
        for one in labelled:
            states = [draft_token_states(model, one) for model in models]
            rows.append(torch.cat(states, dim=-1))
            draft_size = states[0].shape[-1] if len(states) > 1 else 0
            meter.advance()
    return torch.cat(rows).numpy(), draft_size
