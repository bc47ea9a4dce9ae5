"""No method keeps an n x n matrix: one layer of 8,192 tokens is observed, scored, measured and merged in 32 MB.

The layer is one of Llama 3.1 8B in its own dtype: 8 kv heads of 128, 4 query heads each, bfloat16. Cheap, because bytes
are counted by `LiveBytes` (one run says them exactly, no process has to be started), because methods that need the same
share their inputs, and because attention with a mass is asked for the last 128 queries only: it works in blocks of
64, of which the last are the widest. Inputs do not count: keys, values, and the queries of the layer's own forward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from tests.support.attention_cases import request_of
from tests.support.discover import methods_of, samples_of
from tests.support.held_rows import Row, example_tensors, held_of, make_row
from tests.support.live_bytes import LiveBytes
from tests.support.segments_of import Padded
from torch import Tensor

import kvtailor.allocate
import kvtailor.merge
import kvtailor.score
from kvtailor.allocate.contract import Allocator
from kvtailor.attend.segments import Segments
from kvtailor.bench.measure.memory_gauge import gauge_of
from kvtailor.engine.observe import observe
from kvtailor.merge.contract import Merger
from kvtailor.ops.attention.prompt import with_mass
from kvtailor.plan.arguments import word_of
from kvtailor.score.contract import Scorer
from kvtailor.score.snapkv import SnapKV
from kvtailor.types import Held, Layout, Needs, PlainSegment, Rotation
from kvtailor.types.evidence import Evidence

LIMIT = 32e6
# Its blocks have a size of their own; all of it is 4 GB.
MASS_LIMIT = 48e6
TOKENS, HEADS, GROUP, SIZE = 8192, 8, 4, 128
LAST = 128
KINDS = [*methods_of(kvtailor.score, Scorer), *methods_of(kvtailor.allocate, Allocator)]
MERGERS = [each for kind in methods_of(kvtailor.merge, Merger) for each in samples_of(kind)]
METHODS = sorted((each for kind in KINDS for each in samples_of(kind)), key=lambda method: repr(method.needs))
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: str(word_of(method)))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The gigabyte of inputs goes when these tests have run."""
    yield
    row.cache_clear()
    held_for.cache_clear()


@cache
def row() -> Row:
    return make_row(TOKENS, heads=HEADS, group=GROUP, size=SIZE, generator=torch.Generator().manual_seed(0))


@lru_cache(maxsize=1)
def held_for(needs: Needs) -> Held:
    held = held_of([row()], needs, dtype=torch.bfloat16)
    # The other tests' values are one channel longer than keys, which no model's are.
    output = None if held.output is None else held.output[:, :SIZE].contiguous()
    return replace(held, values=held.values[..., :SIZE].contiguous(), output=output)


@torch.inference_mode()
def peak_of(work: Callable[[], object]) -> int:
    """Most bytes that it made and held at once, what it gives back included."""
    with LiveBytes() as count:
        work()
    return count.peak


@every_method
def test_scoring_or_measuring_a_layer(method: Scorer | Allocator) -> None:
    tensors = example_tensors(method, layers=3, heads=HEADS, group=GROUP, size=SIZE)
    held = replace(held_for(method.needs), calibration={name: tensor[1] for name, tensor in tensors.items()} or None)
    peak = peak_of(lambda: method.score(held) if isinstance(method, Scorer) else method.measure(held))
    assert peak < LIMIT, f"{method} makes {peak / 1e6:.0f} MB beside what it is given: work in blocks"
    assert peak > 0 or isinstance(method, Allocator)


@pytest.mark.parametrize("merger", MERGERS, ids=lambda merger: str(word_of(merger)))
def test_folding_three_quarters_of_a_layer_into_the_rest(merger: Merger) -> None:
    held = held_for(merger.needs)
    keep = torch.rand(held.valid.shape, generator=torch.Generator().manual_seed(1)) < 0.25
    peak = peak_of(lambda: merger.merge(held, keep, keep))
    # A fit to many queries has a matrix of a head's kept tokens by queries, and systems of queries by queries.
    limit = MASS_LIMIT if type(merger).__name__ == "Matching" else LIMIT
    assert peak < limit, f"{merger} makes {peak / 1e6:.0f} MB beside what it is given: work in blocks"


@every_method
def test_gathering_its_evidence(method: Scorer | Allocator) -> None:
    peak = gathering(method.needs)
    assert peak < (MASS_LIMIT if method.needs.mass else LIMIT), f"the evidence of {method} takes {peak / 1e6:.0f} MB"


