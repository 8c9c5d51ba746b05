"""Drafts trees with an EAGLE-3 head: a stable cache of pairs made of target states, and a throw-away part per round.

Tokens c_0 .. c_{n-1} of a row are in the target's cache and gave it the fused states G_0 .. G_{n-1}; c_n is the root.
The head's cache holds the pairs (c_{j+1}, G_j), j < n. A drafted token goes in with its parent's output as feature,
behind the pairs; after the verdict all of that is dropped and the kept tokens come back with the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropmatch.core.acceptance import HeadMatch, MajorityMatch, RejectionSampling, TargetMatch
from dropmatch.core.interfaces import DraftTree, ModelOutput, Verdict
from dropmatch.core.sequence import Row
from dropmatch.core.verification import RowSampling
from dropmatch.eagle3.model import Eagle3Head
from dropmatch.eagle3.tree import best_tokens, first_best, keep_best
from dropmatch.errors import ConfigError
from dropmatch.hf.cache import RaggedCache
from dropmatch.hf.masks import node_positions, visible_keys

TREE_TOKENS = 60
"""Nodes of a tree, the root included, where nobody says otherwise: the official default."""
TREE_TOP_K = 10
"""Children tried per node and nodes expanded per level, likewise."""

MOST_TREE_TOKENS = 4096
"""Larger trees are refused: far beyond any use, and candidates take memory with the square of a level's width."""

_BLIND_RULES = (TargetMatch, HeadMatch, MajorityMatch, RejectionSampling)
"""Rules that never look at the distribution of drafts chosen by rank, which costs a vocabulary per node."""


