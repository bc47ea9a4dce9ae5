"""What attention is, by its definition: parts of every kind, and what a row and head make of them in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tests.support.segments_of import Padded, states, uneven
from torch import Tensor

from kvtailor.attend.contract import AttentionContext, AttentionRequest
from kvtailor.encode.indexed import Indexed
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.plain import Plain
from kvtailor.types import Layout, PlainSegment, Rotation, Segment, Visibility

__all__ = ["MIXES", "SIZES", "STILL", "Case", "request_of", "case", "close", "defined", "naive"]

# b, h, g, d, dv: odd heads, one head, unequal sizes.
SIZES = [(3, 5, 2, 24, 24), (1, 1, 1, 16, 16), (2, 3, 3, 20, 12)]
# What is held before the tail, and how many of its tokens the tail holds beside the new ones.
MIXES: dict[str, tuple[str, ...]] = {
    "prompt": (),
    "tail": ("tail",),
    "moved tail": ("positions",),
    "dense": ("dense", "tail"),
    "ragged": ("ragged", "tail"),
    "kivi": ("kivi", "kivi", "tail"),
    "all": ("ragged", "dense", "kivi", "ragged kivi", "indexed", "tail"),
}
# A method that turns keys gives what the others give where a turn changes nothing; its own test has turns that do.
STILL = AttentionContext(layer=4, layers=6, rotation=Rotation(frequencies=torch.zeros(6)))


@dataclasses.dataclass
class Case:
    """Parts in time order, and the definition's inputs: all that each row and head holds."""

    parts: list[Segment]
    new: int
    seen: int
    query: Tensor
    visible: Padded
    sizes: tuple[int, int, int, int, int]

    @property
    def real_queries(self) -> Tensor | None:
        return None if self.visible.real is None else self.visible.real[:, self.seen - self.new : self.seen]


