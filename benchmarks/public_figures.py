"""KIVI's perplexity on SmolLM2-135M-Instruct by somebody else's protocol, beside the figures that they published.

VeloxQuant-MLX (`benchmark_scripts/benchmark_kivi_multi_model.py`, its variable LONG_SAMPLE; results in
`kivi_bf16_perplexity_rerun.json`, 2026-08-28) scores one text of some 430 tokens in one forward through the cache. All
tokens but the newest 128 are rounded before anybody reads them, so that a token sees its own neighbours rounded; a
prompt of kvtailor's is read exactly, and rounded behind that. So the protocol is done here by a cache of transformers
that rounds as theirs does, with the arithmetic of kvtailor's `kivi`, and not by a plan.

    python -m benchmarks.public_figures TEXT --model FOLDER

TEXT is a file with that sample, which is not ours to give on. A checkpoint whose weights were rounded has another
perplexity than the published one from the start: what can be compared is what rounding the cache adds. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvtailor.ops.codes.quant import dequantise, quantise

PUBLISHED = {"none": 28.873, "4": 29.630, "2": 44.847}
GROUP, RECENT, LONGEST = 32, 128, 512


class RoundedCache(DynamicCache):
    """A cache whose tokens but the newest are read as KIVI's codes give them back."""

    def __init__(self, bits: int | None, whole_blocks: bool):
        super().__init__()
        self._bits, self._size = bits, RECENT if whole_blocks else GROUP

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
        """Append the states (1, h, n, d), and return all of them, rounded."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **more)
        # In blocks of 128 KIVI rounds whatever is a whole block; otherwise groups of 32 leave the newest 128 alone.
        old = keys.shape[2] - (RECENT if self._size == GROUP else 0)
        count = max(0, old // self._size * self._size)
        if self._bits is None or not count:
            return keys, values
        return self._rounded(keys, count, dim=2), self._rounded(values, count, dim=3)

    def _rounded(self, states: Tensor, count: int, dim: int) -> Tensor:
        assert self._bits is not None
        codes, step, low = quantise(states[:, :, :count], self._bits, dim, GROUP)
        return torch.cat([dequantise(codes, step, low, dim), states[:, :, count:]], 2)


@torch.inference_mode()
def perplexity(model: Any, ids: list[int], cache: RoundedCache) -> float:
    """Return the perplexity of all tokens but the first, in one forward through the cache."""
    logits = model(torch.tensor([ids[:-1]]), past_key_values=cache).logits[0].float().log_softmax(-1)
    return math.exp(-float(logits.gather(1, torch.tensor(ids[1:])[:, None]).mean()))


def main() -> None:
    """Print a row for each number of bits, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    ids = AutoTokenizer.from_pretrained(args.model).encode(args.text.read_text(encoding="utf-8").strip())[:LONGEST]
    rows: list[dict[str, Any]] = []
    for bits in (None, 4, 2):
        here = {
            name: perplexity(model, ids, RoundedCache(bits, whole_blocks))
            for name, whole_blocks in (("in groups of 32", False), ("in blocks of 128", True))
        }
        rows.append({"bits": bits, "published": PUBLISHED[str(bits or "none")], "here": here})
    for row in rows:
        theirs = row["published"] / rows[0]["published"]
        ours = {name: f"{value / rows[0]['here'][name]:.3f}" for name, value in row["here"].items()}
        print(f"{row['bits'] or 'no codes'}: published {row['published']} ({theirs:.3f}), here {row['here']} ({ours})")
    print(json.dumps({"model": Path(args.model).name, "dtype": args.dtype, "tokens": len(ids), "rows": rows}))


if __name__ == "__main__":
    main()
