"""Attention over some pages, and over buffers that have free slots, against float64."""

from __future__ import annotations

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, error, exactly, needs_loops, needs_triton

from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole

pytestmark = [needs_triton, needs_loops]


@pytest.mark.parametrize(
    ("name", "page", "group"), [("whole", 4, 0), ("whole", 16, 0), ("kivi", 16, 32), ("kivi", 32, 16), ("kivi", 4, 16)]
)
def test_only_the_named_pages_are_read(name: str, page: int, group: int) -> None:
    from kvtailor.ops.attention.triton.attend import attend_pages

    generator = torch.Generator().manual_seed(page)
    query, k, v = (torch.randn(shape, generator=generator) for shape in ((2, 3, 1, 24), (2, 63, 24), (2, 63, 24)))
    count = -(-63 // page)
    pages = torch.stack([torch.randperm(count, generator=generator)[: max(2, count - 1)] for _ in range(2)])
    pages[0, 0] = -1
    named = torch.zeros((2, 1, 64), dtype=torch.bool)
    for lane in range(2):
        for each in pages[lane].tolist():
            if each >= 0:
                named[lane, 0, each * page : (each + 1) * page] = True
    named = named[..., :63]
    if name == "whole":
        # What is not named must not be read.
        k, v = (x.masked_fill(~named[:, 0, :, None], torch.nan) for x in (k, v))
        keys, values = Whole(states=k.to(DEVICE)), Whole(states=v.to(DEVICE))
        decoded = k.nan_to_num(), v.nan_to_num()
    else:
        coded, other = ChannelCodes.of(k.to(DEVICE), 4, group), TokenCodes.of(v.to(DEVICE), 4, 24)
        keys, values, decoded = coded, other, (coded.decode().cpu(), other.decode().cpu())
    wanted, lse = exactly(query, *decoded, 0.2, None, named)
    found, found_lse = attend_pages(
        AttentionInputs(query.to(DEVICE), keys, values, scaling=0.2), pages.to(DEVICE, torch.int32), page, splits=2
    )
    assert error(found, wanted) < (1e-6 if name == "whole" else 2e-3)
    assert (found_lse.cpu() - lse).abs().max() < (1e-5 if name == "whole" else 6e-3)


def test_pages_of_lanes_that_share_an_owner_under_a_mask() -> None:
    """Owner 1 has two lanes, one of which is cut short, and owner 2 has none."""
    from kvtailor.ops.attention.triton.attend import attend_pages

    generator = torch.Generator().manual_seed(5)
    query, k, v = (torch.randn(shape, generator=generator) for shape in ((3, 2, 2, 24), (3, 30, 24), (3, 30, 24)))
    owner, pages = [0, 1, 1], torch.tensor([[3, 0, -1], [7, 2, 5], [-1, -1, 1]])
    visible = torch.rand((3, 2, 30), generator=generator) < 0.7
    sees = visible.clone()
    for lane in range(3):
        for page in set(range(8)) - set(pages[lane].tolist()):
            sees[lane, :, page * 4 : page * 4 + 4] = False
    sees[1, :, 29:] = False
    wanted, lse = exactly(query, k, v, 0.2, owner, sees)
    found, found_lse = attend_pages(
        AttentionInputs(
            query.to(DEVICE),
            Whole(states=k.to(DEVICE)),
            Whole(states=v.to(DEVICE)),
            scaling=0.2,
            owner=torch.tensor(owner, device=DEVICE),
            visible=visible.to(DEVICE),
            lengths=torch.tensor([30, 29, 30], dtype=torch.int32, device=DEVICE),
        ),
        pages.to(DEVICE, torch.int32),
        4,
    )
    assert error(found, wanted) < 1e-6 and not found[2].any()
    assert torch.allclose(found_lse.cpu(), lse.float(), atol=1e-5)


def test_refuses_pages_that_are_no_power_of_two() -> None:
    from kvtailor.ops.attention.triton.attend import attend_pages

    side = Whole(states=torch.zeros(1, 8, 24))
    with pytest.raises(ValueError, match="a power of two of slots, found 6"):
        attend_pages(AttentionInputs(torch.zeros(1, 1, 1, 24), side, side, scaling=1.0), torch.zeros(1, 1), 6)


@pytest.mark.parametrize("new", [1, 3])
def test_what_is_filled_is_counted_on_the_device(new: int) -> None:
    """Buffers with free slots: what lies past the lengths is not read, and of the new tokens none sees a later one."""
    from kvtailor.ops.attention.triton.attend import attend_coded

    generator = torch.Generator().manual_seed(new)
    lengths = torch.tensor([5, 17], dtype=torch.int32, device=DEVICE)
    keys, values = (torch.randn((2, 40, 24), generator=generator) for _ in range(2))
    for _ in range(2):
        for lane, length in enumerate(lengths.tolist()):
            keys[lane, length:], values[lane, length:] = torch.nan, torch.nan
        query = torch.randn((2, 3, new, 24), generator=generator)
        sides = [Whole(states=side.to(DEVICE)) for side in (keys, values)]
        out, lse = attend_coded(
            AttentionInputs(query.to(DEVICE), *sides, scaling=0.3, lengths=lengths), causal=True, splits=3
        )
        for lane, length in enumerate(lengths.tolist()):
            sees = torch.arange(length) <= torch.arange(new)[:, None] + length - new
            held = (side[lane : lane + 1, :length] for side in (keys, values))
            wanted, its = exactly(query[lane : lane + 1], *held, 0.3, None, sees)
            assert error(out[lane : lane + 1], wanted) < 2e-6
            assert (lse[lane].cpu() - its[0]).abs().max() < 2e-6
        keys, values = (torch.randn((2, 40, 24), generator=generator) for _ in range(2))
        lengths.add_(new)
