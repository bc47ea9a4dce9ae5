"""The static profile for `allocate/erank.py`: each layer's effective rank, averaged over texts.

As RankKV makes it: of the whole causal attention matrix of a text, averaged over heads, the exponential of the entropy
of its singular values. RankKV took three texts of the very split that it scored; here the bench refuses that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.allocate.erank import Erank as Allocator
from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.relevance import held_before
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.hf.make_cache import cache_for
from kvtailor.presets import FULL

__all__ = ["Erank"]


@dataclass(frozen=True, kw_only=True)
class Erank(Calibrator):
    """Mean effective rank of each layer's attention."""

    summary = "effective rank of each layer's attention, averaged over texts (RankKV's static profile)"

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """Ranks (layers,), and how far the texts agree about them."""
        found = []
        for passage in job.passages:
            ranks = _Ranks()
            cache = cache_for(job.subject.model, FULL)
            with watched(cache, ranks.add):
                job.subject.forward(passage.ids[None], cache, last_only=True)
            found.append(torch.cat(ranks.by_layer))
            job.advance("ranks")
        together = torch.stack(found)
        spread = together.std(0).tolist() if len(found) > 1 else None
        return Made(tensors={"erank": together.mean(0).float()}, facts={"standard_deviation_by_layer": spread})


@dataclass
class _Ranks:
    """Of one text, for each layer (1,) float64."""

    by_layer: list[Tensor] = field(default_factory=list)

    def add(self, states: LayerStates) -> None:
        tokens = states.keys.shape[1]
        rank = Allocator(rows=max(2, tokens)).measure(held_before(states, tokens, tokens))
        assert rank is not None
        self.by_layer.append(rank.cpu())
