"""What a plan costs: log-probability of the same continuations, on the compressed cache.

python examples/score_many.py
"""

import kvtailor
from kvtailor.bench.data.texts import generated_text

model, tokenizer = kvtailor.load_model("demo")
text = tokenizer(generated_text(12_000), return_tensors="pt", add_special_tokens=False).input_ids
windows = [text[:, i : i + 320] for i in range(0, min(text.shape[1] - 320, 1280), 320)]

for plan in ("full", "snapkv(window=16) @ keep=0.25", "streaming @ keep=0.25", "kivi(bits=4)"):
    with kvtailor.session(model, plan) as s:
        nats = [-s.score(window[:, :256], window[:, 256:]).mean().item() for window in windows]
        ratio = s.last.ledger().ratio
    print(f"{plan:32s} {sum(nats) / len(nats):.4f} nats per token, {ratio:.2f} of the bytes")
