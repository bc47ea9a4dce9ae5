"""One model on several processes, each with some of its kv heads, and one compressed cache over all of them.

torchrun --nproc-per-node 2 examples/tensor_parallel.py

Here the processes are on the CPU; on GPUs take "nccl" in place of "gloo", and a model of yours in place of the embedded
one. The number of processes must divide the model's kv heads.
"""

import os
import tempfile
from pathlib import Path

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import kvtailor
from kvtailor.hf.model.embedded import path

# One process by itself does the same as torchrun with one.
for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, alone)
dist.init_process_group("gloo")
first, processes = dist.get_rank() == 0, dist.get_world_size()

tokenizer = AutoTokenizer.from_pretrained(path())
shared = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=processes)} if processes > 1 else {}
model = AutoModelForCausalLM.from_pretrained(path(), dtype="float32", **shared)
prompt = "The old mill stood at the end of the village, and nobody had lived there for years. " * 12
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)

# Heads share their layer's budget (adakv), whichever process has them.
cache = kvtailor.cache_for(model, "snapkv + adakv @ keep=0.25")
output = model.generate(**inputs, cache=cache, max_new_tokens=24, do_sample=False)

# Every process calls these two: they speak with each other.
whole = cache.whole_ledger()
with tempfile.TemporaryDirectory() as folder:
    shared_folder = [folder]
    dist.broadcast_object_list(shared_folder, src=0)
    saved = Path(shared_folder[0]) / "cache"
    cache.save(saved)
    later = kvtailor.load_cache(model, saved)
    dist.barrier()

if first:
    own = cache.ledger()
    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
    print(f"this process: {own.total} of {own.full} bytes; all {processes}: {whole.total} of {whole.full}")
    print(f"loaded again: {later.seen} tokens seen")
dist.destroy_process_group()
