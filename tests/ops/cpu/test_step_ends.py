"""A step that drops its middle: first keys are turned and first tokens moved as torch's own operations do it."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.coded_layouts import every_dtype, every_variant, needs_built
from torch import Tensor

from kvtailor.ops.attention.cpu.step import TokenStep
from kvtailor.ops.cpu.library import Ends, Library
from kvtailor.ops.lanes.rotate import cosines_and_sines, turn
from kvtailor.types import Layout, PlainSegment, Rotation

pytestmark = needs_built
# (b, h, g, tokens, d, dv), turned channels, first tokens.
SIZES = [((3, 5, 1, 63, 24, 20), 22, 4), ((1, 2, 4, 130, 128, 128), 128, 4), ((2, 3, 3, 9, 18, 6), 18, 7)]


def parts_of(keys: Tensor, values: Tensor, rows: int, ends: list[int]) -> list[PlainSegment]:
    """Lanes (m, s, d) in runs of slots that end there."""
    found = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        layout = Layout(rows=rows, heads=keys.shape[0] // rows, size=end - begin, start=0)
        found.append(PlainSegment(layout=layout, keys=keys[:, begin:end], values=values[:, begin:end]))
    return found


def step_of(parts: list[PlainSegment], tail: tuple[Tensor, ...], group: int, used: Library, **more: Ends) -> TokenStep:
    heads = group * parts[0].layout.heads
    how = {"query_heads": heads, "scaling": 0.3, "softcap": None, "mass": False, "using": used}
    return TokenStep(parts, [None] * len(parts), *tail, **how, **more)


@every_variant
@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape, turned, first", SIZES)
def test_the_same_bits_as_torch_and_a_step_over_turned_keys(
    shape: tuple[int, ...], turned: int, first: int, interleaved: bool, dtype: torch.dtype, library: Library
) -> None:
    rows, heads, group, tokens, size, value_size = shape
    generator, lanes, room = torch.Generator().manual_seed(sum(shape)), rows * heads, tokens + 5

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    # Free slots may hold anything.
    keys, values = random(lanes, room, size), random(lanes, room, value_size)
    positions = torch.arange(room, dtype=torch.int32).expand(lanes, -1).clone()
    frequencies = 10000.0 ** (-torch.arange(0, turned, 2) / turned)
    rotation = Rotation(frequencies=frequencies, interleaved=interleaved)
    ends = Ends(first=first, planes=turned // 2, interleaved=int(interleaved))
    tail = [keys.clone(), values.clone(), positions.clone()]
    step = step_of(parts_of(*tail[:2], rows, [first, tokens]), (*tail,), group, library, ends=ends)
    for token in range(3):
        query, key = random(rows, heads * group, 1, size), random(rows, heads, 1, size)
        value, column = random(rows, heads, 1, value_size), 1000 + token
        table = cosines_and_sines(torch.tensor([column - tokens]), frequencies)
        ends.cosines, ends.sines = (each.data_ptr() for each in table)
        found, _ = step.take(query, key, value, slot=tokens, column=column)
        # What it stands for: keys that are turned by torch, and tokens that torch moves.
        begins = keys[:, :first].clone()
        keys[:, :first] = turn(begins, torch.tensor([[column - tokens]]), rotation)
        one = parts_of(keys, values, rows, [first, tokens])
        rest = (keys[:, first:], values[:, first:], positions[:, first:])
        expected, _ = step_of(one, rest, group, library).take(query, key, value, slot=tokens - first, column=column)
        assert torch.equal(found, expected)
        keys[:, :first] = begins
        for own in (keys, values, positions):
            own[:, 1 : first + 1] = own[:, :first].clone()
        keys, values, positions = keys[:, 1:], values[:, 1:], positions[:, 1:]
        filled = slice(token + 1, token + 1 + tokens)
        for mine, own in zip(tail, (keys, values, positions), strict=True):
            assert torch.equal(mine[:, filled], own[:, :tokens])


@every_variant
def test_first_keys_that_are_not_turned(library: Library) -> None:
    """One part, of any number of first tokens."""
    for first in (0, 1, 6):
        keys, values = torch.randn(3, 20, 10), torch.randn(3, 20, 7)
        mine = keys.clone(), values.clone(), None
        step = step_of(parts_of(*mine[:2], 1, [12]), mine, 1, library, ends=Ends(first=first))
        plain = keys.clone(), values.clone(), None
        for token in range(4):
            query, key, value = torch.randn(1, 3, 1, 10), torch.randn(1, 3, 1, 10), torch.randn(1, 3, 1, 7)
            found, _ = step.take(query, key, value, slot=12, column=40)
            reference = step_of(parts_of(*plain[:2], 1, [12]), plain, 1, library)
            expected, _ = reference.take(query, key, value, slot=12, column=40)
            assert torch.equal(found, expected)
            for own in plain[:2]:
                own[:, 1 : first + 1] = own[:, :first].clone()
            plain = plain[0][:, 1:], plain[1][:, 1:], None
            assert all(
                torch.equal(a[:, token + 1 : token + 13], b[:, :12]) for a, b in zip(mine[:2], plain[:2], strict=True)
            )
