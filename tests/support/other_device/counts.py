"""How often a plan makes the host wait for the device: for a decoded token, and for a prompt."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.calibrated import shipped_for
from tests.support.every_plan import first_of_each_method, plans_of_presets
from tests.support.other_device.backend import move_model, register
from tests.support.other_device.decoding import decoded
from tests.support.other_device.ready import GRADED
from tests.support.seam.zoo import build
from torch import nn

from kvtailor.errors import PlanError

__all__ = ["DEPTHS", "FEW_STEPS", "LENGTHS", "STEPS", "TOGETHER", "Counts", "counted", "models", "plans"]

DEPTHS = (3, 6)  # layers: what the second takes more, for a prompt or a token, three layers take
LENGTHS = (270,)  # one prompt: longer than the budgets, and than what codecs leave in full precision
STEPS = 12  # decoded tokens
FEW_STEPS = 5  # of the larger model, whose median alone is taken
# What users combine most, at a budget that each token exceeds.
TOGETHER = (
    "snapkv + adakv @ tokens=48",
    "snapkv + adakv + kivi(bits=4, group=8, recent=8) @ tokens=48",
    "h2o @ tokens=48",
    "kivi(bits=4, group=8, recent=8)",
    "quest(tokens=64) + indexed",
    "streaming + rolling @ tokens=48",
    "snapkv + rocket(tokens=16, expect=24) @ tokens=48",
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Host synchronisations of one plan.

    Attributes:
        usual: of a decoded token: the median, so that of one at which nothing is evicted or encoded if most are such.
        mean: of a decoded token: the mean over all.
        token_layer: of a decoded token, for each further layer: the difference of medians; None where the plan does not
            fit the larger model.
        prompt: of a prompt, on the smaller model.
        prompt_layer: of a prompt, for each further layer; None where the plan does not fit the larger model.
        places: of prompt and tokens together, on the smaller model, by kind and place.
    """

    usual: float
    mean: float
    token_layer: float | None
    prompt: int
    prompt_layer: float | None
    places: Counter[tuple[str, str]]


def plans() -> dict[str, str]:
    """Plan texts by the name that a table has for them: presets, methods, and some combinations."""
    # Whether torch takes gradients there depends on what ran in the process before: see `ready.GRADED`.
    methods = {plan: plan for plan in first_of_each_method().values() if GRADED not in plan}
    presets = {text.partition(" @")[0]: text for text in plans_of_presets().values() if GRADED not in text}
    return presets | {plan: plan for plan in TOGETHER} | {k: v for k, v in methods.items() if k not in presets}


def _model(layers: int) -> nn.Module:
    """A model of its own: what is found out about one is remembered, and would not be waited for again."""
    return move_model(build("llama", layers=layers), "gpu:0")


@contextmanager
def models() -> Iterator[None]:
    """Within it plans can be counted: the device is there, and calibration files of random numbers are."""
    register()
    with TemporaryDirectory() as folder, shipped_for([build("llama", layers=each) for each in DEPTHS], Path(folder)):
        yield


def counted(plan: str) -> Counts:
    """Counts of a plan on the smaller model, one prompt with a mask; the same at every run."""
    small = decoded(_model(DEPTHS[0]), plan, LENGTHS, steps=STEPS)
    by_token = [syncs.total for syncs in small.by_token]
    usual = statistics.median(by_token)
    layer = token_layer = None
    try:
        large = decoded(_model(DEPTHS[1]), plan, LENGTHS, steps=FEW_STEPS)
    except PlanError as error:
        # The only plans that fit one model and not the other are tables of its layers.
        if "layers" not in str(error):
            raise
    else:
        further = DEPTHS[1] - DEPTHS[0]
        layer = round((large.prefill.total - small.prefill.total) / further, 1)
        token_layer = round((statistics.median(syncs.total for syncs in large.by_token) - usual) / further, 1)
    return Counts(
        usual=usual,
        mean=round(statistics.mean(by_token), 1),
        token_layer=token_layer,
        prompt=small.prefill.total,
        prompt_layer=layer,
        places=sum((syncs.found for syncs in small.by_token), small.prefill.found),
    )
