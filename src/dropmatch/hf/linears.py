"""Linear layers of a model replaced in place by modules that multiply otherwise."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_linears(model: nn.Module, fits: Callable[[nn.Module], bool], make: Callable[[nn.Linear], nn.Module]) -> int:
    """Put make(layer) in the place of every linear layer that fits. Returns how many."""
    fitting = [name for name, module in model.named_modules() if fits(module)]
    for name in fitting:
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(parent), child, make(linear))
    return len(fitting)
