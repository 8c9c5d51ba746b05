"""The first tokens of a vocabulary alone: how cost grows with it is measured on one model, cut to several sizes."""

from __future__ import annotations

from torch import Tensor, nn

from dropmatch.core.interfaces import LMHead
from dropmatch.errors import ConfigError
from dropmatch.hf.fast_linears import made_like
from dropmatch.hf.head import HFHead
from dropmatch.hf.model import HFModel


def rows_of(head: LMHead) -> Tensor:
    """The rows that a smaller vocabulary would be cut from. Raises ConfigError where the head shows none."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise ConfigError(
            "A smaller vocabulary needs the LM head's rows, and this one shows none (quantised or offloaded). Load "
            "the models in bfloat16 or float32 with --draft-weights own, or leave this axis out: --vocabularies none."
        )
    return weight


class TrimmedHead(HFHead):
    """The LM head of a model for its first vocab_size tokens. The weights are the model's own memory."""

    def __init__(self, model: HFModel, vocab_size: int) -> None:
        """Raises ConfigError where the head shows no rows, or has fewer of them."""
        super().__init__(model.model)
        weight = rows_of(self)
        if not 1 <= vocab_size <= self.vocab_size:
            raise ConfigError(f"A vocabulary of {vocab_size} was asked for; the model has {self.vocab_size} tokens.")
        linear = nn.Linear(weight.shape[1], vocab_size, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight[:vocab_size], requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias[:vocab_size], requires_grad=False)
        self._module = made_like(self._module, linear)
        self.weight = weight[:vocab_size]
        self.bias = None if self.bias is None else self.bias[:vocab_size]
        self.vocab_size = vocab_size


def trimmed(model: HFModel, vocab_size: int) -> HFModel:
    """The same model with its vocabulary cut to the first tokens. It reads all of them, and gives these alone."""
    cut = HFModel(model.model, probe=False)
    cut.head, cut.vocab_size = TrimmedHead(model, vocab_size), vocab_size
    return cut
