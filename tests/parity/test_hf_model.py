"""HFModel against full recomputation: every node of every tree equals the plain model over its root-to-node path."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dropmatch.core.interfaces import DraftTree
from dropmatch.errors import ConfigError, ShapeError, UnsupportedModelError
from dropmatch.hf.model import HFModel
from dropmatch.ops.tree import path_to

# Logits of the tiny models have a standard deviation of 0.4 to 2; a wrong mask or position moves them by 0.1 and more.
FLOAT64_SDPA = 1e-9  # float32 enters only in norms and rotary tables, the same for both sides
FLOAT64_EAGER = 2e-5  # eager attention takes its softmax in float32, over rows of another width
FLOAT32 = 2e-4  # sums over keys, heads and experts in another order
BFLOAT16 = 0.15  # 8 bits of mantissa through three layers

Builder = Callable[..., Any]
MOE = {"mixtral", "qwen2-moe", "olmoe", "gpt-oss", "deepseek-v3"}  # grouped matrix products take no float64
EAGER_ONLY = {"gemma2", "gpt-oss"}
MODEL_NAMES = [
    "llama",
    "llama-tied",
    "qwen2",
    "qwen2-mixed",
    "qwen3",
    "mistral",
    "mistral-full",
    "gemma2",
    "gemma3",
    "granite",
    "cohere",
    "cohere2",
    "phi",
    "phi3",
    "gpt-neox",
    "gpt2",
    "gptj",
    "opt",
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "olmoe",
    "starcoder2",
    "gpt-oss",
    "deepseek-v3",
]
CASES = [
    (name, attention)
    for name in MODEL_NAMES
    for attention in ("sdpa", "eager")
    if attention == "eager" or name not in EAGER_ONLY
]


def plain_logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The model's own logits [len, V] over each sequence: right-padded, no cache, no mask of ours."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    padded = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    if not longest:
        return []
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(padded), attention_mask=None, use_cache=False).logits
    return [row[: len(sequence)] for row, sequence in zip(logits, sequences, strict=True)]


@dataclass
class Session:
    """Drives an HFModel with random trees and checks each node. Keeps the rows' texts as the truth."""

    model: Any
    wrapped: HFModel
    tolerance: float
    dice: random.Random
    texts: list[list[int]] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(3, 97) for _ in range(count)]

    def join(self, lengths: Sequence[int]) -> None:
        prompts = [self.tokens(length) for length in lengths]
        hidden = self.wrapped.add_rows(prompts).hidden
        assert hidden.shape[:2] == (len(prompts), max(lengths))
        full = [(row, prompt) for row, prompt in enumerate(prompts) if prompt]
        for (row, prompt), expected in zip(full, plain_logits(self.model, [p for _, p in full]), strict=True):
            self.check(hidden[row, : len(prompt)], expected)
        self.texts += prompts
        assert self.wrapped.lengths == [len(text) for text in self.texts]

    def step(self, num_nodes: int, *, is_chain: bool = False) -> None:
        """One forward over another tree per row, checked; then each row keeps another path."""
        B, N = len(self.texts), num_nodes
        tokens = torch.tensor([self.tokens(N) for _ in range(B)])
        parents = torch.tensor(
            [[-1] + [n - 1 if is_chain else self.dice.randrange(n) for n in range(1, N)] for _ in range(B)]
        )
        tree = DraftTree.tree(tokens, parents)
        hidden = self.wrapped.forward(tokens, None if is_chain else tree.ancestors).hidden
        paths = [
            (b, path_to(torch.tensor([n]), tree.ancestors[b : b + 1])[0].tolist()) for b in range(B) for n in range(N)
        ]
        expected = plain_logits(self.model, [self.texts[b] + tokens[b, path].tolist() for b, path in paths])
        for (b, path), logits in zip(paths, expected, strict=True):
            self.check(hidden[b, path[-1]], logits[-1])
        self.keep(tokens, tree, is_chain=is_chain)

    def keep(self, tokens: Tensor, tree: DraftTree, *, is_chain: bool) -> None:
        node = torch.tensor([self.dice.randrange(tokens.shape[1]) for _ in self.texts])
        path = path_to(node, tree.ancestors)
        kept = [int(tree.depth[b, n]) + 1 for b, n in enumerate(node.tolist())]
        self.wrapped.commit(kept, None if is_chain else path)
        for b, text in enumerate(self.texts):
            text += tokens[b, path[b, : kept[b]]].tolist()
        assert self.wrapped.lengths == [len(text) for text in self.texts]

    def check(self, hidden: Tensor, expected: Tensor) -> None:
        logits = self.wrapped.head(hidden)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= self.tolerance


