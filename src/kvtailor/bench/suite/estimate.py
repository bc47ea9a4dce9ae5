"""How long a suite takes on a model, before anything is loaded or measured: from the model's shapes and two rates.

A prompt takes its products at the machine's rate of arithmetic, and at least one read of the weights; a token that is
fed alone takes one read of the weights and of the whole uncompressed cache. Nothing else is counted, so the sum is what
a run takes at least, at these rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtailor.bench.measure.flops import Weights, prefill_flops, twice_pairs
from kvtailor.bench.measure.machine import matmul_flops, read_bandwidth
from kvtailor.bench.runner import TaskJob
from kvtailor.bench.suite.run import Prepared
from kvtailor.bench.tasks.contract import Demand
from kvtailor.errors import KvtailorError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan

__all__ = ["SuiteEstimate", "TaskEstimate", "Rates", "estimate", "measured_rates", "rates_of_line"]

_KEYS = ("flops", "bytes")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        flops: floating-point operations of matrix products.
        bandwidth: bytes that are read.
        source: where both are from, half a sentence.
    """

    flops: float
    bandwidth: float
    source: str


@dataclass(frozen=True, kw_only=True)
class TaskEstimate:
    """One task of a suite.

    Attributes:
        asked: in one line.
        plans: how many are scored on it, the model's own cache included where the task measures that.
        prompts: that are read, over all plans.
        seconds: at least; None where the task does not say what it feeds.
        why: why there are none; None where there are.
    """

    asked: str
    plans: int
    prompts: int
    seconds: float | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class SuiteEstimate:
    """A whole suite.

    Attributes:
        parts: of the tasks.
        weights: bytes of all weights.
        cache: bytes of the largest uncompressed cache.
        assumed: what the numbers rest on, whole sentences.
    """

    parts: tuple[TaskEstimate, ...]
    weights: int
    cache: int
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of all tasks that say what they feed."""
        return sum(part.seconds or 0.0 for part in self.parts)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "seconds": self.seconds,
            "weights": self.weights,
            "cache": self.cache,
            "assumed": list(self.assumed),
            "tasks": [vars(part) for part in self.parts],
        }


def rates_of_line(line: str) -> Rates:
    """The rates that a user gives, such as "flops=4e14, bytes=3.3e12".

    Raises:
        KvtailorError: it is none.
    """
    found: dict[str, float] = {}
    for part in line.split(","):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            found[name.strip()] = 0.0
    if set(found) != set(_KEYS) or not all(0 < each < float("inf") for each in found.values()):
        raise KvtailorError(
            f"asked for an estimate of the machine {line!r}: give what it does in a second, such as "
            "'flops=4e14, bytes=3.3e12', or nothing to measure this one"
        )
    return Rates(flops=found["flops"], bandwidth=found["bytes"], source="as given")


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Those of this machine, measured now in about a second."""
    dtypes = {dtype, torch.float32} if device.type == "cpu" else {dtype}
    return Rates(
        flops=max(matmul_flops(device, each) for each in dtypes),
        bandwidth=read_bandwidth(device),
        source="measured here and now",
    )


