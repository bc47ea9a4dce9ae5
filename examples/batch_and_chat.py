"""A left-padded batch of unequal prompts, and a second turn on the same cache.

python examples/batch_and_chat.py
"""

import torch

import kvtailor

model, tokenizer = kvtailor.load_model("demo")
plan = "snapkv(window=16) @ tokens=64"

batch = tokenizer(
    ["A short story about a lighthouse. " * 8, "It rained all night in the harbour, and in the morning " * 14],
    return_tensors="pt",
    padding=True,
    return_token_type_ids=False,
)
cache = kvtailor.cache_for(model, plan)
out = model.generate(**batch, cache=cache, max_new_tokens=12, do_sample=False)
for row, text in enumerate(tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :])):
    print(f"row {row}: held {cache.held()[row].float().mean():.0f} tokens per head; {text!r}")

# Turn two: hand generate() the whole conversation; it feeds the model only what the cache has not seen.
more = tokenizer(["And then", "And then"], return_tensors="pt", add_special_tokens=False).input_ids
conversation = torch.cat([out, more], 1)
mask = torch.cat([batch.attention_mask, torch.ones(2, conversation.shape[1] - batch.input_ids.shape[1])], 1).long()
before = cache.seen
model.generate(conversation, attention_mask=mask, cache=cache, max_new_tokens=12, do_sample=False)
print(f"turn two fed {cache.seen - before} tokens, not {conversation.shape[1]}")
