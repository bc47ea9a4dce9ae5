"""The optimum of stage 1 is that of trying everything."""

from itertools import product

import numpy as np
import pytest

from kvtailor.fitting.layers import Options, solve


def tried(options, limit):
    """The least loss of all choices under the limit, by trying each; None where there is none."""
    layers, widths = options.keys.shape
    groups, shares = options.kept.shape[1:]
    of_layer = [
        [
            (
                options.keys[layer, k]
                + options.values[layer, v]
                + sum(options.kept[layer, g, s] for g, s in enumerate(kept)),
                sum(options.bytes[layer, k, v, s] for s in kept),
            )
            for k, v in product(range(widths), range(options.values.shape[1]))
            for kept in product(range(shares), repeat=groups)
        ]
        for layer in range(layers)
    ]
    sums = [(sum(loss for loss, _ in each), sum(size for _, size in each)) for each in product(*of_layer)]
    return min((loss for loss, size in sums if size <= limit), default=None)


def some_options(state, groups):
    draw = np.random.default_rng(state)
    layers, widths, shares = 3, 2, 2 if groups > 1 else 3
    return Options(
        keys=draw.random((layers, widths)),
        values=draw.random((layers, widths)),
        kept=draw.random((layers, groups, shares)),
        bytes=draw.integers(1, 100, (layers, widths, widths, shares)).astype(float),
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("state", range(8))
def test_the_choice_loses_as_little_as_the_best_of_all(state, groups):
    options = some_options(state, groups)
    least, most = options.bytes.min((1, 2, 3)).sum() * groups, options.bytes.max((1, 2, 3)).sum() * groups
    for share in (0.05, 0.3, 0.7, 1.0):
        limit = least + share * (most - least)
        found = solve(options, limit)
        assert found.loss == pytest.approx(tried(options, limit), abs=1e-9)
        assert found.bytes <= limit * (1 + 1e-9) and found.gap == 0.0


def test_the_sums_of_a_choice_are_those_of_its_options():
    options = some_options(3, 2)
    found = solve(options, 300.0)
    loss = size = 0.0
    for layer, (k, v, kept) in enumerate(zip(found.keys, found.values, found.kept, strict=True)):
        loss += (
            options.keys[layer, k]
            + options.values[layer, v]
            + sum(options.kept[layer, g, s] for g, s in enumerate(kept))
        )
        size += sum(options.bytes[layer, k, v, s] for s in kept)
    assert (found.loss, found.bytes) == pytest.approx((loss, size))


def test_a_limit_below_the_least_bytes_has_no_choice():
    options = some_options(1, 1)
    least = options.bytes.min((1, 2, 3)).sum()
    assert solve(options, least * 0.999) is None
    assert solve(options, least) is not None


def test_more_bytes_never_lose_more():
    options = some_options(5, 1)
    losses = [solve(options, limit).loss for limit in np.linspace(options.bytes.min((1, 2, 3)).sum() + 1, 300, 6)]
    assert losses == sorted(losses, reverse=True)
