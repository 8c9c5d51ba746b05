"""The hidden states that a judge learns from: those of mined draft tokens, each read at its place in the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from dropmatch.core.interfaces import CachedModel, DraftTree
from dropmatch.judge.mining import Mined


@torch.inference_mode()
def draft_token_states(model: CachedModel, mined: Mined) -> Tensor:
    """A model's state behind the draft model's token of each label, after the answer up to there.

    One forward for all: the answer is a chain, and each draft token that did not stay in it a leaf beside it.
    model: without rows, and so it is left. Returns [M, d] float32.
    """
    last = max((label.position for label in mined.labels), default=-1)
    if last < 0:
        return torch.zeros(0, 0)
    tokens = [mined.prompt.ids[-1], *mined.response[: last + 1]]  # node i + 1 is the answer's token i
    parents = list(range(-1, len(tokens) - 1))
    nodes = []
    for label in mined.labels:
        if mined.response[label.position] == label.draft_token:
            nodes.append(label.position + 1)
            continue
        nodes.append(len(tokens))
        tokens.append(label.draft_token)
        parents.append(label.position)
    known = [token if token < model.vocab_size else 0 for token in tokens]
    tree = DraftTree.tree(torch.tensor([known], device=model.device), torch.tensor([parents], device=model.device))
    model.add_rows([[token if token < model.vocab_size else 0 for token in mined.prompt.ids[:-1]]])
    try:
        states = model.forward(tree.tokens, tree.ancestors).hidden[0]
        return states[torch.tensor(nodes, device=states.device)].float().cpu()
    finally:
        model.filter([])
