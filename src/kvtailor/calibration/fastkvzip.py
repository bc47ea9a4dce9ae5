"""Gates for `score/by_repetition/fastkvzip.py`: for each kv head one that predicts what KVzip finds of a token.

The gate's form is that of arXiv 2601.17668, as kvpress has it. Its loss could not be had from a source that we may use,
so the gate learns by the cross-entropy between the probability that it gives and the one that KVzip finds, with the
optimizer of `kvzap`. What it reads is scaled first, and the scales go into the first maps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.teaching import STEPS_TOLD, Networks, Scales, judged, lessons_of, scales, split, train
from kvtailor.score.by_repetition.fastkvzip import FastKVzip as Scorer
from kvtailor.score.by_repetition.fastkvzip import gated
from kvtailor.score.kvzip import KVzip

__all__ = ["FastKVzip"]

_TINY = 1e-6


@dataclass(frozen=True, kw_only=True)
class FastKVzip(Calibrator):
    """Gates of low rank.

    Attributes:
        steps: of the optimizer.
    """

    summary = "a gate for each kv head that predicts KVzip's score (arXiv 2601.17668)"
    steps: int = 1500

    def units(self, passages: int) -> int:
        return passages + self.steps // STEPS_TOLD

    def measure(self, job: Job) -> Made:
        """Gates, and how far they agree with KVzip on the held-out quarter."""
        learned_from, held_out = split(job)
        lessons, check = (lessons_of(job, each, KVzip()) for each in (learned_from, held_out))
        _, scale = scales(lessons)
        layers, heads, _, read = lessons[0].tokens.shape
        group = _query_heads(job) // heads
        begun = _begun(layers, heads, read, group, job.state)
        made = train(
            lessons,
            begun,
            gated,
            _loss,
            scales=Scales(torch.zeros_like(scale), scale),
            steps=self.steps,
            state=job.state,
            advance=job.advance,
        )
        begun, made = (_unscaled(each, scale) for each in (begun, made))
        return Made(tensors=made, facts=judged(check, begun, made, gated, _loss, "kvzip"))


def _query_heads(job: Job) -> int:
    config = job.subject.model.config.get_text_config(decoder=True)
    return int(config.num_attention_heads)


def _begun(layers: int, heads: int, read: int, group: int, state: int) -> Networks:
    """Small random maps and norms of weight one."""
    generator = torch.Generator().manual_seed(state)
    drawn = Scorer.example_for(layers=layers, heads=heads, group=group, size=read, value_size=0, generator=generator)
    made = {name: tensor * read**-0.5 for name, tensor in drawn.items()}
    for name in ("gate_query_norm", "gate_key_norm"):
        made[name] = torch.ones_like(made[name])
    # Sinks that differ from the beginning, and a share that is small, as most are.
    made["gate_sinks"] = drawn["gate_sinks"]
    made["gate_bias"] = torch.zeros_like(made["gate_bias"])
    return made


def _loss(said: Tensor, found: Tensor) -> Tensor:
    return binary_cross_entropy(said.clamp(_TINY, 1 - _TINY), found.clamp(0, 1))


def _unscaled(networks: Networks, scale: Tensor) -> Networks:
    """The same gates of tokens as they are, from those of tokens over their deviation."""
    return {
        **networks,
        "gate_query": networks["gate_query"] / scale[..., None, None],
        "gate_key": networks["gate_key"] / scale[..., None],
    }
