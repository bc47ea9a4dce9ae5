"""The one timer of everything that is timed against something else.

Machines drift: a processor warms up, another program comes and goes. So times are only compared when they were taken in
turns, in one process: a round gives each side one sample, and the first of a round is another side each time. The first
rounds warm up and do not count. A sample during which other programs took processor time that it needed is left out and
counted (`bench.measure.machine.Neighbours`). What is reported is the median with its quartiles.

Where a side works on several layers, those are rotated over, so that no layer is still in a cache of the processor when
its turn comes again. On a CPU a sample is one layer, the next one in each round. On a GPU a sample goes over all
layers, so that asking for it takes little of the time, and is divided by their number; the device is waited for before
the clock starts and before it stops. A side that can be recorded is one CUDA graph between two events, in which the
host has no part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvtailor.bench.measure.machine import Neighbours
from kvtailor.bench.measure.turns import rounds_in_turns

__all__ = ["CPU", "Measured", "Side", "time_in_turns"]

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the things that are timed against each other.

    Attributes:
        name: as tables show it.
        run: does it once, on the layer of this number; what has one layer ignores the number.
        recorded: on a GPU a CUDA graph can hold it: it launches on fixed addresses and never waits for the device.
        bytes_read: bytes that one run cannot do without reading; None where they were not counted.
        cache_bytes: what the side's cache holds; None where it was not read.
    """

    name: str
    run: Callable[[int], object]
    recorded: bool = False
    bytes_read: int | None = None
    cache_bytes: int | None = None


@dataclass
class Measured:
    """Times of one side.

    Attributes:
        name: of the side.
        seconds: undisturbed samples of one layer, in the order of the rounds.
        disturbed: samples that were left out.
        bytes_read, cache_bytes: of the side.
        peak_bytes: most memory that a run took above what there was before it; None where it was not measured.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    disturbed: int = 0
    bytes_read: int | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None


def time_in_turns(
    sides: Sequence[Side],
    rounds: int,
    *,
    warmup: int = 2,
    layers: int = 1,
    device: torch.device = CPU,
    clock: Callable[[], float] | None = None,
    sweep: bool | None = None,
    pause: float = 0.0,
    before: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Measured]:
    """Return the times of each side, of one layer, in the order of the sides.

    Args:
        sides: what is timed.
        rounds: samples of each side that count.
        warmup: rounds before them.
        layers: layers that a side's `run` rotates over.
        device: where the work runs.
        clock: another clock than the wall's, such as `time.process_time`, which other programs hardly touch: with it no
            sample is left out.
        sweep: a sample goes over all layers; None: on anything but a CPU.
        pause: seconds to sleep before each sample. Threads of OpenMP wait for their next work in a loop, for some
            milliseconds, so where two libraries with threads of their own take turns, one would disturb the other.
        before: runs of the side itself right before each sample, not timed: a side that follows another one pays
            for the code and memory that this one has put into the processor's caches, and what is used alone does not.
        advance: called with a side's name after each sample.
    """
    sweep = device.type != "cpu" if sweep is None else sweep
    neighbours = Neighbours()
    found = [Measured(side.name, bytes_read=side.bytes_read, cache_bytes=side.cache_bytes) for side in sides]
    samplers = [_sampler(side, layers, device, clock or time.perf_counter, sweep=sweep) for side in sides]
    # A graph between two events is timed by the device, which other programs on the host do not slow down.
    by_device = [device.type == "cuda" and side.recorded and clock is None for side in sides]
    for round_, at in rounds_in_turns(range(len(sides)), rounds, warmup=warmup):
        if pause:
            time.sleep(pause)
        for _ in range(before):
            samplers[at](round_)
        neighbours.start()
        seconds = samplers[at](round_)
        disturbed = clock is None and not by_device[at] and neighbours.disturbed()
        if round_ >= 0 and disturbed:
            found[at].disturbed += 1
        elif round_ >= 0:
            found[at].seconds.append(seconds)
        advance(sides[at].name)
    return found


def _sampler(
    side: Side, layers: int, device: torch.device, clock: Callable[[], float], *, sweep: bool
) -> Callable[[int], float]:
    """What takes one sample in the round of a number: seconds of one layer."""

    def everything() -> None:
        for layer in range(layers):
            side.run(layer)

    def one_layer(round_: int) -> float:
        begin = clock()
        side.run(round_ % layers)
        return clock() - begin

    def all_layers(round_: int) -> float:
        _wait(device)
        begin = clock()
        everything()
        _wait(device)
        return (clock() - begin) / layers

    if not sweep:
        return one_layer
    if device.type != "cuda" or not side.recorded:
        return all_layers

    from kvtailor.hf.graphs.replay import captured

    # What a graph records must have run before, which compiles what it launches.
    everything()
    _wait(device)
    replay = captured(everything)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replayed(round_: int) -> float:
        first.record()
        replay()
        last.record()
        _wait(device)
        # Events count milliseconds.
        return float(first.elapsed_time(last)) / 1e3 / layers

    return replayed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
