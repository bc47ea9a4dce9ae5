"""A context whose cache is larger than it may be: encoded, on the disk, and read layer by layer.

python examples/from_disk.py
"""

import tempfile

import kvtailor

model, tokenizer = kvtailor.load_model("demo")
text = "The ferry left the island twice a day, at six and at nine. " * 16
ids = tokenizer(text + "The ferry left", return_tensors="pt").input_ids


def told(plan: str) -> str:
    """Eight tokens under a plan; the prompt comes in pieces, so that no layer ever holds all of it as it is."""
    cache = kvtailor.prefill(model, ids[:, :-1], plan=plan, chunk=64)
    answer = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    tiers, moved = cache.ledger().by_tier, cache.traffic()
    print(f"  {tiers}; {moved.hits} layers were there, {moved.misses} came, {moved.bytes_read} bytes in all")
    return tokenizer.decode(answer[0, ids.shape[1] :])


print("full, all of it resident")
resident, allowed = told("full"), 10 * 2**15 * model.dtype.itemsize
print(f"{ids.shape[1]} tokens, and {allowed} bytes for them")
try:
    told(f"full + device(device_bytes={allowed})")
except kvtailor.KvtailorError as error:
    print(f"  refused: {error}")

with tempfile.TemporaryDirectory() as folder:
    for codec in ("full", "kivi(bits=4, recent=32)"):
        plan = f"{codec} + disk(folder='{folder}', block=32, device_bytes={allowed})"
        print(codec, "on the disk")
        print(f"  the same text as with all of it resident and nothing encoded: {told(plan) == resident}")
