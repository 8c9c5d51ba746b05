"""One dropout head decoding alone, as if it were the model (Table 1 and Figure 3 of the paper).

Decoding stays speculative and loses nothing with regard to that head: a drafted token is kept if it is the head's own
argmax, and the next token is the head's own. The masks are those that the head has under any DropMatch rule of the
same seed, stream and position. Rows of many heads and drop probabilities share one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dropmatch.core.acceptance import Need
from dropmatch.core.interfaces import LMHead
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import Verification
from dropmatch.errors import ConfigError
from dropmatch.ops.random import Purpose, random_bits

_BLOCK = 128  # positions whose logits are held at once


@dataclass(frozen=True, slots=True)
class Head:
    """One dropout head. path: its index from 0; p_drop: in [0, 1)."""

    path: int
    p_drop: float

    @property
    def name(self) -> str:
        """As in tables, counted from 1: "head 2 p=0.3"."""
        return f"head {self.path + 1} p={self.p_drop:g}"


@dataclass(slots=True, eq=False)
class HeadAlone:
    """The acceptance rule of rows that one head decodes. heads: by the engine's request number, filled as requests are
    added. Greedy rows without logits processors only."""

    heads: dict[int, Head] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def couples_draft(self) -> bool:
        return True

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        b, n = ask.nonzero(as_tuple=True)
        codes = torch.zeros_like(ask, dtype=torch.int8)
        if len(b):
            N = ask.shape[1]
            flat, child = torch.unique(b * N + v.parent[b, n], return_inverse=True)  # siblings share their parent
            own = self._tokens(v, flat // N, flat % N)[child]
            codes[b, n] = (own == v.tree.tokens[b, n]).to(torch.int8) * int(Reason.HEAD)
        return codes

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        token = v.plain_at(node)
        mine = [b for b, row in enumerate(v.sampling.rows) if row.request in self.heads]
        if mine:
            rows = torch.tensor(mine, device=node.device)
            token = token.index_copy(0, rows, self._tokens(v, rows, node[rows]))
        return token

    def _tokens(self, v: Verification, row: Tensor, node: Tensor) -> Tensor:
        """The own token of each row's head at nodes (row, node) [M]. Returns [M]."""
        rows = v.sampling.rows
        for b in set(row.tolist()):
            if rows[b].params.temperature > 0 or rows[b].needs_processing:
                raise ConfigError(
                    "A single head decodes greedily, without logits processors. Use temperature=0 and plain settings."
                )
        heads = [self.heads[rows[b].request] for b in row.tolist()]
        keys = v.sampling.keys(row, v.positions[row, node])
        return head_tokens(v.head.head, v.hidden[row, node], keys, heads)


def head_tokens(head: LMHead, hidden: Tensor, keys: Tensor, heads: list[Head]) -> Tensor:
    """The argmax of one dropout head at each position. hidden: [M, d]; keys: [M, 3]; heads: M of them. Returns [M]."""
    tokens = []
    for start in range(0, len(heads), _BLOCK):
        part = slice(start, start + _BLOCK)
        tokens.append(head(_dropped(hidden[part], keys[part], heads[part])).argmax(-1))
    return torch.cat(tokens)


def _dropped(hidden: Tensor, keys: Tensor, heads: list[Head]) -> Tensor:
    """The LM head's input as each position's own head sees it (Eq. 2). Returns [M, d]."""
    device, M = hidden.device, len(heads)
    path = torch.tensor([head.path for head in heads], device=device)
    p_drop = torch.tensor([head.p_drop for head in heads], dtype=torch.float64, device=device)[:, None]
    bits = random_bits(keys, int(path.max()) + 1, hidden.shape[-1], Purpose.MASK)[torch.arange(M, device=device), path]
    is_kept = bits >= (p_drop * 2**32).round()
    scale = (1.0 / (1.0 - p_drop)).float()
    return hidden * (is_kept * scale).to(hidden.dtype)
