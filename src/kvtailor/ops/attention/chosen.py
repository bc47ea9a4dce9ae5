"""Attention of one new token over the tokens that a guess by chunks puts first, chosen and read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.attention.cpu.choose import Candidates
from kvtailor.ops.attention.parts import Read, read_lanes
from kvtailor.ops.lanes.chunks import indexed_on_host
from kvtailor.types import Segment, Softmax

__all__ = ["read_chosen"]


def read_chosen(
    query: Tensor,
    parts: Sequence[Segment],
    carry: Mapping[str, Tensor],
    sizes: Callable[[int], tuple[int, int]],
    scaling: float,
    softmax: Softmax,
    *,
    most: int,
    waiting: int,
) -> tuple[Read, int] | None:
    """Return what was read, and how many tokens of each owner; None where it has to be worked out by torch.

    What is chosen is what `promised` and `keep_top` choose, up to rounding. No token may be padding.

    Args:
        query: (b, q, 1, d).
        parts: in time order.
        carry: of `rocket`: `capacity`, and `columns` with `bounds` of chunks, `chosen` of a turn, where there are any.
        sizes: from a row's capacity to the tokens of its chunks and the channels that are looked at.
        scaling, softmax: see `read_all`.
        most: tokens that are read of each owner, fewer than are held.
        waiting: so many tokens may be in no chunk, where there are chunks.
    """
    layouts = [part.layout for part in parts]
    if not query.is_cpu or "capacity" not in carry or any(each.owner is not None for each in layouts):
        return None
    known, held = indexed_on_host(carry), sum(each.size for each in layouts)
    if known is None or held <= most or any(each.lengths is not None for each in layouts):
        return None
    listed, after, tokens = carry.get("chosen"), 0, held
    if listed is not None:
        # Slots are columns where nothing was evicted, and the last of a turn's choice is the turn's last token.
        ends = listed[..., -1]
        after = int(ends.max()) + 1
        if not _is_whole(parts) or after <= 0 or int(ends.min()) + 1 != after:
            return None
        listed, tokens = listed.flatten(0, 1), listed.shape[2] + held - after
    each = [sizes(capacity) for capacity in known.capacity]
    heads = len(known.covered) // len(each)
    span, channels = ([size[of] for size in each for _ in range(heads)] for of in (0, 1))
    loose = [tokens - covered for covered in known.covered]
    if min(loose) < 0 or any(more > waiting and size > 1 for more, size in zip(loose, span, strict=True)):
        return None
    bounds = carry["bounds"].flatten(0, 1) if "bounds" in carry else None
    states = [part.decode() for part in parts]
    attend = dispatch.chosen_attention(query, states, bounds)
    if attend is None:
        return None
    b, q = query.shape[:2]
    budget = min(tokens, most)
    out, lse, _ = attend(
        query.reshape(b * heads, q // heads, 1, -1),
        states,
        Candidates(
            listed=listed,
            after=after,
            tokens=tokens,
            bounds=bounds,
            span=span,
            channels=channels,
            covered=known.covered,
        ),
        budget=budget,
        scaling=scaling,
        softcap=softmax.softcap,
        sinks=softmax.sink_rows(b, heads),
    )
    return read_lanes(query, heads, [], scaling, found=[(out, lse)], softmax=softmax), budget


def _is_whole(parts: Sequence[Segment]) -> bool:
    """Whether the parts hold all columns from 0 on, one behind the other."""
    column = 0
    for part in parts:
        if part.layout.start != column:
            return False
        column += part.layout.size
    return True
