"""The exact optimum of stage 1: which width and which share of the tokens each layer gets, under a limit of bytes.

Damages are taken to add up over layers and sides, which `layers.additivity` measures. The rest is a choice of one
option for each layer, and for each of its heads, which HiGHS (SciPy's `milp`) solves exactly: SciPy is kept by others,
takes couplings that dynamic programming over bytes would need rounding for, and tells where its time did not suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from kvtailor.errors import KvtailorError

__all__ = ["Choice", "Options", "solve"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What each layer can have, what it loses by it, and what it costs.

    Attributes:
        keys: [l][w] loss where the keys of layer l have width number w, and nothing else is compressed.
        values: [l][w] the same for values.
        kept: [l][g][f] loss where the heads of group g of layer l keep share number f of their tokens.
        bytes: [l][wk][wv][f] bytes of one group of heads of layer l.
    """

    keys: np.ndarray
    values: np.ndarray
    kept: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One option for each layer.

    Attributes:
        keys, values: (l,) number of the width.
        kept: (l, g) number of the share.
        loss: the sum of the losses, as if they added up.
        bytes: the sum of the bytes.
        gap: how far above the least possible loss this may be, as a share of it; 0.0: it is the least.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    loss: float
    bytes: float
    gap: float


def solve(options: Options, limit: float, *, seconds: float = 60.0) -> Choice | None:
    """Return the choice with the least loss whose bytes are at most `limit`; None where no choice has so few.

    Args:
        options: see there.
        limit: bytes.
        seconds: after which the best that was found is taken, and `gap` says how far it may be off.

    Raises:
        KvtailorError: the solver failed.
    """
    layers, key_widths = options.keys.shape
    value_widths, (_, groups, shares) = options.values.shape[1], options.kept.shape
    if float(options.bytes.reshape(layers, -1).min(1).sum()) * groups > limit:
        return None
    pairs = list(product(range(key_widths), range(value_widths)))
    # x[l, w]: layer l has the widths w; y[l, w, g, f]: it has, and its group g keeps share f.
    count_x = layers * len(pairs)
    x = np.arange(count_x).reshape(layers, len(pairs))
    y = count_x + np.arange(layers * len(pairs) * groups * shares).reshape(layers, len(pairs), groups, shares)
    loss, size = np.zeros(count_x + y.size), np.zeros(count_x + y.size)
    for w, (wk, wv) in enumerate(pairs):
        loss[x[:, w]] = options.keys[:, wk] + options.values[:, wv]
        loss[y[:, w]] = options.kept
        size[y[:, w]] = options.bytes[:, wk, wv][:, None, :]
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    right: list[float] = []

    def equal(places: np.ndarray, factors: np.ndarray, to: float) -> None:
        rows.extend([len(right)] * places.size)
        columns.extend(places.tolist())
        entries.extend(factors.tolist())
        right.append(to)

    for layer in range(layers):
        equal(x[layer], np.ones(len(pairs)), 1.0)
        for w in range(len(pairs)):
            for group in range(groups):
                places = y[layer, w, group]
                equal(np.append(places, x[layer, w]), np.append(np.ones(shares), -1.0), 0.0)
    shape = (len(right), loss.size)
    # Numbers near 1 keep the solver's tolerances meaningful: bytes are shares of the limit, losses of the largest.
    scale = float(np.abs(loss).max()) or 1.0
    found = milp(
        loss / scale,
        constraints=[
            LinearConstraint(csr_array((entries, (rows, columns)), shape=shape), right, right),
            LinearConstraint(csr_array(size[None] / limit), -np.inf, 1.0),
        ],
        bounds=Bounds(0, 1),
        integrality=np.ones(loss.size),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if found.x is None:
        if found.status == 2:
            return None
        raise KvtailorError(f"the solver of stage 1 found no choice under {limit:.0f} bytes: {found.message}")
    chosen = found.x.round().astype(bool)
    which = [pairs[int(np.flatnonzero(chosen[x[layer]])[0])] for layer in range(layers)]
    kept = []
    for layer in range(layers):
        w = int(np.flatnonzero(chosen[x[layer]])[0])
        kept.append(tuple(int(np.flatnonzero(chosen[y[layer, w, group]])[0]) for group in range(groups)))
    return Choice(
        keys=tuple(wk for wk, _ in which),
        values=tuple(wv for _, wv in which),
        kept=tuple(kept),
        loss=float(loss[chosen].sum()),
        bytes=float(size[chosen].sum()),
        gap=max(0.0, float(found.mip_gap or 0.0)),
    )
