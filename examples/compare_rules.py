"""What each acceptance rule keeps, and how far from the target it goes, on the same prompts.

tau: tokens per target forward, the gain. lossy: tokens that are not the target's own. lowest: the target's probability
of the least likely token kept. same: the text equals plain greedy decoding.
"""

import argparse

import dropmatch
from dropmatch import RuleOptions, SamplingParams, make_rule

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "A train travels 60 km in 45 minutes. How fast is it in km/h?",
    "Write a Python function that reverses a string.",
]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", default="small", help="named pair, hub id, folder or .gguf file")
parser.add_argument("--draft", help="draft model, ngram or none; left out: the pair's own, or ngram")
parser.add_argument("--max-new-tokens", type=int, default=60)
options = parser.parse_args()

decoder = dropmatch.load(options.target, options.draft, p_drop="auto")
params = SamplingParams(max_new_tokens=options.max_new_tokens)
rules = {name: make_rule(name) for name in ("exact", "lossless", "dropmatch", "dropmatch-paper", "dropmatch-naive")}
rules["dropmatch, guarded"] = make_rule("dropmatch", RuleOptions(guard_prob=0.05))

plain = decoder.run(PROMPTS, params, engine=decoder.engine(drafter=None))
texts = [generation.text for generation in plain.generations]
print(f"{'rule':<20}{'tau':>6}{'lossy':>9}{'lowest':>9}{'same':>6}")
for name, rule in rules.items():
    run = decoder.run(PROMPTS, params, engine=decoder.engine(rule=rule))
    requests = run.stats.requests
    lowest = min((token.prob for token in requests.lossy), default=None)
    same = sum(generation.text == text for generation, text in zip(run.generations, texts, strict=True))
    share = len(requests.lossy) / requests.emitted
    floor = "" if lowest is None else f"{lowest:.3f}"
    print(f"{name:<20}{requests.tau:>6.2f}{share:>9.1%}{floor:>9}{same:>4}/{len(texts)}")
