"""The multi-sample LM head: Monte Carlo dropout on the head's input, K paths that share one weight.

Only the head's input is dropped; the body of the model and its KV cache are untouched. K x V logits never leave this
module. Knows hidden states and keys, but no tree, cache or tokenizer.
Source: DropMatch (arXiv 2603.03333), Eq. 1-3, 5-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig
from dropmatch.core.head_rows import HeadRows
from dropmatch.core.interfaces import LMHead
from dropmatch.errors import ConfigError
from dropmatch.ops.divergence import js_from_log_probs, js_point_mass, log_probs, log_probs_at
from dropmatch.ops.random import dropout_masks
from dropmatch.ops.sampling import likeliest

Tie = Literal["centroid", "path"]

# most bytes of float32 logits, or of gathered rows of the head, held at once; more positions are done in blocks
_BYTES_CAP = 256 * 2**20


@dataclass(frozen=True, slots=True)
class HeadEnsemble:
    """What the K dropout heads say at M positions.

    tokens: [M, K] each path's token. majority: [M] most frequent token; votes: [M] its count.
    radius: [M] max_i JS(path_i, centroid) in nats (Eq. 6), or None where no divergence was asked for.
    js_heads: [M, K] in nats, js_draft: [M] JS(draft, centroid) in nats, or None likewise.
    centroid_logits: [M, V] float32, the mean of the paths' logits (Eq. 5), or None unless kept.
    """

    tokens: Tensor
    majority: Tensor
    votes: Tensor
    js_heads: Tensor | None
    js_draft: Tensor | None
    centroid_logits: Tensor | None

    @property
    def radius(self) -> Tensor | None:
        return None if self.js_heads is None else self.js_heads.amax(-1)


def majority_vote(tokens: Tensor, centroid_at_tokens: Tensor, tie: Tie = "centroid") -> tuple[Tensor, Tensor]:
    """The plurality winner among K votes and its count (Eq. 7).

    tokens: [M, K]; centroid_at_tokens: [M, K] centroid logit of each path's token. A tie goes to the larger centroid
    logit and then to the lower id, or with tie="path" to the token that the lowest path index names first.
    Returns winner [M], votes [M].
    """
    counts = (tokens[:, :, None] == tokens[:, None, :]).sum(-1)  # [M, K]
    votes = counts.amax(-1)
    tied = counts == votes[:, None]
    if tie == "path":
        first = tied.int().argmax(-1, keepdim=True)
        return tokens.gather(-1, first)[:, 0], votes
    weight = centroid_at_tokens.masked_fill(~tied, float("-inf"))
    best = tied & (weight == weight.amax(-1, keepdim=True))
    return tokens.masked_fill(~best, torch.iinfo(torch.int64).max).amin(-1), votes


class MCDropoutHead:
    """K dropout paths through one LM head.

    Masks are keyed by (seed, stream, position, path), so that a row's result depends neither on its batch mates nor
    on the draft length nor on the number of devices.
    """

    def __init__(self, head: LMHead, config: DropoutConfig, *, tie: Tie = "centroid") -> None:
        if isinstance(config.p_drop, str):
            raise ConfigError(
                f"p_drop={config.p_drop!r} must be settled before the head is built. Call `choose_p_drop` first."
            )
        self.head = head
        self.config = config
        self.tie: Tie = tie
        self.p_drop = float(config.p_drop)
        self.rows_asked = 0
        self.can_shortlist = (
            config.heads == "shortlist"
            and self.p_drop > 0.0  # without dropout only the head's own products give the plain tokens to the last bit
            and config.shortlist_size < head.vocab_size
            and isinstance(getattr(head, "weight", None), Tensor)
        )

    def path_logits(self, hidden: Tensor, masks: Tensor) -> Tensor:
        """Logits of each path (Eq. 2-3). hidden: [M, d]; masks: [M, K, d] True = kept. Returns [M, K, V]."""
        return self.head(self._dropped(hidden, masks))

    @property
    def block(self) -> int:
        """Positions whose path logits are held at once."""
        return max(1, _BYTES_CAP // (4 * self.config.num_paths * self.head.vocab_size))

    def _dropped(self, hidden: Tensor, masks: Tensor) -> Tensor:
        """Each path's input of the head (Eq. 2). hidden: [M, d]; masks: [M, K, d]. Returns [M, K, d]."""
        return hidden[:, None, :] * (masks * (1.0 / (1.0 - self.p_drop))).to(hidden.dtype)

    def keyed_logits(self, hidden: Tensor, keys: Tensor) -> Tensor:
        """Logits of each path under the keyed masks. hidden: [M, d]; keys: [M, 3]. Returns [M, K, V]."""
        return self.path_logits(hidden, dropout_masks(keys, self.config.num_paths, hidden.shape[-1], self.p_drop))

    def __call__(
        self,
        hidden: Tensor,
        keys: Tensor,
        *,
        pick: Callable[[Tensor, Tensor], Tensor],
        process: Callable[[Tensor, Tensor], Tensor] | None = None,
        with_js: bool = False,
        draft_log_probs: Callable[[Tensor], Tensor] | None = None,
        keep_centroid: bool = False,
        masks: Tensor | None = None,
    ) -> HeadEnsemble:
        """Ask all paths at M positions.

        hidden: [M, d]; keys: [M, 3] of (seed, stream, position). pick(logits [m, K, V], index [m]) -> tokens [m, K];
        process changes path logits [m, K, V] as the plain ones were (penalties, masks); draft_log_probs(index [m])
        -> [m, V] gives the drafter's distribution. index says which of the M positions a block holds.
        masks: [M, K, d] instead of the keyed ones.
        """
        M, d = hidden.shape
        K = self.config.num_paths
        self.rows_asked += M
        parts: list[HeadEnsemble] = []
        for start in range(0, M, self.block):
            index = torch.arange(start, min(start + self.block, M), device=hidden.device)
            own = dropout_masks(keys[index], K, d, self.p_drop) if masks is None else masks[index]
            logits = self.path_logits(hidden[index], own)  # [m, K, V]
            if process is not None:
                logits = process(logits, index)
            tokens = pick(logits, index)
            logits = logits.float()
            centroid = logits.mean(1)  # [m, V]
            majority, votes = majority_vote(tokens, centroid.gather(-1, tokens), self.tie)
            js_heads, js_draft = None, None
            if with_js:
                draft = None if draft_log_probs is None else draft_log_probs(index)
                js_heads, js_draft = self._divergences(logits, centroid, draft)
            parts.append(HeadEnsemble(tokens, majority, votes, js_heads, js_draft, centroid if keep_centroid else None))
        return parts[0] if len(parts) == 1 else _concatenate(parts)

    def ask_shortlist(
        self, hidden: Tensor, keys: Tensor, plain: Tensor, draft_logits: Tensor | None, *, with_js: bool
    ) -> HeadEnsemble:
        """Ask all paths about the likeliest tokens only. Greedy rows with unprocessed logits.

        hidden: [M, d]; keys: [M, 3]; plain: [M, V] logits of the undropped head; draft_logits: [M, V] or None.
        What lies behind the shortlist is one more token. Its mass under a path is the plain one times what dropout did
        to the mass of the shortlist's less likely half.
        """
        rows = HeadRows.of(self.head)
        self.rows_asked += len(hidden)
        gathered = self.config.shortlist_size * hidden.shape[-1] * rows.weight.element_size()
        block = max(1, _BYTES_CAP // max(4 * self.head.vocab_size, gathered))
        if len(hidden) <= block:
            return self._ask_listed(rows, hidden, keys, plain, draft_logits, with_js=with_js)
        parts = [
            self._ask_listed(
                rows,
                hidden[start : start + block],
                keys[start : start + block],
                plain[start : start + block],
                None if draft_logits is None else draft_logits[start : start + block],
                with_js=with_js,
            )
            for start in range(0, len(hidden), block)
        ]
        return _concatenate(parts)

    def _ask_listed(
        self,
        rows: HeadRows,
        hidden: Tensor,
        keys: Tensor,
        plain: Tensor,
        draft_logits: Tensor | None,
        *,
        with_js: bool,
    ) -> HeadEnsemble:
        """`ask_shortlist` of a block of rows."""
        plain = plain.float()
        best, ids = likeliest(plain, self.config.shortlist_size)  # [M, S]
        masks = dropout_masks(keys, self.config.num_paths, hidden.shape[-1], self.p_drop)
        paths = rows.project(self._dropped(hidden, masks), ids).float()  # [M, K, S]
        centroid = paths.mean(1)
        is_best = paths == paths.amax(-1, keepdim=True)
        place = ids[:, None].masked_fill(~is_best, self.head.vocab_size).argmin(-1)  # the lowest id of a tie
        tokens = ids.gather(-1, place)  # [M, K]
        votes_at = centroid.gather(-1, place)
        majority, votes = majority_vote(tokens, votes_at, self.tie)
        js_heads, js_draft = None, None
        if with_js:
            behind = _log_rest(plain.logsumexp(-1), best.logsumexp(-1))  # [M]
            half = best.shape[-1] // 2
            likely = best[:, half:].logsumexp(-1)
            # where half of the list is impossible there is nothing to measure, and next to nothing behind the list
            path_rest = behind[:, None] + (paths[:, :, half:].logsumexp(-1) - likely[:, None]).nan_to_num()
            centroid_rest = behind + (centroid[:, half:].logsumexp(-1) - likely).nan_to_num()
            draft = None
            if draft_logits is not None:
                listed = log_probs_at(draft_logits, ids)
                draft = _with_rest(listed, _log_rest(torch.zeros_like(behind), listed.logsumexp(-1)))
            log_c = log_probs(_with_rest(centroid, centroid_rest))
            c = log_c.exp()
            # few logits: less time goes into them than into the calls, so all paths at once
            js_heads = js_from_log_probs(log_probs(_with_rest(paths, path_rest)), log_c[:, None], c[:, None])
            js_heads = js_heads.zero_() if self.p_drop == 0.0 else js_heads
            js_draft = None if draft is None else js_from_log_probs(draft, log_c, c)
        return HeadEnsemble(tokens, majority, votes, js_heads, js_draft, None)

    def _divergences(self, logits: Tensor, centroid: Tensor, draft: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Path by path, and on a CPU row by row too, so that one path's logits stay in cache."""
        if self.p_drop == 0.0:  # all paths are the plain head; rounding must not make a radius of them
            js_heads = torch.zeros(logits.shape[:2], device=logits.device)
        else:
            js_heads = torch.empty(logits.shape[:2], device=logits.device)
        js_draft = None if draft is None else torch.empty(len(logits), device=logits.device)
        step = 1 if logits.device.type == "cpu" else len(logits)
        for m in range(0, len(logits), step):
            rows = slice(m, m + step)
            log_c = log_probs(centroid[rows])
            c = log_c.exp()
            if self.p_drop > 0.0:
                for k in range(logits.shape[1]):
                    js_heads[rows, k] = js_from_log_probs(log_probs(logits[rows, k]), log_c, c)
            if js_draft is not None and draft is not None:
                js_draft[rows] = js_from_log_probs(draft[rows], log_c, c)
        return js_heads, js_draft


def _log_rest(log_total: Tensor, log_part: Tensor) -> Tensor:
    """log(exp(log_total) - exp(log_part)), at least e^-30 of the total, below what float32 can tell from nothing."""
    share = (log_part - log_total).exp().clamp(max=1.0)
    return log_total + (1.0 - share).clamp(min=math.exp(-30.0)).log()


def _with_rest(listed: Tensor, rest: Tensor) -> Tensor:
    """Append the mass behind a shortlist as one more logit. listed: [..., S]; rest: [...]."""
    return torch.cat([listed, rest[..., None]], dim=-1)


def merge(is_first: Tensor, first: HeadEnsemble, second: HeadEnsemble) -> HeadEnsemble:
    """Answers at M positions from two parts. is_first: [M] bool. Centroid logits are kept if the second part has them,
    NaN where the first gives none."""

    def joined(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(len(is_first), *b.shape[1:], dtype=b.dtype, device=b.device)
        out[is_first], out[~is_first] = a, b
        return out

    def optional(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if b is None:
            return None
        return joined(b.new_full((int(is_first.sum()), *b.shape[1:]), float("nan")) if a is None else a, b)

    return HeadEnsemble(
        joined(first.tokens, second.tokens),
        joined(first.majority, second.majority),
        joined(first.votes, second.votes),
        optional(first.js_heads, second.js_heads),
        optional(first.js_draft, second.js_draft),
        optional(first.centroid_logits, second.centroid_logits),
    )


def _concatenate(parts: list[HeadEnsemble]) -> HeadEnsemble:
    def joined(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    tokens, majority, votes = (torch.cat([getattr(part, n) for part in parts]) for n in ("tokens", "majority", "votes"))
    return HeadEnsemble(tokens, majority, votes, joined("js_heads"), joined("js_draft"), joined("centroid_logits"))


def point_mass_divergence(centroid_logits: Tensor, tokens: Tensor) -> Tensor:
    """JS between the point mass on tokens [M] and the centroid [M, V], in nats."""
    normalizer = torch.logsumexp(centroid_logits, dim=-1)
    return js_point_mass(centroid_logits.gather(-1, tokens[:, None])[:, 0] - normalizer)
