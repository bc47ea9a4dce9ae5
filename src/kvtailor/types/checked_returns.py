"""What methods return, held against what their contracts promise, where the engine takes it.

A tensor of a wrong shape would often be broadcast, and the answer would be wrong without a word. Shapes, dtypes and
devices are known without waiting for a device; numbers are compared only where they are on the CPU already.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, device, dtype, float32, int64, stack
from torch import bool as truth

from kvtailor.errors import CacheMisuse, MethodError
from kvtailor.method import Method
from kvtailor.types import PlainSegment, Segment
from kvtailor.types.late_checks import all_finite, require_none, send

__all__ = [
    "check_attended",
    "check_budgets",
    "check_counts",
    "check_measured",
    "check_scores",
    "check_segment",
    "check_tensor",
    "check_spent",
    "contract_error",
    "is_of_others",
    "ranking_error",
]

_TO_DO = "mend the method, or use another; `tests/contract` says what each kind of method promises"


def contract_error(method: object, what: str) -> MethodError:
    """The error of a method that broke its contract; `what` completes the sentence that begins with its name."""
    kind = type(method)
    return MethodError(f"{kind.__qualname__} (of {kind.__module__}) {what}; {_TO_DO}")


def check_tensor(
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
        raise contract_error(
            method, f"returned {type(found).__name__} as {name}, where a tensor of shape {wanted} is due"
        )
    sizes = found.shape
    if len(sizes) != len(shape) or any(due not in (None, size) for due, size in zip(shape, sizes, strict=True)):
        raise contract_error(method, f"returned {name} of shape {tuple(sizes)}, where {wanted} is due")
    if found.dtype != kind:
        raise contract_error(method, f"returned {name} of {found.dtype}, where {kind} is due")
    if place is not None and found.device != place:
        raise contract_error(method, f"returned {name} on {found.device}, where {place} is due")
    return found


def check_scores(method: object, found: object, like: Tensor) -> Tensor:
    """Scores in the shape and on the device of the held tokens' positions (b, h, n), in float32."""
    return check_tensor(method, "scores", found, tuple(like.shape), float32, like.device)


def ranking_error(plan: object, layer: int, keys: Tensor) -> CacheMisuse:
    """Return the error of a compressed layer whose tokens have scores that are not finite.

    Args:
        plan: whose scorer gave them.
        layer: its number.
        keys: what it holds, or () bool, whether all of it is finite.
    """
    finite = bool(keys if keys.dtype == truth else all_finite(keys))
    what = "no finite score" if finite else "NaN or infinity in its keys"
    why = "its keys are finite, so its queries are not, or the score is at fault; " if finite else ""
    return CacheMisuse(
        f"layer {layer} of the compressed layers has {what} for some tokens, so {plan} cannot rank them; {why}check "
        "the model's inputs and dtype (float16 overflow is the usual cause)"
    )


