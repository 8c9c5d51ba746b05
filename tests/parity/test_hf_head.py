"""HFHead without dropout equals the model's own logits, whatever the model does between hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.head import HFHead

FLOAT64 = 1e-12  # the same operations in the same order
FLOAT32 = 1e-5

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 4, 60, 11]])
# name -> (options, dtype, is_linear, what the model does)
CASES: dict[str, tuple[dict[str, Any], torch.dtype, bool]] = {
    "llama": ({}, torch.float64, True),  # untied
    "llama-tied": ({}, torch.float64, True),
    "gemma2": ({"final_logit_softcapping": 2.0}, torch.float64, False),
    "gemma3": ({"final_logit_softcapping": 2.0}, torch.float64, False),
    "gemma3-uncapped": ({"final_logit_softcapping": None}, torch.float64, True),
    "granite": ({}, torch.float64, True),  # logits / logits_scaling
    "cohere": ({}, torch.float64, True),  # logits * logit_scale
    "cohere2": ({}, torch.float64, True),
    "phi": ({}, torch.float64, True),  # bias
    "gptj": ({}, torch.float64, True),  # bias
    "gpt2": ({}, torch.float64, True),
    "opt": ({}, torch.float64, True),
    "mixtral": ({}, torch.float32, True),
}


class Int8Linear(nn.Module):
    """Weights in int8 with one scale per row, as a quantised LM head has them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(-1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.weight.to(hidden.dtype) * self.scale).T


def own_logits_and_hidden(model: Any) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits, model.get_decoder()(input_ids=IDS, use_cache=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_head_equals_the_models_own_logits(tiny: Callable[..., Any], name: str) -> None:
    options, dtype, is_linear = CASES[name]
    model = tiny(name.removesuffix("-uncapped"), dtype, "eager", **options)
    head = HFHead(model)
    logits, hidden = own_logits_and_hidden(model)
    assert head.is_linear == is_linear
    assert head.vocab_size == logits.shape[-1] == 97
    assert (head(hidden) - logits).abs().max() <= (FLOAT64 if dtype == torch.float64 else FLOAT32)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "phi", "llama"])
def test_the_published_parts_make_the_same_logits(tiny: Callable[..., Any], name: str) -> None:
    """A dropout head that projects by itself needs exactly weight, bias, scale and softcap."""
    model = tiny(name, attention="eager")
    head = HFHead(model)
    logits, hidden = own_logits_and_hidden(model)
    assert head.weight is not None
    made = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        made = head.softcap * torch.tanh(made / head.softcap)
    assert (made - logits).abs().max() <= FLOAT64


def test_falcon_h1_multiplier() -> None:
    """The whole model is refused for its recurrent layers; its head is still right."""
    config = transformers.FalconH1Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        initializer_range=0.3,
        lm_head_multiplier=0.4,
    )
    torch.manual_seed(7)
    model = transformers.FalconH1ForCausalLM(config).eval()
    logits, hidden = own_logits_and_hidden(model)
    assert logits.std() > 0.1
    assert (HFHead(model)(hidden) - logits).abs().max() <= FLOAT32


def test_a_multiplying_logits_scaling() -> None:
    """HyperCLOVAX multiplies by what Granite divides by, under the same name."""
    config = transformers.HyperCLOVAXConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        logits_scaling=0.4,
    )
    torch.manual_seed(7)
    model = transformers.HyperCLOVAXForCausalLM(config).eval()
    logits, hidden = own_logits_and_hidden(model)
    assert (HFHead(model)(hidden) - logits).abs().max() <= FLOAT32


def test_int8_head_is_called_as_a_module(tiny: Callable[..., Any]) -> None:
    model = tiny("granite")
    model.lm_head = Int8Linear(model.lm_head)
    head = HFHead(model)
    logits, hidden = own_logits_and_hidden(model)
    assert head.weight is None
    assert head.bias is None
    assert head.vocab_size == 97
    assert (head(hidden) - logits).abs().max() <= FLOAT64


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_rows_of_a_head_that_a_hook_changes_are_not_read(tiny: Callable[..., Any], kind: str) -> None:
    """A shortlist would ask the dropout heads without the hook, and the plain head with it."""
    model = tiny("llama")
    assert HFHead(model).weight is not None
    handle = getattr(model.get_output_embeddings(), f"register_{kind}_hook")(lambda *_: None)
    try:
        assert HFHead(model).weight is None
    finally:
        handle.remove()


def test_a_head_without_parameters_is_called_where_the_hidden_states_lie(tiny: Callable[..., Any]) -> None:
    """Some quantised modules pack their weights out of sight."""
    model = tiny("llama", torch.float32)

    class Packed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden[..., :1].expand(*hidden.shape[:-1], 97)

    model.lm_head = Packed()
    head = HFHead(model)
    logits, hidden = own_logits_and_hidden(model)
    assert head.device is None
    assert torch.equal(head(hidden), logits)


def test_tied_head_shares_the_embedding(tiny: Callable[..., Any]) -> None:
    model = tiny("llama-tied")
    weight = HFHead(model).weight
    assert weight is not None
    assert weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_head_takes_any_leading_shape_and_builds_no_graph(tiny: Callable[..., Any]) -> None:
    head = HFHead(tiny("llama"))
    hidden = torch.randn(2, 3, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = head(hidden)
    assert logits.shape == (2, 3, 4, 97)
    assert not logits.requires_grad


def test_a_model_without_head_is_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no LM head"):
        HFHead(transformers.LlamaModel(config))
