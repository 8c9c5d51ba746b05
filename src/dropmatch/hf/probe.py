"""A few tokens through a model when it is wrapped: is what we compute what the model computes? Refuse if not.

Configs can lie or say things we do not read (an unknown logit multiplier, an attention that adds boolean masks, a
window). Two ragged rows and a small tree cost three short forwards; models with windows one more, of two tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.masks import visible_keys

if TYPE_CHECKING:
    from dropmatch.hf.model import HFModel

# Allowed root-mean-square difference of logits, relative to their own spread over the vocabulary. Batches of other
# shapes sum in another order, float32 perhaps in TF32; a lost mask or a position by column moved the tiny models of
# tests/parity by 0.05 to 1.6.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.15}
_SEED = 20240303
# As small as can be, since on a CPU each token counts: two siblings show a lost mask and a position by column.
_PROMPT_LENGTHS = (2, 1)
_ANCESTORS = ((True, False, False), (True, True, False), (True, False, True))
_PATHS = ((0, 0, 1), (0, 0, 2), (1, 0, 2))  # row, then nodes from the root: what is recomputed in full
# Past this the two-token forward of the window check reads too many keys to be cheap; the config is believed then.
_LONGEST_WINDOW = 8192


@torch.inference_mode()
def check_model(model: HFModel) -> None:
    """Raise UnsupportedModelError with the figures if the wrapped model does not compute the caller's model's logits.

    The model must hold no rows; it holds none afterwards.
    """
    prompts, tree = _probe_tokens(min(model.vocab_size, model.num_embeddings))
    plain = _plain_logits(model, prompts, tree)  # [paths, S, V]
    hidden = model.add_rows(prompts).hidden
    _check_width(model, hidden.shape[-1])
    prefill = model.head(hidden)
    device = model.device
    ancestors = torch.tensor(_ANCESTORS, device=device).expand(len(prompts), -1, -1)
    output = model.forward(tree.to(device), ancestors)
    nodes = model.head(output.hidden)
    model.filter([])
    for path, expected in zip(_PATHS, plain, strict=True):
        row, on_path = path[0], list(path[1:])
        length = _PROMPT_LENGTHS[row]
        _compare(model, "its prompt", prefill[row, :length], expected[:length])
        _compare(model, "a draft tree", nodes[row, on_path], expected[length : length + len(on_path)])
    _check_windows(model)


def _probe_tokens(num_ids: int) -> tuple[list[list[int]], Tensor]:
    """Prompts of different lengths and the tokens [B, N] of a tree behind each."""
    generator = torch.Generator().manual_seed(_SEED)
    prompts = [torch.randint(num_ids, (length,), generator=generator).tolist() for length in _PROMPT_LENGTHS]
    return prompts, torch.randint(num_ids, (len(prompts), len(_ANCESTORS)), generator=generator)


def _plain_logits(model: HFModel, prompts: list[list[int]], tree: Tensor) -> Tensor:
    """The caller's model over every prompt and path, without our cache, masks or head. Returns [paths, S, V]."""
    sequences = [prompts[path[0]] + tree[path[0], list(path[1:])].tolist() for path in _PATHS]
    longest = max(len(sequence) for sequence in sequences)
    padded = [sequence + sequence[-1:] * (longest - len(sequence)) for sequence in sequences]
    tokens = torch.tensor(padded, device=model.input_device)
    logits: Tensor = model.model(input_ids=tokens, use_cache=False).logits
    return logits.to(model.device)


def _check_width(model: HFModel, width: int) -> None:
    expected = getattr(model.model.get_output_embeddings(), "in_features", width)
    if expected != width:
        raise UnsupportedModelError(
            f"The LM head of {type(model.model).__name__} reads {expected} numbers per token, its decoder gives "
            f"{width}: a layer between them is unknown to dropmatch. Use a model whose head reads the last norm."
        )


def _compare(model: HFModel, part: str, ours: Tensor, expected: Tensor) -> None:
    """ours, expected: [S, V]."""
    expected = expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    error = (ours.double() - expected).square().mean(-1).sqrt()
    worst = float((error / spread.clamp_min(torch.finfo(torch.float32).tiny)).max())
    allowed = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    if getattr(model.head, "weight", None) is None:  # quantised: activations may be rounded by batch
        allowed = max(allowed, _TOLERANCE[torch.bfloat16])
    if not worst <= allowed:  # NaN fails too
        raise UnsupportedModelError(
            f"{type(model.model).__name__} does not give its own logits over {part}: they differ by {worst:.3g} of "
            f"their spread, {allowed:.3g} is allowed for {model.dtype}. It does something in its attention or LM head "
            "that dropmatch does not know. Use another model or attn_implementation, or probe=False at your own risk."
        )


class _StretchedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Claims `past` cached tokens and gives one key many times over, so that a long cache costs no memory."""

    def __init__(self, past: int) -> None:
        super().__init__()
        self.past = past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        total = self.past + key_states.shape[2]
        return key_states[:, :, :1].expand(-1, -1, total, -1), value_states[:, :, :1].expand(-1, -1, total, -1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.past + query_length, 0

    def get_seq_length(self) -> int:
        return self.past

    def get_max_length(self) -> int:
        return -1


def _check_windows(model: HFModel) -> None:
    """Compare the masks that the model makes for each layer just past its window with ours. Raises if they differ."""
    anatomy = model.anatomy
    sizes = [window for window in anatomy.windows.values() if window is not None and window <= _LONGEST_WINDOW]
    if not sizes:
        return
    past = max(sizes) + 1
    seen = _layer_masks(model, past)
    for index, (kind, mask) in enumerate(zip(anatomy.layer_types, seen, strict=True)):
        ours = visible_keys([past], None, 2, anatomy.windows[kind], mask.device)
        if not torch.equal(mask[:1, :1], ours):
            raise UnsupportedModelError(
                f"Layer {index} of {type(model.model).__name__} ({kind}, window {anatomy.windows[kind]} by its config) "
                "masks other keys than its config says, so drafts cannot be verified with it. Use another model."
            )


def _layer_masks(model: HFModel, past: int) -> list[Tensor]:
    """What the model lets each layer see for two tokens behind `past` cached ones. Bool [1, 1, 2, T] per layer."""
    anatomy = model.anatomy
    seen: list[Tensor] = []
    everything = visible_keys([past], None, 2, None, model.device)

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, kwargs.get("attention_mask")) if isinstance(value, Tensor)]
        masks = [value for value in given if value.dim() == 4]
        mask = masks[0] if masks else everything
        seen.append(mask if mask.dtype == torch.bool else mask == 0)

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in anatomy.layers]
    try:
        device = model.input_device
        anatomy.body(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
            position_ids=torch.tensor([[0, 1]], device=device),  # masks go by column; positions may be few
            use_cache=True,
            **{anatomy.cache_name: Cache(layers=[_StretchedLayer(past) for _ in anatomy.layers])},
        )
    finally:
        for handle in handles:
            handle.remove()
    return seen
