"""Rules of `core.rivals` against the implementations that other libraries ship.

transformers ships one, the static ensemble (DIVERSED), as assistant_ensemble_weight; vLLM's FLy is compared where vLLM
is installed. The others exist only in engines or repositories that cannot be imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import utils as hf_generation

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core import rivals
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.rivals import Diversed, FLy
from dropmatch.core.verification import RowSampling, Verification
from dropmatch.core.verify import decide, judge
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.hf.model import HFModel
from dropmatch.ops.random import Purpose
from scripted import TableHead
from toys import make_row, run

FLOAT32 = 1e-6  # two softmaxes and a difference of probabilities
V, L = 9, 5
WEIGHTS = [0.2, 0.5, 0.9]


def _chain(seed: int, params: SamplingParams) -> Verification:
    """A drafted chain over random target and draft logits that agree in part. The head is the identity."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(1, L + 1, V, generator=generator) * 1.5
    draft = target + torch.randn(1, L + 1, V, generator=generator)
    sampling = RowSampling([make_row([0], params)], torch.device("cpu"))
    drafted = [sampling.choose(draft[:, n], torch.tensor([0]), torch.tensor([n + 1]), Purpose.DRAFT) for n in range(L)]
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *drafted])[None]
    tree = DraftTree.chain(tokens, torch.tensor([L + 1]), draft, sampling.is_sampled)
    head = MCDropoutHead(TableHead(torch.eye(V)), DropoutConfig(p_drop=0.0))
    return Verification(tree, target, target, sampling, head, with_js=False)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("seed", range(30))
def test_sampled_ensemble_decides_and_corrects_as_transformers(
    seed: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same uniform numbers give the same kept length, and the next token comes from the same distribution."""
    v = _chain(seed, SamplingParams(temperature=1.0, seed=seed))
    keys = v.sampling.keys(torch.zeros(L, dtype=torch.int64), v.positions[0, :L])
    coins = rivals.uniform(keys, 1, Purpose.ACCEPT)[:, 0].float()
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "rand_like", lambda like: coins.reshape(like.shape))
    monkeypatch.setattr(
        torch, "multinomial", lambda probs, num_samples: seen.append(probs) or torch.zeros(1, 1, dtype=torch.int64)
    )
    _, num_kept = hf_generation._speculative_sampling(
        v.tree.tokens, v.tree.child_logits[:, :L], L, v.target_logits, assistant_ensemble_weight=weight
    )
    monkeypatch.setattr(rivals, "_draw", lambda v, node, p, left: seen.append(left) or node)
    rule = Diversed(weight)
    verdict = decide(v, judge(v, [rule]), [rule])
    assert int(verdict.num_accepted) == int(num_kept)
    theirs, ours = (probs / probs.sum() for probs in seen)
    torch.testing.assert_close(ours, theirs, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_greedy_ensemble_generates_the_tokens_of_transformers(weight: float, tiny: Callable[..., Any]) -> None:
    """Rejections emit argmax v and full drafts end with the target's own token, so draft lengths must agree too."""
    target = tiny("llama", torch.float32, "eager")
    draft = copy.deepcopy(target)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.15 * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0.0)
    prompt = [5, 17, 3, 44]
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = None  # else the assistant masks every token that equals it
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    theirs = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        assistant_model=draft,
        assistant_ensemble_weight=weight,
        do_sample=False,
        max_new_tokens=40,
    )[0, len(prompt) :].tolist()
    wrapped = HFModel(target)
    engine = SpeculativeEngine(
        wrapped,
        DraftModelDrafter(HFModel(draft), wrapped.vocab_size),
        rule=Diversed(weight),
        config=EngineConfig(draft_length=4),
    )
    result = run(engine, [prompt], SamplingParams(max_new_tokens=40, eos_ids=()))[0]
    assert result.tokens == theirs
    assert {Reason.EXACT, Reason.RECOVERED} <= set(result.reasons)
    if weight < 0.9:
        assert Reason.DIVERSED in result.reasons


def test_fly_gates_by_the_entropy_of_vllm() -> None:
    """The override itself is a Triton kernel; its entropy is plain torch."""
    fly = pytest.importorskip("vllm.v1.spec_decode.fly", reason="needs vLLM 0.33 or later, which ships FLy")
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0)) * 2
    entropy = float(fly.compute_fly_entropy(logits[0, :1].softmax(-1)))
    order = logits[0].argsort(descending=True)
    tokens = torch.stack([torch.tensor(0), order[0, 1], order[1, 0]])[None]  # refused, then kept
    tree = DraftTree.chain(tokens, torch.tensor([3]))
    head = MCDropoutHead(TableHead(torch.eye(V)), DropoutConfig(p_drop=0.0))
    v = Verification(tree, logits, logits, RowSampling([make_row([0])], torch.device("cpu")), head, with_js=False)
    for shift, reason in ((-1e-5, Reason.FLY), (1e-5, Reason.REJECTED)):
        assert int(judge(v, [FLy(entropy + shift, 1)])[0, 1]) == int(reason)
