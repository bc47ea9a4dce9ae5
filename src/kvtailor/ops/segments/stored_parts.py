"""Checks of layouts and segments that come from a file, before anything computes with them.

Attention reads memory by the numbers of a layout and by those of the tables of codes, and does not check them again: a
number out of range would read other memory, or end the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from kvtailor.ops.segments.coded import Coded, PairSegment, TimeGrouped
from kvtailor.ops.segments.pair_sides import HalfSegment
from kvtailor.types import Layout, PlainSegment, Segment

__all__ = ["check_layout", "check_segment"]


def check_layout(layout: Layout, seen: int) -> None:
    """Raise unless each lane, slot and column is in range and in order.

    Args:
        layout: to be checked.
        seen: columns that exist, 0 to seen - 1.

    Raises:
        ValueError: one sentence about the first fault, without a full stop.
    """
    rows, heads, size = layout.rows, layout.heads, layout.size
    if not all(_is_whole(number) for number in (rows, heads, size)) or rows < 1 or heads < 1 or size < 0:
        raise ValueError(f"a layout has {rows} rows, {heads} kv heads and {size} slots in a lane")
    owner, lengths = layout.owner, layout.lengths
    if owner is not None:
        _check_tensor("owner", owner, torch.int64, (owner.shape[0] if owner.ndim else 0,))
        _check_range("owner", owner, rows * heads)
        if bool((owner.diff() < 0).any()):
            raise ValueError("the owners of a layout's lanes do not ascend")
    if lengths is not None:
        _check_tensor("lengths", lengths, torch.int32, (layout.lanes,))
        _check_range("lengths", lengths, size + 1)
    if layout.start is not None:
        if not _is_whole(layout.start) or not 0 <= layout.start <= seen - size:
            raise ValueError(f"a layout holds {size} columns from {layout.start} on, and {seen} were seen")
        return
    assert layout.positions is not None
    _check_tensor("positions", layout.positions, torch.int32, (layout.lanes, size))
    _check_range("positions", layout.positions, seen)
    _check_growth(layout)


def check_segment(segment: Segment, dtype: torch.dtype, sizes: tuple[int, int] | None = None) -> None:
    """Raise unless the tensors of a segment, and of those inside it, have the shapes and dtypes that it requires.

    Rows of tables are checked as well. The segment's own layout must have passed `check_layout`. In the end the segment
    is decoded once: numbers of bits, groups and channels that do not fit their tensors show there.

    Args:
        segment: to be checked.
        dtype: of the cache.
        sizes: channels of the keys and values that the layer holds; None: not known.

    Raises:
        ValueError: one sentence about the first fault, without a full stop.
    """
    for each in _segments_in(segment):
        lanes, slots = each.layout.lanes, each.layout.size
        if slots < 1:
            raise ValueError(f"a {each.codec} segment has lanes of {slots} slots")
        if isinstance(each, PlainSegment):
            for name, states in (("keys", each.keys), ("values", each.values)):
                _check_shape(f"{name} of a plain segment", states, lanes, slots)
                _check_dtype(f"{name} of a plain segment", states, dtype)
        elif isinstance(each, HalfSegment):
            for own in (each.keys, each.values):
                own.check(lanes, slots)
                for name, tensor in own.tensors().items():
                    _check_dtype(f"{name} of a half segment", tensor, torch.int32 if name == "places" else dtype)
        elif isinstance(each, PairSegment):
            for name, side in (("keys", each.keys), ("values", each.values)):
                _check_side(f"{name} of a {each.codec} segment", side, lanes, slots, dtype)
        each.check(dtype)
    decoded = segment.decode()
    lanes, slots = segment.layout.lanes, segment.layout.size
    for name, states, size in zip(("keys", "values"), decoded, sizes or (None, None), strict=True):
        _check_dtype(f"decoded {name}", states, dtype)
        _check_shape(f"decoded {name}", states, lanes, slots)
        if size is not None and states.shape[2] != size:
            raise ValueError(f"the decoded {name} have {states.shape[2]} channels, and those of the layer {size}")


def _check_side(name: str, side: Coded, lanes: int, slots: int, dtype: torch.dtype) -> None:
    tensors = side.tensors()
    for each, tensor in tensors.items():
        known = side.dtypes.get(each, (dtype,) if tensor.is_floating_point() else (torch.uint8,))
        if tensor.dtype not in known:
            said = " or ".join(str(one).removeprefix("torch.") for one in known)
            raise ValueError(f"{each} of {name} are {tensor.dtype} and not {said}")
    if getattr(side, "dtype", str(dtype).removeprefix("torch.")) != str(dtype).removeprefix("torch."):
        raise ValueError(f"the {name} are said to be of {getattr(side, 'dtype', None)}, and the cache is of {dtype}")
    for each in side.of_tokens:
        if each in tensors:
            _check_shape(f"{each} of {name}", tensors[each], lanes, slots)
    if isinstance(side, TimeGrouped):
        _check_tables(name, side, lanes, slots)
    found = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    expected = side.closed_form_bytes(lanes, slots)
    side.check()
    if found != expected:
        raise ValueError(f"the {name} take {found} bytes, and {lanes} lanes of {slots} slots need {expected}")


def _check_tables(name: str, side: TimeGrouped, lanes: int, slots: int) -> None:
    if not _is_whole(side.group) or side.group < 1:
        raise ValueError(f"the {name} have groups of {side.group} tokens")
    tables = {each: getattr(side, each) for each in side.shared}
    if side.row is None:
        for each, table in tables.items():
            _check_shape(f"{each} of {name}", table, lanes, -(-slots // side.group))
        return
    _check_tensor(f"rows of the {name}", side.row, torch.int32, (lanes, slots))
    for table in tables.values():
        _check_range(f"rows of the {name}", side.row, table.shape[0] if table.ndim else 0)


def _check_growth(layout: Layout) -> None:
    """Columns grow along a lane, and along the lanes of one owner."""
    assert layout.positions is not None
    columns = layout.positions.to(torch.int64)
    filled = layout.filled(columns.device)
    filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
    owners = layout.owners(columns.device)[:, None].expand_as(columns)
    columns, owners = columns[filled], owners[filled]
    if bool(((columns.diff() <= 0) & (owners.diff() == 0)).any()):
        raise ValueError("the columns of a layout do not grow along the lanes of each head")


def _segments_in(segment: Segment) -> Iterator[Segment]:
    yield segment
    if is_dataclass(segment):
        for field in fields(segment):
            inner = getattr(segment, field.name)
            if isinstance(inner, Segment):
                yield from _segments_in(inner)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"the {name} are {tensor.dtype} of shape {tuple(tensor.shape)} and not {dtype} of {shape}")


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"the {name} are {tensor.dtype} and not {dtype}")


def _check_shape(name: str, tensor: Tensor, lanes: int, slots: int) -> None:
    if tensor.ndim != 3 or tuple(tensor.shape[:2]) != (lanes, slots):
        raise ValueError(f"the {name} have shape {tuple(tensor.shape)}, and there are {lanes} lanes of {slots}")


def _check_range(name: str, numbers: Tensor, end: int) -> None:
    if numbers.numel():
        least, most = (int(each) for each in numbers.aminmax())
        if least < 0 or most >= end:
            raise ValueError(f"the {name} go from {least} to {most}, and must be from 0 to {end - 1}")


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