def session(model: Any, tolerance: float, *, seed: int = 5, **options: Any) -> Session:
    return Session(model, HFModel(model, **options), tolerance, random.Random(seed))


def dtype_and_tolerance(name: str, attention: str) -> tuple[torch.dtype, float]:
    if name in MOE:
        return torch.float32, FLOAT32
    return torch.float64, FLOAT64_SDPA if attention == "sdpa" else FLOAT64_EAGER


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_node_equals_recomputation_of_its_path(tiny: Builder, name: str, attention: str) -> None:
    """Four ragged rows, other trees and kept paths per row; rows leave, join and start empty; windows of 3."""
    dtype, tolerance = dtype_and_tolerance(name, attention)
    run = session(tiny(name, dtype, attention), tolerance)
    run.join([5, 1, 9, 3])
    for num_nodes, is_chain in ((6, False), (4, True), (1, True), (7, False)):
        run.step(num_nodes, is_chain=is_chain)
    run.wrapped.filter([3, 0, 2])
    run.texts = [run.texts[3], run.texts[0], run.texts[2]]
    run.step(5)
    run.join([0, 8])
    run.step(6)
    run.step(3, is_chain=True)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_equal_length_take_the_fast_paths(tiny: Builder, name: str, attention: str) -> None:
    run = session(tiny(name, attention=attention), dtype_and_tolerance(name, attention)[1])
    run.join([9])
    for num_nodes, is_chain in ((5, True), (1, True), (6, False), (1, False), (4, True)):
        run.step(num_nodes, is_chain=is_chain)
    run.wrapped.filter([])
    run.texts = []
    run.join([8, 8, 8])
    run.step(6)
    run.wrapped.filter([])
    run.texts = []
    run.join([0, 0])
    run.step(4, is_chain=True)


def test_a_row_does_not_depend_on_its_batch_mates(tiny: Builder) -> None:
    wrapped = HFModel(tiny("qwen2-mixed"))
    wrapped.add_rows([[5, 6, 7], [8] * 30, []])
    tokens = torch.tensor([[9, 10], [11, 12], [13, 14]])
    together = wrapped.forward(tokens).hidden
    wrapped.filter([0])
    alone = wrapped.forward(tokens[:1]).hidden
    assert (together[:1] - alone).abs().max() < FLOAT64_SDPA


