"""Bounded least squares against SciPy's, at shapes with more equations and with more unknowns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear, nnls
from torch import Tensor

from kvtailor.ops.least_squares import bounded_factors, ridge_change

SHAPES = [(1, 1), (7, 3), (3, 7), (63, 20), (20, 63), (40, 40)]


def problem(rows: int, unknowns: int, seed: int = 1, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Shares of attention, some of them of nearly equal keys, and their sum with others."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, rows, unknowns, generator=generator, dtype=torch.float64) * 2
    logits[..., unknowns // 2] = logits[..., 0]
    return logits.exp(), torch.randn(batch, rows, generator=generator, dtype=torch.float64).exp() * unknowns


def with_ridge(matrix: Tensor, target: Tensor, ridge: float, prior: float) -> tuple[np.ndarray, np.ndarray]:
    """One of a batch as a plain least squares problem: the ridge as more equations."""
    unknowns = matrix.shape[1]
    more = np.sqrt(ridge) * np.eye(unknowns)
    whole = np.concatenate([matrix.numpy(), more])
    return whole, np.concatenate([target.numpy(), np.sqrt(ridge) * prior * np.ones(unknowns)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ridge", [1e-3, 1.0], ids=str)
def test_equals_nnls_of_scipy(shape: tuple[int, int], ridge: float) -> None:
    matrix, target = problem(*shape)
    found = bounded_factors(matrix, target, ridge=torch.full((3,), ridge), low=0.0, high=torch.inf)
    for mine, one, aim in zip(found, matrix, target, strict=True):
        whole, right = with_ridge(one, aim, ridge, 1.0)
        expected, _ = nnls(whole, right)
        assert np.allclose(mine.numpy(), expected, rtol=1e-6, atol=1e-8)
        assert shape[1] < 20 or (expected == 0).any(), "a bound binds, or nothing is tested"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_bounded_least_squares_of_scipy(shape: tuple[int, int]) -> None:
    matrix, target = problem(*shape, seed=2)
    low, high = float(np.exp(-1)), float(np.exp(1))
    found = bounded_factors(matrix.float(), target, ridge=torch.full((3,), 0.01), low=low, high=high)
    for mine, one, aim in zip(found, matrix.float().double(), target, strict=True):
        whole, right = with_ridge(one, aim, 0.01, 1.0)
        expected = lsq_linear(whole, right, bounds=(low, high), method="bvls", tol=1e-14).x
        assert np.allclose(mine.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_without_a_ridge_to_speak_of_the_residual_is_that_of_nnls() -> None:
    matrix, target = problem(63, 20, seed=3)
    found = bounded_factors(matrix, target, ridge=torch.full((3,), 1e-9), low=0.0, high=torch.inf)
    for mine, one, aim in zip(found, matrix, target, strict=True):
        _, expected = nnls(one.numpy(), aim.numpy())
        assert float((one @ mine - aim).norm()) == pytest.approx(expected, rel=1e-6)


def test_columns_of_nothing_stay_at_the_prior_and_change_no_other() -> None:
    matrix, target = problem(9, 6)
    wide = torch.cat([matrix, torch.zeros(3, 9, 30)], 2)
    ridge = torch.full((3,), 0.1)
    found = bounded_factors(wide, target, ridge=ridge, low=0.05, high=20.0)
    assert (found[:, 6:] == 1).all()
    assert torch.allclose(found[:, :6], bounded_factors(matrix, target, ridge=ridge, low=0.05, high=20.0), atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ridge_regression_equals_that_of_plain_equations(shape: tuple[int, int]) -> None:
    matrix, _ = problem(*shape)
    target = torch.randn(3, shape[0], 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = ridge_change(matrix, target, ridge=torch.full((3,), 0.3))
    for mine, one, aim in zip(found, matrix, target, strict=True):
        whole, _ = with_ridge(one, aim[:, 0], 0.3, 0.0)
        right = np.concatenate([aim.numpy(), np.zeros((shape[1], 5))])
        assert np.allclose(mine.numpy(), np.linalg.lstsq(whole, right, rcond=None)[0], atol=1e-8)
