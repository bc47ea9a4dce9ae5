"""Compress two documents before anybody has asked anything, then ask several questions on copies of the cache.

python examples/ask_later.py
"""

import copy

import torch

import kvtailor
from kvtailor.hf.loading import load

model, tokenizer = load("demo")
documents = [
    "The ferry left the island twice a day. " * 9 + "The code of the harbour is 48213. " + "Nobody was there. " * 15,
    "In the morning the road was gone. " * 6 + "The code of the harbour is 90577. " + "It rained all night. " * 9,
]
batch = tokenizer(documents, return_tensors="pt", padding=True, return_token_type_ids=False)
questions = [" The code of the harbour is", " In the morning the", " The ferry left the"]

# `snapkv` goes by the end of what it has seen and compresses after every 64 tokens, so that the cache never holds more
# than 48 + 64 of them. `kvzip` lets the model repeat the whole document and keeps what it needs for that.
for plan, how in (("full", {}), ("snapkv @ tokens=48", {"chunk": 64}), ("kvzip @ tokens=48", {"tokenizer": tokenizer})):
    cache = kvtailor.prefill(model, plan, **batch, **how)
    print(f"{plan}: {cache.held().double().mean():.0f} of {cache.seen} tokens per head")
    for question in questions:
        new = tokenizer([question] * 2, return_tensors="pt", add_special_tokens=False).input_ids
        conversation = torch.cat([batch.input_ids, new], 1)
        mask = torch.cat([batch.attention_mask, torch.ones_like(new)], 1)
        # A copy: the next question starts from the document again.
        mine = copy.deepcopy(cache)
        out = model.generate(conversation, attention_mask=mask, past_key_values=mine, max_new_tokens=5, do_sample=False)
        print(f"  {question}: {tokenizer.batch_decode(out[:, conversation.shape[1] :])}")