def test_equal_prompts_are_run_once_and_then_go_their_own_ways(tiny: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    run = session(tiny("qwen2-mixed"), FLOAT64_SDPA)
    widths: list[tuple[int, ...]] = []
    real = run.wrapped._run
    monkeypatch.setattr(
        run.wrapped,
        "_run",
        lambda cache, tokens, mask: (widths.append(tuple(tokens.shape)), real(cache, tokens, mask))[1],
    )
    prompts = [[5, 6, 7], [9], [5, 6, 7], [], [9], [5, 6, 7]]
    hidden = run.wrapped.add_rows(prompts).hidden
    assert widths == [(3, 3)]
    assert run.wrapped.lengths == [3, 1, 3, 0, 1, 3]
    run.texts = [list(prompt) for prompt in prompts]
    for row, prompt in zip(hidden, prompts, strict=True):
        if prompt:
            run.check(row[len(prompt) - 1], plain_logits(run.model, [prompt])[0][-1])
    run.step(5)
    run.step(4, is_chain=True)


@pytest.mark.parametrize("name", ["qwen2-mixed", "gemma3"])
def test_twin_rows_are_run_once_until_they_part(tiny: Builder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Three rows of one prompt and one of another: they share a forward while tokens and trees are the same."""
    run = session(tiny(name), FLOAT64_SDPA)
    ran: list[int] = []
    real = run.wrapped._run
    monkeypatch.setattr(
        run.wrapped, "_run", lambda cache, tokens, mask: (ran.append(len(tokens)), real(cache, tokens, mask))[1]
    )
    run.texts = [[5, 6, 7], [9, 4, 4, 4], [5, 6, 7], [5, 6, 7]]
    run.wrapped.add_rows(run.texts)

    def step(drafts: list[list[int]], parents: list[list[int]], kept: list[list[int]]) -> None:
        tree = DraftTree.tree(torch.tensor(drafts), torch.tensor(parents))
        hidden = run.wrapped.forward(tree.tokens, tree.ancestors).hidden
        nodes = [(b, n) for b in range(len(drafts)) for n in range(len(drafts[0]))]
        paths = [path_to(torch.tensor([n]), tree.ancestors[b : b + 1])[0].tolist() for b, n in nodes]
        texts = [run.texts[b] + [drafts[b][i] for i in path] for (b, _), path in zip(nodes, paths, strict=True)]
        for (b, n), logits in zip(nodes, plain_logits(run.model, texts), strict=True):
            run.check(hidden[b, n], logits[-1])
        width = max(map(len, kept))
        run.wrapped.commit([len(k) for k in kept], torch.tensor([k + [k[-1]] * (width - len(k)) for k in kept]))
        for text, draft, path in zip(run.texts, drafts, kept, strict=True):
            text += [draft[i] for i in path]

    bushy, chain = [-1, 0, 0, 2], [-1, 0, 1, 2]
    step([[1, 2, 3, 4]] * 4, [bushy] * 4, [[0, 2, 3], [0], [0, 2, 3], [0, 2, 3]])
    step([[1, 2, 3, 4]] * 4, [bushy, bushy, bushy, chain], [[0, 1], [0, 2], [0, 1], [0, 1]])  # another tree
    step([[8, 2, 3, 4]] * 4, [chain] * 4, [[0, 1], [0], [0], [0, 1]])  # rows 0 and 2 keep other tokens
    step([[7, 2, 3, 4]] * 4, [chain] * 4, [[0], [0], [0], [0]])
    assert ran == [2, 2, 3, 3, 4]
    run.wrapped.filter([2, 0])
    run.texts = [run.texts[2], run.texts[0]]
    run.step(5)


def test_twins_that_are_given_other_tokens_are_run_apart(tiny: Builder) -> None:
    run = session(tiny("llama"), FLOAT64_SDPA)
    run.texts = [[5, 6, 7], [5, 6, 7], [5, 6, 7]]
    run.wrapped.add_rows(run.texts)
    drafts = [[1, 2], [1, 3], [1, 2]]
    hidden = run.wrapped.forward(torch.tensor(drafts)).hidden
    texts = [text + draft for text, draft in zip(run.texts, drafts, strict=True)]
    for row, logits in zip(hidden, plain_logits(run.model, texts), strict=True):
        run.check(row[-1], logits[-1])
    run.wrapped.commit([2, 2, 1])
    run.texts = [texts[0], texts[1], texts[2][:-1]]
    hidden = run.wrapped.forward(torch.tensor([[4], [4], [4]])).hidden
    for row, logits in zip(hidden, plain_logits(run.model, [[*text, 4] for text in run.texts]), strict=True):
        run.check(row[-1], logits[-1])


def test_truncated_twins_stay_twins_at_one_length(tiny: Builder) -> None:
    wrapped = HFModel(tiny("llama"))
    wrapped.add_rows([[5, 6, 7, 8]] * 3)
    wrapped.truncate([2, 2, 3])
    tokens = torch.tensor([[9, 3]] * 3)
    together = wrapped.forward(tokens).hidden
    wrapped.filter([])
    wrapped.add_rows([[5, 6], [5, 6, 7]])
    apart = wrapped.forward(tokens[:2]).hidden
    assert (together - apart[[0, 0, 1]]).abs().max() < FLOAT64_SDPA


def test_a_row_that_overflowed_does_not_poison_others(tiny: Builder) -> None:
    """Masked keys still enter the weighted sum with weight 0, and 0 times NaN is NaN: unused room must be zero."""
    wrapped = HFModel(tiny("llama"))
    wrapped.add_rows([[5, 6, 7], [8] * 30])
    wrapped.filter([0])
    wrapped.add_rows([[4] * 300])
    assert wrapped.forward(torch.tensor([[9], [9]])).hidden.isfinite().all()


def test_truncate_forgets_tokens(tiny: Builder) -> None:
    run = session(tiny("gemma3"), FLOAT64_SDPA)
    run.join([9, 12])
    run.wrapped.truncate([4, 12])
    run.texts[0] = run.texts[0][:4]
    run.step(5)
    with pytest.raises(ShapeError, match="Cannot truncate"):
        run.wrapped.truncate([100, 1])


def test_an_empty_batch_gives_empty_output(tiny: Builder) -> None:
    wrapped = HFModel(tiny("llama"), tap_layers=[0, 2])
    wrapped.add_rows([[3, 4]])
    wrapped.filter([])
    output = wrapped.forward(torch.zeros(0, 5, dtype=torch.int64))
    assert output.hidden.shape == (0, 5, 32)
    assert output.aux is not None
    assert output.aux.shape == (0, 5, 64)
    wrapped.commit([])
    assert wrapped.add_rows([]).hidden.shape == (0, 0, 32)
    assert wrapped.add_rows([[], []]).hidden.shape == (2, 0, 32)
    assert wrapped.lengths == [0, 0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_taps_are_the_inputs_of_the_layers(tiny: Builder, name: str) -> None:
    """hidden_states[i] of transformers is what enters layer i."""
    model = tiny(name)
    wrapped = HFModel(model, tap_layers=[2, 1])
    aux = wrapped.add_rows([[5, 6, 7, 8]]).aux
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True).hidden_states
    assert aux is not None
    assert (aux - torch.cat([states[2], states[1]], dim=-1)).abs().max() < FLOAT64_SDPA
    with pytest.raises(ConfigError, match="layers are 0 to 2"):
        HFModel(model, tap_layers=[3])


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "qwen2-moe"])
def test_bfloat16_follows_its_own_model(tiny: Builder, name: str) -> None:
    run = session(tiny(name, torch.bfloat16, "eager"), BFLOAT16)
    run.join([5, 9])
    run.step(4)


def test_float16_follows_its_own_model(tiny: Builder) -> None:
    run = session(tiny("llama", torch.float16), BFLOAT16)
    run.join([5, 9])
    run.step(4)


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        {
            "model.embed_tokens": "cpu",
            "model.layers.0": "cpu",
            "model.layers.1": "cpu",
            "model.layers.2": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        },
    ],
    ids=["whole", "parts"],
)
def test_a_dispatched_model_works(tiny: Builder, device_map: dict[str, str]) -> None:
    """accelerate's hooks move inputs between devices; on one CPU they must at least not be in the way."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(tiny("llama"), device_map=device_map, force_hooks=True)
    run = session(model, FLOAT64_SDPA)
    run.join([5, 2])
    run.step(5)


def test_an_offloaded_model_works(tiny: Builder) -> None:
    """Weights that lie elsewhere between forwards are meta tensors: the head has no weight, only its module."""
    accelerate = pytest.importorskip("accelerate")
    plain, model = tiny("llama"), tiny("llama")
    accelerate.cpu_offload(model, execution_device="cpu")
    run = Session(plain, HFModel(model), FLOAT64_SDPA, random.Random(5))
    assert run.wrapped.head.weight is None  # type: ignore[attr-defined]
    run.join([5, 2])
    run.step(5)


def test_a_multimodal_wrapper_runs_its_text_model() -> None:
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "initializer_range": 0.3,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=96,
        boi_token_index=95,
        eoi_token_index=94,
        mm_tokens_per_image=4,
        attn_implementation="sdpa",
    )
    torch.manual_seed(7)
    run = session(transformers.Gemma3ForConditionalGeneration(config).double().eval(), FLOAT64_SDPA)
    run.join([5, 9])
    run.dice = random.Random(1)
    run.step(5)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt"])
def test_learned_positions_have_an_end(tiny: Builder, name: str) -> None:
    """Padding nodes past the end are computed, kept tokens past it are refused before anything is counted."""
    wrapped = HFModel(tiny(name, max_position_embeddings=16))
    assert wrapped.max_positions == 16
    with pytest.raises(ShapeError, match="row of 17 tokens does not fit the model's 16 positions"):
        wrapped.add_rows([[5] * 17])
    wrapped.add_rows([[5] * 14, [6]])
    assert wrapped.forward(torch.full((2, 4), 7)).hidden.isfinite().all()
    with pytest.raises(ShapeError, match="row of 17 tokens"):
        wrapped.commit([3, 1])
    wrapped.commit([2, 1])
    with pytest.raises(ShapeError, match="row of 17 tokens"):
        wrapped.forward(torch.full((2, 1), 7))


def test_growing_rope_ends_where_it_starts_to_grow(tiny: Builder) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert HFModel(tiny("llama", rope_parameters=rope)).max_positions == 128
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert HFModel(tiny("llama", rope_parameters=linear)).max_positions is None


def test_bad_rows_are_refused(tiny: Builder) -> None:
    wrapped = HFModel(tiny("llama"))
    with pytest.raises(ConfigError, match="the model has 0 to 96"):
        wrapped.add_rows([[5, 97]])
    wrapped.add_rows([[5, 6]])
    with pytest.raises(ShapeError, match="2 rows were given to a model that holds 1"):
        wrapped.forward(torch.tensor([[5], [6]]))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
def test_the_callers_model_is_untouched(tiny: Builder, name: str) -> None:
    model = tiny(name, torch.float32, "eager")
    prompt = torch.tensor([[5, 6, 7, 8]])

    def generate() -> list[int]:
        tokens: list[int] = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12).tolist()
        return tokens

    def state() -> Any:
        hooks = [
            (len(module._forward_pre_hooks), len(module._forward_hooks), module.training) for module in model.modules()
        ]
        return copy.deepcopy((model.config.to_dict(), model.config._attn_implementation, hooks, sorted(vars(model))))

    before = generate(), model.generation_config.to_dict(), state()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    wrapped = HFModel(model, tap_layers=[1])
    wrapped.add_rows([[5, 6], [7]])
    wrapped.forward(torch.tensor([[9, 10], [11, 12]]))
    wrapped.commit([1, 2])
    assert (generate(), model.generation_config.to_dict(), state()) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_hooks_leave_when_a_forward_fails(tiny: Builder) -> None:
    model = tiny("llama")
    wrapped = HFModel(model, tap_layers=[1])
    wrapped.add_rows([[5]])
    with pytest.raises(IndexError):
        wrapped.forward(torch.tensor([[1000]]))
    assert all(not module._forward_pre_hooks for module in model.modules())


