"""A transformers model as a CachedModel: ragged rows, draft trees, roll-back. The caller's model is not changed.

Only the decoder body is called; logits are HFHead's business. Positions and masks come from hf/masks.py, keys and
values from hf/cache.py, refusals from hf/support.py and hf/probe.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dropmatch.core.interfaces import LMHead, ModelOutput
from dropmatch.errors import ConfigError, ShapeError
from dropmatch.hf.attention import grouped_attention
from dropmatch.hf.cache import RaggedCache
from dropmatch.hf.head import HFHead
from dropmatch.hf.lean import lean_body
from dropmatch.hf.masks import additive, node_positions, visible_keys
from dropmatch.hf.support import examine
from dropmatch.hf.twins import TwinRows, first_of_each

_FEW_TWINS = 0.8  # picking rows copies their cache, so it must spare more than a fifth of them


class HFModel:
    """A decoder with its own ragged cache. Implements core.interfaces.CachedModel.

    head: the model's LM head; device: where hidden states and logits lie; lengths: cached tokens of each row (one
    list, changed in place; read only); max_positions: longest row the model can hold, None without a limit;
    tap_layers: as given.
    """

    def __init__(self, model: Any, *, tap_layers: Sequence[int] = (), probe: bool = True) -> None:
        """Wrap a causal language model in eval mode.

        tap_layers: decoder layers whose input is returned, concatenated in this order, as ModelOutput.aux.
        probe: run a few tokens and compare with the model's own logits.
        Raises UnsupportedModelError if the model cannot be verified or rolled back, or fails the probe.
        """
        self.model = model
        self.anatomy = examine(model)
        head = HFHead(model)
        self.head: LMHead = head
        self.vocab_size = head.vocab_size
        self.max_positions = self.anatomy.max_positions
        self.dtype: torch.dtype = model.dtype
        embeddings = model.get_input_embeddings()
        self.num_embeddings = int(embeddings.num_embeddings)
        self.input_device = _execution_device(embeddings)
        self.device: torch.device = head.device or self.input_device
        self.tap_layers = tuple(tap_layers)
        self._tapped = _tapped_layers(self.anatomy.layers, tap_layers)
        self._lean = lean_body(self.anatomy)
        self._cache = RaggedCache(len(self.anatomy.layers))
        self._twins = TwinRows()
        self.lengths: list[int] = self._cache.lengths
        if probe:
            from dropmatch.hf.probe import check_model

            check_model(self)

    @torch.inference_mode()
    def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
        """Append rows and cache their tokens (a prompt may be empty). Rows in flight are not touched.

        Returns hidden [R, S, d] with S the longest prompt; what stands right of a shorter prompt means nothing.
        """
        first, index = first_of_each([tuple(prompt) for prompt in prompts])  # equal prompts are run once
        unique = [prompts[row] for row in first]
        lengths = [len(prompt) for prompt in unique]
        longest = max(lengths, default=0)
        self._check_prompts(unique, longest)
        fresh = RaggedCache(len(self.anatomy.layers), num_rows=len(unique))
        if longest:
            # Right padding needs no mask: under a causal mask no token sees the padding behind it.
            padded = [[*prompt, *[prompt[-1] if prompt else 0] * (longest - len(prompt))] for prompt in unique]
            tokens = torch.tensor(padded, device=self.input_device)
            output = self._run(fresh, tokens, None)
        else:
            output = self._empty(len(unique), 0)
        fresh.commit(lengths)
        if len(unique) < len(prompts):
            fresh.filter(index)
            rows = torch.tensor(index, device=output.hidden.device)
            output = ModelOutput(output.hidden[rows], None if output.aux is None else output.aux[rows])
        self._cache.append(fresh)
        self._twins.add(index)
        return output

    @torch.inference_mode()
    def forward(self, tokens: Tensor, ancestors: Tensor | None = None) -> ModelOutput:
        """Run N new tokens per row and write their keys and values behind each row's cached ones, uncounted.

        tokens: [B, N]; ancestors: [B, N, N], None for a chain. Returns hidden [B, N, d].
        Nodes past max_positions are computed at the last position: they can be padding, but cannot be committed.
        Raises ShapeError if the rows do not fit, or the root of a row is past max_positions.
        """
        if tokens.shape[0] != len(self.lengths):
            raise ShapeError(f"Tokens of {tokens.shape[0]} rows were given to a model that holds {len(self.lengths)}.")
        if tokens.numel() == 0:
            return self._empty(*tokens.shape)
        if self.max_positions is not None and max(self.lengths) >= self.max_positions:
            raise ShapeError(_too_long(max(self.lengths) + 1, self.max_positions))
        tokens = tokens.to(self.input_device)
        first, index = self._twins.begin(tokens, ancestors)
        if len(first) > _FEW_TWINS * len(index):
            return self._run(self._cache, tokens, ancestors)
        rows = torch.tensor(first, device=tokens.device)
        part = self._cache.select(first, tokens.shape[1])
        output = self._run(part, tokens[rows], None if ancestors is None else ancestors[rows.to(ancestors.device)])
        self._cache.spread(part, index)
        spread = torch.tensor(index, device=output.hidden.device)
        return ModelOutput(output.hidden[spread], None if output.aux is None else output.aux[spread])

    @torch.inference_mode()
    def commit(self, num_kept: Sequence[int], path: Tensor | None = None) -> None:
        """Count tokens of the last forward as cached: the first num_kept[b], or those at path[b, :num_kept[b]]."""
        longest = max((length + kept for length, kept in zip(self.lengths, num_kept, strict=False)), default=0)
        if self.max_positions is not None and longest > self.max_positions:
            raise ShapeError(_too_long(longest, self.max_positions))
        self._cache.commit(num_kept, path)
        self._twins.commit(num_kept, path)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget cached tokens behind lengths[b]."""
        self._cache.truncate(lengths)
        self._twins.truncate(lengths)

    @torch.inference_mode()
    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        self._cache.filter(keep)
        self._twins.filter(keep)

    def _run(self, cache: RaggedCache, tokens: Tensor, ancestors: Tensor | None) -> ModelOutput:
        """One forward of the body over new tokens [B, N], written to the cache."""
        positions, mask = self._layout(cache.lengths, tokens.shape[1], ancestors)
        cache.begin(tokens.shape[1])
        if self._lean is not None:
            assert not isinstance(mask, dict)  # one kind of layer, so one mask
            hidden, lean_taps = self._lean(tokens, positions, mask, cache, self.tap_layers)
            return ModelOutput(hidden, torch.cat(lean_taps, dim=-1) if lean_taps else None)
        attention = nullcontext() if mask is None else grouped_attention(self.anatomy.body)
        with _inputs_of(self._tapped) as taps, attention:
            output = self.anatomy.body(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                **{self.anatomy.cache_name: cache},
            )
        aux = torch.cat([tap.to(self.device) for tap in taps], dim=-1) if taps else None
        return ModelOutput(hidden=output[0].to(self.device), aux=aux)

    def _layout(
        self, lengths: Sequence[int], num_new: int, ancestors: Tensor | None
    ) -> tuple[Tensor, Tensor | dict[str, Tensor] | None]:
        """Positions [B, N] and the attention mask: None where the model's own causal one is right, a dict by layer type
        where layers differ, else one mask for all layers."""
        device = self.input_device
        if ancestors is not None:
            ancestors = ancestors.to(device)
        depth = None if ancestors is None else ancestors.sum(-1) - 1
        positions = node_positions(lengths, depth, num_new, device)
        longest = max(lengths)
        if self.max_positions is not None and longest + num_new > self.max_positions:
            positions = positions.clamp(max=self.max_positions - 1)
        if (longest == 0 and ancestors is None) or (num_new == 1 and min(lengths) == longest):
            return positions, None
        windows = {
            kind: None if window is None or window >= longest + num_new else window
            for kind, window in self.anatomy.windows.items()
        }
        masks = {window: self._mask(lengths, ancestors, num_new, window) for window in set(windows.values())}
        if len(windows) == 1:  # models without a choice of masks take no dict
            return positions, next(iter(masks.values()))
        return positions, {kind: masks[window] for kind, window in windows.items()}

    def _mask(self, lengths: Sequence[int], ancestors: Tensor | None, num_new: int, window: int | None) -> Tensor:
        visible = visible_keys(lengths, ancestors, num_new, window, self.input_device)
        # Eager attention adds the mask, sdpa selects by it; eager would add a boolean without a word.
        return additive(visible, self.dtype) if self.anatomy.is_eager else visible

    def _empty(self, num_rows: int, num_new: int) -> ModelOutput:
        shape = (num_rows, num_new)
        width = int(self.anatomy.config.hidden_size)
        hidden = torch.zeros(*shape, width, dtype=self.dtype, device=self.device)
        aux = hidden.new_zeros(*shape, width * len(self._tapped)) if self._tapped else None
        return ModelOutput(hidden=hidden, aux=aux)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], longest: int) -> None:
        if self.max_positions is not None and longest > self.max_positions:
            raise ShapeError(_too_long(longest, self.max_positions))
        for prompt in prompts:
            if len(prompt) and not 0 <= min(prompt) <= max(prompt) < self.num_embeddings:
                raise ConfigError(
                    f"Token ids {min(prompt)} to {max(prompt)} were given; "
                    f"the model has 0 to {self.num_embeddings - 1}."
                )


