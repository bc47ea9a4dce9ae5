"""A model whose layers lie on several devices, or partly on a disk (`device_map`): each layer's cache stays with it.

python examples/split_model.py
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtailor
from kvtailor.hf.model.embedded import path

tokenizer = AutoTokenizer.from_pretrained(path())
with tempfile.TemporaryDirectory() as folder:
    if torch.cuda.device_count() > 1:
        where = "auto"
    else:
        # Without GPUs: half of the layers wait on the disk, and come when they are needed.
        half = {f"model.layers.{layer}": "cpu" if layer < 3 else "disk" for layer in range(6)}
        where = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu", **half}
    model = AutoModelForCausalLM.from_pretrained(path(), device_map=where, offload_folder=folder)
    prompt = "The old mill stood at the end of the village, and nobody had lived there for years. " * 12
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)

    # `expected` reads each layer's rotary embedding, and `pooled` compares the tokens of all layers.
    cache = kvtailor.cache_for(model, "expected + pooled @ keep=0.25")
    output = model.generate(**inputs, cache=cache, max_new_tokens=24, do_sample=False)

    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
    print(f"layers on: {sorted({str(device) for device in model.hf_device_map.values()})}")
    ledger = cache.ledger()
    print(f"held {ledger.held:.0f} of {ledger.seen} tokens, {ledger.total} of {ledger.full} bytes")
