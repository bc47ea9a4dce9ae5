"""Bases against their definitions: Palu's whitened singular vectors, energies, ranks that keep their sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtailor.ops.codes.subspace import Basis, StateMoments, principal, random_directions, rank_of, split_ranks
from kvtailor.ops.lanes.joined import apart, group_layout, hold_the_same, members, together
from kvtailor.types import Layout


def measured(states: Tensor, heads: int) -> StateMoments:
    """Moments of states (n, h * c)."""
    return StateMoments.of(states.mT @ states, states.sum(0).view(heads, -1), states.shape[0])


def skewed(tokens: int, width: int, seed: int) -> Tensor:
    """(n, w) float64 of very different variances, correlated, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    drawn = torch.randn(tokens, width, generator=generator, dtype=torch.float64) * torch.logspace(0, -1.5, width)
    return drawn @ mixing + torch.randn(width, generator=generator, dtype=torch.float64)


def projector(directions: Tensor) -> Tensor:
    return directions @ directions.mT


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_palus_whitened_decomposition_is_the_projection_on_the_states_own_directions(rank: int) -> None:
    """Against the paper's formula: W S cut to r, with S the Cholesky factor of the inputs' second moment, then S^-1."""
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(12, 20, generator=generator, dtype=torch.float64)
    inputs = skewed(400, 20, 3)
    root = torch.linalg.cholesky(inputs.mT @ inputs)
    left, values, right = torch.linalg.svd(weight @ root, full_matrices=False)
    reconstruct = left[:, :rank] * values[:rank].sqrt()
    project = values[:rank].sqrt()[:, None] * right[:rank] @ torch.linalg.inv(root)
    expected = inputs @ (reconstruct @ project).mT
    states = inputs @ weight.mT
    vectors = torch.linalg.eigh(states.mT @ states).eigenvectors[:, -rank:]
    assert torch.allclose(states @ projector(vectors), expected, atol=1e-8)
    # And from a file, whose correlations have 8 bits, nearly so.
    basis = principal(measured(states, 1), 1, rank, centred=False, shared=False)[0]
    found = states.float()[None]
    restored = basis.states(basis.latents(found, None), None)[0].double()
    best, ours = ((states - each).square().sum() / states.square().sum() for each in (expected, restored))
    assert best - 1e-9 <= ours <= 1.02 * best + 1e-4


