"""Profiles for `allocate/lukv.py`: which share of its tokens each kv head drops at each ratio of all.

As arXiv 2602.08585 has it, by a reader's notes on the paper. What a token of a context is worth to a head is the
largest, over the queries that come later, of the length of what it adds to the output: probability times value, through
the head's output projection. Tokens go by a score, here `expected(epsilon=0.02)`, and a head that keeps b of them loses
what the others are worth. The gains of one more token after another are made non-increasing (isotonic regression, pool
adjacent violators), and then the largest gains of all heads together are the best split. The profile is the mean of
these splits over the texts.

Departs: later queries are those of the text's own last quarter, where the paper asks 30 questions about one generated
context and lets the model answer. Of the query heads of a group the largest counts; what the paper does about groups is
not known here. Every fourth passage is held out, to say what the profile loses on it beside equal budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.lukv import LUKV as Allocator
from kvtailor.allocate.lukv import RATIOS
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.passages import Passage
from kvtailor.calibration.teaching import split
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.prefill import prefill
from kvtailor.plan import Plan
from kvtailor.presets import FULL
from kvtailor.score.contract import Scorer
from kvtailor.score.expected import Expected
from kvtailor.types import Held, Needs

__all__ = ["LUKV", "best_split", "lengths_in_output", "relaxed"]

_SCORE, _SCORE_IN_WORDS = Expected(epsilon=0.02), "expected(epsilon=0.02)"
_JUDGED_AT = 0.25


@dataclass(frozen=True, kw_only=True)
class LUKV(Calibrator):
    """Mean of the best splits."""

    summary = "which share of its tokens each kv head can best do without, at each ratio (LU-KV, arXiv 2602.08585)"

    def units(self, passages: int) -> int:
        return passages

    @torch.inference_mode()
    def measure(self, job: Job) -> Made:
        """The profile (layers, h, 99), and what it loses on the held-out quarter."""
        learned_from, held_out = split(job)
        splits = torch.stack([best_split(relaxed(gains)) for gains in _gains_of(job, learned_from)])
        pruned = splits.mean(0).float()
        return Made(tensors={"pruned": pruned}, facts=_judged(_gains_of(job, held_out), pruned))


def relaxed(gains: Tensor) -> Tensor:
    """(..., n) float64: the nearest sequences that never rise, by least squares."""
    flat = gains.double().cpu().flatten(0, -2)
    made = [torch.from_numpy(isotonic_regression(each.numpy(), increasing=False).x.copy()) for each in flat]
    return torch.stack(made).view(gains.shape)


def best_split(gains: Tensor) -> Tensor:
    """(l, h, 99) float64: the share of its tokens that each head drops where 1 to 99 percent of all go.

    Args:
        gains: (l, h, n) what the first, second ... token that is kept adds; never rising.
    """
    layers, heads, tokens = gains.shape
    head_of = gains.flatten().argsort(descending=True, stable=True) // tokens
    found = []
    for gone in range(1, RATIOS + 1):
        kept = round(gains.numel() * (1 - gone / (RATIOS + 1)))
        found.append(1 - torch.bincount(head_of[:kept], minlength=layers * heads).double() / tokens)
    return torch.stack(found, -1).view(layers, heads, RATIOS)


def lengths_in_output(values: Tensor, output: Tensor) -> Tensor:
    """(h, g, n) float32: how long each value becomes in the layer's output, for each query head of its group.

    Args:
        values: (h, n, dv).
        output: (q, dv, D).
    """
    grouped = output.float().unflatten(0, (values.shape[0], -1))
    return torch.stack(
        [
            torch.stack([(value.float() @ projection).norm(dim=-1) for projection in group])
            for value, group in zip(values, grouped, strict=True)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class _Listening(Scorer):
    """Another scorer, of which it is remembered what it said of each layer: the order of the tokens, and how long their
    values become.
    """

    of: Scorer
    heard: list[tuple[Tensor, Tensor]] = field(default_factory=list, compare=False, hash=False, repr=False)

    @property
    def needs(self) -> Needs:
        return self.of.needs | Needs(output=True)

    def score(self, held: Held) -> Tensor:
        assert held.output is not None
        scores = self.of.score(held)
        order = scores[0].argsort(dim=-1, descending=True, stable=True)
        self.heard.append((order, lengths_in_output(held.values[0], held.output)))
        return scores


def _gains_of(job: Job, passages: Sequence[Passage]) -> list[Tensor]:
    """For each passage (l, h, n) float64: what the tokens of its first three quarters are worth, in the score's order.

    The rest of the passage is what comes later.
    """
    found = []
    for passage in passages:
        ids = passage.ids[None].to(job.subject.device)
        context = ids.shape[1] - ids.shape[1] // 4
        listening = _Listening(of=_SCORE)
        # One token fewer than there are, so that something is to be decided.
        prefill(job.subject.model, ids[:, :context], plan=Plan(score=listening, tokens=context - 1))
        looked_at: list[Tensor] = []

        def see(states: LayerStates, into: list[Tensor] = looked_at, context: int = context) -> None:
            end = states.queries.shape[1]
            heads = range(states.keys.shape[0])
            into.append(torch.stack([states.attention(h, context, end)[..., :context].amax(1) for h in heads]))

        cache = cache_for(job.subject.model, FULL)
        with watched(cache, see):
            job.subject.forward(ids, cache, last_only=True)
        gains = [
            (given * lengths).amax(1).gather(-1, order)
            for given, (order, lengths) in zip(looked_at, listening.heard, strict=True)
        ]
        found.append(torch.stack([each.double().cpu() for each in gains]))
        job.advance("profiles")
    return found


def _judged(held_out: Sequence[Tensor], pruned: Tensor) -> dict[str, object]:
    """What the profile and equal budgets lose at one ratio, of what all tokens are worth, in percent."""
    lost: dict[str, list[float]] = {"profile": [], "equal": []}
    for gains in held_out:
        layers, heads, tokens = gains.shape
        request = BudgetRequest(
            total=torch.tensor([int(_JUDGED_AT * gains.numel())]),
            capacity=torch.full((1, layers, heads), tokens),
            floor=torch.zeros(1, layers, heads, dtype=torch.int64),
            layers=tuple(range(layers)),
            num_layers=layers,
            calibration={"pruned": pruned},
        )
        even = replace(request, calibration={"pruned": torch.full_like(pruned, 1 - _JUDGED_AT)})
        for name, each in (("profile", request), ("equal", even)):
            budgets = Allocator().allocate(each)[0]
            dropped = torch.arange(tokens) >= budgets[..., None]
            lost[name].append(100 * float((gains * dropped).sum() / gains.sum()))
    less = mean_difference(lost["profile"], lost["equal"])
    apart = less.interval(2, signed=True) or "too few for an interval"
    means = {name: sum(each) / len(each) for name, each in lost.items()}
    return {
        "verdict": (
            f"under {_SCORE_IN_WORDS} at keep={_JUDGED_AT}, heads lose {means['profile']:.1f} % of what all tokens are "
            f"worth to later queries, with equal budgets {means['equal']:.1f} % (difference "
            f"{means['profile'] - means['equal']:+.2f} points, {apart}), on {len(held_out)} held-out passages"
        ),
        "held_out": {"passages": len(held_out), "lost": lost, "score": _SCORE_IN_WORDS},
    }
