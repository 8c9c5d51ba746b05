"""Several requests in one batch, each with settings of its own: rule, temperature, stop strings, lengths.

A row's result depends neither on its batch mates nor on their settings.
"""

import argparse

import dropmatch
from dropmatch import Chunk, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", default="small", help="named pair, hub id, folder or .gguf file")
parser.add_argument("--draft", help="draft model, ngram or none; left out: the pair's own, or ngram")
parser.add_argument("--max-new-tokens", type=int, default=60)
options = parser.parse_args()

longest = options.max_new_tokens
requests = {
    "List three uses of salt.": SamplingParams(max_new_tokens=longest),
    "What is 17 times 3?": SamplingParams(max_new_tokens=longest, rule="lossless", stop=("\n",)),
    "Invent a name for a cat.": SamplingParams(max_new_tokens=longest, temperature=0.8, top_p=0.95, seed=7),
    "Say hello.": SamplingParams(max_new_tokens=longest // 2, draft_length=2, repetition_penalty=1.1),
}

decoder = dropmatch.load(options.target, options.draft, p_drop="auto")
engine = decoder.engine()
prompts = {engine.add(decoder.encode(prompt), params): prompt for prompt, params in requests.items()}
texts = dict.fromkeys(prompts, "")
last: dict[int, Chunk] = {}
while engine.has_work:
    for chunk in engine.step():  # a chunk per request in flight
        texts[chunk.request] += chunk.text
        last[chunk.request] = chunk

for request, prompt in prompts.items():
    stats = last[request].stats
    assert stats is not None
    print(f"--- {prompt}  [{last[request].finish_reason}, {stats.emitted} tokens, tau {stats.tau:.2f}]")
    print(texts[request])
print(f"all together: {engine.stats.tokens_per_second:.0f} tokens/s")
