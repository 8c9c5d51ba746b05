"""The closed form against the sampled heads it stands for: many masks through the real dropout head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dropmatch.config import DropoutConfig, SamplingParams
from dropmatch.core.acceptance import AcceptanceRule, make_rule
from dropmatch.core.closed_form import draft_divergence, head_chance, head_radius, radius
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.head_rows import HeadRows
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.verification import Verification
from dropmatch.core.verify import judge
from dropmatch.hf.calibration import PROBE_TEXT
from dropmatch.ops.closed_form import win_chance
from dropmatch.provenance import cache_dir
from scripted import ScriptedModel, TableHead
from toys import make_row, verify

V, D = 40, 96
NUM_ROWS = 60
MANY = 2000  # heads; the standard error of a chance is at most 0.011
CHANCE_MEAN, CHANCE_WORST = 0.015, 0.06
"""Of a chance, closed against sampled by 2,000 heads: 0.006 and 0.035 were seen, of which 0.006 is the sampling."""
LINEAR_CAP_WORST = 0.12  # sampled rows under a soft-cap: the cap is taken as linear around the plain score
RADIUS_CORRELATION = {0.05: 0.9, 0.2: 0.7}
"""Of the logarithms, by p_drop: 0.94 and 0.77 were seen. Past small p a head can leave a position's likely tokens
altogether, which second order cannot see."""
RADIUS_RANGE = (0.75, 1.1)
"""Closed over sampled radius, median over positions: K - 1 gammas are a lower bound, by 6% at K = 5."""
TARGET = ScriptedModel(V, D, seed=0)
DRAFT = ScriptedModel(V, D, seed=0, noise=0.8)


class FullHead(TableHead):
    """Bias, scale and soft-cap, as HFHead has them."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None):
        super().__init__(weight)
        self.bias, self.scale, self.softcap, self.is_linear = bias, scale, softcap, softcap is None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = super().__call__(hidden)
        logits = (logits if self.bias is None else logits + self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _target(**options: object) -> ScriptedModel:
    model = ScriptedModel(V, D, seed=0)
    model.head = FullHead(model.head.weight, **options)
    return model


def _verification(
    dropout: DropoutConfig, params: SamplingParams | None = None, target: ScriptedModel = TARGET
) -> Verification:
    """One token per row, drafted by a model that mostly agrees; sampled rows draw with the target's own noise."""
    prompts = [[1, b % V, b // V, 5] for b in range(NUM_ROWS)]
    rows = [make_row(prompt, params or SamplingParams(seed=b)) for b, prompt in enumerate(prompts)]
    logits = torch.stack([DRAFT.head(DRAFT.state(prompt)) for prompt in prompts])  # [B, V]
    drafted = logits.topk(2, dim=-1).indices[:, 1]  # the second best, so that most are neither certain nor hopeless
    tokens = torch.stack([torch.full_like(drafted, 5), drafted], dim=1)
    child_logits = torch.stack([logits, logits], dim=1)
    tree = DraftTree.chain(tokens, torch.full((NUM_ROWS,), 2), child_logits)
    return verify(target, rows, tree, dropout)


def _asked(v: Verification) -> tuple[Tensor, Tensor]:
    return (v.tree.depth > 0).nonzero(as_tuple=True)


CASES = {
    "greedy": (SamplingParams(), {}),
    "sampled": (SamplingParams(temperature=0.7, seed=5), {}),
    "sampled hot": (SamplingParams(temperature=1.6, seed=6), {}),
    "suppressed": (SamplingParams(suppress_tokens=tuple(range(0, V, 3))), {}),
    "scale": (SamplingParams(), {"scale": 0.4}),
    "bias": (SamplingParams(), {"bias": torch.randn(V, generator=torch.Generator().manual_seed(1))}),
    "soft-cap": (SamplingParams(), {"softcap": 3.0}),
    "all, sampled": (
        SamplingParams(temperature=0.9, seed=7),
        {"bias": torch.randn(V, generator=torch.Generator().manual_seed(1)), "scale": 1.3, "softcap": 12.0},
    ),
}


@pytest.mark.parametrize("p_drop", [0.1, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_chance_of_a_head_equals_the_share_of_many_sampled_heads(case: str, p_drop: float) -> None:
    """Mask seeds 0..59. Sampled rows under a soft-cap are the roughest case."""
    params, options = CASES[case]
    v = _verification(DropoutConfig(num_paths=MANY, p_drop=p_drop), params, _target(**options))
    b, n = _asked(v)
    closed = head_chance(v, b, n)
    sampled = v.ensemble(v.tree.depth > 0).votes[b, n] / MANY
    error = (closed - sampled).abs()
    assert float(sampled.std()) > 0.05  # there is something to agree on
    assert float(error.mean()) < CHANCE_MEAN
    assert float(error.max()) < (LINEAR_CAP_WORST if case == "all, sampled" else CHANCE_WORST)


@pytest.mark.parametrize("options", [{}, {"scale": 0.4}, {"softcap": 6.0}], ids=["plain", "scale", "soft-cap"])
@pytest.mark.parametrize("p_drop", RADIUS_CORRELATION)
def test_radius_follows_the_mean_of_many_sampled_radii(p_drop: float, options: dict[str, float]) -> None:
    """200 samplings of K = 5 (seeds 0..199): the standard error of a mean radius is about 4%."""
    target = _target(**options)
    config = DropoutConfig(num_paths=5, p_drop=p_drop)
    hidden = target.table[:NUM_ROWS]
    sampled = torch.stack([_radius(target.head, hidden, config, seed) for seed in range(200)]).mean(0)
    closed = head_radius(HeadRows.of(target.head), hidden, target.head(hidden), 5, p_drop)
    low, high = RADIUS_RANGE
    assert low < float((closed / sampled).median()) < high
    assert float(torch.corrcoef(torch.stack([closed.log(), sampled.log()]))[0, 1]) > RADIUS_CORRELATION[p_drop]


def _radius(head: object, hidden: Tensor, config: DropoutConfig, seed: int) -> Tensor:
    position = torch.arange(len(hidden))
    keys = torch.stack([torch.full_like(position, seed), torch.zeros_like(position), position], dim=-1)
    heads = MCDropoutHead(head, config)(hidden, keys, pick=lambda logits, index: logits.argmax(-1), with_js=True)
    return heads.radius


def _agreement(
    closed: AcceptanceRule, sampled: AcceptanceRule, dropout: DropoutConfig, seeds: int
) -> tuple[float, float]:
    """How often the closed rule agrees with one sampling, and the most that any fixed decision could."""
    kept = torch.stack(
        [
            judge(v, [sampled] * NUM_ROWS)[:, 1] > 0
            for v in (_verification(dropout, SamplingParams(seed=seed)) for seed in range(seeds))
        ]
    )
    share = kept.float().mean(0)
    v = _verification(dropout)
    mine = judge(v, [closed] * NUM_ROWS)[:, 1] > 0
    return float(torch.where(mine, share, 1 - share).mean()), float(torch.maximum(share, 1 - share).mean())


@pytest.mark.parametrize(("closed", "sampled", "slack"), [("expected-head", "head", 0.01), ("expected-js", "js", 0.03)])
def test_a_closed_rule_agrees_with_one_sampling_almost_as_often_as_any_fixed_decision(
    closed: str, sampled: str, slack: float
) -> None:
    """60 positions, mask seeds 0..99: a sampled decision is random, and its own majority is the best fixed guess."""
    agreement, best = _agreement(make_rule(closed), make_rule(sampled), DropoutConfig(p_drop=0.15), 100)
    assert best < 0.995  # some decisions are open
    assert agreement > best - slack


def test_divergence_of_the_draft_is_the_definition() -> None:
    v = _verification(DropoutConfig(p_drop=0.1))
    b, n = _asked(v)
    draft, plain = (x[:, 0].double().softmax(-1) for x in (v.tree.child_logits, v.target_logits))
    middle = (draft + plain) / 2
    exact = ((draft * (draft / middle).log()).sum(-1) + (plain * (plain / middle).log()).sum(-1)) / 2
    assert torch.allclose(draft_divergence(v, b, n).double(), exact, rtol=0, atol=1e-5)
    assert float(radius(v, b, v.parent[b, n]).min()) > 0


# --- real hidden states ---

REAL_CHANCE_MEAN, REAL_CHANCE_WORST = {0.05: 0.02, 0.3: 0.04}, 0.15
"""Against 1,000 heads over the whole vocabulary. 0.030 and 0.106 were seen on the 135M model at p = 0.3, whose heads
often name a token outside the 32 rivals; below 0.02 everywhere else."""


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
@pytest.mark.parametrize("p_drop", [0.05, 0.3])
def test_chance_on_real_hidden_states(name: str, p_drop: float) -> None:
    """Seed 0, the second best token at 24 positions of ordinary text, 1,000 masks."""
    hidden, weight = _real(name)
    logits = hidden @ weight.T
    best = logits.topk(33, dim=-1).indices
    tokens = torch.cat([best[:, 1:2], best[:, :1], best[:, 2:]], dim=-1)
    scores, products = logits.gather(-1, tokens), weight[tokens] * hidden[:, None]
    margin = scores[:, :1] - scores[:, 1:]
    closed = win_chance(margin, products[:, :1] - products[:, 1:], p_drop)
    generator = torch.Generator().manual_seed(0)
    sampled = torch.zeros(len(hidden))
    for _ in range(20):
        kept = torch.rand(len(hidden), 50, hidden.shape[-1], generator=generator) >= p_drop
        winner = (hidden[:, None] * kept / (1 - p_drop) @ weight.T).argmax(-1)
        sampled += (winner == tokens[:, :1]).sum(-1) / 1000
    error = (closed - sampled).abs()
    assert float(error.mean()) < REAL_CHANCE_MEAN[p_drop]
    assert float(error.max()) < REAL_CHANCE_WORST


def _real(name: str) -> tuple[Tensor, Tensor]:
    """Hidden states [24, d] and head [V, d] in float32."""
    from dropmatch.hf.loading import load_model, load_tokenizer

    folder: Path = cache_dir() / "models" / name
    if not folder.is_dir():
        pytest.skip(f"needs the weights of {name} in {folder}")
    model = load_model(folder, dtype="float32", device="cpu")
    ids = load_tokenizer(folder)(PROBE_TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return hidden[torch.linspace(8, len(hidden) - 1, 24).long()].clone(), model.get_output_embeddings().weight.detach()