def case(
    size: tuple[int, int, int, int, int],
    mix: str,
    new: int,
    *,
    seed: int = 0,
    padded: bool = False,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    b, h, g, d, dv = size
    column, parts = 0, []
    span = 67
    for i, what in enumerate(MIXES[mix]):
        keys, values = states((b * h, span, d), seed + i, dtype), states((b * h, span, dv), seed + 50 + i, dtype)
        layout = Layout(rows=b, heads=h, size=span, start=column)
        if what in ("ragged", "ragged kivi"):
            layout, owner, at = uneven(b, h, 32, most=span, columns=span, seed=seed + i)
            assert layout.positions is not None
            layout = dataclasses.replace(layout, positions=layout.positions + column)
            keys, values = keys[owner, at], values[owner, at]
        elif what == "positions":
            # Each row and head kept other columns.
            draws = [torch.randperm(span, generator=torch.Generator().manual_seed(n))[:30] for n in range(b * h)]
            at = torch.stack(draws).sort(-1).values
            keys, values = (x.gather(1, at[..., None].expand(-1, -1, x.shape[-1])) for x in (keys, values))
            columns = (at + column).to(torch.int32)
            layout = Layout(rows=b, heads=h, size=30, positions=columns)
        if what not in ("tail", "positions"):
            codec = Kivi(bits=4) if "kivi" in what else Indexed() if what == "indexed" else Plain()
            parts.append(codec.encode(layout, keys, values))
        else:
            parts.append(PlainSegment(layout=layout, keys=keys, values=values))
        column += span
    keys, values = states((b * h, new, d), seed + 90, dtype), states((b * h, new, dv), seed + 91, dtype)
    before = parts.pop() if MIXES[mix] else None
    layout = Layout(rows=b, heads=h, size=new, start=column)
    if before is not None:
        if before.layout.start is not None:
            layout = Layout(rows=b, heads=h, size=before.layout.size + new, start=before.layout.start)
        else:
            newest = torch.arange(column, column + new, dtype=torch.int32).expand(b * h, -1)
            positions = torch.cat([before.layout.columns(torch.device("cpu")).to(torch.int32), newest], 1)
            layout = Layout(rows=b, heads=h, size=positions.shape[1], positions=positions)
        old = before.decode()
        keys, values = torch.cat([old[0], keys], 1), torch.cat([old[1], values], 1)
    # As in a real tail, the lanes are cut from a buffer with free slots, and those are poisoned.
    buffers = [torch.full((x.shape[0], x.shape[1] + 9, x.shape[2]), float("nan"), dtype=dtype) for x in (keys, values)]
    for buffer, x in zip(buffers, (keys, values), strict=True):
        buffer[:, : x.shape[1]] = x
    parts.append(PlainSegment(layout=layout, keys=buffers[0][:, : layout.size], values=buffers[1][:, : layout.size]))
    seen = column + new
    real = None
    if padded:
        # The last row is padding but for its newest tokens: some of its queries see nothing.
        left = torch.tensor([0, 5, seen - max(1, new - 2)])[:b]
        real = torch.arange(seen)[None] >= left[:, None]
    visible = Padded(new_tokens=new, first_column=column, real=real, window=window)
    query = states((b, h * g, new, d), seed + 99, dtype)
    return Case(parts=parts, new=new, seen=seen, query=query, visible=visible, sizes=size)


def request_of(
    query: Tensor, parts: Sequence[Segment], visible: Visibility, scaling: float, **more: Any
) -> AttentionRequest:
    """The request of an attention, as short as the tests need it."""
    return AttentionRequest(query=query, parts=parts, visible=visible, scaling=scaling, **more)


def naive(
    case: Case, scaling: float, softcap: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention by its definition in float64, head by head: out, lse, mass of each part.

    A sink (q,) is a key more whose logit is the sink and whose value is 0.
    """
    b, h, g, _, dv = case.sizes
    out = torch.zeros((b, h * g, case.new, dv), dtype=torch.float64)
    lse = torch.full((b, h * g, case.new), -torch.inf, dtype=torch.float64)
    decoded = [part.decode() for part in case.parts]
    mass = [torch.zeros(keys.shape[:2], dtype=torch.float64) for keys, _ in decoded]
    real = torch.ones((b, case.new), dtype=torch.bool) if case.real_queries is None else case.real_queries
    cpu = torch.device("cpu")
    for row in range(b):
        for head in range(h):
            mine = [
                (part.layout.owners(cpu) == row * h + head)[:, None].expand(part.layout.lanes, part.layout.size)
                & (True if part.layout.filled(cpu) is None else part.layout.filled(cpu))
                for part in case.parts
            ]
            keys = torch.cat([k[m] for (k, _), m in zip(decoded, mine, strict=True)]).double()
            values = torch.cat([v[m] for (_, v), m in zip(decoded, mine, strict=True)]).double()
            columns = torch.cat(
                [part.layout.columns(cpu).expand(m.shape)[m] for part, m in zip(case.parts, mine, strict=True)]
            )
            seen = case.visible.at(torch.tensor([row]), columns[None])[0].expand(case.new, -1)
            heads = slice(head * g, head * g + g)
            logits = case.query[row, heads].double() @ keys.T * scaling
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            logits = logits.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks[heads].double()[:, None, None].expand(g, case.new, 1)], -1)
            weights = logits.softmax(-1).nan_to_num(0.0)[..., : keys.shape[0]]
            out[row, heads] = weights @ values
            lse[row, heads] = logits.logsumexp(-1)
            shares = weights[:, real[row]].sum((0, 1)).split([int(m.sum()) for m in mine])
            for total, m, share in zip(mass, mine, shares, strict=True):
                total[m] = share
    return out, lse, mass


@lru_cache(maxsize=8)
def defined(
    size: tuple[int, int, int, int, int], mix: str, new: int, scaling: float = 0.04, **options: Any
) -> tuple[Case, Tensor, Tensor, list[Tensor]]:
    """A case and what `naive` finds, once for all methods, which follow each other and change nothing."""
    made = case(size, mix, new, **options)
    return made, *naive(made, scaling)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    blind = expected == -torch.inf
    same = bool((found[blind] == -torch.inf).all())
    return same and torch.allclose(found[~blind].double(), expected[~blind], atol=tolerance, rtol=tolerance)