@pytest.mark.parametrize(("joined", "shared"), [(1, False), (3, False), (1, True), (2, False)])
@pytest.mark.parametrize("centred", [False, True])
def test_the_energy_kept_is_the_sum_of_the_kept_eigenvalues(joined: int, shared: bool, centred: bool) -> None:
    heads, channels, tokens = 6, 4, 500
    states = skewed(tokens, heads * channels, 1)
    moments = measured(states, heads)
    # What the file's moments say, so that its 8 bits are no part of the comparison.
    second = moments.covariance() + moments.mean.double().flatten()[:, None] * moments.mean.double().flatten()
    mean = moments.mean.double().flatten()
    basis, energies = principal(moments, joined, 3, centred=centred, shared=shared)
    assert basis.directions.shape == (heads // joined, joined * channels, 3)
    width = joined * channels
    for group in range(heads // joined):
        own = slice(group * width, (group + 1) * width)
        directions = basis.directions[group].double()
        assert torch.allclose(directions.mT @ directions, torch.eye(3, dtype=torch.float64), atol=1e-5)
        if not shared:
            matrix = second[own, own] - (mean[own, None] * mean[own] if centred else 0)
            kept = (directions.mT @ matrix @ directions).diagonal().sum()
            assert torch.allclose(kept, energies[group][:3].sum(), rtol=1e-4, atol=1e-6)
            assert torch.allclose(energies[group].sum(), matrix.diagonal().sum(), rtol=1e-4)
    if shared:
        pooled = states.view(tokens * heads, channels)
        pooled = pooled - pooled.mean(0) if centred else pooled
        exact = torch.linalg.eigvalsh(pooled.mT @ pooled / len(pooled)).flip(-1)
        assert torch.allclose(energies[0], exact, rtol=2e-2, atol=1e-2)
        assert torch.equal(basis.directions[0], basis.directions[-1])


def test_moments_come_back_from_their_eight_bits() -> None:
    states = skewed(600, 10, 2)
    moments = measured(states, 2)
    exact = torch.cov(states.mT, correction=0)
    scale = exact.diagonal().sqrt()
    assert ((moments.covariance() - exact).abs() <= (0.5 / 127 + 2e-3) * scale[:, None] * scale).all()
    assert torch.allclose(moments.mean.double().flatten(), states.mean(0), atol=1e-2, rtol=1e-3)
    assert moments == measured(states, 2) and hash(moments) == hash(measured(states, 2))
    assert moments != measured(states + 1, 2)
    still = measured(torch.ones(50, 4, dtype=torch.float64), 2)
    assert bool(still.covariance().isfinite().all())


@pytest.mark.parametrize("owner", [None, torch.tensor([0, 1, 1, 1, 2, 3, 3])], ids=["even", "pages"])
def test_folding_the_way_back_into_sums_is_reconstruction(owner: Tensor | None) -> None:
    """Weighted sums of latents, lifted once, against sums of reconstructed states; 2 rows of 2 groups of 3 heads."""
    basis = principal(measured(skewed(300, 30, 4), 6), 3, 7, centred=True, shared=False)[0]
    lanes = 4 if owner is None else len(owner)
    of_lane = torch.arange(4) if owner is None else owner
    latents = torch.randn(lanes, 9, 7, generator=torch.Generator().manual_seed(5))
    weights = torch.rand(12, 2, 9, generator=torch.Generator().manual_seed(6))
    states = basis.states(latents, owner).unflatten(2, (3, 5))
    sums, share, expected = torch.zeros(12, 2, 7), torch.zeros(12, 2), torch.zeros(12, 2, 5)
    for lane in range(lanes):
        for member in range(3):
            head = int(of_lane[lane]) * 3 + member
            sums[head] += weights[head] @ latents[lane]
            share[head] += weights[head].sum(-1)
            expected[head] += weights[head] @ states[lane, :, member]
    assert torch.allclose(basis.lift().of_sums(sums, share), expected, atol=1e-5)
    alone = basis.by_head()
    assert alone.lift().matrix.shape == (6, 7, 5) and torch.equal(alone.lift().matrix, basis.lift().matrix)


def test_random_directions_are_orthonormal_and_keep_their_share_of_any_energy() -> None:
    basis = random_directions(40, 2, 32, 8, 3, shared=False)
    assert torch.allclose(basis.directions.mT @ basis.directions, torch.eye(8).expand(40, -1, -1), atol=1e-5)
    states = skewed(40, 32, 7).float()[:, None]
    kept = basis.latents(states, None).square().sum((1, 2)) * basis.scale**2 / states.square().sum((1, 2))
    assert 0.18 < float(kept.mean()) < 0.32
    assert not torch.equal(basis.directions, random_directions(40, 2, 32, 8, 4, shared=False).directions)
    assert torch.equal(*random_directions(2, 1, 32, 8, 3, shared=True).directions)


def test_ranks_of_shares_and_counts() -> None:
    assert [rank_of(0.5, 128), rank_of(0.001, 128), rank_of(1.0, 7), rank_of(200, 128), rank_of(3, 0)] == [
        64,
        1,
        7,
        128,
        0,
    ]
    assert rank_of(128, 64, 2) == 64 and rank_of(96, 64, 4) == 24


@pytest.mark.parametrize("widths", [(64, 64), (128, 64), (0, 64), (48, 0), (7, 7)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_ranks_by_weight_keep_their_sum(widths: tuple[int, int], share: float) -> None:
    generator = torch.Generator().manual_seed(widths[0])
    weights = torch.rand(2, 5, generator=generator) * torch.tensor([[0.2], [3.0]])
    ranks = torch.tensor([rank_of(share, width) for width in widths])
    found = split_ranks(weights, ranks, torch.tensor(widths))
    assert int(found.sum()) == 5 * int(ranks.sum())
    for side, width in enumerate(widths):
        assert bool((found[side] <= width).all()) and bool((found[side] >= min(1, width)).all())
    if widths == (64, 64) and share == 0.5:
        order = weights[0].argsort()
        assert bool((found[0][order].diff() >= 0).all()) and found[1].sum() > found[0].sum()


def test_equal_weights_give_equal_ranks() -> None:
    assert torch.equal(
        split_ranks(torch.ones(2, 3), torch.tensor([32, 32]), torch.tensor([64, 64])), torch.full((2, 3), 32)
    )


def test_heads_side_by_side_and_apart_again() -> None:
    even = Layout(rows=2, heads=4, size=3, start=0)
    states = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(1))
    lanes = members(even, 2)
    assert lanes is not None and lanes.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    wide = together(states, lanes)
    assert torch.equal(wide[1, 2], torch.cat([states[2, 2], states[3, 2]])) and torch.equal(apart(wide, lanes), states)
    # Row 0 has one page of each head, row 1 two.
    owner = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    column = torch.tensor([[0, 1, 2]] * 4 + [[0, 1, 2], [3, 4, 4]] * 4, dtype=torch.int32)
    lengths = torch.tensor([3] * 4 + [3, 2] * 4, dtype=torch.int32)
    pages = Layout(rows=2, heads=4, size=3, owner=owner, positions=column, lengths=lengths)
    lanes = members(pages, 2)
    assert lanes is not None and lanes.tolist() == [[0, 1], [2, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert hold_the_same(pages, lanes)
    groups = group_layout(pages, lanes)
    assert groups.owner is not None and groups.owner.tolist() == [0, 1, 2, 2, 3, 3] and groups.heads == 2
    assert groups.lengths is not None and groups.lengths.tolist() == [3, 3, 3, 2, 3, 2]
    states = torch.randn(12, 3, 5, generator=torch.Generator().manual_seed(2))
    assert torch.equal(apart(together(states, lanes), lanes), states)
    other = column.clone()
    other[7, 0] = 9
    assert not hold_the_same(Layout(rows=2, heads=4, size=3, owner=owner, positions=other, lengths=lengths), lanes)
    assert members(Layout(rows=1, heads=2, size=3, owner=torch.tensor([0, 0, 0, 1]), positions=column[:4]), 2) is None


def test_a_basis_keeps_float16_finite() -> None:
    basis = random_directions(1, 1, 64, 64, 0, shared=False)
    states = torch.full((1, 4, 64), 6e4, dtype=torch.float16)
    assert bool(basis.latents(states, None).isfinite().all()) and basis.scale == 8.0
    assert isinstance(basis, Basis) and torch.allclose(
        basis.states(basis.latents(states, None), None).float(), states.float(), rtol=1e-2
    )
