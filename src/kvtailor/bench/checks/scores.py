"""Scores that must be the same because nothing was dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtailor.bench.checks.fraud import Fraud

__all__ = ["check_identity", "check_whole_budget", "tolerances", "tolerances_of_another_path"]


def tolerances(dtype: torch.dtype) -> tuple[float, float | None]:
    """How far two ways to compute one thing may differ, in nats: in any one token, and in the mean of their sizes.

    In float32 1e-3. In half precision 0.5 and 0.02 in the mean: a bfloat16 logit of 20 has steps of 1/8.
    """
    return (1e-3, None) if dtype == torch.float32 else (0.5, 0.02)


def tolerances_of_another_path(dtype: torch.dtype) -> tuple[float, float | None]:
    """The same for a plan whose attention takes another exact way, as h2o with its column sums does.

    In half precision every product then rounds elsewhere: on the embedded model h2o at keep=1.0 is 0.017 to 0.035 nats
    off in the mean token in bfloat16, and 2e-6 in float32. So 0.1 in the mean is allowed there.
    """
    worst, mean = tolerances(dtype)
    return (worst, None) if mean is None else (worst, 0.1)


def check_identity(
    ours: Sequence[float], own: Sequence[float], tolerance: float, what: str, mean_tolerance: float | None = None
) -> None:
    """The null plan gives what the model's own cache gives.

    Raises:
        Fraud: "identity", where the largest difference of any token's log-probability is above `tolerance`, or the
            mean of their sizes above `mean_tolerance`.
    """
    found = _difference(ours, own, tolerance, mean_tolerance)
    if found is not None:
        raise Fraud(
            "identity",
            f"plan 'full' and the model's own cache differ by {found} of {what}: no number of this run can be trusted; "
            "please report it with the model's name",
        )


def check_whole_budget(
    plan: str,
    whole: str,
    ours: Sequence[float],
    full: Sequence[float],
    tolerance: float,
    what: str,
    mean_tolerance: float | None = None,
) -> None:
    """A plan that may keep everything gives what 'full' gives.

    Args:
        plan: as the user wrote it.
        whole: what was tried in its place.
        ours, full: log-probability of the same tokens.
        tolerance, what, mean_tolerance: see `check_identity`.

    Raises:
        Fraud: "whole budget".
    """
    found = _difference(ours, full, tolerance, mean_tolerance)
    if found is not None:
        raise Fraud(
            "whole budget",
            f"plan {plan!r} was tried as {whole!r}, which drops nothing, and differs from 'full' by {found} of {what}: "
            "what it loses is not its budget's doing; please report it with the model's name",
        )


def _difference(
    ours: Sequence[float], theirs: Sequence[float], tolerance: float, mean_tolerance: float | None
) -> str | None:
    """What is too large, in words; a difference that is not a number counts as too large."""
    sizes = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    worst, mean = max(sizes), sum(sizes) / len(sizes)
    if mean_tolerance is not None and not mean <= mean_tolerance:
        return f"{mean:.2e} nats in the mean token, where {mean_tolerance:.0e} is allowed,"
    if not all(size <= tolerance for size in sizes):
        return f"up to {worst:.2e} nats in one token, where {tolerance:.0e} is allowed,"
    return None
