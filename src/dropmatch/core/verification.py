"""All that a rule may look at when it judges a draft tree, computed once and only where it is asked for.

Target logits, plain tokens and sampling noise live at every node; the dropout heads are asked at the parents of the
drafted tokens that a rule is still undecided about, and what they say is kept for the next rule of the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropmatch.core.head import HeadEnsemble, MCDropoutHead, merge, point_mass_divergence
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.sequence import Row
from dropmatch.ops.divergence import log_probs
from dropmatch.ops.random import Purpose, gumbel
from dropmatch.ops.sampling import most_likely, restrict


@dataclass(slots=True)
class NodeEnsemble:
    """What the heads say about each drafted token, stored at the token's own node. Filled only where asked.

    tokens: [B, N, K] the heads' tokens at the node's parent; majority, votes: [B, N]; radius, js_draft: [B, N] nats;
    centroid_prob: [B, N] probability of the drafted token under the centroid (NaN unless needed).
    """

    tokens: Tensor
    majority: Tensor
    votes: Tensor
    radius: Tensor
    js_draft: Tensor
    centroid_prob: Tensor
    asked: Tensor


class RowSampling:
    """Sampling settings of a batch as tensors, and the noise that all models of a round share.

    At temperature 0 a row's noise is zero, so that one argmax serves greedy and sampled rows alike.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self.any_sampled = any(row.params.temperature > 0 for row in rows)
        self.any_warped = any(row.params.needs_warping for row in rows)
        self.any_processed = any(row.needs_processing for row in rows)
        self.is_sampled = torch.tensor([row.params.temperature > 0 for row in rows], device=device)
        # rows whose tokens are the argmax of the head's own logits
        bare = [not (row.params.temperature > 0 or row.needs_processing) for row in rows]
        self.is_bare = torch.tensor(bare, device=device)
        self.seeds = torch.tensor([[row.seed, row.stream] for row in rows], dtype=torch.int64, device=device)
        if self.any_sampled:
            params = [row.params for row in rows]
            self.temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device)
            self.top_k = torch.tensor([p.top_k if p.temperature > 0 else 0 for p in params], device=device)
            self.top_p = torch.tensor([p.top_p if p.temperature > 0 else 1.0 for p in params], device=device)
            self.min_p = torch.tensor([p.min_p if p.temperature > 0 else 0.0 for p in params], device=device)

    def keys(self, row: Tensor, position: Tensor) -> Tensor:
        """[M, 3] random keys of (row, position of the predicted token)."""
        return torch.cat([self.seeds[row], position[:, None]], dim=-1)

    def warp(self, logits: Tensor, row: Tensor) -> Tensor:
        """Temperature, top-k, top-p, min-p. logits: [M, V] or [M, K, V]; row: [M]. Greedy rows are left as they are."""
        if not self.any_sampled:
            return logits
        shape = logits.shape
        row = row[:, None].expand(shape[:-1]).reshape(-1) if logits.dim() == 3 else row
        logits = logits.reshape(-1, shape[-1]).float() / self.temperature[row][:, None]
        if self.any_warped:
            logits = restrict(logits, self.top_k[row], self.top_p[row], self.min_p[row])
        return logits.reshape(shape)

    def noise(self, row: Tensor, position: Tensor, V: int, purpose: Purpose, num_paths: int = 1) -> Tensor | None:
        """Gumbel noise [M, num_paths, V], zero in greedy rows; None if every row is greedy."""
        if not self.any_sampled:
            return None
        noise = torch.zeros(len(row), num_paths, V, device=self.device)
        sampled = self.is_sampled[row]
        noise[sampled] = gumbel(self.keys(row[sampled], position[sampled]), V, purpose, num_paths)
        return noise

    def choose(self, logits: Tensor, row: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
        """Argmax of greedy rows, a draw of sampled ones. logits: [M, V] processed. Returns [M]."""
        noise = self.noise(row, position, logits.shape[-1], purpose)
        if noise is None:
            return most_likely(logits)
        return most_likely(self.warp(logits, row) + noise[:, 0])

    def process(self, logits: Tensor, row: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Penalties, masks and processors of each row. logits: [M, V] or [M, K, V], the m-th following the ids of
        row[m] and then paths[m]."""
        if not self.any_processed:
            return logits
        # at least float32, as transformers has it: in bfloat16 a small penalty would be rounded away
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for m, (b, path) in enumerate(zip(row, paths, strict=True)):
            if self.rows[b].needs_processing:
                block = logits[m] if logits.dim() == 3 else logits[m : m + 1]
                block.copy_(self.rows[b].process(block.clone(), path))
        return logits


class Verification:
    """One round's evidence: tree, target logits, lazily the dropout heads.

    tree: the drafts. hidden: [B, N, d]; target_logits: [B, N, V] of the undropped head, raw. with_js: whether any rule
    of the round needs divergences. keep_centroid: whether the drafted token's centroid probability is needed.
    """

    def __init__(
        self,
        tree: DraftTree,
        hidden: Tensor,
        target_logits: Tensor,
        sampling: RowSampling,
        head: MCDropoutHead,
        *,
        with_js: bool,
        with_centroid_prob: bool = False,
    ) -> None:
        B, N = tree.tokens.shape
        self.tree = tree
        self.hidden = hidden
        self.sampling = sampling
        self.head = head
        self._with_js = with_js
        self._with_centroid_prob = with_centroid_prob
        device = hidden.device
        self._row = torch.arange(B, device=device).repeat_interleave(N)
        roots = torch.tensor([len(row.ids) - 1 for row in sampling.rows], device=device)
        self.positions = roots[:, None] + tree.depth + 1  # [B, N], of the token that each node predicts
        self._roots = roots
        self._paths = self._prefixes() if sampling.any_processed else None
        flat = target_logits.reshape(B * N, -1)
        self.target_logits = self._process(flat, torch.arange(B * N, device=device)).view(B, N, -1)
        self.plain_token = sampling.choose(
            self.target_logits.reshape(B * N, -1), self._row, self.positions.reshape(-1), Purpose.GUMBEL
        ).view(B, N)
        has_distribution = tree.child_logits is not None
        self._can_shortlist = [
            head.can_shortlist and row.can_shortlist(has_distribution=has_distribution) for row in sampling.rows
        ]
        self.parent = tree.parents.clamp(min=0)
        self.is_exact = tree.tokens == self.plain_token.gather(-1, self.parent)  # [B, N], of each drafted token
        self._ensemble: NodeEnsemble | None = None

    def _prefixes(self) -> list[list[int]]:
        """Tokens from below the root to each node, for logits processors. [B * N] lists."""
        tokens, ancestors = self.tree.tokens.tolist(), self.tree.ancestors.tolist()
        return [
            [t for m, (t, on_path) in enumerate(zip(tokens[b], path, strict=True)) if on_path and m > 0]
            for b, paths in enumerate(ancestors)
            for path in paths
        ]

    def _process(self, logits: Tensor, flat: Tensor) -> Tensor:
        if self._paths is None:
            return logits
        index = flat.tolist()
        N = self.tree.tokens.shape[1]
        return self.sampling.process(logits, [i // N for i in index], [self._paths[i] for i in index])

    def places(self, ask: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and nodes of what is asked. ask: [B, N] bool. Returns two [M]."""
        b, n = ask.nonzero(as_tuple=True)
        return b, n

    def target_probs(self, ask: Tensor) -> tuple[Tensor, Tensor]:
        """The target's undropped probability (temperature 1, after processing) of each drafted token and of the best
        token at its parent. ask: [B, N] bool. Returns two [B, N] float32, NaN where not asked."""
        prob = torch.full(ask.shape, float("nan"), device=ask.device)
        best = prob.clone()
        b, n = ask.nonzero(as_tuple=True)
        prob[b, n], best[b, n] = self.target_probs_at(b, n)
        return prob, best

    def target_probs_at(self, b: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """`target_probs` at the drafted tokens (b, n) [M] alone. Returns two [M]."""
        logits = self.target_logits[b, self.parent[b, n]].float()
        normalizer = logits.logsumexp(-1)
        prob = (logits.gather(-1, self.tree.tokens[b, n][:, None])[:, 0] - normalizer).exp()
        return prob, (logits.amax(-1) - normalizer).exp()

    def draft_log_probs(self, b: Tensor, n: Tensor) -> Tensor:
        """The drafter's log-probabilities (temperature 1) over the children of nodes (b, n). Returns [M, V]."""
        assert self.tree.child_logits is not None
        return log_probs(self.tree.child_logits[b, n])

    def ensemble(self, ask: Tensor) -> NodeEnsemble:
        """Ask the dropout heads about drafted tokens. ask: [B, N] bool over the tokens' own nodes (never the root).

        Siblings share their parent's heads, and nothing is asked twice in a round.
        """
        ensemble = self._ensemble or self._new_ensemble()
        self._ensemble = ensemble
        N = ask.shape[1]
        b, n = (ask & ~ensemble.asked).nonzero(as_tuple=True)
        if len(b) == 0:
            return ensemble
        parents, child = torch.unique(b * N + self.parent[b, n], return_inverse=True)
        row, node = parents // N, parents % N
        has_distribution = self.tree.child_logits is not None
        heads = self._ask_heads(row, node, parents)
        tokens = self.tree.tokens[b, n]
        ensemble.tokens[b, n] = heads.tokens[child]
        ensemble.majority[b, n] = heads.majority[child]
        ensemble.votes[b, n] = (heads.tokens[child] == tokens[:, None]).sum(-1)
        if heads.radius is not None:
            ensemble.radius[b, n] = heads.radius[child]
        if heads.centroid_logits is not None:
            centroid = heads.centroid_logits[child]
            log_prob = centroid.gather(-1, tokens[:, None])[:, 0] - centroid.logsumexp(-1)
            ensemble.centroid_prob[b, n] = log_prob.exp()
            if self._with_js and not has_distribution:
                ensemble.js_draft[b, n] = point_mass_divergence(centroid, tokens)
        if heads.js_draft is not None:
            ensemble.js_draft[b, n] = heads.js_draft[child]
        ensemble.asked[b, n] = True
        return ensemble

    def _ask_heads(self, row: Tensor, node: Tensor, flat: Tensor) -> HeadEnsemble:
        """The heads' answers at nodes (row, node) [M]. Each row is asked in full or about a shortlist by its own
        settings alone, so that it does not depend on its batch mates. flat: [M] row * N + node."""
        child_logits = self.tree.child_logits
        has_distribution = child_logits is not None
        keep_centroid = self._with_centroid_prob or (self._with_js and not has_distribution)

        def in_full(row: Tensor, node: Tensor, flat: Tensor) -> HeadEnsemble:
            return self.head(
                self.hidden[row, node],
                self._mask_keys(row, node),
                pick=self._picker(row, node),
                process=None if self._paths is None else lambda logits, index: self._process(logits, flat[index]),
                with_js=self._with_js,
                draft_log_probs=(lambda i: self.draft_log_probs(row[i], node[i])) if has_distribution else None,
                keep_centroid=keep_centroid,
            )

        def about_shortlist(row: Tensor, node: Tensor) -> HeadEnsemble:
            return self.head.ask_shortlist(
                self.hidden[row, node],
                self._mask_keys(row, node),
                self.target_logits[row, node],
                None if child_logits is None or not self._with_js else child_logits[row, node],
                with_js=self._with_js,
            )

        # what the host knows of the whole batch needs no reading back
        if not any(self._can_shortlist):
            return in_full(row, node, flat)
        if all(self._can_shortlist):
            return about_shortlist(row, node)
        listed = torch.tensor(self._can_shortlist, device=row.device)[row]
        if not bool(listed.any()):
            return in_full(row, node, flat)
        short = about_shortlist(row[listed], node[listed])
        if bool(listed.all()):
            return short
        return merge(listed, short, in_full(row[~listed], node[~listed], flat[~listed]))

    def correction_logits(self, node: Tensor, kind: str) -> Tensor:
        """Logits that the token after `node` [B] is taken from, other than the plain target's: "centroid" or
        "head1". Returns [B, V]. ("mode" is the majority token: see `majority_at`.)"""
        row = torch.arange(len(node), device=node.device)
        masks_keys = self._mask_keys(row, node)
        logits = self.head.keyed_logits(self.hidden[row, node], masks_keys)  # [B, K, V]
        logits = self._process(logits, row * self.tree.tokens.shape[1] + node).float()
        return logits.mean(1) if kind == "centroid" else logits[:, 0]

    def centroid_rank(self, b: Tensor, n: Tensor) -> Tensor:
        """How many tokens the heads' centroid puts above the drafted one at (b, n) [M]. Returns [M]. Asks the heads
        anew, since an ensemble keeps no logits."""
        node = self.parent[b, n]
        ranks = []
        for start in range(0, max(1, len(b)), self.head.block):
            some = slice(start, start + self.head.block)
            row, parent = b[some], node[some]
            logits = self.head.keyed_logits(self.hidden[row, parent], self._mask_keys(row, parent))  # [m, K, V]
            centroid = self._process(logits, row * self.tree.tokens.shape[1] + parent).float().mean(1)
            ranks.append((centroid > centroid.gather(-1, self.tree.tokens[row, n[some]][:, None])).sum(-1))
        return torch.cat(ranks)

    def plain_at(self, node: Tensor) -> Tensor:
        """The undropped target's own token behind `node` [B]. Returns [B]."""
        return self.plain_token.gather(-1, node[:, None])[:, 0]

    def choose_at(self, logits: Tensor, node: Tensor) -> Tensor:
        """A token from logits [B, V] at `node` [B], with the noise of the position. Returns [B]."""
        row = torch.arange(len(node), device=node.device)
        return self.sampling.choose(logits, row, self.positions[row, node], Purpose.GUMBEL)

    def majority_at(self, node: Tensor) -> Tensor:
        """The majority token of the heads at `node` [B]. Returns [B]."""
        row = torch.arange(len(node), device=node.device)
        flat = row * self.tree.tokens.shape[1] + node
        heads = self.head(
            self.hidden[row, node],
            self._mask_keys(row, node),
            pick=self._picker(row, node),
            process=lambda logits, index: self._process(logits, flat[index]),
        )
        return heads.majority

    def _mask_keys(self, row: Tensor, node: Tensor) -> Tensor:
        sharing = self.head.config.mask_sharing
        if sharing == "position":
            position = self.positions[row, node]
        elif sharing == "round":
            position = self._roots[row]
        else:
            position = torch.zeros_like(row)
        return self.sampling.keys(row, position)

    def _picker(self, row: Tensor, node: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        sampling, K = self.sampling, self.head.config.num_paths
        is_shared = self.head.config.noise == "shared"

        def pick(logits: Tensor, index: Tensor) -> Tensor:
            rows, positions = row[index], self.positions[row[index], node[index]]
            V = logits.shape[-1]
            if is_shared:
                noise = sampling.noise(rows, positions, V, Purpose.GUMBEL)
            else:
                # path 0 of the purpose belongs to the plain token, so the paths take the ones behind it
                noise = sampling.noise(rows, positions, V, Purpose.GUMBEL, K + 1)
                noise = None if noise is None else noise[:, 1:]
            if noise is None:
                return most_likely(logits)
            return most_likely(sampling.warp(logits, rows) + noise)

        return pick

    def _new_ensemble(self) -> NodeEnsemble:
        B, N = self.tree.tokens.shape
        device = self.hidden.device

        def nan() -> Tensor:
            return torch.full((B, N), float("nan"), device=device)

        return NodeEnsemble(
            tokens=torch.full((B, N, self.head.config.num_paths), -1, device=device),
            majority=torch.full((B, N), -1, device=device),
            votes=torch.zeros(B, N, dtype=torch.int64, device=device),
            radius=nan(),
            js_draft=nan(),
            centroid_prob=nan(),
            asked=torch.zeros(B, N, dtype=torch.bool, device=device),
        )

    @property
    def seen(self) -> NodeEnsemble | None:
        """What the heads were asked so far in this round, for statistics and tie-breaks."""
        return self._ensemble
