"""The two fits of `matching` for one kv head, with SciPy and NumPy, on shares of attention that a test has counted."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import lsq_linear

from kvtailor.merge.matching import Matching

__all__ = ["fit_by_hand"]


def fit_by_hand(
    merger: Matching,
    rows: np.ndarray,
    whole: np.ndarray,
    summed: np.ndarray,
    rest: np.ndarray,
    others: np.ndarray,
    old: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Factors (t,) and values (t, dv) of the tokens that may change, and the errors of dropping and of the fit.

    Args:
        merger: its settings.
        rows: (r, t) shares that each query gives those tokens.
        whole, summed: (r,) and (r, dv) shares and values of those and of the dropped ones, summed.
        rest, others: the same of all other tokens.
        old: (t, dv) the values of the tokens that may change.
    """
    count = len(old)
    factors, new = np.ones(count), old
    if merger.fit != "values":
        ridge = np.sqrt(merger.ridge * (rows**2).sum() / count)
        bounds = math.exp(-merger.bound), math.exp(merger.bound)
        system = np.concatenate([rows, ridge * np.eye(count)]), np.concatenate([whole, ridge * np.ones(count)])
        factors = lsq_linear(*system, bounds=bounds, method="bvls", tol=1e-14, max_iter=1000).x
    if merger.fit != "weights":
        attended = _over(rows * factors, rows @ factors) * whole[:, None]
        ridge = np.sqrt(merger.ridge * (attended**2).sum() / count)
        system = np.concatenate([attended, ridge * np.eye(count)])
        right = summed * (rows @ factors > 0)[:, None]
        new = np.linalg.lstsq(system, np.concatenate([right, ridge * old]), rcond=None)[0]
    dropping = fitting = 0.0
    for later in (0.0, 1.0):
        aim = _over(others + summed, rest + whole + later)
        dropping += ((_over(others + rows @ old, rest + rows.sum(-1) + later) - aim) ** 2).sum()
        fitted = _over(others + rows @ (factors[:, None] * new), rest + rows @ factors + later)
        fitting += ((fitted - aim) ** 2).sum()
    return factors, new, float(dropping), float(fitting)


def _over(sums: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Means of rows; a query that sees none of the tokens gets nothing."""
    return sums / np.where(totals > 0, totals, 1.0)[:, None]
