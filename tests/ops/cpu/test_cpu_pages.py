"""Bounds of pages, and attention over chosen pages where they lie, on every variant against plain forms."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.coded_layouts import COARSE, every_dtype, every_variant, needs_built, states_of
from tests.ops.cpu.coded_truth import same, truth

from kvtailor.ops.attention.cpu import attention
from kvtailor.ops.attention.cpu.choose import attend_pages, page_bounds, unsuited_pages
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole

pytestmark = needs_built
# Lanes 1 and 2 are of owner 1. Of 63 slots the last page of 4 has three. Pages are adjacent or not; one lane has none.
PAGES = torch.tensor([[15, 0, 1, 2], [7, -1, 8, -1], [9, 3, -1, 15], [-1, -1, -1, -1], [5, 4, 6, 14]])
OWNER = torch.tensor([0, 1, 1, 2, 4])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(attention.torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))


@every_variant
@every_dtype
@pytest.mark.parametrize("size", [64, 24])
@pytest.mark.parametrize("seen", [1.0, 0.6])
def test_only_the_named_pages_are_read(library: Library, dtype: torch.dtype, size: int, seen: float) -> None:
    state = torch.Generator().manual_seed(size)
    named = torch.zeros((5, 64), dtype=torch.bool)
    for lane, pages in enumerate(PAGES.tolist()):
        for page in filter(lambda each: each >= 0, pages):
            named[lane, 4 * page : 4 * page + 4] = True
    named = named[:, :63]
    # Slots of a longer buffer: lanes lie 70 slots apart.
    buffers = states_of(1, dtype, 5, 70, size)
    keys, values = (buffer[:, :63].masked_fill_(~named[..., None], torch.nan) for buffer in buffers)
    query = torch.randn((5, 3, 1, size), generator=state)
    visible = torch.rand((5, 1, 63), generator=state) < seen if seen < 1 else None
    sides = Whole(states=keys), Whole(states=values)
    assert unsuited_pages(*sides) is None
    found = attend_pages(
        AttentionInputs(query, *sides, scaling=0.1, owner=OWNER, visible=visible), PAGES, 4, using=library
    )
    sees = named if visible is None else named & visible[:, 0]
    for owner in range(5):
        lanes = owner == OWNER
        k, v = (Whole(states=side[lanes].nan_to_num().reshape(1, -1, size)) for side in (keys, values))
        mine = slice(owner, owner + 1)
        if not lanes.any():
            assert (found[1][mine] == -torch.inf).all() and not found[0][mine].any()
            continue
        expected = truth(query[mine], k, v, sees[lanes].reshape(1, 1, -1))
        assert same((found[0][mine], found[1][mine]), expected, COARSE if dtype != torch.float32 else 1e-5)


@every_variant
def test_pages_that_follow_each_other_fill_blocks(library: Library) -> None:
    """Every page of 600 slots, of which a block takes 256, is what no choice of pages reads."""
    keys, values = (Whole(states=each) for each in states_of(3, torch.bfloat16, 2, 600, 32))
    query = torch.randn(2, 4, 1, 32)
    pages = torch.stack([torch.randperm(38) for _ in range(2)])
    found = attend_pages(AttentionInputs(query, keys, values, scaling=0.1), pages, 16, using=library)
    assert same(found, truth(query, keys, values), COARSE)


@every_variant
@every_dtype
@pytest.mark.parametrize(("group", "pages", "size"), [(1, 63, 64), (4, 300, 128), (7, 1, 24)])
def test_bounds_are_the_greatest_products(
    library: Library, dtype: torch.dtype, group: int, pages: int, size: int
) -> None:
    one, other = states_of(2, dtype, 3, pages, size)
    low, high, owner = torch.minimum(one, other), torch.maximum(one, other), torch.tensor([0, 0, 1])
    query = torch.randn((2, group, size), generator=torch.Generator().manual_seed(4))
    found = page_bounds(query, low, high, owner, using=library)
    rows = query[owner].double()[:, :, None]
    products = torch.maximum(rows * low[:, None].double(), rows * high[:, None].double()).sum(-1)
    assert torch.allclose(found.double(), products.amax(1), rtol=1e-5, atol=1e-4)
    query[1, -1, 0] = torch.nan
    broken = page_bounds(query, low, high, owner, using=library)
    assert torch.equal(broken[:2], found[:2]) and broken[2].isnan().all()


def test_what_cannot_be_read_in_place_is_said() -> None:
    whole = Whole(states=torch.zeros(2, 8, 16))
    turned = Whole(states=torch.zeros(2, 16, 8).transpose(1, 2))
    assert "C++ kernels read" in str(unsuited_pages(whole, turned))
    longer = Whole(states=torch.zeros(2, 9, 16)[:, :8])
    assert "whole number of slots" in str(unsuited_pages(whole, longer))
