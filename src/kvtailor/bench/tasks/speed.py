"""Time to the first token and time per token, every plan in every round of one process.

A round gives each plan a new cache, a prefill (with all that compressing costs) up to the choice of the first token,
and then a fixed number of greedy tokens, one at a time; there is no end token. The order changes from round to round. A
sample during which other programs took processor time that it needed is counted and left out; where too few are left,
rounds are added, and where that does not help there is no time.

Timings: `ttft` (seconds to the first token of all rows), `tpot` (seconds per further step, which gives each row one
token). Values: `ttft`, `tpot` for each round in the order in which they ran, `disturbed` (1: left out of the timings);
on the CPU also `ttft_processor`, the seconds that all threads of this process ran for until the first token. Other
programs hardly touch those, so that small differences show on a busy machine too.

Metrics, None where a part is not known:
`tokens_per_second`: rows * tokens over time, of the steps after the first token alone;
`flops_prefill`, `flops_token`: operations of the model, for all rows of a prefill, and for one token of one row;
`flops_method_prefill`, `flops_method_token`: what the plan adds to each, see `bench.measure.flops`;
`achieved_gflops_prefill`, `achieved_gflops_token`: both together over the time that was measured, in 1e9 per second;
`floor_ttft_seconds`: the time below which no prefill can be: reading every weight once at `machine.read_bandwidth`, or
the model's own operations at `machine.matmul_flops`, whichever takes longer. A floor above a time that was measured is
none, and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import bytes_of, weigh
from kvtailor.bench.measure.statistics import timings_of
from kvtailor.bench.measure.turns import rounds_in_turns
from kvtailor.bench.tasks.contract import AllAtOnce, Demand, Sample, Scored, Turns, hash_of
from kvtailor.bench.tasks.settings import (
    BATCHES,
    CONTEXTS,
    NEW_TOKENS,
    ROUNDS,
    Column,
    Count,
    Metric,
    Option,
    Shown,
    Whole,
    setting,
)
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.measure.flops import CountedFlops
    from kvtailor.bench.measure.machine import Neighbours
    from kvtailor.bench.subject import Subject

__all__ = ["Speed"]


@dataclass
class _Samples:
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)
    weight: dict[str, Any] = field(default_factory=dict)
    bytes_read: int | None = None
    work: CountedFlops | None = None

    def clean(self, name: str) -> list[float]:
        return [x for x, bad in zip(getattr(self, name), self.disturbed, strict=True) if not bad]


@dataclass(frozen=True, kw_only=True)
class Speed(AllAtOnce):
    """Interleaved rounds over all plans and the model's own cache.

    Attributes:
        text: what the prompts' tokens come from. Each row has its own piece of it; where it is too short for that, the
            rows begin at different places of the repeated text: times do not depend on it.
        source: its name.
        context: tokens of the prompt.
        tokens: tokens decoded, the first included.
        batch: rows, of equal length.
        rounds: undisturbed samples wanted of each plan.
        warmup: rounds before the first that counts.
        patience: where samples are disturbed, rounds are added until there are so many times `rounds`.
        graphs: plans decode by CUDA graphs, and what recording them takes is in their times; the model's own cache
            decodes as ever.
    """

    name: ClassVar[str] = "speed"
    version: ClassVar[int] = 3
    order: ClassVar[int] = 4
    usual: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    of_cost: ClassVar[bool] = True
    own_cache: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="tokens_per_second", unit="tokens per second", higher_is_better=True),
        Metric(name="flops_prefill", unit="FLOP"),
        Metric(name="flops_token", unit="FLOP"),
        Metric(name="flops_method_prefill", unit="FLOP", higher_is_better=False),
        Metric(name="flops_method_token", unit="FLOP", higher_is_better=False),
        Metric(name="achieved_gflops_prefill", unit="GFLOP per second", higher_is_better=True),
        Metric(name="achieved_gflops_token", unit="GFLOP per second", higher_is_better=True),
        Metric(name="floor_ttft_seconds", unit="seconds"),
    )
    shown: ClassVar[Shown] = Shown(
        first=(
            Column("TTFT over full", "ttft_over_full", 3),
            Column("TPOT over full", "tpot_over_full", 3),
            Column("tokens/s", "tokens_per_second", 1),
            Column("tokens/s per GiB", "tokens_per_second_per_gib", 0),
        ),
        terminal=(
            Column("TTFT", "ttft_over_full", 2, unit="×"),
            Column("TPOT", "tpot_over_full", 2, unit="×"),
            Column("tokens/s", "tokens_per_second"),
            Column("per GiB", "tokens_per_second_per_gib"),
            Column("ms/token", "tpot_median", form="time and floor", beside="floor_seconds"),
            Column("FLOP/token", "flops_token", form="operations"),
            Column("of method", "flops_method_token", form="operations"),
            Column("GFLOP/s", "achieved_gflops_token"),
        ),
        title="Cost",
        note=(
            "Medians with quartiles. Floor of TPOT: weights and cache read once at the bandwidth that this "
            "machine reached; of TTFT: that of the weights, or the operations at the rate it reached, "
            "whichever is longer. Operations are counted by arithmetic, the method's own apart; GFLOP/s are "
            "of both together. Tokens/s per GiB: of all rows, over what their caches hold, as a memory that "
            "is full of such caches would give."
        ),
        own=(
            Column("bytes held", "bytes_held", form="bytes"),
            Column("TTFT, ms", "ttft", form="time"),
            Column("floor of TTFT, ms", "floor_ttft_seconds", form="floor", beside="ttft_median"),
            Column("TPOT, ms", "tpot", form="time"),
            Column("floor of TPOT, ms", "floor_seconds", form="floor", beside="tpot_median"),
            Column("tokens/s", "tokens_per_second"),
            Column("tokens/s per GiB", "tokens_per_second_per_gib"),
            Column("prefill", "flops_prefill", form="flop"),
            Column("prefill, method", "flops_method_prefill", form="flop"),
            Column("prefill, GFLOP/s", "achieved_gflops_prefill"),
            Column("token", "flops_token", form="flop"),
            Column("token, method", "flops_method_token", form="flop"),
            Column("token, GFLOP/s", "achieved_gflops_token"),
        ),
    )
    values: ClassVar[tuple[str, ...]] = ("ttft", "tpot", "ttft_processor")
    timings: ClassVar[tuple[str, ...]] = ("ttft", "tpot")
    text: str
    source: str
    context: Count = setting(512, option=CONTEXTS, each=True, counts_tokens=True)
    batch: Count = setting(1, option=BATCHES, each=True)
    tokens: Annotated[int, Ge(2)] = setting(32, option=NEW_TOKENS, each=True, counts_tokens=True)
    rounds: Count = setting(10, option=ROUNDS)
    warmup: Whole = setting(3)
    patience: Count = setting(2)
    graphs: bool = setting(
        False,
        option=Option(flag="--graphs", help="Plans decode by CUDA graphs in speed, which they must allow."),
    )

    def steps(self) -> int:
        return self.patience * self.rounds + self.warmup + 1

    def demand(self) -> Demand:
        rounds = self.rounds + self.warmup + 1
        return Demand(prompts={self.context: rounds * self.batch}, decoded=rounds * (self.tokens - 1))

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        prompt = self._prompt(subject)
        names = ("context", "tokens", "batch", "rounds", "warmup")
        point: dict[str, object] = {name: getattr(self, name) for name in names}
        if self.graphs:
            point["graphs"] = True
        yield Sample(point=point, text=self.source, text_hash=hash_of(prompt), steps=self.steps(), data=prompt)

    def score_all(
        self, subject: Subject, contestants: Sequence[Contestant], sample: Sample, turns: Turns
    ) -> Mapping[str, Scored]:
        from kvtailor.bench.measure.flops import count
        from kvtailor.bench.measure.machine import Neighbours

        prompt = sample.data
        samples = {contestant.hash: _Samples() for contestant in contestants}
        meter = Neighbours()

        def enough(contestant: Contestant) -> bool:
            return not turns.live(contestant) or len(samples[contestant.hash].clean("tpot")) >= self.rounds

        for index, contestant in rounds_in_turns(
            contestants, self.rounds, warmup=self.warmup, patience=self.patience, enough=enough
        ):
            with turns(contestant) as going:
                if going:
                    self._sample(subject, contestant, prompt, meter, samples[contestant.hash], counts=index >= 0)
        found = {}
        for contestant in contestants:
            with turns(contestant) as going:
                if going:
                    mine = samples[contestant.hash]
                    mine.work = count(subject, contestant, prompt, self.tokens)
                    found[contestant.hash] = mine
        return {plan: self._scored(subject, mine, turns.machine, meter) for plan, mine in found.items()}

    def _prompt(self, subject: Subject) -> Tensor:
        import torch

        if subject.positions is not None and self.context + self.tokens > subject.positions:
            raise KvtailorError(
                f"asked for {self.context} + {self.tokens} tokens, but {subject.name} has {subject.positions} "
                "positions: ask for a "
                "shorter --context"
            )
        start, ids = subject.start(), subject.tokens(self.text).ids
        if not ids.numel():
            raise KvtailorError(f"asked for a prompt from {self.source}, which is empty: give a text")
        rest = max(0, self.context - start.numel())
        enough = ids.numel() >= self.batch * rest
        step = rest if enough else max(1, ids.numel() // self.batch)
        at = (torch.arange(self.batch)[:, None] * step + torch.arange(rest)) % ids.numel()
        return torch.cat([start.expand(self.batch, -1), ids[at]], 1)[:, : self.context]

    def _sample(
        self,
        subject: Subject,
        contestant: Contestant,
        prompt: Tensor,
        meter: Neighbours,
        found: _Samples,
        *,
        counts: bool,
    ) -> None:
        cache = subject.new_cache(contestant)
        subject.wait()
        meter.start()
        begin, ran = time.perf_counter(), time.process_time()
        logits, cache = subject.prefill(prompt, cache, last_only=True)
        token = logits[:, -1:].argmax(-1)
        subject.wait()
        first, ran = time.perf_counter(), time.process_time() - ran
        cache = subject.decode(token, cache, self.tokens - 1, graphs=self.graphs and not contestant.is_own)
        last = time.perf_counter()
        if counts:
            found.ttft.append(first - begin)
            found.tpot.append((last - first) / (self.tokens - 1))
            if subject.device.type == "cpu":
                found.processor.append(ran)
            found.disturbed.append(meter.disturbed())
            found.weight, found.bytes_read = weigh(cache), bytes_of(cache)
            read, held = found.weight.get("tokens_read"), found.weight.get("tokens_held")
            if read and held and found.bytes_read is not None:
                # A floor must not count bytes that are not read; the work of choosing the tokens is left out.
                found.bytes_read = int(found.bytes_read * min(1.0, read / held))

    def _scored(self, subject: Subject, found: _Samples, machine: Mapping[str, object], meter: Neighbours) -> Scored:
        notes = meter.notes()
        if machine.get("probes_disturbed"):
            notes.append("Other programs ran while bandwidth and arithmetic were measured: the floors may be too high.")
        floors = {
            "tpot": _floor_of_token(subject, machine, found.bytes_read),
            "ttft": _floor_of_prefill(subject, machine, found.work),
        }
        timings = timings_of({"ttft": found.ttft, "tpot": found.tpot}, found.disturbed, self.rounds)
        for name, floor in floors.items():
            if floor is not None and found.clean(name) and floor > min(found.clean(name)):
                floors[name] = None
                notes.append(f"No floor of {name.upper()}: this run was faster than what the machine was measured at.")
        return Scored(
            samples=found.disturbed.count(False),
            values={
                "ttft": tuple(found.ttft),
                "tpot": tuple(found.tpot),
                "disturbed": tuple(map(float, found.disturbed)),
                **({"ttft_processor": tuple(found.processor)} if found.processor else {}),
            },
            metrics={**self._metrics(found.work, timings), "floor_ttft_seconds": floors["ttft"]},
            timings=timings,
            floor_seconds=floors["tpot"],
            notes=notes,
            held=found.weight,
        )

    def _metrics(
        self, work: CountedFlops | None, timings: Mapping[str, Mapping[str, float | None]]
    ) -> dict[str, float | None]:
        ttft, tpot = (timings.get(name, {}).get("median") for name in ("ttft", "tpot"))
        found: dict[str, float | None] = {"tokens_per_second": self.batch / tpot if tpot else None}
        for name in ("prefill", "token", "method_prefill", "method_token"):
            found[f"flops_{name}"] = None if work is None else getattr(work, name)
        for name, seconds, times in (("prefill", ttft, 1), ("token", tpot, self.batch)):
            own, added = found[f"flops_{name}"], found[f"flops_method_{name}"]
            rate = None
            if own is not None and added is not None and seconds:
                rate = times * (own + added) / seconds / 1e9
            found[f"achieved_gflops_{name}"] = rate
        return found


def _floor_of_prefill(subject: Subject, machine: Mapping[str, object], work: CountedFlops | None) -> float | None:
    bandwidth, peak = (machine.get(name) for name in ("read_bandwidth", "matmul_flops"))
    weights = subject.weights()
    if not isinstance(bandwidth, float) or not isinstance(peak, float) or weights is None or work is None:
        return None
    return max(weights[2] / bandwidth, work.prefill / peak)


def _floor_of_token(subject: Subject, machine: Mapping[str, object], cache: int | None) -> float | None:
    bandwidth, weights = machine.get("read_bandwidth"), subject.weights()
    if not isinstance(bandwidth, float) or weights is None or cache is None:
        return None
    return (weights[2] + cache) / bandwidth