class Eagle3Drafter:
    """Trees from an EAGLE-3 head. The target must be wrapped with the head's taps (HFModel(tap_layers=...)).

    tree_tokens: most nodes of a tree, the root included, 2 to 4,096. top_k: children tried per node, and nodes expanded
    per level; 1 drafts chains. A tree's depth is the request's draft length: the official code's --depth plus one.
    vocab_size: the target's. Tokens are chosen by rank at temperature 1, whatever the request's own temperature.
    """

    name = "eagle3"

    def __init__(
        self, head: Eagle3Head, vocab_size: int, *, tree_tokens: int = TREE_TOKENS, top_k: int = TREE_TOP_K
    ) -> None:
        for name, value, least in (("tree_tokens", tree_tokens, 2), ("top_k", top_k, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} is not allowed. Give a whole number of at least {least}.")
        if tree_tokens > MOST_TREE_TOKENS:
            raise ConfigError(f"tree_tokens={tree_tokens} is not allowed. Give at most {MOST_TREE_TOKENS}.")
        self.head = head
        self.vocab_size = vocab_size
        self.tree_tokens = tree_tokens
        self.top_k = top_k
        self._num_layers = head.settings.num_layers
        self._cache = RaggedCache(self._num_layers)
        self._last: Tensor | None = None  # [B, H] outputs at each row's last pair; what the first level grows from
        self._tree: DraftTree | None = None

    @property
    def pairs(self) -> list[int]:
        """Pairs in the stable cache, by row: as many as the target has cached tokens."""
        return list(self._cache.lengths)

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        taps = self._taps(output)
        lengths = [len(row.ids) - 1 for row in rows]
        device, width = taps.device, max(lengths)
        fresh = RaggedCache(self._num_layers, num_rows=len(rows))
        last = torch.zeros(len(rows), self.head.settings.hidden_size, dtype=self.head.dtype, device=device)
        if width:
            padded = [[*row.ids[1:], *[0] * (width + 1 - len(row.ids))] for row in rows]
            out = self._run_pairs(fresh, torch.tensor(padded, device=device), taps[:, :width])
            at = torch.tensor(lengths, device=device)
            last = out[torch.arange(len(rows), device=device), at.clamp(min=1) - 1]
        fresh.commit(lengths)
        self._last = last if self._last is None else torch.cat([self._last, last])
        self._cache.append(fresh)

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        assert self._last is not None
        device = self._last.device
        # a row of one token has no pair yet, so there is nothing to draft from
        limits = [limit if pairs else 0 for limit, pairs in zip(max_new, self._cache.lengths, strict=True)]
        roots = torch.tensor([row.ids[-1] for row in rows], device=device)
        stable = self.pairs
        pool = self._grow(rows, roots, limits)
        self._cache.truncate(stable)
        self._tree = self._plant(rows, roots, pool)
        return self._tree

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        assert self._tree is not None
        taps, path = self._taps(output), verdict.path
        B, P = path.shape
        row = torch.arange(B, device=path.device)
        tokens = torch.zeros(B, P, dtype=torch.int64, device=path.device)
        tokens[:, : P - 1] = self._tree.tokens.gather(-1, path[:, 1:])
        tokens[row, verdict.num_accepted] = verdict.next_token
        out = self._run_pairs(self._cache, tokens, taps[row[:, None], path])
        self._cache.commit(verdict.num_kept)
        self._last = out[row, verdict.num_accepted]
        self._tree = None

    def filter(self, keep: Sequence[int]) -> None:
        self._cache.filter(keep)
        if self._last is not None:
            self._last = self._last[torch.tensor(list(keep), dtype=torch.int64, device=self._last.device)]

    def _taps(self, output: ModelOutput) -> Tensor:
        if output.aux is None:
            raise ConfigError(
                f"The target gives no hidden states of inner layers. Wrap it as HFModel(model, tap_layers="
                f"{list(self.head.settings.tap_layers or ())}), or let dropmatch.load do it."
            )
        return output.aux

    def _run_pairs(self, cache: RaggedCache, tokens: Tensor, taps: Tensor) -> Tensor:
        """Outputs over pairs behind each row's cached ones, not counted yet. tokens: [B, N]; taps: [B, N, A]."""
        N, device = tokens.shape[1], tokens.device
        positions = node_positions(cache.lengths, None, N, device)
        mask = visible_keys(cache.lengths, None, N, None, device)
        return self._run(cache, tokens, self.head.fuse(taps), positions, mask)

    def _run(self, cache: RaggedCache, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        cache.begin(tokens.shape[1])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.layers[layer].update(k, v)
            return torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
            )

        out: Tensor = self.head(tokens, features, positions, attend)
        return out

    def _grow(self, rows: Sequence[Row], roots: Tensor, limits: Sequence[int]) -> _Pool:
        """Level by level: expand the k best candidates of the last level, keep all their children as candidates."""
        assert self._last is not None
        B, device = len(rows), roots.device
        # a candidate behind tree_tokens - 1 better ones of its level is never kept, nor is what grows from it
        k = min(self.top_k, self.head.settings.draft_vocab_size, self.tree_tokens - 1)
        limit = torch.tensor(limits, device=device)
        stable = torch.tensor(self._cache.lengths, device=device)
        processing = _Processing(rows, device, self.head.target_ids, self.vocab_size)
        log_probs = self._log_probs(self._last[:, None], processing, [[] for _ in rows])  # [B, 1, Vd]
        pool = _Pool(B, log_probs, k)
        feature = self.head.next_feature(self._last)[:, None].expand(B, k, -1)
        scores, drafted = best_tokens(log_probs[:, 0], k)
        frontier = pool.add(drafted, torch.full_like(drafted, -1), self._closed(scores, limit, 1))
        seen = torch.eye(k, dtype=torch.bool, device=device).expand(B, k, k)  # drafted tokens that a node attends to
        for level in range(1, max(limits)):
            tokens = self.head.target_ids[pool.tokens.gather(1, frontier)]
            positions = (stable + level - 1)[:, None].expand(B, k)
            mask = _growth_mask(stable, seen, max(self._cache.lengths) + k)
            out = self._run(self._cache, tokens, feature, positions, mask)  # [B, k, H]
            self._cache.commit([k] * B)
            log_probs = self._log_probs(out, processing, processing.paths(pool, frontier))
            gains, drafted = best_tokens(log_probs, k)  # [B, k, k]
            above = pool.scores.gather(1, frontier)[..., None]
            scores = self._closed((above + gains).flatten(1), limit, level + 1)
            parents = frontier[..., None].expand(B, k, k).flatten(1)
            first = pool.size
            pool.expand(frontier, log_probs)
            children = pool.add(drafted.flatten(1), parents, scores)
            if level + 1 < max(limits):
                _, best = first_best(scores, k)
                parent = best // k  # place in the old frontier
                frontier = children.gather(1, best)
                feature = self.head.next_feature(out).gather(1, parent[..., None].expand(B, k, out.shape[-1]))
                inherited = seen.gather(1, parent[..., None].expand(B, k, seen.shape[-1]))
                seen = torch.cat([inherited, torch.eye(k, dtype=torch.bool, device=device).expand(B, k, k)], dim=-1)
            assert first + k * k == pool.size
        return pool

    def _closed(self, scores: Tensor, limit: Tensor, level: int) -> Tensor:
        """Scores [B, M], -inf in rows that may not draft so deep."""
        return scores.masked_fill((limit < level)[:, None], float("-inf"))

    def _log_probs(self, out: Tensor, processing: _Processing, paths: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities over the draft vocabulary behind outputs [B, N, H]. Returns [B, N, Vd] float32."""
        logits = self.head.logits(out).float()
        return processing(logits, paths).log_softmax(-1)

    def _plant(self, rows: Sequence[Row], roots: Tensor, pool: _Pool) -> DraftTree:
        """The best candidates as a DraftTree."""
        chosen, parents, is_real = keep_best(pool.scores, pool.parents, self.tree_tokens - 1)
        B, _ = chosen.shape
        drafted = self.head.target_ids[pool.tokens.gather(1, chosen)]
        tokens = torch.cat([roots[:, None], torch.where(is_real, drafted, roots[:, None])], dim=1)
        child_logits = None
        if not all(isinstance(row.rule, _BLIND_RULES) for row in rows):
            child_logits = pool.child_logits(chosen, self.head.target_ids, self.vocab_size)
        if self.top_k == 1:
            return DraftTree.chain(tokens, is_real.sum(-1) + 1, child_logits)
        root = torch.full((B, 1), -1, device=roots.device)
        valid = torch.cat([torch.ones_like(root, dtype=torch.bool), is_real], dim=1)
        return DraftTree.tree(tokens, torch.cat([root, parents], dim=1), valid, child_logits)


class _Pool:
    """All candidates of a round in the order in which they came up, with what was computed for the expanded ones.

    tokens [B, M]: draft ids; parents [B, M]: indices into the pool, -1 for the root; scores [B, M]."""

    def __init__(self, B: int, root_log_probs: Tensor, k: int) -> None:
        self.k = k
        device = root_log_probs.device
        self.tokens = torch.zeros(B, 0, dtype=torch.int64, device=device)
        self.parents = self.tokens
        self.scores = torch.zeros(B, 0, device=device)
        self._log_probs = [root_log_probs]  # [B, 1, Vd], then [B, k, Vd] for each level that was expanded
        self._expanded: list[Tensor] = []  # [B, k] pool indices for each of those levels

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def add(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> Tensor:
        """Append candidates [B, m]. Returns their indices [B, m]."""
        first = self.size
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.scores = torch.cat([self.scores, scores], dim=1)
        return torch.arange(first, self.size, device=tokens.device).expand(tokens.shape)

    def expand(self, nodes: Tensor, log_probs: Tensor) -> None:
        """Record what is behind nodes [B, k]: [B, k, Vd]."""
        self._expanded.append(nodes)
        self._log_probs.append(log_probs)

    def child_logits(self, chosen: Tensor, target_ids: Tensor, V: int) -> Tensor:
        """Distribution over the children of the root and of the chosen candidates, [B, 1 + n, V]; -inf for ids outside
        the draft vocabulary. Nodes that were never expanded have no children, and get zeros."""
        B, n = chosen.shape
        known = torch.cat(self._log_probs, dim=1)  # [B, E, Vd], the root first
        place = torch.zeros(B, self.size, dtype=torch.int64, device=chosen.device)  # 0: not expanded
        if self._expanded:
            expanded = torch.cat(self._expanded, dim=1)
            number = torch.arange(1, expanded.shape[1] + 1, device=chosen.device)
            place.scatter_(1, expanded, number.expand_as(expanded))
        at = torch.cat([torch.zeros(B, 1, dtype=torch.int64, device=chosen.device), place.gather(1, chosen)], dim=1)
        logits = known.new_full((B, n + 1, V), float("-inf"))
        logits[:, :, target_ids] = known.gather(1, at[..., None].expand(B, n + 1, known.shape[-1]))
        is_leaf = at == 0
        is_leaf[:, 0] = False
        return logits.masked_fill_(is_leaf[..., None], 0.0)


class _Processing:
    """The requests' own logits processing, on logits of the draft vocabulary. Does nothing where no request has any."""

    def __init__(self, rows: Sequence[Row], device: torch.device, target_ids: Tensor, V: int) -> None:
        self._sampling = RowSampling(rows, device)
        self._target_ids = target_ids
        self._V = V

    def paths(self, pool: _Pool, nodes: Tensor) -> list[list[int]]:
        """Target ids from below the root to each of nodes [B, k], as B * k lists. Empty where nobody asks."""
        if not self._sampling.any_processed:
            return []
        tokens, parents = self._target_ids[pool.tokens].tolist(), pool.parents.tolist()
        paths = []
        for b, row in enumerate(nodes.tolist()):
            for node in row:
                path: list[int] = []
                while node >= 0:
                    path.insert(0, tokens[b][node])
                    node = parents[b][node]
                paths.append(path)
        return paths

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """logits: [B, N, Vd]; paths: B * N lists. Returns [B, N, Vd]."""
        if not self._sampling.any_processed:
            return logits
        B, N, _ = logits.shape
        full = logits.new_full((B * N, self._V), float("-inf"))
        full[:, self._target_ids] = logits.flatten(0, 1)
        row = [b for b in range(B) for _ in range(N)]
        return self._sampling.process(full, row, paths)[:, self._target_ids].view_as(logits)


def _growth_mask(stable: Tensor, seen: Tensor, total: int) -> Tensor:
    """What nodes of a growing tree attend to: the stable pairs, their ancestors and themselves.

    stable: [B] pairs; seen: [B, k, M] among all nodes run so far, which stand in columns stable + 0 .. stable + M - 1;
    total: columns. Returns [B, 1, k, total] bool.
    """
    B, k, M = seen.shape
    column = torch.arange(total, device=seen.device)
    mask = (column < stable[:, None])[:, None].repeat(1, k, 1)  # [B, k, total]
    at = stable[:, None] + torch.arange(M, device=seen.device)  # [B, M]
    return mask.scatter_(2, at[:, None].expand(B, k, M), seen)[:, None]