_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA3N = {
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [48] * 4,
}
REFUSALS = {
    "mamba": (
        "MambaForCausalLM",
        {"state_size": 4},
        r"Layer 0 of 'mamba'.*'linear_attention' and cannot be rolled back",
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        r"Layer 0 of 'falcon_h1'.*'hybrid'",
    ),
    "jamba": (
        "JambaForCausalLM",
        {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        r"Layer 0 of 'jamba'.*'linear_attention'",
    ),
    "bamba": (
        "BambaForCausalLM",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
        r"Layer 0 of 'bamba'.*'linear_attention'",
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {
            "head_dim": 8,
            "num_experts": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "num_experts_per_tok": 1,
        },
        r"Layer 0 of 'qwen3_next'.*'linear_attention'",
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        {"lru_width": 32, "attention_window_size": 8},
        r"Layer 0 of 'recurrent_gemma'.*'linear_attention'",
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8},
        r"Layer 0 of 'llama4_text'.*'chunked_attention'",
    ),
    "gemma3n": ("Gemma3nForCausalLM", _GEMMA3N, "'gemma3n_text'.*shares keys and values between layers"),
    "bloom": ("BloomForCausalLM", {"n_head": 4, "n_layer": 2}, "'bloom'.*takes no position ids"),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "'mpt'.*takes no position ids"),
    "falcon-alibi": ("FalconForCausalLM", {"alibi": True}, "'falcon'.*uses ALiBi"),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "local"], 2]]},
        "Layer 1 of 'gpt_neo'.*local window",
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4},
        "'t5'.*attends to an encoder",
    ),
    "bert": ("BertForMaskedLM", {}, "'bert'.*has no causal LM head"),
    "llama-body": ("LlamaModel", {}, "'llama'.*has no causal LM head"),
    "electra": ("ElectraForCausalLM", {"embedding_size": 16}, "reads 16 numbers per token, its decoder gives 32"),
    "bert-encoder": ("BertLMHeadModel", {}, "BertLMHeadModel"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_models_that_cannot_be_rolled_back_are_refused_by_name(name: str) -> None:
    class_name, options, message = REFUSALS[name]
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**{**_SMALL, **options})).eval()
    with pytest.raises(UnsupportedModelError, match=message):
        HFModel(model)


