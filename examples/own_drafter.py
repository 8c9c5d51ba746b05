"""A drafter of one's own: it knows a few texts by heart and drafts how they go on. See docs/write-a-drafter.md."""

import argparse
from collections.abc import Sequence

import torch

import dropmatch
from dropmatch import SamplingParams
from dropmatch.core.interfaces import DraftTree, ModelOutput, Verdict
from dropmatch.core.sequence import Row


class RecitingDrafter:
    """Drafts what follows the row's last two tokens in one of the texts, given as token ids."""

    name = "reciting"

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.follows = {tuple(text[i - 2 : i]): list(text[i:]) for text in texts for i in range(2, len(text))}

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        """Nothing to prepare: the row itself is all this drafter looks at."""

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        drafts = [self.follows.get(tuple(row.ids[-2:]), [])[:n] for row, n in zip(rows, max_new, strict=True)]
        width = max(len(draft) for draft in drafts)
        # the root first, then the draft; shorter rows are padded with anything, since num_nodes says what counts
        tokens = [[row.ids[-1], *draft, *[0] * (width - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        return DraftTree.chain(torch.tensor(tokens), torch.tensor([1 + len(draft) for draft in drafts]))

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        """Nothing to follow: the engine has put the kept tokens into the rows."""

    def filter(self, keep: Sequence[int]) -> None:
        """Nothing to drop: there is no state by row."""


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", default="small", help="named pair, hub id, folder or .gguf file")
parser.add_argument("--draft", help="not used here")
parser.add_argument("--max-new-tokens", type=int, default=60)
options = parser.parse_args()

decoder = dropmatch.load(options.target, "none")
params = SamplingParams(max_new_tokens=options.max_new_tokens)
prompt = ["Explain in two sentences why the sky is blue."]

plain = decoder.run(prompt, params, engine=decoder.engine(rule="exact", drafter=None)).generations[0]
drafter = RecitingDrafter([plain.tokens])  # so it has heard the answer before
run = decoder.run(prompt, params, engine=decoder.engine(rule="exact", drafter=drafter))
print(f"plain: {len(plain.tokens)} forwards; reciting: {run.stats.requests.rounds}, tau {run.stats.requests.tau:.2f}")
print("the same text:", run.generations[0].tokens == plain.tokens)