def check_budgets(
    method: object, found: object, total: Tensor, floor: Tensor, capacity: Tensor, *, settled: bool, spare: int
) -> Tensor:
    """Budgets (b, l, h) within their bounds, of no more than the total.

    Where all layers are decided together, less than the total is said, and taken.

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
    budgets = check_tensor(method, "budgets", found, tuple(capacity.shape), int64, capacity.device)
    for name, wrong, bound in (
        ("below the tokens that must stay", budgets < floor, floor),
        ("above the tokens that are there", budgets > capacity, capacity),
    ):
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise contract_error(
                method, f"gave {int(budgets[at])} tokens to (row, layer, head) {at}, {name}, which are {int(bound[at])}"
            )
    if not settled:
        return budgets
    due, sums = total.clamp(floor.sum((1, 2)), capacity.sum((1, 2))), budgets.sum((1, 2))
    for wrong in (sums > due, sums < due - spare):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            said = contract_error(
                method, f"gave row {row} {int(sums[row])} tokens in all, where {int(due[row])} are due"
            )
            if int(sums[row]) > int(due[row]):
                raise said
            warnings.warn(f"{said}: fewer are held than the plan asks for", stacklevel=3)
    return budgets


def check_spent(method: object, beyond: Tensor, total: Tensor, *, layers: int, heads: int) -> None:
    """Raise `MethodError` where layers that are decided one after the other got more together than there is.

    The share of each is not known, and the tokens that must stay may exceed it: so what they got beyond these is held
    against the whole total, with a token a head for what is rounded up.

    Args:
        method: the allocator.
        beyond: (b,) int64 tokens that the layers so far got beyond those that must stay.
        total: (b,) int64 tokens over all layers.
        layers: how many layers so far. heads: of a layer.
    """
    wrong = beyond > total + layers * heads
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise contract_error(
            method,
            f"gave row {row} {int(beyond[row])} tokens beyond those that must stay on {layers} layers, where all "
            f"layers together have {int(total[row])}",
        )


def check_counts(method: object, kept: Tensor, scores: Tensor, budgets: Tensor, *, exact: bool) -> Tensor:
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
    # (2, b, h), in one transfer, which the eviction needs anyway where the counts were not promised.
    both = stack([kept.sum(-1), (kept & (scores == -float("inf"))).sum(-1)])
    if exact and kept.device.type != "cpu":
        wrong = (both[0] != send(budgets, kept.device)) | (both[1] > 0)
        require_none(wrong, lambda: _miscounted(method, both.cpu(), budgets, exact=True))
        return budgets
    on_host = both.cpu()
    if bool(on_host[1].any()) or bool((on_host[0] != budgets if exact else on_host[0] > budgets).any()):
        raise _miscounted(method, on_host, budgets, exact=exact)
    return on_host[0]


def _miscounted(method: object, both: Tensor, budgets: Tensor, *, exact: bool) -> MethodError:
    """The error of a selector that kept, of each row and head, other tokens than it was asked for.

    Args:
        method, budgets, exact: see `check_counts`.
        both: (2, b, h) int64 on the CPU: how many it kept, and how many of these are none.
    """
    counts, absent = both
    if bool(absent.any()):
        return contract_error(method, f"kept {int(absent.sum())} slots that hold no token")
    wrong = counts != budgets if exact else counts > budgets
    at = tuple(wrong.nonzero()[0].tolist())
    return contract_error(
        method, f"kept {int(counts[at])} tokens in (row, head) {at}, where {int(budgets[at])} are due"
    )


def check_measured(method: object, found: object, rows: int) -> Tensor | None:
    """What an allocator measured of a layer: None, or a tensor of so many rows.

    Raises:
        MethodError: it is something else; the sentence names the method.
    """
    if found is None or (isinstance(found, Tensor) and found.shape[:1] == (rows,)):
        return found
    shape = getattr(found, "shape", type(found).__name__)
    raise contract_error(method, f"measured {shape}, where a tensor of {rows} rows is due")


_DECODED: set[tuple[str, int, int]] = set()
"""Codecs of other packages and sizes of states, of which a segment was decoded to see what it gives."""


def check_segment(method: object, found: object, kind: type[Segment], plain: PlainSegment) -> Segment:
    """A codec's segment, of the class that it named and for the lanes that it was given.

    What it decodes to is seen once in a process for each size, of codecs that are not kvtailor's own: ours are held to
    it by tests.

    Args:
        method: the codec.
        found: what it returned.
        kind: the class that it named.
        plain: what it was given.

    Raises:
        MethodError: it is something else; the sentence names the method.
    """
    if not isinstance(found, kind):
        raise contract_error(method, f"returned a {type(found).__name__} as a segment, where a {kind.__name__} is due")
    theirs = (found.layout.rows, found.layout.heads, found.layout.lanes, found.layout.size)
    layout = plain.layout
    due = (layout.rows, layout.heads, layout.lanes, layout.size)
    if theirs != due:
        raise contract_error(
            method, f"returned a segment of (rows, heads, lanes, slots) {theirs}, where {due} is due, as it was given"
        )
    if is_of_others(method) and (seen := (repr(method), plain.keys.shape[-1], plain.values.shape[-1])) not in _DECODED:
        for name, side, given in zip(("keys", "values"), found.decode(), (plain.keys, plain.values), strict=True):
            check_tensor(method, f"decoded {name}", side, tuple(given.shape), given.dtype, given.device)
        _DECODED.add(seen)
    return found


def is_of_others(method: object) -> bool:
    """Whether another package than kvtailor has a method, or one that it is made of."""
    if not type(method).__module__.startswith("kvtailor."):
        return True
    own = getattr(method, "__dict__", {}).values()
    inside = (each for value in own for each in (value if isinstance(value, tuple) else (value,)))
    return any(isinstance(each, Method) and is_of_others(each) for each in inside)


def check_attended(method: object, found: object, query: Tensor, parts: Sequence[Segment], *, want_mass: bool) -> None:
    """Raise `MethodError` where an attention gives no output for each query, or no mass for each slot.

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
    check_tensor(method, "an output", output, (*query.shape[:3], size), query.dtype, query.device)
    tokens_read = getattr(found, "tokens_read", None)
    if tokens_read is not None:
        check_tensor(method, "tokens read", tokens_read, (newest.layout.rows, newest.layout.heads), int64)
    if not want_mass:
        return
    mass = getattr(found, "mass", None)
    if mass is None or len(mass) != len(parts):
        raise contract_error(
            method, f"returned mass of {0 if mass is None else len(mass)} parts, where {len(parts)} were read"
        )
    for part, each in zip(parts, mass, strict=True):
        check_tensor(method, "mass", each, (part.layout.lanes, part.layout.size), float32, query.device)