def test_attention_that_takes_no_tree_mask_is_refused(tiny: Builder) -> None:
    model = tiny("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r'\'flash_attention_2\'.*attn_implementation="sdpa"'):
        HFModel(model)


def test_a_model_in_training_mode_is_refused(tiny: Builder) -> None:
    with pytest.raises(UnsupportedModelError, match=r"training mode.*Call model.eval\(\)"):
        HFModel(tiny("llama").train())


def test_the_probe_finds_an_unknown_logit_multiplier(tiny: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("granite")
    monkeypatch.setattr("dropmatch.hf.head._scale", lambda _: 1.0)
    with pytest.raises(UnsupportedModelError, match="does not give its own logits over its prompt"):
        HFModel(model)
    HFModel(model, probe=False)


def test_the_probe_finds_a_mask_that_is_added_as_if_it_were_selected_by(
    tiny: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention adds a boolean mask without a word."""
    monkeypatch.setattr("dropmatch.hf.model.additive", lambda visible, _: visible)
    with pytest.raises(UnsupportedModelError, match="own logits over a draft tree"):
        HFModel(tiny("llama", attention="eager"))


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_probe_finds_a_window_that_is_longer_than_its_text(
    tiny: Builder, monkeypatch: pytest.MonkeyPatch, name: str, attention: str
) -> None:
    """A window of 40 hides nothing from a probe of four tokens; the masks of a stretched cache still show it."""
    model = tiny(name, attention=attention, sliding_window=40)
    HFModel(model)
    examine = __import__("dropmatch.hf.support", fromlist=["examine"]).examine

    def misread(given: Any) -> Any:
        anatomy = examine(given)
        anatomy.windows["sliding_attention"] = 41
        return anatomy

    monkeypatch.setattr("dropmatch.hf.model.examine", misread)
    with pytest.raises(UnsupportedModelError, match=r"Layer 0 of .* \(sliding_attention, window 41"):
        HFModel(model)


def test_the_probe_leaves_no_rows(tiny: Builder) -> None:
    assert HFModel(tiny("llama")).lengths == []


def test_a_model_that_reads_the_name_of_its_attention_keeps_it() -> None:
    """Falcon branches on the name itself; under another one it would take its eager path with a mask made for sdpa."""
    config = transformers.FalconConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=False,
        attn_implementation="sdpa",
    )
    HFModel(transformers.FalconForCausalLM(config).eval())  # the load probe compares logits
