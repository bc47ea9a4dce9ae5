"""Principal components for `encode/subspace/kvtc.py`, and the squared error of each group of them at each width.

The texts are read twice. The first reading gives mean and covariance of keys as they are cached, of keys before the
rotary embedding, and of values, over the channels of all heads together and of each alone, and so the components. The
second gives what codes of 0 to 8 bits lose of each eight components, `GROUP` tokens to a step and a minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.lowrank import SIDES, Sums, check_enough, rotations
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.geometry import Geometry
from kvtailor.ops.codes.components import part_distortions, principal_parts
from kvtailor.presets import FULL

__all__ = ["GROUP", "Kvtc"]

GROUP = 64


@dataclass(frozen=True, kw_only=True)
class Kvtc(Calibrator):
    """Components of keys and values, and what bits are worth to them."""

    summary: ClassVar[str] = (
        "principal components of keys and values, and their errors at 0 to 8 bits (arXiv 2511.01815)"
    )

    def units(self, passages: int) -> int:
        return 2 * passages

    def measure(self, job: Job) -> Made:
        """What `principal_parts` and `part_distortions` give for each of keys, unrotated (keys) and values."""
        check_enough(job, Geometry.of(job.subject.model.config))
        turned = rotations(job.subject.model)
        sums = Sums(rotations=turned)
        self._read(job, sums.add, "components")
        layers = range(len(turned))
        parts = {
            (layer, side): principal_parts(sums.second[layer, side], sums.first[layer, side], sums.tokens)
            for layer in layers
            for side in SIDES
        }
        errors: dict[tuple[int, str, str], Tensor] = {}

        def see(states: LayerStates) -> None:
            for side, each in sums.sides(states):
                for name, error in part_distortions(each.cpu(), parts[states.layer, side], GROUP).items():
                    at = states.layer, side, name
                    errors[at] = errors[at] + error if at in errors else error

        self._read(job, see, "errors")
        tensors = {
            f"{side}_{name}": torch.stack([parts[layer, side][name] for layer in layers])
            for side in SIDES
            for name in parts[0, side]
        }
        for side in SIDES:
            for name in ("together_distortion", "alone_distortion"):
                each = torch.stack([errors[layer, side, name] for layer in layers])
                tensors[f"{side}_{name}"] = (each / sums.tokens).float()
        facts = {
            f"{side}_variance_of_a_quarter_by_layer": [_quarter(each) for each in tensors[f"{side}_together_variance"]]
            for side in SIDES
        }
        return Made(
            tensors=tensors, facts={**facts, "group": GROUP, "rotary": all(each is not None for each in turned)}
        )

    @staticmethod
    def _read(job: Job, see: Callable[[LayerStates], None], what: str) -> None:
        with torch.inference_mode():
            for passage in job.passages:
                cache = cache_for(job.subject.model, FULL)
                with watched(cache, see):
                    job.subject.forward(passage.ids[None], cache, last_only=True)
                job.advance(what)


def _quarter(variance: Tensor) -> float:
    """The share of the variance that a quarter of all heads' components has."""
    return float(variance[: max(1, len(variance) // 4)].sum() / variance.sum())
