"""A small model drafts, the demo model verifies on a quantised cache: the same text in fewer forwards, as it comes.

python examples/speculate.py
"""

from transformers import TextStreamer

import kvtailor

model, tokenizer = kvtailor.load_model("demo")
prompt = "The old mill stood at the end of the village, and nobody had lived there for years. " * 12
ids = tokenizer(prompt, return_tensors="pt").input_ids

for speculation in ({"draft": "demo-draft"}, {"draft": "demo-draft", "middle_plan": "retrieval @ tokens=128"}):
    output = kvtailor.generate(
        model,
        ids,
        plan="kivi(bits=4, recent=32)",
        **speculation,
        gamma=4,
        min_gain=None,
        max_new_tokens=32,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )
    counted = output.statistics
    print(f"{counted.acceptance:.2f} accepted, {counted.emitted_per_verification:.2f} tokens for each verification")
