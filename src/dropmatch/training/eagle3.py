"""Trains an EAGLE-3 head for a target on what the target itself wrote: `dropmatch train eagle3`.

Source: arXiv 2503.01840 (training-time test), with the head's vocabulary cut to the tokens that answers use. States are
read once and scaled to about unit size while training; the scale goes into `fc` when the head is written.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropmatch.api import Decoder
from dropmatch.bench.progress import ProgressMeter
from dropmatch.core.head_rows import HeadRows
from dropmatch.eagle3.checkpoint import TargetFacts, save_head
from dropmatch.eagle3.model import Eagle3Head
from dropmatch.eagle3.settings import Family, HeadSettings
from dropmatch.errors import ConfigError, DataError, IntegrityError
from dropmatch.hf.rotary import rotary_frequencies
from dropmatch.provenance import collect
from dropmatch.training.distill import DistillSettings, Example, distill, read_shards
from dropmatch.training.lookahead import lookahead
from dropmatch.training.prompts import TrainingPrompt

_STEP_WEIGHT = 0.8
_BETAS = (0.9, 0.95)
_CLIP = 0.5
_WARM_UP = 0.03
_SAVE_EVERY = 100  # steps between checkpoints
_HELD_OUT, _MOST_HELD_OUT = 0.04, 64  # share of the answers, and their number
_BUCKET = 64  # sequences whose lengths are evened out together


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """draft_vocab_size: tokens the head can draft. steps: S of the training-time test. epochs: passes over the data.
    batch_tokens: rows of one update, padding included. max_length: rows of one sequence. intermediate_size: MLP width,
    None for the target's. rope_theta: the official heads' 10000 whatever the target's."""

    draft_vocab_size: int = 4096
    steps: int = 3
    epochs: int = 3
    batch_tokens: int = 512
    max_length: int = 512
    learning_rate: float = 1e-3
    intermediate_size: int | None = None
    rope_theta: float = 10000.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("draft_vocab_size", "steps", "epochs", "batch_tokens", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not allowed. Give at least 1.")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning_rate={self.learning_rate} is out of range. Allowed: above 0, below 1.")


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples. ids: [B, L]; taps: [B, T, A] and hidden: [B, U, d] scaled as they come, U = min(T + steps, F);
    counts: real rows of each; answered: [B, U] whether position j predicts an answer's token."""

    ids: Tensor
    taps: Tensor
    hidden: Tensor
    num_rows: int
    answered: Tensor


