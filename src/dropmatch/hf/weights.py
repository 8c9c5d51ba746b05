"""How many bytes of weights one narrow forward reads: what no implementation can do without."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor, nn

from dropmatch.hf.int4 import Int4Linear
from dropmatch.hf.int8 import Int8Linear
from dropmatch.hf.model import HFModel
from dropmatch.hf.packed import PackedLinear


def body_bytes(model: HFModel) -> int:
    """Bytes of all weights but the embeddings, of which a few rows are read, and the LM head. Counts every expert of a
    mixture."""
    head = model.model.get_output_embeddings()
    modules = (m for m in model.model.modules() if m is not head and not isinstance(m, nn.Embedding))
    return sum(map(_bytes, modules))


def head_bytes(model: HFModel) -> int:
    """Bytes of the LM head, cut to the vocabulary that the model gives."""
    module = model.model.get_output_embeddings()
    return _bytes(module) * model.vocab_size // int(module.out_features)


def _bytes(module: nn.Module) -> int:
    """Of a module's own weights, children left out. Of replaced layers, what they multiply with."""
    if isinstance(module, (PackedLinear, Int4Linear, Int8Linear)):
        return _sum(chain(module.buffers(recurse=False), [] if module.bias is None else [module.bias]))
    return _sum(module.parameters(recurse=False))


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
