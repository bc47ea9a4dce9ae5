"""How often the bench's sanity checks cry wolf on a model, and how often they miss a fraud.

A limit that was set on one model is a guess on every other one. So on the model at hand each check gets honest runs,
where every alarm is a false one, and prepared frauds, where every silence is a miss:

- *identity*: 'full' is honest; frauds stand in its place: a cache that loses tokens, or holds codes of some bits.
- *whole budget*: plans that evict are honest with room for everything; in the fraud 2 % of the tokens are lost there.
- *untouched cache*, *hidden bytes*: honest plans; the fraud keeps every key and value, and reads them in secret.
- *better than full* and all checks of records: honest plans, on each text.

Beside it stand the distances of which identity is judged, and what the rule before would have said: 0.02 nats in the
mean token of half precision, or what the model's two attentions differ by; 0.001 nats in one token of float32.

    python -m benchmarks.bench_limits --model FOLDER --dtype bfloat16 --text NOVEL.txt --text OTHER.txt

A row is one processor: run it again where kernels differ (ATEN_CPU_CAPABILITY, another machine), with small windows
where a dtype is slow. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor import cache_for
from kvtailor.bench.checks import Fraud, findings
from kvtailor.bench.contestant import OTHER_ATTENTION, OWN, Contestant
from kvtailor.bench.measure.machine import describe
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject, plans_at_whole_budget
from kvtailor.bench.tasks.perplexity import Perplexity, score_window

HONEST = (
    "streaming @ keep=0.5",
    "snapkv @ keep=0.5",
    "h2o @ keep=0.5",
    "kivi(bits=8)",
    "kivi(bits=4)",
    "vector(bits=8)",
)
IN_PLACE_OF_FULL = (
    "streaming @ keep=0.995",
    "streaming @ keep=0.95",
    "streaming @ keep=0.75",
    "kivi(bits=8, recent=32)",
    "kivi(bits=4, recent=32)",
)
LEAKING = ("h2o @ keep=0.5", "snapkv @ keep=0.5", "streaming @ keep=0.5")


def with_caches(subject: Subject, make: Callable[[Any, str], Any], whole: bool = False) -> Subject:
    """The subject, with other caches than its plans say."""
    return Subject(
        name=subject.name,
        model=subject.model,
        tokenizer=subject.tokenizer,
        make_cache=make,
        whole_budget=plans_at_whole_budget if whole else None,
        stock_attention=subject.stock_attention,
    )


def secretly_whole(model: Any, plan: str) -> Any:
    """A cache of the plan whose attention reads all keys and values that there ever were, which it keeps aside."""
    cache = cache_for(model, plan)
    if plan == "full":
        return cache
    for layer in cache.layers:
        _read_all(layer)
    return cache


def _read_all(layer: Any) -> None:
    attend, append = layer.attend, layer.state.append
    kept: list[tuple[Tensor, Tensor]] = []

    def heard(keys: Tensor, values: Tensor, **how: Any) -> None:
        kept.append((keys.clone(), values.clone()))
        append(keys, values, **how)

    def reading(query: Tensor, mask: Any, scaling: float, *module: Any) -> Tensor:
        output: Tensor = attend(query, mask, scaling, *module)
        if len(kept) == 1:
            return output
        keys, values = (torch.cat(each, 2) for each in zip(*kept, strict=True))
        group, new, seen = query.shape[1] // keys.shape[1], query.shape[2], keys.shape[2]
        shown = torch.arange(seen) <= torch.arange(seen - new, seen)[:, None]
        logits = query.float() @ keys.repeat_interleave(group, 1).float().mT * scaling
        weights = logits.masked_fill(~shown, -torch.inf).softmax(-1)
        return (weights @ values.repeat_interleave(group, 1).float()).to(output.dtype)

    layer.attend, layer.state.append = reading, heard


def alarms(subject: Subject, plans: tuple[str, ...], task: Perplexity) -> tuple[Counter[str], list[str]]:
    """The names of the checks that fail, and the notes on identity."""
    found: Counter[str] = Counter()
    records: list[Any] = []
    try:
        run(
            subject,
            contestants_of(plans),
            [task],
            bandwidth=False,
            finish=records.append,
            judge=lambda all_of_them: None,
        )
    except Fraud as fraud:
        found[fraud.name] += 1
    found.update({each.name for each in findings(records)})
    notes = [note for record in records for note in record.notes if note.startswith("Identity")]
    return found, notes


def rule_before(subject: Subject, task: Perplexity) -> bool:
    """Whether the limits that stood here before 2026-11-26 refuse the model."""
    windows = task.cut(subject)

    def scores(contestant: Contestant) -> Tensor:
        return torch.cat([score_window(subject, contestant, w.context, w.targets)[0] for w in windows])

    own = scores(OWN)
    apart = (scores(Contestant.of("full")) - own).abs()
    if subject.dtype == torch.float32:
        return float(apart.max()) > 1e-3
    rounding = (scores(OTHER_ATTENTION) - own).abs()
    return float(apart.max()) > max(0.5, float(rounding.max())) or float(apart.mean()) > max(
        0.02, float(rounding.mean())
    )


def _instead(plan: str, model: Any, asked: Any) -> Any:
    """A cache of another plan than was asked for."""
    return cache_for(model, plan)


def measure(subject: Subject, texts: list[Path], sizes: dict[str, Any]) -> dict[str, Any]:
    """Alarms of honest runs and of frauds, over all texts."""
    false: Counter[str] = Counter()
    before, notes = 0, list[str]()
    caught: dict[str, list[int]] = {}

    def try_fraud(name: str, check: str, given: Subject, plans: tuple[str, ...], task: Perplexity) -> None:
        hits, _ = alarms(given, plans, task)
        tries = caught.setdefault(name, [0, 0])
        tries[0] += bool(hits[check])
        tries[1] += 1

    for path in texts:
        task = Perplexity(text=path.read_text(encoding="utf-8")[:400_000], source=path.name, **sizes)
        found, said = alarms(subject, HONEST, task)
        false += found
        notes += said
        before += rule_before(subject, task)
        for plan in IN_PLACE_OF_FULL:
            given = with_caches(subject, partial(_instead, plan))
            try_fraud(f"identity: 'full' is {plan}", "identity", given, (), task)
        for plan in LEAKING:
            given = with_caches(
                subject, lambda model, asked: cache_for(model, asked.replace("keep=1.0", "keep=0.98")), True
            )
            try_fraud(f"whole budget: {plan} loses 2 %", "whole budget", given, (plan,), task)
        given = with_caches(subject, secretly_whole)
        try_fraud("untouched cache: snapkv reads all in secret", "untouched cache", given, ("snapkv @ keep=0.5",), task)
        try_fraud("hidden bytes: snapkv keeps all in secret", "hidden bytes", given, ("snapkv @ keep=0.5",), task)
    return {
        "texts": len(texts),
        "false_alarms": dict(false),
        "false_alarms_before": before,
        "identity": notes,
        "caught": {name: f"{hits} of {tries}" for name, (hits, tries) in caught.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype")
    parser.add_argument("--text", type=Path, action="append", required=True)
    for name, usual in (("context", 512), ("continuation", 128), ("windows", 4)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    begin = time.perf_counter()
    subject = Subject.load(given.model, dtype=given.dtype)
    sizes = {name: getattr(given, name) for name in ("context", "continuation", "windows")}
    found = measure(subject, given.text, sizes)
    for name, value in found.items():
        print(name, value)
    about = {"model": given.model, "dtype": str(subject.dtype).removeprefix("torch."), **sizes}
    machine = {name: describe(bandwidth=False)[name] for name in ("processor", "threads")}
    capability = torch.backends.cpu.get_cpu_capability()
    seconds = round(time.perf_counter() - begin)
    print(json.dumps({**about, **machine, "capability": capability, "seconds": seconds, **found}))


if __name__ == "__main__":
    main()