def estimate(prepared: Prepared, rates: Rates) -> SuiteEstimate:
    """How long a suite takes at least.

    Args:
        prepared: the suite on a model, which may be without its weights (`hf.model.loading.load_bare`).
        rates: of the machine.

    Raises:
        KvtailorError: the shapes of the model are not known.
    """
    model = prepared.subject.model
    weights = Weights.of(model)
    if weights is None:
        raise KvtailorError(
            f"asked for an estimate of {prepared.subject.name}, whose matrices are not known: run a piece"
        )
    shapes = _Shapes(
        Geometry.of(model.config), weights, prepared.subject.dtype.itemsize, prepared.subject.cache_dtype.itemsize
    )
    parts = tuple(_part(job, shapes, rates) for job in prepared.jobs)
    longest = max((n for job in prepared.jobs for n in _prompts(job)), default=0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return SuiteEstimate(
        parts=parts,
        weights=parameters * prepared.subject.dtype.itemsize,
        cache=shapes.cache(longest),
        assumed=tuple(_assumed(rates, parts)),
    )


@dataclass(frozen=True)
class _Shapes:
    """What a model computes and reads; bytes of an element of the weights and of the cache."""

    geometry: Geometry
    weights: Weights
    element: int
    cache_element: int

    def cache(self, tokens: int) -> int:
        """Bytes of an uncompressed cache of one row."""
        each = (
            s.kv_heads * (s.key_size + s.value_size) * min(tokens, s.window or tokens) for s in self.geometry.shapes
        )
        return self.cache_element * sum(each)

    def prompt(self, tokens: int, rates: Rates) -> float:
        flops = prefill_flops(self.weights, self.geometry, rows=1, tokens=tokens)
        return max(flops / rates.flops, self.weights.body * self.element / rates.bandwidth)

    def following(self, tokens: int, after: int, rates: Rates) -> float:
        attention = sum(
            s.q_heads
            * (s.key_size + s.value_size)
            * (twice_pairs(after + tokens, s.window) - twice_pairs(after, s.window))
            for s in self.geometry.shapes
            if s.kv_heads
        )
        return (2 * tokens * (self.weights.body + self.weights.head) + attention) / rates.flops

    def token(self, after: int, rates: Rates) -> float:
        read = (self.weights.body + self.weights.head) * self.element + self.cache(after)
        return read / rates.bandwidth


def _part(job: TaskJob, shapes: _Shapes, rates: Rates) -> TaskEstimate:
    asked = job.asked or job.kind
    if job.task is None:
        return TaskEstimate(asked=asked, plans=len(job.there), prompts=0, seconds=None, why=job.why)
    demand = job.task.demand()
    # The model's own cache is one more, where it is measured: perplexity holds 'full' against it.
    plans = len(job.there) + (job.task.own_cache or job.kind == "perplexity")
    if demand is None:
        why = f"{job.kind} does not say before what it feeds."
        return TaskEstimate(asked=asked, plans=plans, prompts=0, seconds=None, why=why)
    alone = plans - len(job.there)
    read, again = _readings([None] * alone + [each.plan for each in job.there], shared=not job.task.exclusive)
    often = sum(demand.prompts.values())
    return TaskEstimate(
        asked=asked,
        plans=plans,
        prompts=read * often,
        seconds=_seconds(demand, shapes, rates, plans=plans, readings=read + again),
    )


def _seconds(demand: Demand, shapes: _Shapes, rates: Rates, *, plans: int, readings: int) -> float:
    often = max(1, sum(demand.prompts.values()))
    total = 0.0
    for tokens, times in demand.prompts.items():
        share = times / often
        total += readings * times * shapes.prompt(tokens, rates)
        total += plans * times * shapes.following(round(demand.following / often), tokens, rates)
        total += plans * share * demand.decoded * shapes.token(tokens, rates)
    return total


def _prompts(job: TaskJob) -> Mapping[int, int]:
    demand = None if job.task is None else job.task.demand()
    return {} if demand is None else demand.prompts


def _readings(plans: Sequence[Plan | None], *, shared: bool) -> tuple[int, int]:
    """How often a prompt goes through the model for all of these plans, and how often it is repeated.

    Args:
        plans: None stands for the model's own cache, and for a cache that is not kvtailor's.
        shared: one forward serves all plans whose pass over a prompt is the same, see `hf.run.kept_prompt`.
    """
    passes: set[object] = set()
    repeated: set[object] = set()
    for place, plan in enumerate(plans):
        common = None if plan is None or not shared else plan.prompt_pass
        passes.add(place if common is None else common)
        if plan is not None and plan.needs.reconstruction is not None:
            repeated.add(place if common is None else plan.needs.reconstruction)
    return len(passes), len(repeated)


def _assumed(rates: Rates, parts: tuple[TaskEstimate, ...]) -> list[str]:
    found = [
        f"{rates.flops:.2g} operations of matrix products and {rates.bandwidth:.2g} bytes read in a second, "
        f"{rates.source}. Give what a machine reaches, not its peak.",
        "Answers are as long as they may be, and every token that is fed alone reads the whole uncompressed cache.",
        "Not counted: what methods compute and copy, attention that is slower than products, loading, the host.",
        "A prompt counts once for all plans that can share it, as does its repetition for plans that read it twice. "
        "Records of an earlier run are not taken off.",
    ]
    silent: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        if part.seconds is None:
            silent.setdefault((part.asked.partition("(")[0], part.why or ""), []).append(part.asked)
    for (kind, why), asked in silent.items():
        many = asked[0] if len(asked) == 1 else f"{len(asked)} tasks of {kind}, such as {asked[-1]}"
        found.append(f"Without an estimate: {many}: {why}")
    return found
