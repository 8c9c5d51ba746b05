"""Small targets, drafters and shortcuts for tests of the core. No network, no files.

`ScriptedModel` (scripted.py) hashes the whole prefix, so mistakes of cache, path or position show; `MarkovModel` looks
at the last token only and is vectorised, so that 20,000 rows decode in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import AcceptanceRule, make_rule
from dropmatch.core.engine import Chunk, SpeculativeEngine
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import CachedModel, Drafter, DraftTree, ModelOutput, Verdict
from dropmatch.core.judge import JudgeHead
from dropmatch.core.reasons import Reason
from dropmatch.core.sequence import Row
from dropmatch.core.stats import RequestStats
from dropmatch.core.verification import RowSampling, Verification
from scripted import TableHead

GENTLE = DropoutConfig(p_drop=0.1)
"""Enough dropout that heads differ on the small models of the tests, too little to saturate the radius."""


class MarkovModel:
    """A CachedModel whose next-token logits depend on the last token only: table [V, d] @ weight.T [d, V]."""

    device = torch.device("cpu")

    def __init__(self, table: Tensor, weight: Tensor) -> None:
        self.table = table
        self.head = TableHead(weight)
        self.vocab_size = len(weight)
        self.lengths: list[int] = []

    @classmethod
    def from_probs(cls, probs: Tensor) -> MarkovModel:
        """probs: [V, V], row = last token. Each row is a hidden state of its own, so p_drop > 0 makes little sense."""
        V = len(probs)
        return cls(torch.eye(V), probs.log().T.contiguous())

    @classmethod
    def random(cls, V: int, *, seed: int, scale: float = 1.5) -> MarkovModel:
        generator = torch.Generator().manual_seed(seed)
        return cls.from_probs((torch.randn(V, V, generator=generator) * scale).softmax(-1))

    @property
    def probs(self) -> Tensor:
        """[V, V] float64."""
        return (self.table.double() @ self.head.weight.double().T).softmax(-1)

    def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
        self.lengths += [len(prompt) for prompt in prompts]
        return ModelOutput(torch.zeros(len(prompts), 0, self.table.shape[1]))

    def forward(self, tokens: Tensor, ancestors: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.table[tokens])

    def commit(self, num_kept: Sequence[int], path: Tensor | None = None) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, num_kept, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def filter(self, keep: Sequence[int]) -> None:
        self.lengths = [self.lengths[b] for b in keep]


def judge_head(size: int, *, seed: int = 0, bias: float = 0.0, draft_size: int = 0, levels: int = 26) -> JudgeHead:
    """A random head on states of `size` numbers, of which draft_size are the draft model's."""
    generator = torch.Generator().manual_seed(seed)
    return JudgeHead(
        mean=torch.randn(size, generator=generator) * 0.1,
        scale=torch.rand(size, generator=generator) + 0.5,
        weight=torch.randn(size, generator=generator) / size**0.5,
        bias=bias,
        features="DD-DT" if draft_size else "DT",
        draft_size=draft_size,
        thresholds=tuple(i / (levels - 1) for i in range(levels)),
        name="toy",
    )


class TreeDrafter:
    """Trees of a fixed shape: the r-th child of a node is the r-th best token of a model at the node's prefix.

    model: anything with state(prefix) and head. parents: the shape, -1 first. Nodes deeper than a row's limit are
    padding."""

    name = "test-tree"

    def __init__(self, model: object, parents: Sequence[int], *, with_distribution: bool = True) -> None:
        self.model = model
        self.parents = list(parents)
        self.with_distribution = with_distribution

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        """No state."""

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        B, N = len(rows), len(self.parents)
        tokens = torch.zeros(B, N, dtype=torch.int64)
        valid = torch.zeros(B, N, dtype=torch.bool)
        logits = torch.zeros(B, N, self.model.head.vocab_size)
        for b, row in enumerate(rows):
            paths: list[list[int]] = []
            seen = [0] * N
            for n, parent in enumerate(self.parents):
                if n == 0:
                    tokens[b, 0] = row.ids[-1]
                    paths.append([])
                else:
                    token = int(logits[b, parent].argsort(descending=True, stable=True)[seen[parent]])
                    seen[parent] += 1
                    tokens[b, n] = token
                    paths.append([*paths[parent], token])
                valid[b, n] = len(paths[n]) <= max_new[b]
                here = self.model.head(self.model.state([*row.ids, *paths[n]]))[None]
                logits[b, n] = row.process(here, paths[n])[0]
        parents = torch.tensor(self.parents).expand(B, N)
        return DraftTree.tree(tokens, parents, valid, logits if self.with_distribution else None)

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        """No state."""

    def filter(self, keep: Sequence[int]) -> None:
        """No state."""


