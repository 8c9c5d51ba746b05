"""One round's evidence over a chain, without an engine: what a measurement of heads and rules asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropmatch.config import SamplingParams
from dropmatch.core.acceptance import AcceptanceRule, Need
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.sequence import Row
from dropmatch.core.verification import RowSampling, Verification


def chain_verification(
    ids: Sequence[int],
    hidden: Tensor,
    logits: Tensor,
    draft_logits: Tensor,
    head: MCDropoutHead,
    rule: AcceptanceRule,
) -> Verification:
    """A greedy row whose last q ids were drafted behind the ones before, q + 1 nodes with the root.

    hidden: [1, q, d] and logits: [1, q, V] of the target at the q nodes that have a child; draft_logits: [1, q + 1, V].
    """
    q = hidden.shape[1]
    start = len(ids) - 1 - q
    row = Row(
        request=0,
        ids=list(ids[: start + 1]),
        prompt_length=start + 1,
        params=SamplingParams(),
        rule=rule,
        seed=0,
        stream=0,
        eos_ids=frozenset(),
        draft_length=q,
        max_new_tokens=q + 1,
    )
    chain = torch.tensor([list(ids[start:])], device=hidden.device)  # [1, q + 1]
    tree = DraftTree.chain(chain, torch.tensor([q + 1]), draft_logits)
    # a rule reads parents only; the last node has no child, so its state is padding
    hidden, logits = (torch.cat([part, part[:, -1:]], dim=1) for part in (hidden, logits))
    sampling = RowSampling([row], hidden.device)
    return Verification(tree, hidden, logits, sampling, head, with_js=Need.DIVERGENCE in rule.needs)


def judge_chain(
    ids: Sequence[int],
    hidden: Tensor,
    logits: Tensor,
    draft_logits: Tensor,
    head: MCDropoutHead,
    rule: AcceptanceRule,
) -> Tensor:
    """The rule's codes for all q drafted tokens, asked as the engine asks. Arguments as above. Returns [1, q + 1]."""
    v = chain_verification(ids, hidden, logits, draft_logits, head, rule)
    ask = v.tree.valid.clone()
    ask[:, 0] = False
    return rule.judge(v, ask)