def train_eagle3(
    decoder: Decoder,
    prompts: Sequence[TrainingPrompt],
    output: Path,
    work: Path,
    *,
    target_name: str,
    data: DistillSettings,
    settings: TrainSettings,
    family: Family = "official",
    restart: bool = False,
) -> dict[str, Any]:
    """Make the data, train and write the head to `output`. Returns what its training.json says.

    work: folder of data and checkpoints; a stopped run goes on from it. Raises ConfigError if they belong to other
    settings, cannot be written, or the loss is no number; IntegrityError if they are damaged; DataError if the data
    hold too little.
    """
    taps = list(decoder.target.tap_layers)
    described = {"target": target_name, "taps": taps, "prompts": _fingerprint(prompts)}
    shards = distill(decoder, prompts, work, data, described=described, restart=restart)
    cut = [_cut(example, settings) for example in read_shards(shards)]
    examples = [example for example in cut if len(example.taps) >= example.prompt_length]
    num_held = max(1, min(_MOST_HELD_OUT, round(len(examples) * _HELD_OUT)))
    held, train = examples[:num_held], examples[num_held:]
    if not train:
        raise DataError(
            f"{len(cut)} of {len(prompts)} prompts were answered (none of more than {data.max_prompt_tokens} tokens "
            f"is), and {len(examples)} answers begin within {settings.max_length} tokens. At least 2 are needed: "
            "give more prompts, or larger --max-prompt-tokens, --max-length or --max-tokens."
        )
    head, scales = new_head(decoder, train, settings)
    truth = Truth(decoder, head.target_ids)
    optimizer = torch.optim.AdamW(head.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0)
    schedule = _schedule([len(example.taps) for example in train], settings)
    checkpoint = _Checkpoint(work / "training.pt", {**described, **asdict(settings), "shards": len(shards)}, restart)
    start, curve = checkpoint.load(head, optimizer)
    head.train()
    with ProgressMeter("training", len(schedule), start) as meter:
        for step in range(start, len(schedule)):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, len(schedule), settings.learning_rate)
            batch = collate([train[i] for i in schedule[step]], scales, settings.steps)
            losses = lookahead_losses(head, truth, batch, settings.steps)
            total = sum(_STEP_WEIGHT**s * loss for s, loss in enumerate(losses))
            assert isinstance(total, Tensor)
            optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            norm = torch.nn.utils.clip_grad_norm_(head.parameters(), _CLIP)
            if not bool(total.isfinite() & norm.isfinite()):
                raise ConfigError(
                    f"Training has run away: the loss of update {step + 1} or its gradient is no number. Remove "
                    f"{checkpoint.path} if it is there, and give a smaller --learning-rate."
                )
            optimizer.step()
            curve.append(round(float(total.detach()), 4))
            if (step + 1) % _SAVE_EVERY == 0:
                checkpoint.save(head, optimizer, step + 1, curve)
            meter.advance(note=f"loss {sum(curve[-50:]) / len(curve[-50:]):.3f}")
    head.eval()
    agreement = evaluate(head, held, scales, settings)
    report = {
        "target": target_name,
        "settings": asdict(settings),
        "data": {**asdict(data), "prompts": described["prompts"], "answered": len(examples),
                 "rows": sum(len(example.taps) for example in examples)},
        "held_out": agreement,
        "vocabulary_coverage": _coverage(held, head.target_ids),
        "loss": curve[:: max(1, len(curve) // 200)],
        "provenance": collect(device=str(decoder.target.device)),
    }  # fmt: skip
    save_head(merged(head, scales), output, family=family, target_name=target_name, extra=report)
    return report


# -- the head -------------------------------------------------------------------------------------------------------


def choose_vocabulary(examples: Sequence[Example], size: int, vocab_size: int) -> Tensor:
    """The most frequent answer tokens, equal counts by lower id, ascending; filled up with the lowest unused ids.
    Returns [size] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += torch.bincount(example.ids[example.prompt_length :], minlength=vocab_size)
    # a stable sort of equal counts keeps the lower id in front, and unused ids all have the count 0
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def new_head(decoder: Decoder, examples: Sequence[Example], settings: TrainSettings) -> tuple[Eagle3Head, Tensor]:
    """A head to train, and the factors [A] that bring each tap to about unit size.

    It starts as a pass through the last tap: fc copies it, the LM head is the target's own rows.
    """
    target = decoder.target
    facts, config = TargetFacts.of(target), target.anatomy.config
    H, size = facts.hidden_size, min(settings.draft_vocab_size, facts.vocab_size)
    head_dim = getattr(config, "head_dim", None) or H // config.num_attention_heads
    shape = HeadSettings(
        family="official",
        hidden_size=H,
        target_hidden_size=H,
        intermediate_size=settings.intermediate_size or int(getattr(config, "intermediate_size", 4 * H)),
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        num_layers=1,
        vocab_size=len(facts.embedding),
        draft_vocab_size=size,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_positions=int(getattr(config, "max_position_embeddings", 2048)),
        rope={"rope_type": "default", "rope_theta": settings.rope_theta},
        tap_layers=target.tap_layers,
    )
    ids = choose_vocabulary(examples, size, facts.vocab_size)
    frequencies, scale = rotary_frequencies(shape.rope, head_dim, shape.max_positions)
    torch.manual_seed(settings.seed)
    head = Eagle3Head(shape, facts.embedding.float(), ids, frequencies, scale)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
            if name == "fc.weight":
                parameter.mul_(0.1)
                parameter[:, -H:] += torch.eye(H)
        head.lm_head.weight.copy_(HeadRows.of(target.head).weight[ids].float())
        norm = getattr(getattr(target.anatomy.body, "norm", None), "weight", None)
        if isinstance(norm, Tensor) and norm.shape == head.norm.weight.shape:
            head.norm.weight.copy_(norm.float())
    return head, _tap_scales(examples, shape.num_taps)


def merged(head: Eagle3Head, scales: Tensor) -> Eagle3Head:
    """The head for taps as the target gives them. The weights are shared but for fc."""
    plain = Eagle3Head(head.settings, head.embedding, head.target_ids, head.inv_freq, head.rope_scale)
    weights = {name: parameter.detach() for name, parameter in head.named_parameters()}
    weights["fc.weight"] = weights["fc.weight"] * scales
    plain.load_state_dict(weights, assign=True)
    return plain.requires_grad_(False).eval()


def _tap_scales(examples: Sequence[Example], num_taps: int) -> Tensor:
    """1 / root mean square of each tap, by element [A]. The first token is left out: it often carries outliers that
    are hundreds of times larger than all else."""
    sample = torch.cat([example.taps[1:].float() for example in examples[:200]])
    parts = sample.view(len(sample), num_taps, -1)
    size = parts.square().mean((0, 2)).sqrt().clamp(min=1e-6)
    return (1.0 / size).repeat_interleave(parts.shape[-1])


# -- the loss -------------------------------------------------------------------------------------------------------


class Truth:
    """The target's distribution over the draft vocabulary, from its final hidden states."""

    def __init__(self, decoder: Decoder, target_ids: Tensor) -> None:
        rows = HeadRows.of(decoder.target.head)
        self._weight = rows.weight[target_ids].float()
        self._bias = None if rows.bias is None else rows.bias[target_ids].float()
        self._scale, self._softcap = rows.scale, rows.softcap
        self.rank = torch.full((decoder.target.vocab_size,), -1)  # [V] draft id of each target id, -1 without one
        self.rank[target_ids] = torch.arange(len(target_ids))

    def probs(self, hidden: Tensor) -> Tensor:
        """hidden: [M, d]. Returns [M, Vd], renormalised over the draft vocabulary."""
        logits = torch.nn.functional.linear(hidden.float(), self._weight, self._bias) * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.softmax(-1)


def collate(examples: Sequence[Example], scales: Tensor, steps: int) -> Batch:
    """Pad examples on the right. Rows reach as far as a truth exists for their first step."""
    B, L = len(examples), max(len(example.ids) for example in examples)
    states = [len(example.taps) for example in examples]
    T, width, d = max(states), examples[0].taps.shape[1], examples[0].hidden.shape[1]
    ids = torch.zeros(B, L, dtype=torch.int64)
    taps, hidden = torch.zeros(B, T, width), torch.zeros(B, T, d)
    answered = torch.zeros(B, T, dtype=torch.bool)
    for b, (example, count) in enumerate(zip(examples, states, strict=True)):
        ids[b, : len(example.ids)] = example.ids
        taps[b, :count] = example.taps.float() * scales
        hidden[b, :count] = example.hidden.float()
        answered[b, example.prompt_length - 1 : count] = True  # position j predicts token j + 1
    return Batch(ids, taps, hidden, sum(states), answered)


def lookahead_losses(head: Eagle3Head, truth: Truth, batch: Batch, steps: int) -> list[Tensor]:
    """Cross-entropy of each step against the target's distribution, over all real rows of the batch.

    A row counts if what it predicts is an answer's token, and the target's own choice is in the draft vocabulary."""
    outputs = lookahead(head, batch.ids, batch.taps, steps)
    known = _next_ranks(batch, truth) >= 0
    learnt = batch.answered & known
    probs = truth.probs(batch.hidden[learnt])  # [M, Vd], once for all steps
    number = torch.full(learnt.shape, -1)
    number[learnt] = torch.arange(len(probs))
    losses = []
    for step, out in enumerate(outputs):
        position = number[:, step + 1 :]  # row t predicts what position t + step + 1 does
        b, t = (position >= 0).nonzero(as_tuple=True)
        log_probs = head.logits(out[b, t]).log_softmax(-1)
        losses.append(-(probs[position[b, t]] * log_probs).sum() / batch.num_rows)
    return losses


def _next_ranks(batch: Batch, truth: Truth) -> Tensor:
    """Draft id of the token behind each position, [B, T]; -1 outside the draft vocabulary. Answers are greedy, so this
    is also the target's argmax there."""
    T = batch.taps.shape[1]
    return truth.rank[torch.nn.functional.pad(batch.ids, (0, 1))[:, 1 : T + 1]]


@torch.no_grad()
def evaluate(head: Eagle3Head, examples: Sequence[Example], scales: Tensor, settings: TrainSettings) -> dict[str, Any]:
    """How often the head's first choice is the target's, by step, given that all earlier steps were right; and the tau
    of chains of as many tokens that follows."""
    steps = max(settings.steps, 5)
    tried, right = torch.zeros(steps), torch.zeros(steps)
    rank = torch.full((len(head.embedding),), -1)
    rank[head.target_ids] = torch.arange(len(head.target_ids))
    for start in range(0, len(examples), 8):
        batch = collate(examples[start : start + 8], scales, steps)
        T = batch.taps.shape[1]
        following = rank[torch.nn.functional.pad(batch.ids, (0, 1))[:, 1 : T + 1]]
        alive = torch.ones_like(batch.answered)
        for step, out in enumerate(lookahead(head, batch.ids, batch.taps, steps)):
            here = T - step - 1
            if here < 1:
                break
            # rows near the end are left out of all steps alike, so that a step's chance is over the same rows
            asked = alive[:, :here] & batch.answered[:, step + 1 :]
            hit = asked & (head.logits(out[:, :here]).argmax(-1) == following[:, step + 1 :])
            tried[step] += asked.sum()
            right[step] += hit.sum()
            alive = torch.nn.functional.pad(hit, (0, T - here))
    chances = [float(r / t) if t else 0.0 for r, t in zip(right, tried, strict=True)]
    tau = 1.0 + sum(math.prod(chances[: i + 1]) for i in range(steps))
    return {"chance_by_step": [round(chance, 4) for chance in chances], "chain_tau": round(tau, 3), "steps": steps}


# -- the loop -------------------------------------------------------------------------------------------------------


def _schedule(lengths: Sequence[int], settings: TrainSettings) -> list[list[int]]:
    """Which examples each update sees: a new order every epoch, like lengths together. Depends on the seed alone."""
    batches: list[list[int]] = []
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(settings.seed * 1_000 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        made: list[list[int]] = []
        for start in range(0, len(order), _BUCKET):
            bucket = sorted(order[start : start + _BUCKET], key=lambda i: (lengths[i], i))
            current: list[int] = []
            for index in bucket:  # ascending, so the newest is the longest
                if current and (len(current) + 1) * lengths[index] > settings.batch_tokens:
                    made.append(current)
                    current = []
                current.append(index)
            made.append(current)
        batches += [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]
    return batches


def _learning_rate(step: int, total: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to 0."""
    warm = max(1, round(total * _WARM_UP))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


class _Checkpoint:
    """Weights, optimiser and loss curve on disk, written whole or not at all."""

    def __init__(self, path: Path, settings: dict[str, Any], restart: bool) -> None:
        self.path = path
        self._settings = json.dumps(settings, sort_keys=True)
        if restart:
            path.unlink(missing_ok=True)

    def load(self, head: Eagle3Head, optimizer: torch.optim.Optimizer) -> tuple[int, list[float]]:
        """The step to go on with and the curve so far; (0, []) without a checkpoint."""
        if not self.path.exists():
            return 0, []
        try:
            state = torch.load(self.path, weights_only=True)
            settings, step, curve = state["settings"], int(state["step"]), list(state["curve"])
        except Exception as error:  # what is no pickle can fail in any way
            raise self._damaged(error) from error
        if settings != self._settings:
            raise ConfigError(
                f"{self.path} was made with other settings or other data. Give those again, another --work folder, or "
                "remove that file to train anew on the same answers."
            )
        try:
            head.load_state_dict(state["head"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(error) from error
        return step, curve

    def _damaged(self, error: Exception) -> IntegrityError:
        # what torch says of pickles advises to run them
        reason = "it holds no checkpoint" if isinstance(error, pickle.UnpicklingError) else str(error).split("\n")[0]
        return IntegrityError(f"{self.path} cannot be read ({reason}). Remove it to train anew on the same answers.")

    def save(self, head: Eagle3Head, optimizer: torch.optim.Optimizer, step: int, curve: list[float]) -> None:
        """Raises ConfigError where it cannot be written, as on a full disk."""
        partial = self.path.with_suffix(".partial")
        state = {
            "settings": self._settings,
            "head": head.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "curve": curve,
        }
        try:
            torch.save(state, partial)
            partial.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            partial.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.path} cannot be written ({error}). Make room and give the same command again."
            ) from error


def _cut(example: Example, settings: TrainSettings) -> Example:
    """At most max_length states, with the tokens that their rows look ahead to."""
    count = settings.max_length
    if len(example.taps) <= count:
        return example
    return replace(example, ids=example.ids[: count + 1], taps=example.taps[:count], hidden=example.hidden[:count])


def _fingerprint(prompts: Sequence[TrainingPrompt]) -> str:
    """A short hash of the prompts, so that data are not taken for those of other prompts."""
    import hashlib

    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.text.encode("utf-8", "surrogatepass") + b"\0")
    return f"{len(prompts)} prompts, {digest.hexdigest()[:16]}"


def _coverage(examples: Sequence[Example], target_ids: Tensor) -> float:
    """Share of answer tokens that the head can draft."""
    answers = torch.cat([example.ids[example.prompt_length :] for example in examples])
    return round(float(torch.isin(answers, target_ids).float().mean()), 4)