@cache
def gathering(needs: Needs) -> int:
    """Peak of `observe` over a whole prompt at once, and of the attention that a mass comes from."""
    queries = row().queries[None].to(torch.bfloat16)
    rotation = Rotation(frequencies=torch.rand(SIZE // 2))
    rest = replace(needs, mass=False)
    peak = peak_of(lambda: observe(rest, Evidence(), queries, 0, None, rotation=rotation))
    return max(peak, with_a_mass(torch.bfloat16)) if needs.mass else peak


@pytest.mark.parametrize("padding", [0, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_mass_of_every_dtype_and_of_padded_rows(dtype: torch.dtype, padding: int) -> None:
    assert with_a_mass(dtype, padding) < MASS_LIMIT


@pytest.mark.long
def test_a_mass_of_all_queries_takes_what_that_of_the_last_takes() -> None:
    """Half a minute: what the tests above leave out to be cheap."""
    keys, values, queries = (each[None, ..., :SIZE] for each in (row().keys, row().values, row().queries))
    few, all_of_them = queries[:, :, -LAST:], torch.ones(1, TOKENS)
    last = peak_of(lambda: with_mass(few, keys, values, 0.1, all_of_them[:, -LAST:], None)) - few.nbytes
    every = peak_of(lambda: with_mass(queries, keys, values, 0.1, all_of_them, None)) - queries.nbytes
    assert every == pytest.approx(last, rel=0.01)


def with_a_mass(dtype: torch.dtype, padding: int = 0) -> int:
    keys, values = (each[None, ..., :SIZE].to(dtype).contiguous() for each in (row().keys, row().values))
    queries = row().queries[None, :, -LAST:].to(dtype)
    real = torch.arange(TOKENS)[None] >= padding
    part = PlainSegment(layout=Layout(rows=1, heads=HEADS, size=TOKENS, start=0), keys=keys[0], values=values[0])
    visible = Padded(new_tokens=LAST, first_column=TOKENS - LAST, real=real if padding else None)
    return peak_of(lambda: Segments().attend(request_of(queries, [part], visible, 0.1, want_mass=True)))


@dataclass(frozen=True, kw_only=True)
class Square(Scorer):
    """What must not be: which token sees which, for all pairs of them."""

    def score(self, held: Held) -> Tensor:
        columns = held.positions[0, 0]
        return (columns[:, None] >= columns).any(0).float().expand(held.positions.shape)


@dataclass(frozen=True, kw_only=True)
class Copying(Scorer):
    """What must not be: all keys, widened at once."""

    def score(self, held: Held) -> Tensor:
        return (held.keys.float() * 2.0).norm(dim=-1)


@pytest.mark.parametrize("bad", [Square(), Copying()], ids=lambda bad: type(bad).__name__)
def test_a_bad_scorer_is_caught(bad: Scorer) -> None:
    assert peak_of(lambda: bad.score(held_for(Needs()))) > LIMIT


def test_views_and_what_was_there_before_count_for_nothing() -> None:
    before = torch.ones(1000)
    with LiveBytes() as count:
        view = before.view(10, 100).t()[2:]
        before.mul_(2)
        assert count.peak == 0
        made = view + 1
        size = made.nbytes
        assert count.now == size
        part = made[1:]
        del made
        view.sum()
        assert count.now == size + 4, "a view keeps the whole storage"
        del part
        torch.zeros(10, out=torch.empty(10))
        assert count.now == 40 and count.peak == size + 4


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are read from /proc")
def test_the_count_is_what_the_kernel_says() -> None:
    """VmHWM of a process that does the same: inside of an operation hides no more than a copy of one operand."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    code = "from tests.contract.test_evidence_memory import say; say()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == 4
    for name, (counted, resident) in said.items():
        assert resident == pytest.approx(counted, rel=0.1, abs=10e6), name


def say() -> None:
    """Of some works, the peak that is counted and that which the kernel saw."""
    gauge = gauge_of(torch.device("cpu"))
    held = held_for(SnapKV().needs)
    found = {}
    keys, values, queries = (each[None, ..., :SIZE] for each in (row().keys, row().values, row().queries))
    last, weight = queries[:, :, -LAST:], torch.ones(1, LAST)
    works: dict[str, Callable[[], object]] = {
        "SnapKV": lambda: SnapKV().score(held),
        "Square": lambda: Square().score(held),
        "Copying": lambda: Copying().score(held),
        "an attention with its mass": lambda: with_mass(last, keys, values, 0.1, weight, None),
    }
    for name, work in works.items():
        counted = peak_of(work)
        before = gauge.now()
        gauge.reset()
        with torch.inference_mode():
            work()
        found[name] = counted, gauge.highest() - before
    print(json.dumps(found))
