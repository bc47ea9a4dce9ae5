"""Compress a long document once, keep the compressed cache in a file, and ask it later.

python examples/save_and_reload.py
"""

import tempfile
from pathlib import Path

import torch

import kvtailor

model, tokenizer = kvtailor.load_model("demo")
document = tokenizer("The ferry left the island twice a day, at six and at nine. " * 20, return_tensors="pt").input_ids

cache = kvtailor.cache_for(model, "snapkv(window=16) + kivi(bits=4) @ keep=0.5")
with torch.no_grad():
    model(document, cache=cache)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "document.safetensors"
    cache.save(path)
    print(f"{document.shape[1]} tokens in a file of {path.stat().st_size} bytes (uncompressed: {cache.ledger().full})")
    later = kvtailor.load_cache(model, path)

question = tokenizer(" The ferry left", return_tensors="pt", add_special_tokens=False).input_ids
whole = torch.cat([document, question], 1)
answer = model.generate(whole, cache=later, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(answer[0, whole.shape[1] :]))
