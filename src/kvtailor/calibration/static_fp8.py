"""Scales for `encode/static_fp8.py`: the largest magnitudes of keys and of values of each kv head, over 448.

Keys are taken as they are cached, after the rotary embedding. A scale is rounded up to a number that bfloat16 has, so
that it is the same number in a checkpoint of any dtype and in a cache of bfloat16 or float32, and that nothing of the
text is clipped. Text that the calibration has not seen may be: `static_fp8` cuts it to 448 scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.ops.codes.quant import FLAT, MOST_E4M3
from kvtailor.presets import FULL

__all__ = ["StaticFp8", "scales_of"]


@dataclass(frozen=True, kw_only=True)
class StaticFp8(Calibrator):
    """One scale for the keys, and one for the values, of each kv head."""

    summary = "scales of keys and values of each kv head in 8-bit floats, as serving engines load them"

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """key_scale and value_scale (layers, h) float32, and what one scale for a layer makes coarser."""
        most = _Most()
        for passage in job.passages:
            cache = cache_for(job.subject.model, FULL)
            with watched(cache, most.add):
                job.subject.forward(passage.ids[None], cache, last_only=True)
            job.advance("magnitudes")
        tensors = {f"{side}_scale": scales_of(torch.stack(most.sides[side])) for side in ("key", "value")}
        facts = {
            f"{side}_scale_of_layer_over_least_head": [round(float(row.max() / row.min()), 2) for row in tensors[side]]
            for side in ("key_scale", "value_scale")
        }
        return Made(tensors=tensors, facts=facts)


def scales_of(most: Tensor) -> Tensor:
    """Return the scales that take magnitudes to 448: numbers that bfloat16 has, none below what is asked.

    Args:
        most: float32, finite, 0 or above.
    """
    wanted = most.float() / MOST_E4M3
    # The high 16 bits are the number that bfloat16 has; one more of them is the next larger one.
    bits = wanted.contiguous().view(torch.int32)
    raised = torch.where((bits & 0xFFFF) > 0, (bits & ~0xFFFF) + 0x10000, bits).view(torch.float32)
    return torch.where(raised > 0, raised, torch.full_like(raised, FLAT))


@dataclass
class _Most:
    """(h,) float32 largest magnitudes so far, by side and layer."""

    sides: dict[str, list[Tensor]] = field(default_factory=lambda: {"key": [], "value": []})

    def add(self, states: LayerStates) -> None:
        for name, each in (("key", states.keys), ("value", states.values)):
            found, known = each.abs().amax((1, 2)).cpu(), self.sides[name]
            if not bool(found.isfinite().all()):
                raise KvtailorError("the model's keys or values have NaN or infinity: calibrate it in another dtype")
            if states.layer == len(known):
                known.append(found)
            else:
                known[states.layer] = torch.maximum(known[states.layer], found)
