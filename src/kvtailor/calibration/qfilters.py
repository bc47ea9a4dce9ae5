"""Filters for `score/by_keys/qfilters.py`: the direction in which the queries of each head lie.

From arXiv 2503.02812, section 3: the first right-singular vector of all of a head's queries (their mean is not taken
off), with the sign that makes the projection of the mean query positive, so that keys with a larger projection get more
attention; the filters of a group's query heads are averaged. The queries are taken as they meet the cached keys, that
is after their rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.presets import FULL

__all__ = ["QFilters", "filters_of"]


@dataclass(frozen=True, kw_only=True)
class QFilters(Calibrator):
    """The principal direction of the queries of each kv head."""

    summary = "direction of the queries of each kv head (arXiv 2503.02812)"

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """Filters (layers, h, d), and how much of the queries' energy lies along them."""
        sums = _Sums()
        for passage in job.passages:
            cache = cache_for(job.subject.model, FULL)
            with watched(cache, sums.add):
                job.subject.forward(passage.ids[None], cache, last_only=True)
            job.advance("queries")
        filters, shares = [], []
        for second, first in zip(sums.second, sums.first, strict=True):
            filters.append(filters_of(second, first, cache.geometry.kv_heads))
            energy = second.diagonal(dim1=-2, dim2=-1).sum(-1)
            shares.append((torch.linalg.eigvalsh(second)[:, -1] / energy).mean().item())
        return Made(tensors={"filters": torch.stack(filters).float()}, facts={"energy_along_by_layer": shares})


def filters_of(second: Tensor, first: Tensor, kv_heads: int) -> Tensor:
    """The filters of one layer.

    Args:
        second: (q, d, d) sum over all queries of their outer product with themselves.
        first: (q, d) sum of the queries.
        kv_heads: h.

    Returns:
        (h, d), the mean over each group of unit vectors.

    Raises:
        KvtailorError: they hold NaN or infinity.
    """
    if not bool(second.isfinite().all()):
        raise KvtailorError("the model's queries have NaN or infinity: calibrate it in another dtype")
    # The right-singular vectors of a matrix are the eigenvectors of its Gram matrix, the largest last.
    directions = torch.linalg.eigh(second).eigenvectors[..., -1]
    signs = torch.where((directions * first).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    found: Tensor = (directions * signs).unflatten(0, (kv_heads, -1)).mean(1)
    return found


@dataclass
class _Sums:
    """Over all queries so far, for each layer: (q, d, d) and (q, d) float64."""

    second: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)

    def add(self, states: LayerStates) -> None:
        queries = states.queries.double()
        second, first = (queries.mT @ queries).cpu(), queries.sum(1).cpu()
        if states.layer == len(self.second):
            self.second.append(second)
            self.first.append(first)
        else:
            self.second[states.layer] += second
            self.first[states.layer] += first
