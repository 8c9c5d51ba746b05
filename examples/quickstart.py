"""Load a pair, stream an answer, and see what speculation did.

python examples/quickstart.py --target default "Write a haiku about dropout."
"""

import argparse

import dropmatch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt", nargs="?", default="Name the planets of the solar system, nearest to the sun first.")
parser.add_argument("--target", default="small", help="named pair, hub id, folder or .gguf file")
parser.add_argument("--draft", help="draft model, ngram or none; left out: the pair's own, or ngram")
parser.add_argument("--max-new-tokens", type=int, default=80)
options = parser.parse_args()

# p_drop="auto" measures the model: the paper's 0.3 is too much for a small one.
decoder = dropmatch.load(options.target, options.draft, p_drop="auto")
for chunk in decoder.stream(options.prompt, max_new_tokens=options.max_new_tokens):
    print(chunk.text, end="", flush=True)
print()

stats = chunk.stats  # the last chunk brings the counts of the whole request
assert stats is not None
print(f"p_drop {decoder.dropout.p_drop}; {stats.tau:.2f} tokens per target forward (tau)")
print("kept because:", ", ".join(f"{reason.label} {count}" for reason, count in stats.reasons.most_common()))
print(f"{len(stats.lossy)} of {stats.emitted} tokens are not the target's own choice")
