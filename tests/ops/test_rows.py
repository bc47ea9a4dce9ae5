"""What each owner holds as one run of tokens: the quick form of whole lanes, and slots that are copied as rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtailor.ops.lanes.rows import gather, rows_of
from kvtailor.types import Layout, PlainSegment

ROWS, HEADS = 2, 3
CPU = torch.device("cpu")


def part(layout: Layout, spacing: int, seed: int) -> PlainSegment:
    """States of a layout, in buffers that have `spacing` slots for each lane."""
    made = torch.Generator().manual_seed(seed)
    buffers = [torch.randn(layout.lanes, spacing, 7, generator=made) for _ in range(2)]
    return PlainSegment(layout=layout, keys=buffers[0][:, : layout.size], values=buffers[1][:, : layout.size])


def parts() -> list[PlainSegment]:
    chosen = torch.stack([torch.randperm(90)[:37].sort().values for _ in range(ROWS * HEADS)]).int()
    first = Layout(rows=ROWS, heads=HEADS, size=37, positions=chosen)
    second = Layout(rows=ROWS, heads=HEADS, size=5, start=90)
    return [part(first, 37, 1), part(second, 64, 2), part(replace(second, size=21, start=95), 21, 3)]


def test_whole_lanes_are_what_lanes_with_owners_are() -> None:
    made = parts()
    spelt = [
        replace(
            each,
            layout=replace(
                each.layout,
                owner=torch.arange(ROWS * HEADS),
                positions=torch.as_tensor(
                    each.layout.columns(CPU).expand(ROWS * HEADS, -1), dtype=torch.int32
                ).contiguous(),
                start=None,
            ),
        )
        for each in made
    ]
    quick, slow = rows_of(made, None, CPU), rows_of(spelt, None, CPU)
    for name in ("columns", "address", "counts", "on_host"):
        found, wanted = getattr(quick, name), getattr(slow, name)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), name


@pytest.mark.parametrize("count", [1, 3])
def test_gathers_what_a_loop_finds(count: int) -> None:
    states = [each.keys for each in parts()[:count]]
    flat: list[Tensor] = [slot for each in states for lane in each for slot in lane]
    address = torch.randint(0, len(flat), (4, 11), generator=torch.Generator().manual_seed(5))
    found = gather(states, address)
    assert found.shape == (4, 11, 7)
    assert torch.equal(found, torch.stack([torch.stack([flat[int(at)] for at in row]) for row in address]))


def test_gathers_states_that_are_no_table_of_slots() -> None:
    whole = torch.randn(9, 4, 7)
    for states in (whole.transpose(0, 1), whole[:1].expand(5, -1, -1), whole[..., ::2], whole[:1, 1:]):
        lanes, slots, _ = states.shape
        address = torch.randint(0, lanes * slots, (2, 6))
        found = gather([states], address)
        assert torch.equal(found, states.reshape(lanes * slots, -1)[address])
