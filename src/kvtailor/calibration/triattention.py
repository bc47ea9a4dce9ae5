"""Centres for `score/decoding/triattention.py`: where the queries of each query head lie before their rotation.

From arXiv 2604.04921: of each query head the mean query before its rotation, and the mean length of the queries in each
plane that is turned. The length of the first over the second is 1 where all queries agree in that plane.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.ops.lanes.rotate import turn, turned_planes
from kvtailor.types import Rotation

__all__ = ["TriAttention"]

# It evicts nothing of a passage, and its layers know their rotation.
_WATCHED = "expected @ keep=1.0"


@dataclass(frozen=True, kw_only=True)
class TriAttention(Calibrator):
    """Mean queries before their rotation, and mean lengths in its planes."""

    summary = "centre of the queries of each head before their rotation (arXiv 2604.04921)"

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """Centres (layers, h, g, d) and lengths (layers, h, g, d // 2), and how far queries agree, by layer.

        Raises:
            KvtailorError: the queries hold NaN or infinity, or a layer has no rotation that is understood.
        """
        sums = _Sums()
        for passage in job.passages:
            cache = cache_for(job.subject.model, _WATCHED)
            sums.rotations = [state.model.rotation for state in cache.engine.states]
            with watched(cache, sums.add):
                job.subject.forward(passage.ids[None], cache, last_only=True)
            job.advance("queries")
        centres = torch.stack(sums.states) / sums.count
        lengths = torch.stack(sums.lengths) / sums.count
        if not bool(centres.isfinite().all()):
            raise KvtailorError("the model's queries have NaN or infinity: calibrate it in another dtype")
        heads = cache.geometry.kv_heads
        rotation = sums.rotation(0)
        agreed = torch.hypot(*turned_planes(centres, rotation)) / lengths[..., : rotation.size // 2].clamp_min(1e-12)
        return Made(
            tensors={
                "centres": centres.unflatten(1, (heads, -1)).float(),
                "lengths": lengths.unflatten(1, (heads, -1)).float(),
            },
            facts={"agreement_by_layer": agreed.flatten(1).mean(1).tolist()},
        )


@dataclass
class _Sums:
    """Over all queries so far, for each layer: (q, d) and (q, d // 2) float64."""

    states: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    rotations: list[Rotation | None] = field(default_factory=list)
    count: int = 0

    def rotation(self, layer: int) -> Rotation:
        """The layer's; a plan that needs it is not made without."""
        found = self.rotations[layer]
        assert found is not None
        return found

    def add(self, states: LayerStates) -> None:
        new, rotation = states.queries.shape[1], self.rotation(states.layer)
        first = states.keys.shape[1] - new
        columns = torch.arange(first, first + new, device=states.queries.device)
        before = turn(states.queries, -columns, rotation).double().sum(1).cpu()
        planes = torch.hypot(*turned_planes(states.queries, rotation)).double().sum(1).cpu()
        lengths = torch.zeros(before.shape[0], before.shape[1] // 2, dtype=torch.float64)
        lengths[:, : planes.shape[1]] = planes
        if states.layer == len(self.states):
            self.states.append(before)
            self.lengths.append(lengths)
        else:
            self.states[states.layer] += before
            self.lengths[states.layer] += lengths
        self.count += new if states.layer == 0 else 0
