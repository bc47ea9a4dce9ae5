"""The one line: a cache that holds a quarter of the prompt, handed to plain `generate()`.

python examples/one_line.py
"""

import kvtailor

model, tokenizer = kvtailor.load_model("demo")
prompt = "The old mill stood at the end of the village, and nobody had lived there for years. " * 12
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)

cache = kvtailor.cache_for(model, "snapkv + adakv @ keep=0.25")
output = model.generate(**inputs, cache=cache, max_new_tokens=24, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
ledger = cache.ledger()
print(f"held {ledger.held:.0f} of {ledger.seen} tokens, {ledger.total} of {ledger.full} bytes ({ledger.ratio:.2f})")
