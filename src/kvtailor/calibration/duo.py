"""Gates of retrieval heads: how much of its attention each kv head gives to an earlier occurrence of the same text.

Random tokens are fed twice. A query in the second copy stands at a token that was there before; a head that retrieves
looks at that token's place in the first copy, or at what followed it there (an induction head: Olsson et al.,
"In-context Learning and Induction Heads", arXiv 2209.11895). The gate of a kv head is the share of attention that goes
to those two places, averaged over queries, of its query head with the largest. Both places lie a whole copy back, so
that neither sinks nor the recent window count. DuoAttention (arXiv 2410.10819) learns its gates by gradient descent on
passkeys instead, which is dearer, and sees more than copying.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.bench.subject import Subject
from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.presets import FULL

__all__ = ["Duo", "repeated"]

_SINKS = 4


@dataclass(frozen=True, kw_only=True)
class Duo(Calibrator):
    """Attention from the second copy of random tokens to the first."""

    summary = "how much each kv head attends to an earlier occurrence of the same text"
    reads_text: ClassVar[bool] = False
    tokens: ClassVar[int] = 16_384

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """Gates (layers, h) from 0 to 1."""
        start = job.subject.start()
        length = (job.context - start.numel()) // 2
        if length <= 2 * _SINKS:
            raise KvtailorError(f"asked to repeat {length} random tokens: give a context of 64 tokens or more")
        allowed = _ordinary_tokens(job.subject)
        generator = torch.Generator().manual_seed(job.state)
        total: list[Tensor] = []
        for _ in range(job.count):
            said = allowed[torch.randint(len(allowed), (length,), generator=generator)]
            shares: list[Tensor] = []
            cache = cache_for(job.subject.model, FULL)
            with watched(cache, partial(_share, shares, length, start.numel())):
                job.subject.forward(torch.cat([start, said, said])[None], cache, last_only=True)
            total.append(torch.stack(shares))
            job.advance("repetitions")
        gates = torch.stack(total).mean(0)
        return Made(
            tensors={"gates": gates},
            facts={"mean_by_layer": gates.mean(1).tolist(), "above_half": (gates > 0.5).float().mean().item()},
        )


def repeated(states: LayerStates, length: int, before: int) -> Tensor:
    """(h,) the share of attention that the second copy gives to its own place in the first copy and to the next one.

    Args:
        states: of `before` tokens, then twice the same `length` tokens.
        length: of a copy.
        before: beginning tokens.
    """
    first, end = before + length + _SINKS, before + 2 * length - 1
    found = []
    for head in range(states.keys.shape[0]):
        attention = states.attention(head, first, end)
        own = torch.arange(before + _SINKS, before + length - 1, device=attention.device)
        at = torch.stack([own, own + 1], -1).expand(attention.shape[0], -1, -1)
        found.append(attention.gather(-1, at).sum(-1).mean(-1).max())
    return torch.stack(found).cpu()


def _share(into: list[Tensor], length: int, before: int, states: LayerStates) -> None:
    into.append(repeated(states, length, before))


def _ordinary_tokens(subject: Subject) -> Tensor:
    """(v,) ids that are no special tokens."""
    size = subject.model.get_input_embeddings().num_embeddings
    # Models have rows for tokens that their tokenizer never gives.
    size = min(size, len(subject.tokenizer)) if hasattr(subject.tokenizer, "__len__") else size
    special = set(getattr(subject.tokenizer, "all_special_ids", ()))
    return torch.tensor([each for each in range(size) if each not in special])
