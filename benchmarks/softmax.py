"""What a cap on logits and learned sinks cost a decoded token and a prompt: time with them over time without.

    python -m benchmarks.softmax [CONTEXTS] [DTYPES] [ROUNDS]

The model is `random-llama-gqa` of `micro decode`, and the same on all sides: a Llama hands on to its
attention what its caller gives it, so that softcap=50 and a sink for each query head can be given or left out. Sides
take turns in one process, on one thread; printed are the median ratio of the rounds' processor times and the quartiles.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.micro.cases import VOCABULARY, model_states, random_llama
from benchmarks.micro.timer import Side, time_in_turns
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.stock import fill
from kvtailor.hf.versions import hand_cache

CPU = torch.device("cpu")
SINKS = torch.linspace(-1, 1, 32)
GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 50.0},
    "sinks": {"s_aux": SINKS},
    "both": {"softcap": 50.0, "s_aux": SINKS},
}
PLANS = ("full", "kivi(bits=4, group=64, recent=128)", "snapkv + adakv @ tokens={budget}")


def compared(title: str, sides: list[Side], rounds: int) -> None:
    """Time the sides and print each over the first."""
    base, *others = time_in_turns(sides, rounds, warmup=3, device=CPU, clock=time.process_time)
    own = statistics.median(base.seconds) * 1e3
    for each in others:
        ratios = [a / b for a, b in zip(each.seconds, base.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{title:60} {own:8.2f} ms plain, {each.name:8} {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


@torch.no_grad()
def decoding(dtype: torch.dtype, context: int, rounds: int) -> None:
    """One decoded token after a context, by plan."""
    model = random_llama(dtype, CPU)
    states, token = model_states(model, context), torch.tensor([[7]])
    ids = torch.randint(0, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(2))
    for line in PLANS:
        plan = line.format(budget=context // 8)
        sides = []
        for name, given in GIVEN.items():
            cache = cache_for(model, plan)
            fill(cache, states)
            model(ids, **hand_cache(cache), logits_to_keep=1, **given)
            model(token, **hand_cache(cache), **given)

            def run(_: int, cache: Any = cache, given: dict[str, Any] = given) -> object:
                return model(token, **hand_cache(cache), **given)

            sides.append(Side(name=name, run=run))
        compared(f"token after {context}, {dtype}, {plan}", sides, rounds)


@torch.no_grad()
def prompts(dtype: torch.dtype, context: int, rounds: int) -> None:
    """A prompt under the null plan."""
    model = random_llama(dtype, CPU)
    ids = torch.randint(0, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(3))

    def once(given: dict[str, Any]) -> Callable[[int], object]:
        return lambda _: model(ids, **hand_cache(cache_for(model, "full")), logits_to_keep=1, **given)

    compared(f"prompt of {context}, {dtype}", [Side(name=n, run=once(g)) for n, g in GIVEN.items()], rounds)


def main() -> None:
    """Print the ratios."""
    asked = dict(enumerate(sys.argv[1:]))
    contexts = [int(each) for each in asked.get(0, "2048,8192").split(",")]
    dtypes = asked.get(1, "float32,bfloat16").split(",")
    rounds = int(asked.get(2, "30"))
    torch.set_num_threads(1)
    for name in dtypes:
        for context in contexts:
            decoding(getattr(torch, name), context, rounds)
        prompts(getattr(torch, name), contexts[0], 3)


if __name__ == "__main__":
    main()
