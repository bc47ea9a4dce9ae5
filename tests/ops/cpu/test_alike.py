"""The newest vector that is like another, by the C++ kernel, against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.cpu.library import Library, built, load
from kvtailor.ops.lanes.alike_cpu import ALIKE_VARIANTS, newest_alike

_LOADED = [each for each in map(load, built().values()) if each is not None]
_SUITED = [each for each in _LOADED if each.variant in ALIKE_VARIANTS]
pytestmark = [
    pytest.mark.skipif(not _SUITED, reason="no variant that has this kernel was built or runs here"),
    pytest.mark.usefixtures("poisoned"),
]
every_suited = pytest.mark.parametrize("library", _SUITED, ids=lambda each: each.variant)


def checked(found: Tensor, vectors: Tensor, rows: Tensor, columns: Tensor, above: float, newer: bool) -> int:
    """Hold each answer to products in float64, and return how many rows have one."""
    products = vectors.double() @ vectors.double().T
    answered = 0
    for i, row in enumerate(rows.tolist()):
        others = [each for each in columns.tolist() if (each > row if newer else each < row)]
        # What is as near as rounding may or may not count.
        sure, perhaps = ([each + 1 for each in others if products[row, each] > above + by] for by in (1e-5, -1e-5))
        mine = int(found[i])
        assert max(sure, default=0) <= mine <= max(perhaps, default=0)
        assert mine == 0 or mine in perhaps
        answered += mine > 0
    return answered


@every_suited
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_size_against_a_loop(library: Library, data: st.DataObject) -> None:
    count, size = data.draw(st.integers(1, 130)), data.draw(st.integers(1, 40))
    above, newer = data.draw(st.sampled_from([-0.3, 0.0, 0.5, 0.95])), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    vectors = torch.randn((count, size), generator=generator)
    vectors += 2 * torch.randn(size, generator=generator) * (torch.rand((count, 1), generator=generator) < 0.5)
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    rows, columns = (
        (torch.rand(count, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))).nonzero()[:, 0]
        for _ in range(2)
    )
    # What is neither row nor column is read by nothing.
    used = torch.cat([rows, columns])
    poisoned = torch.full_like(vectors, torch.nan)
    poisoned[used] = vectors[used]
    found = newest_alike(poisoned, rows, columns, above, newer=newer, using=library)
    checked(found, vectors, rows, columns, above, newer)


@every_suited
@pytest.mark.parametrize("newer", [True, False])
def test_many_bands_and_threads(library: Library, newer: bool, threads: int) -> None:
    generator = torch.Generator().manual_seed(9)
    vectors = torch.nn.functional.normalize(torch.randn((1003, 24), generator=generator), dim=-1)
    slots = torch.arange(1003)
    found = newest_alike(vectors, slots, slots[::3], 0.5, newer=newer, using=library)
    # Some have an answer and some have none, or nothing would be shown.
    assert 200 < checked(found, vectors, slots, slots[::3], 0.5, newer) < 900


def test_it_is_taken_where_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    directions = torch.zeros(3, 4)
    for each in _LOADED:
        monkeypatch.setattr(dispatch, "library", lambda each=each: each)
        assert (dispatch.newest_alike(directions) is None) is (each not in _SUITED)
    monkeypatch.setattr(dispatch, "library", lambda: _SUITED[0])
    assert dispatch.newest_alike(directions.double()) is None
    with dispatch.using("reference"):
        assert dispatch.newest_alike(directions) is None
