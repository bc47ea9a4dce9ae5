"""Statistics for `score/expected.py` with `static`: mean and covariance of the queries of each query head.

As kvpress makes them beside arXiv 2510.00636: of queries before their rotation, without those of the first four tokens
of each text. Here the texts are those that are given; kvpress takes a hundred pieces of books.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.plan import Plan
from kvtailor.score.expected import Expected as Scorer
from kvtailor.types import Moments

__all__ = ["Expected", "joined"]


@dataclass(frozen=True, kw_only=True)
class Expected(Calibrator):
    """Mean and covariance of queries before their rotation."""

    summary = "mean and covariance of each head's queries before their rotation (arXiv 2510.00636)"

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """Mean (layers, h, g, d) and covariance (layers, h, g, d, d), float32."""
        layers: list[tuple[Tensor, Tensor, Tensor]] = []
        for passage in job.passages:
            cache = cache_for(job.subject.model, Plan(score=Scorer(), keep=1.0))
            job.subject.forward(passage.ids[None], cache, last_only=True)
            found = [_of(state.observed.evidence.moments) for state in cache.engine.states]
            layers = [joined(one, other) for one, other in zip(layers, found, strict=True)] if layers else found
            job.advance("queries")
        counts, means, spreads = (torch.stack(each) for each in zip(*layers, strict=True))
        if not bool(spreads.isfinite().all()):
            raise KvtailorError("the model's queries have NaN or infinity: calibrate it in another dtype")
        heads = cache.geometry.kv_heads
        return Made(
            tensors={
                "query_mean": means.unflatten(1, (heads, -1)).float(),
                "query_spread": (spreads / counts[:, None, None, None]).unflatten(1, (heads, -1)).float(),
            },
            facts={"queries": int(counts[0])},
        )


def joined(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Count (), mean (q, d) and spread (q, d, d) of two samples together (Chan, Golub and LeVeque's update)."""
    (count, mean, spread), (more, new_mean, new_spread) = one, other
    step, total = new_mean - mean, count + more
    apart = step[..., None] * step[..., None, :]
    return total, mean + more / total * step, spread + new_spread + count * more / total * apart


def _of(moments: Moments | None) -> tuple[Tensor, Tensor, Tensor]:
    """Those of one row, float64 on the CPU."""
    assert moments is not None
    count, mean, spread = (each[0].double().cpu() for each in (moments.count, moments.mean, moments.spread))
    return count, mean, spread