class ListDrafter(TreeDrafter):
    """Chains of tokens that the test names: drafts(ids of the row) -> tokens. No distribution."""

    def __init__(self, drafts: object) -> None:
        self.drafts = drafts

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        drafts = [self.drafts(row.ids)[:limit] for row, limit in zip(rows, max_new, strict=True)]
        width = max(len(draft) for draft in drafts)
        tokens = [[row.ids[-1], *draft, *[0] * (width - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        return DraftTree.chain(torch.tensor(tokens), torch.tensor([1 + len(draft) for draft in drafts]))


@dataclass
class Result:
    """All chunks of one request, joined."""

    tokens: list[int] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    finish_reason: str | None = None
    stats: RequestStats | None = None


def collect(chunks: Sequence[Chunk]) -> dict[int, Result]:
    results: dict[int, Result] = {}
    for chunk in chunks:
        result = results.setdefault(chunk.request, Result())
        result.tokens += chunk.tokens
        result.reasons += chunk.reasons
        result.logprobs += chunk.logprobs or ()
        result.text += chunk.text
        result.chunks.append(chunk)
        result.finish_reason = chunk.finish_reason
        result.stats = chunk.stats
    return results


def run(
    engine: SpeculativeEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[Result]:
    """Decode prompts and join what each got. params: one for all, or one each."""
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    requests = [engine.add(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    results = collect(engine.run())
    return [results[request] for request in requests]


def run_one(
    target: CachedModel,
    drafter: Drafter | None,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    rule: str | AcceptanceRule = "dropmatch",
    dropout: DropoutConfig = GENTLE,
    config: EngineConfig | None = None,
    **options: object,
) -> Result:
    engine = SpeculativeEngine(target, drafter, rule=rule, dropout=dropout, config=config, **options)
    return run(engine, [prompt], params)[0]


def make_row(ids: Sequence[int], params: SamplingParams | None = None, *, prompt_length: int | None = None) -> Row:
    params = params or SamplingParams()
    return Row(
        request=0,
        ids=list(ids),
        prompt_length=len(ids) if prompt_length is None else prompt_length,
        params=params,
        rule=make_rule("exact"),
        seed=params.seed or 0,
        stream=params.stream,
        eos_ids=frozenset(params.eos_ids or ()),
        draft_length=5,
        max_new_tokens=params.max_new_tokens,
    )


def verify(
    model: object,
    rows: Sequence[Row],
    tree: DraftTree,
    dropout: DropoutConfig = GENTLE,
    *,
    tie: str = "centroid",
    with_js: bool = True,
    with_centroid_prob: bool = True,
) -> Verification:
    """The Verification of a tree under a model with state(prefix) and head. Nothing is cached."""
    B, N = tree.tokens.shape
    hidden = torch.stack(
        [
            torch.stack(
                [
                    model.state(
                        [*rows[b].ids[:-1], *(int(tree.tokens[b, m]) for m in range(N) if tree.ancestors[b, n, m])]
                    )
                    for n in range(N)
                ]
            )
            for b in range(B)
        ]
    )
    head = MCDropoutHead(model.head, dropout, tie=tie)
    sampling = RowSampling(rows, torch.device("cpu"))
    return Verification(
        tree, hidden, model.head(hidden), sampling, head, with_js=with_js, with_centroid_prob=with_centroid_prob
    )
