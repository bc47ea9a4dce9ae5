"""Attention of few queries over codes in torch alone, where nothing was compiled: scales go into queries and weights.

What codes stand for is never written down. Products are taken of the codes themselves, and scales and minima enter
what is small: queries, logits, softmax weights. Codes become floats piece by piece in a core's cache. Where the
processor multiplies bytes, and lanes are long, queries and weights become bytes instead, three for each number, which
loses 2^-20 of the largest. Codes that have moved, each with a row of scales of its own, are decoded piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kvtailor.ops.attention.folded import over_owners
from kvtailor.ops.codes.quant import unpack
from kvtailor.ops.codes.sides import ChannelCodes
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded, layout_of
from kvtailor.types import Softmax

__all__ = ["attend_coded", "unsuited"]

_KINDS = (CodeKind.TOKENS, CodeKind.CHANNELS)

# Elements of a piece as floats: 1 to 4 MiB do equally well, a quarter of a MiB takes half as long again.
_PIECE = 1 << 19
# Bytes that stand for a query or weight, each a digit to this base.
_DIGITS, _BASE = 3, 128
# Products of bytes are taken lane by lane, which pays for lanes of so many slots; and so many bytes of codes at a time.
_LONG, _BYTES = 1024, 1 << 20
# Softmax weights of so many numbers become digits at once: a few lanes are one operation each, and stay in a cache.
_WEIGHTS = 1 << 17


def unsuited(keys: Coded, values: Coded) -> str | None:
    """Why `attend_coded` cannot take these; None where it can."""
    for name, side in (("keys", keys), ("values", values)):
        layout = side.code_layout
        if layout is None or layout.kind not in _KINDS or layout.magnitudes is not None:
            return f"{name}: {type(side).__name__} are decoded"
        if layout.codes.device.type != "cpu":
            return f"{name} are on {layout.codes.device}, and pieces that fit a core's cache are for CPUs"
    return None


def attend_coded(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`ops.attention.cpu.attention.attend_coded` in torch; see `unsuited` for what keys and values can be."""
    query, keys, values = inputs.query, layout_of(inputs.keys), layout_of(inputs.values)
    owner, visible = inputs.owner, inputs.visible
    owners, group, new, size = query.shape
    rows = (query.float() * inputs.scaling).reshape(owners, group * new, size)
    # Each lane is read as if it were alone, with the queries of its owner; lanes of one owner are merged in the end.
    logits = _logits(rows if owner is None else rows.index_select(0, owner), keys)
    Softmax(softcap=inputs.softcap).cap_(logits)
    lanes, _, slots = logits.shape
    if inputs.log_weight is not None:
        logits += inputs.log_weight[:, None]
    if inputs.lengths is not None:
        logits.masked_fill_((torch.arange(slots) >= inputs.lengths[:, None])[:, None], -torch.inf)
    if visible is not None:
        logits.view(lanes, group, new, slots).masked_fill_(~visible.expand(lanes, new, slots)[:, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weights = logits.sub_(shift).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _sums(weights, values) / total.clamp_min(torch.finfo(torch.float32).tiny)
    out, lse = out.unflatten(1, (group, new)), (shift + total.log())[..., 0].unflatten(1, (group, new))
    return (out, lse) if owner is None else over_owners(out, lse, owner, owners)


def _logits(rows: Tensor, keys: CodeLayout) -> Tensor:
    """(m, r, s) float32: products of rows (m, r, c) with the keys of each lane."""
    lanes, slots = keys.codes.shape[:2]
    if keys.kind is CodeKind.TOKENS and _multiplies_bytes(keys):
        return _with_scales(_byte_products(rows, keys), rows, keys, 0, _offset(keys))
    logits = rows.new_empty((lanes, rows.shape[1], slots))
    for lane, slot, floats in _floats(keys):
        if keys.kind is CodeKind.TOKENS:
            logits[lane, :, slot] = _token_logits(rows[lane], floats, keys, lane, slot)
        else:
            logits[lane, :, slot] = _channel_logits(rows[lane], floats, keys, lane, slot)
    return logits


def _token_logits(rows: Tensor, codes: Tensor, keys: CodeLayout, lane: slice, slot: slice) -> Tensor:
    """(l, r, s') of codes (l, s', c) as floats, at these lanes and slots."""
    low = None if keys.low is None else keys.low[lane, slot]
    here = keys._replace(step=_step(keys)[lane, slot], low=low)
    groups = _step(here).shape[-1]
    parts = zip(rows.chunk(groups, -1), codes.chunk(groups, -1), strict=True)
    return torch.stack([_with_scales(_dot(mine, each), mine, here, i, 0) for i, (mine, each) in enumerate(parts)]).sum(
        0
    )


def _with_scales(products: Tensor, rows: Tensor, keys: CodeLayout, group: int, offset: int) -> Tensor:
    """Logits (m, r, s) of products with codes less `offset`, of one group of channels."""
    # A key is (code - zero) * step, or code * step + low, the same for all channels of a group. So a row r gives
    # (sum r * code - zero * sum r) * step, and (sum r * code) * step + low * sum r: scales enter after the product.
    # `products` are of codes less `offset`, which puts offset * sum r back.
    whole = rows.sum(-1, keepdim=True)
    step = _step(keys)[:, None, :, group].float()
    if keys.low is None:
        return products.add_(whole * (offset - keys.zero)).mul_(step)
    return products.add_(whole * offset).mul_(step).add_(whole * keys.low[:, None, :, group].float())


def _channel_logits(rows: Tensor, codes: Tensor, keys: CodeLayout, lane: slice, slot: slice) -> Tensor:
    """(l, r, s') of codes (l, s', c) as floats, or of states where tokens have moved."""
    if keys.row is not None:
        return _dot(rows, codes)
    step, low = _tables(keys, lane, slot)
    # Products of single runs with queries of their own would be thousands of tiny ones.
    for first, count, run in _runs(codes, keys.group):
        run.unflatten(1, (count, -1)).mul_(step[:, first : first + count, None])
    # Scales of a channel differ from run to run of tokens, so they go into the codes; minima need one product for each
    # run (l, r, runs), which all tokens of the run get. The last run may be longer than what is there.
    bias = _dot(rows, low).repeat_interleave(keys.group, -1)
    return _dot(rows, codes) + bias[..., : codes.shape[1]]


def _runs(tokens: Tensor, group: int) -> Iterator[tuple[int, int, Tensor]]:
    """The first run, their number, and the tokens of the whole runs of (l, s', c); and the same of what is left."""
    whole = tokens.shape[1] // group
    for first, count, run in ((0, whole, tokens[:, : whole * group]), (whole, 1, tokens[:, whole * group :])):
        if run.shape[1]:
            yield first, count, run


def _sums(weights: Tensor, values: CodeLayout) -> Tensor:
    """(m, r, c) float32: the values of each lane summed with weights (m, r, s)."""
    out = weights.new_zeros((*weights.shape[:2], values.size))
    if values.kind is CodeKind.CHANNELS:
        for lane, slot, floats in _floats(values):
            out[lane] += _channel_sums(weights[lane, :, slot], floats, values, lane, slot)
        return out
    groups, by_bytes = _step(values).shape[-1], _multiplies_bytes(values)
    # As in `_with_scales`, from the other side: a token's step enters its weight before the product with its codes, and
    # its minimum, times its weight, is added to every channel of the group.
    scaled = [weights * _step(values)[:, None, :, group].float() for group in range(groups)]
    offset = _offset(values) if by_bytes else 0
    for group, (each, part) in enumerate(zip(scaled, out.chunk(groups, -1), strict=True)):
        whole = each.sum(-1, keepdim=True)
        if values.low is None:
            part += whole * (offset - values.zero)
        else:
            part += weights @ values.low[..., group : group + 1].float() + whole * offset
    if by_bytes:
        return out + _byte_sums(scaled[0], values)
    for lane, slot, floats in _floats(values):
        for mine, codes, part in zip(scaled, floats.chunk(groups, -1), out.chunk(groups, -1), strict=True):
            part[lane] += mine[lane, :, slot] @ codes
    return out


def _channel_sums(weights: Tensor, codes: Tensor, values: CodeLayout, lane: slice, slot: slice) -> Tensor:
    """(l, r, c) of codes (l, s', c) as floats, or of states where tokens have moved."""
    if values.row is not None:
        return weights @ codes
    step, low = _tables(values, lane, slot)
    for first, count, run in _runs(codes, values.group):
        tables = (table[:, first : first + count, None] for table in (step, low))
        run.unflatten(1, (count, -1)).mul_(next(tables)).add_(next(tables))
    return weights @ codes


def _tables(side: CodeLayout, lane: slice, slot: slice) -> tuple[Tensor, Tensor]:
    """Steps and minima (l, runs, c) float32 of the runs of tokens in a piece."""
    run = slice(slot.start // side.group, -(-slot.stop // side.group))
    step, low = _step(side)[lane, run].float(), _low(side)[lane, run].float()
    return step, low


def _dot(rows: Tensor, codes: Tensor) -> Tensor:
    """(l, r, s') of rows (l, r, c) and codes (l, s', c); few columns beside many rows are faster so on a CPU."""
    return torch.bmm(codes, rows.transpose(1, 2)).transpose(1, 2)


def _floats(side: CodeLayout) -> Iterator[tuple[slice, slice, Tensor]]:
    """Lanes, slots and codes (l, s', c) as floats of each piece, in one scratch; states where tokens have moved."""
    lanes, slots = side.codes.shape[:2]
    scratch = torch.empty(0, dtype=torch.float32)
    moved = None
    if side.kind is CodeKind.CHANNELS and side.row is not None:
        # Tables of 16 bits would round what they decode to.
        moved = ChannelCodes(
            group=side.group,
            bits=side.bits,
            size=side.size,
            codes=side.codes,
            step=_step(side).float(),
            low=_low(side).float(),
            row=side.row,
        )
    # A piece ends where a group of tokens does, so that no group's scale is needed by two pieces.
    multiple = side.group if side.kind is CodeKind.CHANNELS else 1
    for lane, slot in pieces(lanes, slots, side.size, _PIECE, multiple=multiple):
        codes = side.codes[lane, slot]
        if moved is not None and moved.row is not None:
            yield lane, slot, replace(moved, codes=codes, row=moved.row[lane, slot]).decode()
            continue
        codes = unpack(codes, side.bits, side.size)
        if scratch.numel() < codes.numel():
            scratch = torch.empty(codes.numel(), dtype=torch.float32)
        yield lane, slot, scratch[: codes.numel()].view(codes.shape).copy_(codes)


def _step(side: CodeLayout) -> Tensor:
    assert side.step is not None
    return side.step


def _low(side: CodeLayout) -> Tensor:
    assert side.low is not None
    return side.low


@cache
def _byte_arithmetic() -> bool:
    """Return whether this processor multiplies bytes, and torch makes exact use of it."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(vnni is not None and vnni() and torch.backends.mkldnn.is_available() and _products_are_exact())


def _products_are_exact() -> bool:
    """Return whether torch's products of bytes are exact here.

    Which instruction its library takes is that library's choice (ONEDNN_MAX_CPU_ISA may forbid the processor's best),
    and its form for AVX2 adds pairs in 16 bits, where large bytes overflow without a word. So it is tried.
    """
    if not hasattr(torch, "_int_mm"):
        return False
    least, most = (torch.full((32, 64), each, dtype=torch.int8) for each in (-128, 127))
    pairs = [(least, most), (most, least), (most, most), (least, least)]
    return all(torch.equal(torch._int_mm(a, b.T), a.int() @ b.T.int()) for a, b in pairs)


def _multiplies_bytes(side: CodeLayout) -> bool:
    return side.codes.shape[1] >= _LONG and _step(side).shape[-1] == 1 and _byte_arithmetic()


def _offset(side: CodeLayout) -> int:
    """What `_signed` takes off."""
    return 128 if side.bits == 8 else 0


def _signed(side: CodeLayout) -> Iterator[tuple[int, slice, Tensor]]:
    """Lane, slots and codes (s', c) int8 less `_offset` of each piece, in one scratch.

    What torch makes anew for each piece the system would have to give anew, page by page, which takes longer than the
    products.
    """
    lanes, slots = side.codes.shape[:2]
    scratch = torch.empty(0, dtype=torch.uint8)
    for some, slot in pieces(lanes, slots, side.size, _BYTES):
        for lane in range(some.start, some.stop):
            codes = side.codes[lane, slot]
            if side.bits == 8:
                scratch = torch.empty(codes.shape, dtype=torch.uint8) if codes.shape != scratch.shape else scratch
                codes = torch.bitwise_xor(codes, 128, out=scratch)
            else:
                codes = unpack(codes, side.bits, side.size)
            yield lane, slot, codes.view(torch.int8)


def _byte_products(rows: Tensor, keys: CodeLayout) -> Tensor:
    """(m, r, s) float32: rows (m, r, c) float32 times the codes of each lane, less `_offset`."""
    out = rows.new_empty((*rows.shape[:2], keys.codes.shape[1]))
    whole = torch.empty(0, dtype=torch.int32)
    digits, places = _digits(rows, rows.abs().amax(-1, keepdim=True))
    for lane, slot, codes in _signed(keys):
        # Few rows times many columns (3 r, c) x (c, s'): torch's kernel takes 1.3 to 2 times as long for the transpose.
        shape = (digits.shape[1], codes.shape[0])
        if whole.shape != shape:
            whole = torch.empty(shape, dtype=torch.int32)
        out[lane, :, slot] = places[lane] @ torch._int_mm(digits[lane], codes.T, out=whole).float()
    return out


def _byte_sums(weights: Tensor, values: CodeLayout) -> Tensor:
    """(m, r, c) float32: codes of each lane, less `_offset`, summed with weights (m, r, s) float32."""
    out = weights.new_zeros((*weights.shape[:2], values.size))
    least, most = weights.aminmax(dim=-1, keepdim=True)
    most = torch.maximum(most, -least)
    few = max(1, _WEIGHTS // weights[0].numel())
    scratch = torch.empty_like(weights[:few])
    for lane, slot, codes in _signed(values):
        if slot.start == 0 and lane % few == 0:
            these = slice(lane, lane + few)
            digits, places = _digits(weights[these], most[these], scratch)
        out[lane] += places[lane % few] @ torch._int_mm(digits[lane % few, :, slot], codes).float()
    return out


def _digits(rows: Tensor, most: Tensor, scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows (m, r, k) float32 as digits (m, 3 r, k) int8, and what each of them is worth in a row (m, r, 3 r).

    Args:
        rows: of absolute values up to `most`.
        most: (m, r, 1).
        scratch: as large as rows.
    """
    # row = unit * (digit_0 + digit_1 / 128 + digit_2 / 128**2), with |digit_0| <= 127: each digit is what the one
    # before left over, times the base. So three products of bytes, exact in int32, make one of float32 and codes.
    unit = most.clamp_min(torch.finfo(torch.float32).tiny) / (_BASE - 1)
    rest = rows / unit
    digit = torch.empty_like(rest)
    lanes, each, size = rows.shape
    digits = torch.empty((lanes, _DIGITS * each, size), dtype=torch.int8)
    for i, place in enumerate(digits.chunk(_DIGITS, 1)):
        place.copy_(torch.round(rest, out=digit))
        if i + 1 < _DIGITS:
            rest.sub_(digit).mul_(_BASE)
    worth = torch.diag_embed(unit[..., 0])
    # All digits of all rows in one product; `places` adds those of each row up again.
    return digits, torch.cat([worth * float(_BASE) ** -i for i in range(_DIGITS)], -1)
