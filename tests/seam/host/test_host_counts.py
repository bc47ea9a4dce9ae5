"""What the host does for a decoded token does not rise: `host_counts.toml` has the ceilings of every plan."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from benchmarks.micro.host import BASE
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.ops.cpu.library import library, why_none
from kvtailor.plan import registry
from tests.support.host.calls import count_calls
from tests.support.host.counts import (
    DEPTHS,
    HostCounts,
    count_operations,
    counted,
    difference,
    line,
    most_called,
    plans,
    sides,
    written,
)

HOW = "run `python -m tests.support.host.counts` and commit tests/seam/host/host_counts.toml with the change"


@pytest.fixture(autouse=True)
def _kernels() -> None:
    """The table is of the forms that run where the package was built; torch's own take other steps."""
    if library() is None:
        pytest.skip(f"the counts are those with the C++ kernels, which are not here: {why_none()}")
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text(encoding="utf-8")
    for name in ("torch", "transformers"):
        pinned, here = re.search(rf"^{name}==(\S+)", pins, re.MULTILINE), version(name).partition("+")[0]
        assert pinned is not None
        if here != pinned[1]:
            pytest.skip(
                f"the counts are those of {name} {pinned[1]}, whose own operations are taken off; here is {here}"
            )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", plans())
def test_no_count_rises(plan: str) -> None:
    found, most = counted(plan), written()[plan]
    above, below = difference(found, most)
    assert not above, (
        f"{plan}: {', '.join(above)} above the table.\n  now    {line(plan, found)}\n  table  {line(plan, most)}\n"
        f"Take out what is new; where it has to be, {HOW}. Most often, in a token of the smaller model:\n"
        f"{most_called(plan)}"
    )
    if below:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"{plan}: {', '.join(below)} fell by more than a tenth: {HOW}", stacklevel=1)


def test_every_preset_has_a_line_and_nothing_else_has() -> None:
    assert list(written()) == list(plans()), HOW
    assert set(registry.presets()) <= {plan.partition(" @")[0] for plan in plans()}


def test_the_base_calls_nothing_of_ours() -> None:
    side = sides(DEPTHS[0])[BASE]
    with torch.no_grad(), count_operations() as operations, count_calls() as calls:
        side.run(0)
    # Each layer has two projections more than attention and a feed-forward have products, so many operations at least.
    assert not calls and operations.found.total() > 9 * DEPTHS[0]


@pytest.mark.filterwarnings("ignore")
def test_one_more_call_and_operation_of_a_layer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, update = counted("full"), CompressedLayer.update

    def slower(self: CompressedLayer, keys: torch.Tensor, *more: Any, **named: Any) -> Any:
        keys.neg()
        return update(self, keys, *more, **named)

    # A function belongs to the module that its globals name.
    slower = FunctionType(slower.__code__, {"__name__": "kvtailor.made_up"}, "slower", None, slower.__closure__)
    monkeypatch.setattr(CompressedLayer, "update", slower)
    after = counted("full")
    assert after == replace(before, calls_layer=before.calls_layer + 1, operations_layer=before.operations_layer + 1)
    above, below = difference(after, before)
    assert above == ["calls_layer", "operations_layer"] and not below


def test_what_is_above_and_what_fell_by_a_tenth() -> None:
    most = HostCounts(calls_layer=100, calls_token=0, operations_layer=10, operations_token=-20)
    assert difference(most, most) == ([], [])
    assert difference(replace(most, calls_layer=90, operations_layer=9), most) == ([], [])
    assert difference(replace(most, calls_layer=89.5, calls_token=-1), most) == ([], ["calls_layer", "calls_token"])
    assert difference(replace(most, calls_token=0.25, operations_token=-19), most)[0] == [
        "calls_token",
        "operations_token",
    ]
    assert difference(replace(most, operations_token=-23), most)[1] == ["operations_token"]


SOURCE = """
from contextlib import contextmanager
from dataclasses import dataclass

@dataclass(frozen=True)
class Pair:
    first: int
    second: object = None
    @property
    def twice(self):
        return 2 * self.first

def numbers():
    yield 1
    yield 2

@contextmanager
def entered():
    yield

def everything():
    pair = Pair(3, Pair(4))
    assert pair == Pair(3, Pair(4)) and pair.twice == 6
    list(numbers())
    [str(n) for n in range(3)], {n for n in range(3)}, {n: n for n in range(3)}, sum(n for n in range(3))
    (lambda: 1)()
    with entered():
        pass
    len(sorted([3, 1], key=lambda n: -n))
"""


def test_the_same_calls_on_every_python() -> None:
    """What this file counts here was counted on Python 3.11.7, 3.12.1 and 3.13.0."""
    module = ModuleType("made_up.inside")
    sys.modules[module.__name__] = module
    try:
        exec(compile(SOURCE, "inside.py", "exec"), module.__dict__)
        with count_calls("made_up") as calls:
            module.everything()
            Counter([1, 1])
    finally:
        del sys.modules[module.__name__]
    names = {name.partition(":")[2].rpartition(".")[2]: count for name, count in calls.items()}
    assert names == {"everything": 1, "__init__": 4, "twice": 1, "numbers": 1, "entered": 1}
