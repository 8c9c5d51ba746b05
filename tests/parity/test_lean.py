"""The lean forward against transformers' own modules, on the same layers, and what it is not used for."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dropmatch.hf import native
from dropmatch.hf.fast_linears import speed_up_linears
from dropmatch.hf.int4 import Int4Linear, quantize_int4
from dropmatch.hf.model import HFModel
from dropmatch.hf.native import NativeLinear

pytestmark = pytest.mark.skipif(
    native.library() is None or torch.cpu._is_amx_tile_supported(), reason="needs our kernels for bfloat16"
)
ROUNDING = 0.02  # of a state's norm: bfloat16 sums in another order, through four layers
SHAPE = {
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [3, 1, 4, 1, 5, 9, 2, 6]]
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)


def make(kind: str = "qwen2", **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {**SHAPE, **options}
    model = Qwen2ForCausalLM(Qwen2Config(**settings)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.bfloat16().eval().requires_grad_(False)


def both(model: Any, **options: Any) -> tuple[HFModel, HFModel]:
    """The model in its lean form, and the same layers as transformers runs them."""
    lean, plain = HFModel(model, probe=False, **options), HFModel(model, probe=False, **options)
    assert lean._lean is not None
    plain._lean = None
    return lean, plain


def assert_close(got: Tensor, expected: Tensor) -> None:
    error = (got.float() - expected.float()).norm(dim=-1)
    assert (error <= ROUNDING * expected.float().norm(dim=-1)).all(), error / expected.float().norm(dim=-1)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize(
    ("weights", "key_heads"), [("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 4), ("int4", 2), ("int4", 4)]
)
def test_prompts_chains_and_trees_give_the_same_states(kind: str, weights: str, key_heads: int) -> None:
    model = make(kind, num_key_value_heads=key_heads)
    if weights == "int4":
        quantize_int4(model)
    else:
        speed_up_linears(model)
    lean, plain = both(model)
    chains = torch.tensor([[7], [8], [9]]), torch.tensor([[7, 8, 9], [1, 2, 3], [4, 4, 4]])
    with torch.inference_mode():
        for prompts in (PROMPTS[:1], PROMPTS):  # a single row, whose cache has one length, and ragged ones
            a, b = lean.add_rows(prompts).hidden, plain.add_rows(prompts).hidden
            for row, prompt in enumerate(prompts):
                assert_close(a[row, : len(prompt)], b[row, : len(prompt)])
            for tokens in chains:
                assert_close(lean.forward(tokens[: len(prompts)]).hidden, plain.forward(tokens[: len(prompts)]).hidden)
                for model_ in (lean, plain):
                    model_.commit([tokens.shape[1]] * len(prompts))
            nodes = torch.tensor([[7, 8, 9, 10]] * len(prompts))
            ancestors = TREE.expand(len(prompts), 4, 4)
            assert_close(lean.forward(nodes, ancestors).hidden, plain.forward(nodes, ancestors).hidden)
            path = torch.tensor([[0, 1, 3]] * len(prompts))
            for model_ in (lean, plain):
                model_.commit([3] * len(prompts), path)
            assert_close(lean.forward(nodes[:, :1]).hidden, plain.forward(nodes[:, :1]).hidden)
            for model_ in (lean, plain):
                model_.filter([])


def test_tapped_layers_give_what_goes_into_them() -> None:
    model = make()
    speed_up_linears(model)
    lean, plain = both(model, tap_layers=(2, 0))
    with torch.inference_mode():
        a, b = lean.add_rows(PROMPTS[:1]), plain.add_rows(PROMPTS[:1])
    assert a.aux is not None
    assert b.aux is not None
    assert a.aux.shape == (1, 5, 256)
    assert_close(a.aux[..., :128], b.aux[..., :128])
    assert_close(a.aux[..., 128:], b.aux[..., 128:])


def test_the_load_probe_accepts_the_lean_form() -> None:
    model = make()
    speed_up_linears(model)
    assert HFModel(model)._lean is not None


def test_weights_stand_side_by_side_once_and_stay_the_models() -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    speed_up_linears(model)
    first, second = HFModel(model, probe=False)._lean, HFModel(model, probe=False)._lean
    assert first is not None
    assert second is not None
    for a, b in zip(first._layers, second._layers, strict=True):
        assert a.query_key_value.bias is not None
        assert b.query_key_value.bias is not None
        assert a.query_key_value.bias.data_ptr() == b.query_key_value.bias.data_ptr()
        assert a.query_key_value.weight.data_ptr() == b.query_key_value.weight.data_ptr()
        assert a.gate_up.weight.data_ptr() == b.gate_up.weight.data_ptr()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert type(model.model.layers[0].self_attn.q_proj.weight) is torch.nn.Parameter


def test_weights_that_are_changed_in_place_are_seen() -> None:
    model = make()
    speed_up_linears(model)
    lean, plain = both(model)
    other = make(initializer_range=0.1)
    for parameter in other.parameters():
        parameter.data.normal_(std=0.2)
    model.load_state_dict(other.state_dict())
    assert_close(lean.add_rows(PROMPTS[:1]).hidden, plain.add_rows(PROMPTS[:1]).hidden)


def test_each_layer_has_its_own_scale() -> None:
    model = make(initializer_range=0.2)
    model.model.layers[2].self_attn.scaling *= 3
    speed_up_linears(model)
    lean, plain = both(model)
    assert_close(lean.add_rows(PROMPTS[:1]).hidden, plain.add_rows(PROMPTS[:1]).hidden)


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * 2


def replace_class(module: torch.nn.Module) -> None:
    module.__class__ = type("OwnRMSNorm", (type(module),), {"forward": lambda self, x: x})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on a layer": lambda body: body.layers[1].register_forward_hook(lambda *_: None),
    "a hook before a linear layer": lambda body: body.layers[1].mlp.up_proj.register_forward_pre_hook(lambda *_: None),
    "a hook on the embedding": lambda body: body.embed_tokens.register_forward_hook(lambda *_: None),
    "another forward": lambda body: setattr(body.layers[0].mlp, "forward", MethodType(lambda _, x: x, body)),
    "another module": lambda body: setattr(body.layers[0], "mlp", Wrapped(body.layers[0].mlp)),
    "another class": lambda body: replace_class(body.norm),
    "another gate": lambda body: setattr(body.layers[3].mlp, "act_fn", torch.nn.GELU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_runs_as_changed(change: str) -> None:
    """Such as activation steering by hooks: the lean form would pass them by without a word."""
    model = make("llama")
    speed_up_linears(model)
    CHANGES[change](model.model)
    assert HFModel(model, probe=False)._lean is None


def test_asking_for_hidden_states_once_changes_nothing() -> None:
    model = make()
    speed_up_linears(model)
    model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)  # transformers leaves its hooks behind
    assert HFModel(model, probe=False)._lean is not None


def test_wide_inputs_of_int4_go_to_onednn_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    quantize_int4(model)
    lean, plain = both(model)
    monkeypatch.delattr(native, "multiply")
    long = [list(range(20))]
    assert_close(lean.add_rows(long).hidden, plain.add_rows(long).hidden)


@pytest.mark.parametrize("rows", [1, 11, 20])
def test_a_norm_rotation_and_gate_are_those_of_transformers(rows: int) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).mul(8).bfloat16()
    norm = Qwen2RMSNorm(96, 1e-6).bfloat16().requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    got, expected = native.rms_norm(x, norm.weight, 1e-6), norm(x)
    assert (got != expected).float().mean() < 0.01  # another order of summation flips a rounding now and then
    torch.testing.assert_close(got, expected, rtol=0.01, atol=0.0)
    angles = torch.rand(rows, 32, generator=generator) * 6
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()
    turned = x.clone()
    native.rotate(turned, cosines, sines, 2)
    heads = x.view(1, rows, 3, 32).transpose(1, 2)
    exact, _ = apply_rotary_pos_emb(heads[:, :2], heads[:, :2], cosines[None], sines[None])
    assert torch.equal(turned.view(rows, 3, 32)[:, :2], exact[0].transpose(0, 1))
    assert torch.equal(turned[:, 64:], x[:, 64:])  # the third head is not to be turned
    gate = native.silu_product(x)
    expected = torch.nn.functional.silu(x[:, :48]) * x[:, 48:]
    assert (gate != expected).float().mean() < 0.01
    torch.testing.assert_close(gate, expected, rtol=0.02, atol=0.0)


def test_gates_far_from_zero_are_finite() -> None:
    values = torch.tensor([-300.0, -120.0, -88.5, -20.0, 0.0, 20.0, 88.5, 300.0] * 2).bfloat16()
    got = native.silu_product(torch.cat([values, torch.ones(16).bfloat16()])[None])
    torch.testing.assert_close(got[0], torch.nn.functional.silu(values), rtol=0.01, atol=1e-30)


def test_other_models_run_as_transformers_has_them() -> None:
    plain = make()
    assert HFModel(plain, probe=False)._lean is None  # torch's own layers
    float32 = make().float()
    speed_up_linears(float32)
    assert HFModel(float32, probe=False)._lean is None
    gelu = make(hidden_act="gelu")
    speed_up_linears(gelu)
    assert HFModel(gelu, probe=False)._lean is None
    mixed = make()
    speed_up_linears(mixed)
    mixed.model.layers[1].mlp.up_proj = Int4Linear(torch.nn.Linear(128, 192).bfloat16())
    assert HFModel(mixed, probe=False)._lean is None
    odd = make()
    speed_up_linears(odd)
    assert isinstance(odd.model.layers[0].self_attn.q_proj, NativeLinear)
    odd.config.model_type = "qwen9"
    assert HFModel(odd, probe=False)._lean is None
    windowed = make(use_sliding_window=True, sliding_window=8, max_window_layers=2)
    speed_up_linears(windowed)
    assert HFModel(windowed, probe=False)._lean is None
