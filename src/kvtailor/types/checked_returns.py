"""What methods return, held against what their contracts promise, where the engine takes it.

A tensor of a wrong shape would often be broadcast, and the answer would be wrong without a word. Shapes, dtypes and
devices are known without waiting for a device; numbers are compared only where they are on the CPU already.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, device, dtype, float32, int64, stack

from kvtailor.errors import MethodError
from kvtailor.types import Layout, PlainSegment, Segment

__all__ = [
    "check_attended",
    "checked_budgets",
    "checked_counts",
    "checked_scores",
    "checked_segment",
    "checked_tensor",
    "refuse",
]

_TO_DO = "mend the method, or use another; `tests/contract` says what each kind of method promises"


def refuse(method: object, what: str) -> MethodError:
    """The error of a method that broke its contract; `what` completes the sentence that begins with its name."""
    kind = type(method)
    return MethodError(f"{kind.__qualname__} (of {kind.__module__}) {what}; {_TO_DO}")


def checked_tensor(
    method: object, name: str, found: object, shape: tuple[int | None, ...], kind: dtype, place: device | None = None
) -> Tensor:
    """The tensor, if it is what was promised.

    Args:
        method: that returned it.
        name: what it is.
        found: what was returned.
        shape: None where a size is free.
        kind: its dtype.
        place: its device; None: any.

    Raises:
        MethodError: it is something else; the sentence names the method.
    """
    wanted = tuple("any" if size is None else size for size in shape)
    if not isinstance(found, Tensor):
        raise refuse(method, f"returned {type(found).__name__} as {name}, where a tensor of shape {wanted} is due")
    sizes = found.shape
    if len(sizes) != len(shape) or any(due not in (None, size) for due, size in zip(shape, sizes, strict=True)):
        raise refuse(method, f"returned {name} of shape {tuple(sizes)}, where {wanted} is due")
    if found.dtype != kind:
        raise refuse(method, f"returned {name} of {found.dtype}, where {kind} is due")
    if place is not None and found.device != place:
        raise refuse(method, f"returned {name} on {found.device}, where {place} is due")
    return found


def checked_scores(method: object, found: object, like: Tensor) -> Tensor:
    """Scores in the shape and on the device of the held tokens' positions (b, h, n), in float32."""
    return checked_tensor(method, "scores", found, tuple(like.shape), float32, like.device)


def checked_budgets(
    method: object, found: object, total: Tensor, floor: Tensor, capacity: Tensor, *, settled: bool, spare: int
) -> Tensor:
    """Budgets (b, l, h) within their bounds, of no more than the total. Less than the total is said, and taken.

    Args:
        method: the allocator.
        found: what it returned.
        total: (b,) int64 tokens over all layers.
        floor, capacity: (b, l, h) int64, all on the CPU.
        settled: no other layer will take from these; before, their sum is only known not to exceed their bounds.
        spare: how many tokens of a row may stay unspent once all layers are settled.

    Raises:
        MethodError: it is something else; the sentence names the method.
    """
    budgets = checked_tensor(method, "budgets", found, tuple(capacity.shape), int64, capacity.device)
    for name, wrong, bound in (
        ("below the tokens that must stay", budgets < floor, floor),
        ("above the tokens that are there", budgets > capacity, capacity),
    ):
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise refuse(
                method, f"gave {int(budgets[at])} tokens to (row, layer, head) {at}, {name}, which are {int(bound[at])}"
            )
    if not settled:
        return budgets
    due, sums = total.clamp(floor.sum((1, 2)), capacity.sum((1, 2))), budgets.sum((1, 2))
    for wrong in (sums > due, sums < due - spare):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            said = refuse(method, f"gave row {row} {int(sums[row])} tokens in all, where {int(due[row])} are due")
            if int(sums[row]) > int(due[row]):
                raise said
            warnings.warn(f"{said}: fewer are held than the plan asks for", stacklevel=3)
    return budgets


def checked_counts(method: object, kept: Tensor, scores: Tensor, budgets: Tensor, *, exact: bool) -> Tensor:
    """(b, h) int64 on the CPU: how many tokens a selector kept, if they are tokens and as many as it was asked for.

    Args:
        method: the selector.
        kept: (b, h, n) bool.
        scores: (b, h, n) float32, -inf where no token is.
        budgets: (b, h) int64 on the CPU.
        exact: whether it promised exactly so many.

    Raises:
        MethodError: it is something else; the sentence names the method.
    """
    # One transfer for both, which the eviction needs anyway.
    absent = kept & (scores == -float("inf"))
    counts, absent = stack([kept.sum(-1), absent.sum(-1)]).cpu().unbind()
    if bool(absent.any()):
        raise refuse(method, f"kept {int(absent.sum())} slots that hold no token")
    wrong = counts != budgets if exact else counts > budgets
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise refuse(method, f"kept {int(counts[at])} tokens in (row, head) {at}, where {int(budgets[at])} are due")
    return counts


def checked_segment(method: object, found: object, kind: type[Segment], layout: Layout) -> Segment:
    """A codec's segment, of the class that it named and for the lanes that it was given.

    Raises:
        MethodError: it is something else; the sentence names the method.
    """
    if not isinstance(found, kind):
        raise refuse(method, f"returned a {type(found).__name__} as a segment, where a {kind.__name__} is due")
    theirs = (found.layout.rows, found.layout.heads, found.layout.lanes, found.layout.size)
    due = (layout.rows, layout.heads, layout.lanes, layout.size)
    if theirs != due:
        raise refuse(
            method, f"returned a segment of (rows, heads, lanes, slots) {theirs}, where {due} is due, as it was given"
        )
    return found


def check_attended(method: object, found: object, query: Tensor, parts: Sequence[Segment], *, want_mass: bool) -> None:
    """Raises `MethodError` where an attention gives no output for each query, or no mass for each slot.

    Args:
        method: the attention.
        found: what it returned.
        query: (b, q, t, d).
        parts: what it read, the new tokens last and as they came.
        want_mass: whether it was asked for the mass.
    """
    newest = parts[-1]
    size = newest.values.shape[-1] if isinstance(newest, PlainSegment) else None
    output = getattr(found, "output", None)
    checked_tensor(method, "an output", output, (*query.shape[:3], size), query.dtype, query.device)
    tokens_read = getattr(found, "tokens_read", None)
    if tokens_read is not None:
        checked_tensor(method, "tokens read", tokens_read, (newest.layout.rows, newest.layout.heads), int64)
    if not want_mass:
        return
    mass = getattr(found, "mass", None)
    if mass is None or len(mass) != len(parts):
        raise refuse(method, f"returned mass of {0 if mass is None else len(mass)} parts, where {len(parts)} were read")
    for part, each in zip(parts, mass, strict=True):
        checked_tensor(method, "mass", each, (part.layout.lanes, part.layout.size), float32, query.device)
