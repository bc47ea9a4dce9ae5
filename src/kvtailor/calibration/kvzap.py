"""Networks for `score/by_repetition/kvzap.py`: for each kv head one that predicts what KVzip+ finds of a token.

From arXiv 2601.07891 and its code in kvpress: mean squared error on the logarithm, AdamW with a rate of 1e-3 that falls
as a cosine, batches of 512 tokens, gradients cut at a norm of 1. What it reads is scaled first, and the scales go into
the first map. The passages come from the texts that it is given, where the paper has nine sets of web text and code.
Beside each network stands a linear map, by ridge regression with a penalty of 1, as in that code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, mse_loss

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.teaching import (
    STEPS_TOLD,
    Lessons,
    Networks,
    Scales,
    judged,
    lessons_of,
    scales,
    split,
    train,
)
from kvtailor.score.by_repetition.kvzip_plus import KVzipPlus

__all__ = ["KVzap"]

# What no query looks at has no logarithm.
_LEAST = 1e-9
_PENALTY = 1.0


@dataclass(frozen=True, kw_only=True)
class KVzap(Calibrator):
    """Networks of one hidden layer, and linear maps.

    Attributes:
        steps: of the optimizer.
        hidden: m, width of the hidden layer.
    """

    summary = "a small network for each kv head that predicts KVzip+'s score (arXiv 2601.07891)"
    steps: int = 1500
    hidden: int = 32

    def units(self, passages: int) -> int:
        return passages + self.steps // STEPS_TOLD

    def measure(self, job: Job) -> Made:
        """Networks, and how far they agree with KVzip+ on the held-out quarter."""
        learned_from, held_out = split(job)
        lessons, check = (lessons_of(job, each, KVzipPlus()) for each in (learned_from, held_out))
        middle, scale = scales(lessons)
        begun = _begun(lessons[0].tokens.shape, self.hidden, job.state)
        # Of the logarithms' mean, so that training begins with a guess and not with nothing.
        begun["zap_out_bias"] = torch.cat([each.found.clamp_min(_LEAST).log() for each in lessons], 2).mean(2)
        made = train(
            lessons,
            begun,
            _said,
            _loss,
            scales=Scales(middle, scale),
            steps=self.steps,
            state=job.state,
            advance=job.advance,
        )
        begun, made = (_unscaled(each, middle, scale) for each in (begun, made))
        facts = judged(check, begun, made, _said, _loss, "kvzip_plus")
        linear = ridge(lessons)
        flat = {**linear, "zap_linear": torch.zeros_like(linear["zap_linear"])}
        of_linear = judged(check, flat, linear, _said_linearly, _loss, "kvzip_plus")
        facts["verdict"] += f"; the linear form {of_linear['verdict']}"
        return Made(tensors={**made, **linear}, facts={**facts, "linear": of_linear["held_out"]})


def ridge(lessons: Sequence[Lessons]) -> Networks:
    """Maps (l, h, d + dv) from a token to the logarithm of what was found, and constants (l, h).

    Least squares with a penalty of `_PENALTY` on the squares of a map, and none on its constant.
    """
    tokens = torch.cat([each.tokens for each in lessons], 2).double()
    wanted = torch.cat([each.found for each in lessons], 2).double().clamp_min(_LEAST).log()
    middle, level = tokens.mean(2), wanted.mean(2)
    apart = tokens - middle[:, :, None]
    square = apart.mT @ apart + _PENALTY * torch.eye(apart.shape[-1], dtype=torch.float64)
    found = torch.linalg.solve(square, apart.mT @ (wanted - level[..., None])[..., None])[..., 0]
    return {"zap_linear": found.float(), "zap_linear_bias": (level - (found * middle).sum(-1)).float()}


def _begun(shape: torch.Size, hidden: int, state: int) -> Networks:
    layers, heads, _, read = shape
    generator = torch.Generator().manual_seed(state)
    return {
        "zap_hidden": torch.randn(layers, heads, read, hidden, generator=generator, dtype=torch.float32) * read**-0.5,
        "zap_hidden_bias": torch.zeros(layers, heads, hidden, dtype=torch.float32),
        "zap_out": torch.randn(layers, heads, hidden, generator=generator, dtype=torch.float32) * hidden**-0.5,
    }


def _said(tokens: Tensor, made: Mapping[str, Tensor]) -> Tensor:
    hidden = gelu(tokens @ made["zap_hidden"] + made["zap_hidden_bias"][:, :, None])
    return (hidden @ made["zap_out"][..., None])[..., 0] + made["zap_out_bias"][..., None]


def _said_linearly(tokens: Tensor, made: Mapping[str, Tensor]) -> Tensor:
    return (tokens @ made["zap_linear"][..., None])[..., 0] + made["zap_linear_bias"][..., None]


def _loss(said: Tensor, found: Tensor) -> Tensor:
    return mse_loss(said, found.clamp_min(_LEAST).log())


def _unscaled(networks: Networks, middle: Tensor, scale: Tensor) -> Networks:
    """The same network of tokens as they are, from one of tokens less their mean, over their deviation."""
    first = networks["zap_hidden"] / scale[..., None]
    bias = networks["zap_hidden_bias"] - (middle[..., None] * first).sum(2)
    return {**networks, "zap_hidden": first, "zap_hidden_bias": bias}
