"""What a layout says of codes is what they stand for, and the kinds that C++ reads have the numbers of its source."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from tests.ops.cpu.coded_layouts import GGML, LAYOUTS, states_of
from torch import Tensor

from kvtailor.ops import cpu
from kvtailor.ops.attention.cpu import sides
from kvtailor.ops.codes.floats import exponent_scales, levels_of
from kvtailor.ops.codes.quant import unpack
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded, layout_of

# C++ has three kinds of plain states, one for each dtype.
NAMES = {
    CodeKind.WHOLE: "FLOAT32",
    CodeKind.TOKENS: "TOKEN_CODES",
    CodeKind.CHANNELS: "CHANNEL_CODES",
    CodeKind.LEVELS: "LEVEL_CODES",
    CodeKind.BLOCKS: "BLOCK_LEVELS",
    CodeKind.FLOATS: "BLOCK_LEVELS",
    CodeKind.POINTS: "GRID_CODES",
    CodeKind.SIGNS: "SIGNED_LEVELS",
    CodeKind.FITTED: "FITTED_LEVELS",
}


def per_token(layout: CodeLayout, table: Tensor) -> Tensor:
    """(m, s, ...) of a table of runs of tokens."""
    if layout.row is not None:
        return table[layout.row.long()]
    return table.repeat_interleave(layout.group, 1)[:, : layout.codes.shape[1]]


def wide(table: Tensor, layout: CodeLayout) -> Tensor:
    """(m, s, c) of a table with a number for each block of channels."""
    return table.double().repeat_interleave(layout.block, -1)[..., : layout.size]


def numbers(layout: CodeLayout) -> Tensor:
    """(m, s, c) float64 that the codes stand for, by the sentences of `CodeKind`; of SIGNS twice as many."""
    kind, step, levels = layout.kind, layout.step, layout.levels
    if kind is CodeKind.WHOLE:
        return layout.codes.double()
    assert step is not None
    count = -(-layout.size // 2) if kind is CodeKind.POINTS else layout.size
    codes = unpack(layout.codes, layout.bits, count).long()
    if kind is CodeKind.TOKENS and layout.low is None:
        return (codes.double() - layout.zero) * wide(step, layout)
    if kind is CodeKind.TOKENS:
        return codes.double() * wide(step, layout) + wide(layout.low, layout)
    if kind is CodeKind.CHANNELS:
        return codes.double() * per_token(layout, step).double() + per_token(layout, layout.low).double()
    if kind is CodeKind.FLOATS:
        return levels_of(layout.element)[codes].double() * per_token(layout, step).double()
    if kind is CodeKind.BLOCKS:
        scales = exponent_scales(step) if layout.exponents else levels_of("e4m3")[step.long()]
        outer = 1.0 if layout.outer is None else per_token(layout, layout.outer).double()
        return levels[codes].double() * wide(scales, layout) * outer
    if kind is CodeKind.FITTED:
        run = per_token(layout, levels).double().gather(-1, codes)
        tables = (layout.low, step)
        low, reach = (x.double() if layout.block > 1 else per_token(layout, x).double() for x in tables)
        found, aside = run * reach + low, layout.aside
        token = torch.repeat_interleave(aside.counts.flatten().long())
        found.view(-1, layout.size)[token, aside.channels.long()] = aside.exact.double()
        return found
    if kind is CodeKind.POINTS:
        points = levels[codes].double()
        second = points[..., : layout.size - count, 1].flip(-1)
        return torch.cat([points[..., 0], second], -1) * step.double()
    found = levels[codes].double() * step.double()
    if kind is CodeKind.LEVELS:
        return found
    plus = unpack(layout.signs.signs, 1, layout.size).double() * 2 - 1
    return torch.cat([found, plus * layout.signs.norm.double()], -1)


def check(side: Coded) -> None:
    found, wanted = numbers(layout_of(side)), side.stored().double()
    assert found.shape == wanted.shape
    # Decoding rounds once to the cache's float32.
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [33, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_says_what_codes_stand_for(name: str, size: int) -> None:
    if size % 2 and name == "tokens4x8":
        pytest.skip("groups of 8 channels do not divide 33")
    side = LAYOUTS[name](states_of(7, torch.float32, 3, 37, size)[0])
    check(side)
    moved = side.regather(torch.tensor([[2] * 20, [0] * 20]), torch.stack([torch.arange(20), torch.randperm(37)[:20]]))
    check(moved)
    assert layout_of(moved).codes is not layout_of(side).codes


@pytest.mark.parametrize("format", GGML)
def test_blocks_of_llama_cpp_have_one_where_they_are_whole(format: str) -> None:
    check(GGML[format](states_of(7, torch.float32, 3, 37, 96)[0]))
    assert GGML[format](states_of(7, torch.float32, 3, 37, 80)[0]).code_layout is None


@pytest.mark.parametrize("name", ["plain", "channels4", "levels4"])
def test_it_is_made_once_and_no_part_of_a_copy(name: str) -> None:
    side = LAYOUTS[name](states_of(7, torch.float32, 3, 37, 64)[0])
    assert side.code_layout is side.code_layout
    for twin in (copy.deepcopy(side), pickle.loads(pickle.dumps(side))):
        assert "code_layout" in vars(side) and "code_layout" not in vars(twin)
        assert layout_of(twin).levels is layout_of(side).levels
        assert torch.equal(twin.stored(), side.stored())


def test_kinds_have_the_numbers_of_the_source() -> None:
    source = (Path(cpu.__file__).parent / "layouts.h").read_text(encoding="utf-8")
    body = re.search(r"enum Kind \{(.*?)\};", source, re.DOTALL)
    assert body is not None
    known = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", body[1])}
    assert {NAMES[kind]: number for kind, (number, _) in sides._KINDS.items()} == {
        name: number for name, number in known.items() if name not in ("BFLOAT16", "FLOAT16")
    }
