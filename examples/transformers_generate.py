"""DropMatch inside `model.generate`: your model, your settings, one more argument.

python examples/transformers_generate.py --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b
"""

import argparse

import dropmatch
from dropmatch.hf.loading import load_model, load_tokenizer  # AutoModelForCausalLM.from_pretrained does as well

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", default="smollm2-135m", help="packaged model, hub id, folder or .gguf file")
parser.add_argument("--draft", default="ngram", help="draft model of the same tokenizer, or ngram")
parser.add_argument("--max-new-tokens", type=int, default=60)
options = parser.parse_args()

tokenizer = load_tokenizer(options.target)
# in float32 lossless gives the tokens of generate; in bfloat16 a near-tie may go the other way
model = load_model(options.target, dtype="float32")
draft = "ngram" if options.draft == "ngram" else load_model(options.draft, dtype="float32")
messages = [{"role": "user", "content": "Repeat: the quick brown fox jumps over the lazy dog. The quick brown fox"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = inputs.to(model.device)
settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "repetition_penalty": 1.05}

plain = model.generate(**inputs, **settings)
for rule in ("lossless", "dropmatch"):
    decode = dropmatch.hf.decoder(draft=draft, rule=rule, p_drop="auto", tokenizer=tokenizer)
    output = model.generate(**inputs, **settings, custom_generate=decode)
    same = output.shape == plain.shape and bool((output == plain).all())
    print(f"--- {rule}: tau {decode.stats.requests.tau:.2f}, the tokens of plain generate: {same}")
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
