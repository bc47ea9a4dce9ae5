"""What chunks of LMCache take in the codecs of kvtailor: bytes, error and processor time.

    python -m benchmarks.lmcache_chunks [--layers 30] [--heads 3] [--size 64] [--tokens 256] [--rounds 5]

A chunk has the shape that LMCache gives a serde, by default that of SmolLM2-135M in bfloat16. Its numbers are normal,
with a share of channels four times as large, so that the error says how codecs differ and not what they cost a model.
Times are of `Serializer.serialize` and `Deserializer.deserialize` in one thread: medians of so many rounds, in turns.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from types import SimpleNamespace

import torch

from kvtailor.lmcache_serde import Deserializer, Serializer

PLANS = ("fp8", "kivi4", "vector(bits=4)", "hadamard(of=gaussian, signs=0)", "nvfp4", "ggml(type=q4_0)", "kivi2")


def main() -> None:
    """Measure all plans, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 30), ("heads", 3), ("size", 64), ("tokens", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shape = 2, asked.layers, asked.tokens, asked.heads * asked.size
    chunk = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    chunk[..., :: asked.size // 4] *= 4
    chunk = chunk.bfloat16()
    whole = chunk.numel() * 2
    found = {}
    sides = {plan: (Serializer(plan, asked.size), Deserializer(plan, asked.size)) for plan in PLANS}
    times: dict[str, list[tuple[float, float]]] = {plan: [] for plan in PLANS}
    back = torch.empty_like(chunk)
    for turn in range(asked.rounds + 1):
        for plan, (serializer, deserializer) in sides.items():
            size = serializer.estimate_serialized_size(SimpleNamespace(shapes=[chunk.shape], dtypes=[chunk.dtype]))
            buffer = SimpleNamespace(tensor=torch.zeros(size, dtype=torch.uint8))
            begun = time.process_time()
            serializer.serialize(SimpleNamespace(tensor=chunk), buffer, None)
            middle = time.process_time()
            deserializer.deserialize(buffer, SimpleNamespace(tensor=back), None)
            if turn:  # the first one warms up
                times[plan].append((middle - begun, time.process_time() - middle))
            error = float((back.double() - chunk.double()).norm() / chunk.double().norm())
            found[plan] = {"bytes": size / whole, "error": error}
    print("| plan | bytes | error | MB/s written | MB/s read |\n|---|---:|---:|---:|---:|")
    for plan, each in found.items():
        write, read = (median(side) for side in zip(*times[plan], strict=True))
        each |= {"written": whole / write / 1e6, "read": whole / read / 1e6}
        rates = f"{each['written']:.0f} | {each['read']:.0f}"
        print(f"| `{plan}` | {100 * each['bytes']:.1f} % | {each['error']:.4f} | {rates} |")
    print(json.dumps({"shape": shape, "rounds": asked.rounds, "plans": found}))


if __name__ == "__main__":
    main()
