"""What a draft head learns from: the target's own greedy answers, with the hidden states it had while it wrote them.

Answers are decoded in batches by the engine itself; a drafter that drafts nothing looks on and keeps each row's
states. Finished rows go to disk in shards, and a journal beside them says which prompts are done, so that a stopped
run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dropmatch.api import Decoder
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.interfaces import DraftTree, ModelOutput, Verdict
from dropmatch.core.sequence import Row
from dropmatch.errors import ConfigError
from dropmatch.training.prompts import TrainingPrompt

_ROWS_PER_SHARD = 64
# Prompts that start together are padded to the longest of them, so only a few do; and since the cache is copied when
# rows join, no fewer do.
_ADMITTED = 4
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """How answers are made. max_new_tokens: of one answer. max_tokens: answer tokens in all, after which no more
    prompts are answered (0: no limit). max_prompt_tokens: longer prompts are left out, since they are costly and teach
    no more than short ones. batch: rows decoded together. dtype: of the states on disk."""

    max_new_tokens: int = 256
    max_tokens: int = 200_000
    max_prompt_tokens: int = 256
    batch: int = 24
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


class StateRecorder:
    """A drafter that drafts nothing and keeps the target's states of each row until it is asked for them."""

    name = "recorder"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows: list[int] = []
        self._states: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        taps, hidden = self._stored(output)
        for b, row in enumerate(rows):
            n = len(row.ids) - 1
            self._rows.append(row.request)
            self._states[row.request] = [(taps[b, :n].clone(), hidden[b, :n].clone())]

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        roots = torch.tensor([[row.ids[-1]] for row in rows])
        return DraftTree.chain(roots, torch.ones(len(rows), dtype=torch.int64))

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        taps, hidden = self._stored(output)
        for b, request in enumerate(self._rows):
            self._states[request].append((taps[b, :1], hidden[b, :1]))

    def filter(self, keep: Sequence[int]) -> None:
        self._rows = [self._rows[b] for b in keep]

    def take(self, request: int) -> tuple[Tensor, Tensor]:
        """Taps and hidden states of a request, which is then forgotten."""
        taps, hidden = zip(*self._states.pop(request), strict=True)
        return torch.cat(taps), torch.cat(hidden)

    def _stored(self, output: ModelOutput) -> tuple[Tensor, Tensor]:
        assert output.aux is not None
        return output.aux.to("cpu", self._dtype), output.hidden.to("cpu", self._dtype)


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
    Raises ConfigError if the folder holds data of other settings, or if states are too large for the dtype.
    """
    written = {
        **described,
        "max_new_tokens": settings.max_new_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "dtype": settings.dtype,
    }
    with Journal(folder / "data", written, restart=restart) as journal:
        return _answer(decoder, prompts, folder, settings, journal)


def _answer(
    decoder: Decoder, prompts: Sequence[TrainingPrompt], folder: Path, settings: DistillSettings, journal: Journal
) -> list[Path]:
    done = {number for entry in journal.entries for number in entry["prompts"]}
    have = sum(entry["answer_tokens"] for entry in journal.entries)
    budget = settings.max_tokens or settings.max_new_tokens * len(prompts)
    waiting = [(number, prompt) for number, prompt in enumerate(prompts) if number not in done]
    recorder = StateRecorder(_DTYPES[settings.dtype])
    engine = decoder.engine(
        rule="exact",
        drafter=recorder,
        config=EngineConfig(draft_length=1, max_batch=settings.batch, max_length=decoder.config.max_length),
    )
    numbers: dict[int, int] = {}
    ids: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    finished: list[tuple[int, Example]] = []
    source = iter(waiting)
    longest = min(settings.max_prompt_tokens, (decoder.config.max_length or settings.max_prompt_tokens + 1) - 1)

    def top_up() -> None:
        started, room = 0, settings.batch - len(ids)
        if ids and room < min(_ADMITTED, settings.batch):
            return
        while started < min(_ADMITTED, room) and (entry := next(source, None)) is not None:
            encoded = decoder.encode(entry[1].text)
            if len(encoded) > longest:
                continue
            request = engine.add(encoded, SamplingParams(max_new_tokens=settings.max_new_tokens))
            numbers[request], ids[request], lengths[request] = entry[0], encoded, len(encoded)
            started += 1

    with ProgressMeter("answers (tokens)", budget, min(have, budget)) as meter:
        while have < budget:
            top_up()
            if not engine.has_work:
                break
            for chunk in engine.step():
                ids[chunk.request] += chunk.tokens
                if chunk.finish_reason is None:
                    continue
                tokens, start = ids.pop(chunk.request), lengths.pop(chunk.request)
                finished.append((numbers.pop(chunk.request), _example(tokens, start, recorder.take(chunk.request))))
                have += len(tokens) - start
                if meter.done < budget:
                    meter.advance(min(len(tokens) - start, budget - meter.done))
            if len(finished) >= _ROWS_PER_SHARD or (finished and have >= budget):
                _write_shard(folder, finished, journal)
                finished = []
    if finished:
        _write_shard(folder, finished, journal)
    engine.cancel_all()
    return [folder / entry["shard"] for entry in journal.entries]


def _example(tokens: list[int], start: int, states: tuple[Tensor, Tensor]) -> Example:
    taps, hidden = states
    count = min(len(taps), len(tokens) - 1)
    if not bool(taps[:count].isfinite().all() & hidden[:count].isfinite().all()):
        raise ConfigError(
            f"The target has hidden states that {taps.dtype} cannot hold. Give --feature-dtype bfloat16 or float32."
        )
    return Example(torch.tensor(tokens, dtype=torch.int32), start, taps[:count], hidden[:count])


def _write_shard(folder: Path, finished: Sequence[tuple[int, Example]], journal: Journal) -> None:
    examples = [example for _, example in finished]
    name = f"shard-{len(journal.entries):05d}.safetensors"
    tensors = {
        "ids": torch.cat([example.ids for example in examples]),
        "taps": torch.cat([example.taps for example in examples]),
        "hidden": torch.cat([example.hidden for example in examples]),
        "lengths": torch.tensor([len(example.ids) for example in examples]),
        "states": torch.tensor([len(example.taps) for example in examples]),
        "prompt_lengths": torch.tensor([example.prompt_length for example in examples]),
    }
    partial = folder / (name + ".partial")
    save_file(tensors, partial)
    partial.replace(folder / name)
    answered = sum(len(example.ids) - example.prompt_length for example in examples)
    journal.add({"shard": name, "prompts": [number for number, _ in finished], "answer_tokens": answered})


def read_shards(paths: Sequence[Path]) -> Iterator[Example]:
    """All examples of the shards, in order. Their tensors are views of the shards."""
    for path in paths:
        shard = load_file(path)
        lengths, states = shard["lengths"].tolist(), shard["states"].tolist()
        rows = zip(
            torch.split(shard["ids"], lengths),
            shard["prompt_lengths"].tolist(),
            torch.split(shard["taps"], states),
            torch.split(shard["hidden"], states),
            strict=True,
        )
        for ids, prompt_length, taps, hidden in rows:
            yield Example(ids.long(), prompt_length, taps, hidden)
