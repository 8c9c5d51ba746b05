"""What a draft head learns from: the target's own greedy answers, with the hidden states it had while it wrote them.

Answers are decoded greedily in large batches, without drafts. Finished ones go to disk in shards, and a journal beside
them says which prompts are done, so that a stopped run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dropmatch.api import Decoder
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.errors import ConfigError, IntegrityError
from dropmatch.hf.model import HFModel
from dropmatch.training.prompts import TrainingPrompt

_ROWS_PER_SHARD = 64
_WINDOW = 256  # prompts whose lengths are evened out together, since those that start together are padded
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """How answers are made. max_new_tokens: of one answer. max_tokens: answer tokens in all, after which no more
    prompts are answered (0: no limit). max_prompt_tokens: longer prompts are left out, since they are costly and teach
    no more than short ones. batch: rows decoded together. dtype: of the states on disk."""

    max_new_tokens: int = 256
    max_tokens: int = 200_000
    max_prompt_tokens: int = 256
    batch: int = 48
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigError(f"feature dtype {self.dtype!r} is not allowed. Allowed: {', '.join(_DTYPES)}.")
        for name, least in (("max_new_tokens", 2), ("max_tokens", 0), ("max_prompt_tokens", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is not allowed. Give at least {least}.")


@dataclass(frozen=True, slots=True)
class Example:
    """One answered prompt. ids: [L], prompt and answer; taps [F, A] and hidden [F, d] of the first F tokens, F < L."""

    ids: Tensor
    prompt_length: int
    taps: Tensor
    hidden: Tensor


@dataclass(slots=True)
class _Answer:
    """A prompt as far as it is answered. states: taps and hidden states, as they came."""

    number: int
    ids: list[int]
    prompt_length: int
    states: list[tuple[Tensor, Tensor]]
    is_done: bool = False

    def example(self) -> Example:
        """Raises ConfigError if the states do not fit their dtype."""
        taps, hidden = (torch.cat(parts) for parts in zip(*self.states, strict=True))
        if not bool(taps.isfinite().all() & hidden.isfinite().all()):
            raise ConfigError(
                f"The target has hidden states that {taps.dtype} cannot hold. Give --feature-dtype bfloat16 or float32."
            )
        return Example(torch.tensor(self.ids, dtype=torch.int32), self.prompt_length, taps, hidden)


def distill(
    decoder: Decoder,
    prompts: Sequence[TrainingPrompt],
    folder: Path,
    settings: DistillSettings,
    *,
    described: dict[str, Any],
    restart: bool = False,
) -> list[Path]:
    """Answer prompts until they or the token budget run out. Returns the shards, those of earlier runs included.

    decoder: its target must be wrapped with taps. described: what else the data hang on, such as the target's name.
    Raises ConfigError if the folder holds data of other settings or cannot be written, or if states are too large for
    the dtype.
    """
    written = {
        **described,
        "max_new_tokens": settings.max_new_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "dtype": settings.dtype,
    }
    with Journal(folder / "data", written, restart=restart) as journal:
        if restart:
            for path in folder.glob("shard-*.safetensors*"):
                path.unlink()
        return _answer(decoder, prompts, folder, settings, journal)


def _answer(
    decoder: Decoder, prompts: Sequence[TrainingPrompt], folder: Path, settings: DistillSettings, journal: Journal
) -> list[Path]:
    done = {number for entry in journal.entries for number in entry["prompts"]}
    have = sum(entry["answer_tokens"] for entry in journal.entries)
    budget = settings.max_tokens or settings.max_new_tokens * len(prompts)
    waiting = [(number, prompt) for number, prompt in enumerate(prompts) if number not in done]
    finished: list[_Answer] = []
    with ProgressMeter("answers (tokens)", budget, min(have, budget)) as meter:
        answers = _answers(decoder, _encoded(decoder, waiting, settings), settings)
        while have < budget and (answer := next(answers, None)) is not None:
            finished.append(answer)
            length = len(answer.ids) - answer.prompt_length
            have += length
            meter.advance(min(length, budget - meter.done))
            if len(finished) == _ROWS_PER_SHARD:
                _write_shard(folder, finished, journal)
                finished = []
    if finished:
        _write_shard(folder, finished, journal)
    return [folder / entry["shard"] for entry in journal.entries]


def _encoded(
    decoder: Decoder, waiting: Sequence[tuple[int, TrainingPrompt]], settings: DistillSettings
) -> Iterator[tuple[int, list[int]]]:
    """Numbers and ids of the prompts that are not too long, like lengths near each other."""
    longest = settings.max_prompt_tokens
    if decoder.config.max_length is not None:
        longest = min(longest, decoder.config.max_length - settings.max_new_tokens)
    for start in range(0, len(waiting), _WINDOW):
        window = [(number, decoder.encode(prompt.text)) for number, prompt in waiting[start : start + _WINDOW]]
        yield from sorted((entry for entry in window if len(entry[1]) <= longest), key=lambda entry: len(entry[1]))


@torch.inference_mode()
def _answers(
    decoder: Decoder, prompts: Iterator[tuple[int, list[int]]], settings: DistillSettings
) -> Iterator[_Answer]:
    """Greedy answers in batches, each as it ends.

    A row that has ended stays in the batch until a quarter of it has, since the cache is copied whenever rows leave or
    join; what it goes on to compute is thrown away."""
    target = HFModel(decoder.target.model, tap_layers=decoder.target.tap_layers, probe=False)
    dtype = _DTYPES[settings.dtype]
    rows: list[_Answer] = []
    while True:
        num_open = sum(not row.is_done for row in rows)
        if num_open == 0 or settings.batch - num_open >= max(1, settings.batch // 4):
            target.filter([b for b, row in enumerate(rows) if not row.is_done])
            rows = [row for row in rows if not row.is_done]
            rows += _start(target, list(islice(prompts, settings.batch - num_open)), dtype)
            if not rows:
                return
        output = target.forward(torch.tensor([[row.ids[-1]] for row in rows]))
        assert output.aux is not None
        tokens = target.head(output.hidden[:, -1]).argmax(-1).tolist()
        target.commit([int(not row.is_done) for row in rows])
        taps, hidden = output.aux.to("cpu", dtype), output.hidden.to("cpu", dtype)
        for b, row in enumerate(rows):
            if row.is_done:
                continue
            row.states.append((taps[b], hidden[b]))
            row.ids.append(tokens[b])
            row.is_done = tokens[b] in decoder.eos_ids or len(row.ids) - row.prompt_length == settings.max_new_tokens
            if row.is_done:
                yield row


def _start(target: HFModel, prompts: Sequence[tuple[int, list[int]]], dtype: torch.dtype) -> list[_Answer]:
    """Cache all but the last token of new prompts."""
    if not prompts:
        return []
    output = target.add_rows([ids[:-1] for _, ids in prompts])
    assert output.aux is not None
    taps, hidden = output.aux.to("cpu", dtype), output.hidden.to("cpu", dtype)
    return [
        _Answer(number, list(ids), len(ids), [(taps[b, : len(ids) - 1].clone(), hidden[b, : len(ids) - 1].clone())])
        for b, (number, ids) in enumerate(prompts)
    ]


def _write_shard(folder: Path, finished: Sequence[_Answer], journal: Journal) -> None:
    examples = [answer.example() for answer in finished]
    taken = {entry["shard"] for entry in journal.entries}
    name = next(name for i in count() if (name := f"shard-{i:05d}.safetensors") not in taken)
    tensors = {
        "ids": torch.cat([example.ids for example in examples]),
        "taps": torch.cat([example.taps for example in examples]),
        "hidden": torch.cat([example.hidden for example in examples]),
        "lengths": torch.tensor([len(example.ids) for example in examples]),
        "states": torch.tensor([len(example.taps) for example in examples]),
        "prompt_lengths": torch.tensor([example.prompt_length for example in examples]),
    }
    partial = folder / (name + ".partial")
    try:
        save_file(tensors, partial)
        partial.replace(folder / name)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{folder / name} cannot be written ({error}). Make room and give the same command again."
        ) from error
    answered = sum(len(example.ids) - example.prompt_length for example in examples)
    journal.add({"shard": name, "prompts": [answer.number for answer in finished], "answer_tokens": answered})


def read_shards(paths: Sequence[Path]) -> Iterator[Example]:
    """All examples of the shards, in order. Their tensors are views of the shards. Raises IntegrityError for a shard
    that is missing or damaged."""
    for path in paths:
        try:
            yield from _read_shard(path)
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"{path} cannot be read ({error}). To answer its prompts again, remove the line that names it from "
                f"{path.parent / 'data.journal'}; to answer all anew, give --restart."
            ) from error


def _read_shard(path: Path) -> list[Example]:
    shard = load_file(path)
    lengths, states = shard["lengths"].tolist(), shard["states"].tolist()
    rows = zip(
        torch.split(shard["ids"], lengths),
        shard["prompt_lengths"].tolist(),
        torch.split(shard["taps"], states),
        torch.split(shard["hidden"], states),
        strict=True,
    )
    return [Example(ids.long(), prompt_length, taps, hidden) for ids, prompt_length, taps, hidden in rows]