def _execution_device(module: nn.Module) -> torch.device:
    """Where a module computes. Offloaded weights are meta tensors; accelerate's hook then knows the device."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hook: Any = module._hf_hook
    return torch.device(hook.execution_device)


def _too_long(length: int, max_positions: int) -> str:
    return (
        f"A row of {length} tokens does not fit the model's {max_positions} positions. "
        "Use a shorter prompt, max_new_tokens or draft length."
    )


def _tapped_layers(layers: Sequence[nn.Module], indices: Sequence[int]) -> list[nn.Module]:
    for index in indices:
        if not 0 <= index < len(layers):
            raise ConfigError(f"tap_layers has {index}; the model's layers are 0 to {len(layers) - 1}.")
    return [layers[index] for index in indices]


@contextmanager
def _inputs_of(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect what enters these layers during the block, in the order of the layers given. No hook outlives it."""
    inputs: dict[int, Tensor] = {}
    taps: list[Tensor] = []

    def catcher(slot: int) -> Any:
        def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[slot] = args[0] if args else kwargs["hidden_states"]

        return catch

    handles = [layer.register_forward_pre_hook(catcher(slot), with_kwargs=True) for slot, layer in enumerate(layers)]
    try:
        yield taps
        taps.extend(inputs[slot] for slot in range(len(layers)))
    finally:
        for handle in handles:
            handle.remove()
