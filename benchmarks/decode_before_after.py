"""Decoding before and after a change: processor time per token of two checkouts, in turns.

    python -m benchmarks.decode_before_after BEFORE AFTER [ROUNDS]

BEFORE and AFTER are checkouts with compiled kernels. Each round starts a process of each, the other one first in every
second round. A process decodes 48 tokens of an untrained Llama after a prompt of 300, four times under each plan, on
one thread, and reports the least processor time per token. Printed are the median and the range of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kvtailor.hf.versions import hand_cache

PLANS = (
    "full",
    "streaming @ tokens=128",
    "snapkv(window=16) + adakv @ tokens=128",
    "kivi(bits=4, group=32, recent=32)",
    "h2o @ tokens=128",
    "tova @ tokens=128",
)
PROMPT, WARM, TOKENS, TIMES = 300, 4, 48, 4


def measure() -> dict[str, float]:
    """Return the least seconds of processor time per token, by plan, of the kvtailor that is imported."""
    import torch

    import kvtailor

    torch.set_num_threads(1)
    try:
        from kvtailor.hf.model.loading import load
    except ImportError:  # a checkout of before the folders were moved
        from kvtailor.hf.loading import load  # type: ignore[import-not-found, no-redef, unused-ignore]
    model, _ = load("random-llama")
    ids = torch.arange(PROMPT)[None] % 200
    found: dict[str, list[float]] = {plan: [] for plan in PLANS}
    with torch.inference_mode():
        for _ in range(TIMES):
            for plan, seconds in found.items():
                cache = kvtailor.cache_for(model, plan)
                model(ids, **hand_cache(cache))
                for step in range(WARM + TOKENS):
                    if step == WARM:
                        begin = time.process_time()
                    model(ids[:, :1], **hand_cache(cache))
                seconds.append((time.process_time() - begin) / TOKENS)
    return {plan: min(seconds) for plan, seconds in found.items()}


def of_checkout(folder: str) -> dict[str, float]:
    """Return what a process of a checkout measures."""
    environment = {**os.environ, "PYTHONPATH": str(Path(folder).resolve() / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Print the ratios."""
    if len(sys.argv) < 3:
        print(json.dumps(measure()))
        return
    sides, rounds = sys.argv[1:3], int(sys.argv[3]) if len(sys.argv) > 3 else 6
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for index in range(rounds):
        for side in sides if index % 2 else sides[::-1]:
            found[side].append(of_checkout(side))
    before, after = (found[side] for side in sides)
    for plan in PLANS:
        ratios = [b[plan] / a[plan] for a, b in zip(before, after, strict=True)]
        own = statistics.median(each[plan] for each in before) * 1e3
        low, high = min(ratios), max(ratios)
        print(f"{plan:45} {own:7.3f} ms before, after/before {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
