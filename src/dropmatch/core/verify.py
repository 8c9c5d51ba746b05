"""From decisions about single tokens to the path that stays. Knows trees and reasons, but no rule's inner workings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropmatch.config import PathPolicy, TieBreak
from dropmatch.core.acceptance import AcceptanceRule, Need
from dropmatch.core.interfaces import Verdict
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import Verification
from dropmatch.ops.tree import alive_nodes, chain_to, path_to


def judge(v: Verification, rules: Sequence[AcceptanceRule]) -> Tensor:
    """Reason codes [B, N] int8 of all drafted tokens, each row by its own rule. rules: one per row."""
    ask = v.tree.valid.clone()
    ask[:, 0] = False
    distinct = list(dict.fromkeys(rules))
    if len(distinct) == 1:
        return distinct[0].judge(v, ask)
    codes = torch.zeros_like(ask, dtype=torch.int8)
    for rule in distinct:
        mine = torch.tensor([r == rule for r in rules], device=ask.device)[:, None]
        codes += rule.judge(v, ask & mine)
    return codes


def decide(
    v: Verification,
    codes: Tensor,
    rules: Sequence[AcceptanceRule],
    correction: str = "plain",
    *,
    path_policy: PathPolicy = "longest",
    tie_break: TieBreak = "plain",
) -> Verdict:
    """The kept path of each row and the token that follows it.

    codes: [B, N] from `judge`; path_policy and tie_break: see `EngineConfig`. Ties between paths of equal length go,
    from the root down, to the target's own token, then to more head votes, then to the larger probability (the heads'
    centroid's under rules that ask the heads, else the target's), then to the lower node index.
    """
    alive = alive_nodes(codes > 0, v.tree.ancestors) & v.tree.valid
    if v.tree.is_chain:
        node = alive.sum(-1) - 1
    elif path_policy == "longest" and tie_break == "first":
        depth = torch.where(alive, v.tree.depth, -1)
        node = (depth == depth.amax(-1, keepdim=True)).int().argmax(-1)
    else:
        node = _walk(v, alive, rules, to_the_deepest=path_policy == "longest")
    path = chain_to(node, v.tree.tokens.shape[1]) if v.tree.is_chain else path_to(node, v.tree.ancestors)
    row = torch.arange(len(node), device=node.device)
    return Verdict(
        path=path,
        num_accepted=v.tree.depth[row, node],
        next_token=_next_token(v, node, rules, correction),
        reason=codes,
    )


def _next_token(v: Verification, node: Tensor, rules: Sequence[AcceptanceRule], correction: str) -> Tensor:
    distinct = list(dict.fromkeys(rules))
    token = distinct[0].next_token(v, node)
    for rule in distinct[1:]:
        mine = torch.tensor([r == rule for r in rules], device=node.device)
        token = torch.where(mine, rule.next_token(v, node), token)
    if correction == "plain":
        return token
    # only lossy rules may correct with anything but the plain target
    is_lossy = torch.tensor([bool(rule.needs) for rule in rules], device=node.device)
    if not bool(is_lossy.any()):
        return token
    is_mode = correction == "mode"
    other = v.majority_at(node) if is_mode else v.choose_at(v.correction_logits(node, correction), node)
    children = v.tree.children(node)  # all refused, or node were not the deepest
    is_refused = (children & (v.tree.tokens == other[:, None])).any(-1)  # must not come back as the correction
    return torch.where(is_lossy & children.any(-1) & ~is_refused, other, token)


def _walk(v: Verification, alive: Tensor, rules: Sequence[AcceptanceRule], *, to_the_deepest: bool) -> Tensor:
    """The end of the path that takes the best alive child at every node, as `decide` says. alive: [B, N]. Returns [B].

    to_the_deepest: only children that lead to an alive node of greatest depth."""
    B = len(alive)
    depth = v.tree.depth
    reach = torch.where(v.tree.ancestors, torch.where(alive, depth, -1)[:, :, None], -1).amax(1)  # [B, N] per subtree
    prob, _ = v.target_probs(alive & (depth > 0))
    votes = v.seen.votes if v.seen is not None else torch.zeros_like(depth)
    asks_heads = torch.tensor([Need.HEADS in rule.needs for rule in rules], device=alive.device)
    node = torch.zeros(B, dtype=torch.int64, device=alive.device)
    goal = reach[:, 0]
    for _ in range(int(goal.max())):
        candidate = alive & (v.tree.parents == node[:, None])
        if to_the_deepest:
            candidate &= reach == goal[:, None]
        for key in (v.is_exact.float(), votes.float()):
            candidate &= _is_best(key, candidate)
        is_tied = asks_heads & (candidate.sum(-1) > 1)
        if bool(is_tied.any()):  # the centroid costs K rows of the LM head, so only ties pay for it
            centroid = v.correction_logits(node, "centroid").softmax(-1).gather(-1, v.tree.tokens)  # [B, N]
            candidate &= _is_best(torch.where(is_tied[:, None], centroid, prob), candidate)
        else:
            candidate &= _is_best(prob, candidate)
        node = torch.where(candidate.any(-1), candidate.int().argmax(-1), node)
    return node


def _is_best(key: Tensor, candidate: Tensor) -> Tensor:
    """[B, N], whether a candidate has the largest key of its row."""
    score = key.masked_fill(~candidate, -1.0)
    return score == score.amax(-1, keepdim=True)


def emitted_reasons(verdict: Verdict, has_child: Tensor) -> Tensor:
    """Reason codes [B, P] of the tokens that a round emits: the kept path below the root, then the next token.

    has_child: [B] bool; True where the deepest kept node had a drafted child, so that the next token recovers from a
    rejection rather than being a bonus. Entries behind num_accepted are padding.
    """
    B, P = verdict.path.shape
    row = torch.arange(B, device=has_child.device)
    codes = torch.zeros(B, P, dtype=torch.int8, device=has_child.device)
    codes[:, : P - 1] = verdict.reason.gather(-1, verdict.path[:, 1:])
    last = torch.where(has_child, int(Reason.RECOVERED), int(Reason.BONUS)).to(torch.int8)
    codes[row, verdict.num_accepted] = last
    return codes
