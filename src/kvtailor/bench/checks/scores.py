"""Scores that must be the same because nothing was dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvtailor.bench.checks.fraud import Fraud
from kvtailor.bench.checks.reference import FARTHER, ReferenceScores, judge

__all__ = ["check_finely", "check_identity", "check_whole_budget"]

_SAME = (1e-3, 1e-4)
"""Nats in any one token, and in the mean: float32 is not asked about where it is nearer, as it is by far."""
_SAME_IN_HALF = (0.5, 0.02)
"""The same where nothing says what rounding does to a model: a bfloat16 logit of 20 has steps of 1/8."""
_WORTH_A_LOOK = (0.5, 0.05)
"""Of a plan at its whole budget in half precision: an honest one may be beyond it, and is then held to the truth."""
_CLEARLY_OFF = (2.0, 0.2)
"""The same of a plan that was right in a finer dtype, by the same code: several times what rounding gives."""
_ENOUGH = 512
"""Tokens that are held to the truth."""
_OF_PLAN = "; mend the method where it is yours, or please report it with the model's name"
_UNTRUE = ": no number of this run can be trusted; please report it with the model's name"
_PATHS = 5.0
"""So many times as far as usual may a plan be whose attention takes another exact way, where nothing else is known."""
_OF_ANOTHER_PATH = 2 * FARTHER
"""Margin for a plan whose attention takes another exact way, as h2o with its column sums: products round elsewhere."""


def check_identity(
    ours: Sequence[Tensor],
    own: Sequence[Tensor],
    dtype: torch.dtype,
    what: str,
    reference: Callable[[Sequence[int]], ReferenceScores],
    tolerance: float | None = None,
) -> str | None:
    """The null plan gives what the model's own cache gives, but for rounding.

    Args:
        ours, own: log-probabilities of the same tokens, a tensor (t,) for each window.
        dtype: of the model's caches.
        what: name of the text.
        reference: what some windows are held to.
        tolerance: most nats of one token that a caller allows; None: rounding is judged.

    Returns:
        How near both are to the model in a finer dtype, for a note; None where they are so alike that nobody asked.

    Raises:
        Fraud: "identity".
    """
    sizes = torch.cat([a - b for a, b in zip(ours, own, strict=True)]).abs()
    if tolerance is not None:
        if not float(sizes.max()) <= tolerance:
            found = f"by up to {float(sizes.max()):.2e} nats in one token, where {tolerance:.0e} is allowed"
            raise Fraud("identity", f"plan 'full' and the model's own cache differ {found}, of {what}{_UNTRUE}")
        return None
    worst, mean = _SAME if dtype.itemsize > 2 else (0.0, 0.0)
    if float(sizes.max()) <= worst and float(sizes.mean()) <= mean:
        return None
    chosen = _most_apart(ours, own)
    held = reference(chosen)
    if held.finely is not None and held.truth is not None:
        check_finely("identity", "plan 'full' and the model's own cache", held.finely, held.truth, held.dtype, what)
    if held.truth is None and len(held.ways) == 1 and _is_usual(sizes, dtype):
        return None
    fits, sentence = judge([ours[i] for i in chosen], held)
    if not fits:
        raise Fraud("identity", f"{sentence} of {what}, which is more than rounding and chance give{_UNTRUE}")
    return f"Identity: {sentence} of {what}."


def check_finely(
    name: str, sides: str, ours: Sequence[Tensor], truth: Sequence[Tensor], dtype: torch.dtype, what: str
) -> None:
    """In a finer dtype, where rounding hides nothing, a plan that drops nothing gives what the model's own cache gives.

    Args:
        name: of the check.
        sides: the two that are compared, in words.
        ours, truth: log-probabilities of the same tokens in that dtype, a tensor (t,) for each piece of text.
        dtype: which.
        what: name of the text.

    Raises:
        Fraud: with the name of the check.
    """
    sizes = torch.cat([a.double() - b.double() for a, b in zip(ours, truth, strict=True)]).abs()
    if not _is_usual(sizes, dtype):
        raise Fraud(
            name,
            f"with the weights in {str(dtype).removeprefix('torch.')}, {sides} differ by {float(sizes.mean()):.2e} "
            f"nats a token and by up to {float(sizes.max()):.2e} in one, of {sizes.numel()} tokens of {what}, where "
            f"rounding gives some millionths{_UNTRUE if name == 'identity' else _OF_PLAN}",
        )


def _most_apart(ours: Sequence[Tensor], own: Sequence[Tensor]) -> list[int]:
    """The windows in which two sides differ the most, as many as it takes.

    The choice is the same whichever side is which, so that it favours none of them.
    """
    # A difference that is no number is the largest.
    apart = [float((a - b).abs().mean().nan_to_num(nan=math.inf)) for a, b in zip(ours, own, strict=True)]
    found, tokens = list[int](), 0
    for index in sorted(range(len(ours)), key=apart.__getitem__, reverse=True):
        if tokens >= _ENOUGH:
            break
        found.append(index)
        tokens += ours[index].numel()
    return found


def _is_usual(sizes: Tensor, dtype: torch.dtype) -> bool:
    worst, mean = _SAME_IN_HALF if dtype.itemsize <= 2 else _SAME
    return float(sizes.max()) <= worst and float(sizes.mean()) <= mean


def check_whole_budget(
    plan: str,
    whole: str,
    ours: Tensor,
    full: Tensor,
    dtype: torch.dtype,
    what: str,
    closer: Callable[[], tuple[Tensor, ReferenceScores]],
    finely: bool = False,
) -> None:
    """A plan that may keep everything gives what 'full' gives.

    Args:
        plan: as the user wrote it.
        whole: what was tried in its place.
        ours, full: (t,) log-probability of the same tokens.
        dtype: of the model's caches.
        what: name of the text.
        closer: scores of more tokens under what was tried, and what they are held to; asked where the first ones are
            not near enough.
        finely: it gave what 'full' gives in a finer dtype.

    Raises:
        Fraud: "whole budget".
    """
    sizes = (ours - full).abs()
    worst, mean = _WORTH_A_LOOK if dtype.itemsize <= 2 else (_SAME[0], _SAME[0])
    if finely:
        worst, mean = _CLEARLY_OFF
    if float(sizes.max()) <= worst and float(sizes.mean()) <= mean:
        return
    scores, held = closer()
    if held.truth is None and len(held.ways) == 1 and _is_usual(sizes / _PATHS, dtype):
        return
    fits, sentence = judge([scores], held, _OF_ANOTHER_PATH, "it")
    if not fits:
        raise Fraud(
            "whole budget",
            f"plan {plan!r} was tried as {whole!r}, which drops nothing, and {float(sizes.mean()):.2e} nats a token of "
            f"{what} lie between it and 'full'; {sentence}: what it loses is not its budget's doing{_OF_PLAN}",
        )
