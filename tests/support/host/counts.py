"""What the host does for one decoded token of a plan, counted: Python functions of kvtailor, and torch operations.

Times differ from run to run and from machine to machine, and counts do not: they are held by a table, where times can
only be looked at. Models of two depths tell what a layer takes from what a token takes beside its layers.

    python -m tests.support.host.counts

writes the table anew, with what is counted now.
"""

from __future__ import annotations

import statistics
import sys
import tomllib
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.host.calls import count_calls
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.micro import host
from benchmarks.micro.timer import Side
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.ops.dispatch import using

__all__ = [
    "DEPTHS",
    "TABLE",
    "HostCounts",
    "count_operations",
    "counted",
    "difference",
    "line",
    "most_called",
    "plans",
    "sides",
    "written",
]

TABLE = Path(__file__).parents[2] / "seam" / "host" / "host_counts.toml"
# Twice as many layers; half of four is a pair, which MiniCache needs.
DEPTHS = (4, 8)
# Tokens before those that count, beside the first after the prompt; and those, whose median is the count. At most of
# them no plan evicts or encodes, unless it does so at every token.
_WARMUP, _TOKENS = 1, 3
_HEAD = """\
# What the host does for one decoded token of each plan of `python -m benchmarks.micro host`, at most:
#
#   calls       Python functions of kvtailor that are called
#   operations  torch operations, above those of the same model on transformers' DynamicCache with sdpa
#   layer       for each layer: what a model of {more} layers takes more than one of {few}, divided by {few}
#   token       the rest of a token's; of plans that treat some layers in another way, what these take more, too
#
# Held by tests/seam/host/test_host_counts.py. Written by `python -m tests.support.host.counts`, which belongs into each
# commit that lowers a count. Where one has to rise, the commit has the reason.
"""


@dataclass(frozen=True, kw_only=True)
class HostCounts:
    """Counts of one decoded token; see the head of the table."""

    calls_layer: float
    calls_token: float
    operations_layer: float
    operations_token: float


class count_operations(TorchDispatchMode):  # noqa: N801 - used as a context manager, like a function
    """Within it, every operation that reaches torch's kernels is counted: views too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func] += 1
        return func(*args, **(kwargs or {}))


@cache
def sides(layers: int) -> dict[str, Side]:
    """The base and all plans of the bench on a model of so many layers, after the prompt, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RANDOM_SHAPES, "counted", {**RANDOM_SHAPES[host.MODEL], "num_hidden_layers": layers})
        ready = host.prepared(plans(), torch.device("cpu"), "counted")
    assert not ready.refused, ready.refused
    return {side.name: side for side in ready.sides}


def plans() -> tuple[str, ...]:
    """What is counted: every preset, and what the bench times beside them."""
    return tuple(dict.fromkeys(host.plans()))


@torch.no_grad()
def _of_token(side: Side) -> tuple[Counter[str], Counter[str]]:
    """Calls and operations of one more token, by name."""
    with count_operations() as operations, count_calls() as calls:
        side.run(0)
    return calls, Counter({str(function): count for function, count in operations.found.items()})


@torch.no_grad()
def _totals(plan: str) -> dict[int, tuple[float, float]]:
    """By depth the calls and operations of a token: medians."""
    found = {}
    with using("auto"):
        for layers in DEPTHS:
            side = sides(layers)[plan]
            for _ in range(_WARMUP):
                side.run(0)
            tokens = [_of_token(side) for _ in range(_TOKENS)]
            found[layers] = (
                statistics.median(calls.total() for calls, _ in tokens),
                statistics.median(operations.total() for _, operations in tokens),
            )
    return found


@cache
def _base() -> dict[int, tuple[float, float]]:
    return _totals(host.BASE)


def counted(plan: str) -> HostCounts:
    """The counts of a plan, with the forms that this machine runs by itself."""
    (few, small), (more, large) = _totals(plan).items()
    calls_layer = (large[0] - small[0]) / (more - few)
    above = small[1] - _base()[few][1], large[1] - _base()[more][1]
    operations_layer = (above[1] - above[0]) / (more - few)
    return HostCounts(
        calls_layer=calls_layer,
        calls_token=small[0] - few * calls_layer,
        operations_layer=operations_layer,
        operations_token=above[0] - few * operations_layer,
    )


def most_called(plan: str, shown: int = 20) -> str:
    """The functions of kvtailor that a token calls most often, a line each; for the message of a failed test."""
    with using("auto"):
        calls, operations = _of_token(sides(DEPTHS[0])[plan])
    both = calls.most_common(shown) + operations.most_common(shown)
    return "\n".join(f"{count:6} {name}" for name, count in both)


def difference(found: HostCounts, most: HostCounts) -> tuple[list[str], list[str]]:
    """Names of counts above what the table allows, and of those that are more than a tenth below it."""
    pairs = {each.name: (getattr(found, each.name), getattr(most, each.name)) for each in fields(HostCounts)}
    above = [name for name, (now, then) in pairs.items() if now > then]
    below = [name for name, (now, then) in pairs.items() if then - now > 0.1 * abs(then)]
    return above, below


def written() -> dict[str, HostCounts]:
    """The table, by plan."""
    return {plan: HostCounts(**counts) for plan, counts in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


def line(plan: str, counts: HostCounts) -> str:
    """A line of the table."""
    return f'"{plan}" = {{ {", ".join(f"{name} = {value:g}" for name, value in asdict(counts).items())} }}'


def write() -> None:
    """Write the table anew."""
    warnings.simplefilter("ignore")
    lines = [line(plan, counted(plan)) for plan in plans()]
    TABLE.write_text("\n".join([_HEAD.format(few=DEPTHS[0], more=DEPTHS[1]), *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
    sys.stdout.write(f"{TABLE} is written anew\n")
