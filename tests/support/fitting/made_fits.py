"""Fits made by hand, with numbers of the size that the embedded model has: nothing is measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.fitting.answer import FrontPoint, marked
from kvtailor.fitting.layers import Additivity, LayerMap
from kvtailor.fitting.question import Question
from kvtailor.fitting.result import Fit
from kvtailor.fitting.verdict import Family, Judged, verdict

__all__ = ["FULL_BYTES", "made_fit"]

FULL_BYTES = 3 * 2**20
_PRESETS = ("snapkv", "kivi4", "kivi2", "pyramidkv", "streamingllm", "quest", "sliding_window", "dynamickv", "d2o")
_SCORES = ("snapkv(kernel=21)", "h2o", "tova", "keydiff", "expected", "snapkv(window=8, kernel=7, pooling=max)")
_WEIGHTS, _CODECS = [1.0, 1.0, 0.1, 0.1, 0.25, 0.5], [0, 1, 2, 2, 0, 0]
_IN_WORDS = "h2o + kivi(bits=4, recent=32) @ tokens=700"


def made_fit(points: int = 8, *, layers: int = 6, windows: int = 32, by_head: bool = False, state: int = 0) -> Fit:
    """Return a fit.

    Args:
        points: of the front, at least 2; the plan itself is one of them.
        layers: of the map.
        windows: of the proof.
        by_head: the map has single heads.
        state: random state of all numbers.
    """
    chance = random.Random(state)
    named_plan = _chosen(layers)
    front = [_point(named_plan, "layers", named_plan, 0.12, 0.012, chance)]
    for number in range(points - 1):
        share = 0.03 + 0.6 * chance.random() ** 2
        loss = 0.0022 * share**-1.3 * chance.lognormvariate(0.4, 0.6)
        tokens = max(1, round(share * 2048))
        if number % 3 == 2:
            name = _PRESETS[number // 3 % len(_PRESETS)]
            front.append(_point(f"{name} @ tokens={tokens}", "preset", name, share, loss, chance))
        elif number % 3 == 1:
            plan = f"{_SCORES[number % len(_SCORES)]} + pyramid(beta=5) + kivi(bits=4, recent=32) @ tokens={tokens}"
            front.append(_point(plan, "words", plan, share, loss, chance))
        else:
            plan = named_plan.replace("tokens=1006", f"tokens={tokens}")
            front.append(_point(plan, "layers", plan, share, loss, chance))
    proof = _proof(named_plan, chance, windows)
    named = verdict([each for each in proof if each.origin != "full"])
    return Fit(
        model="demo",
        dtype="bfloat16",
        question=Question(context=2048, batch=1, memory=FULL_BYTES // 8),
        full=FULL_BYTES,
        effort="quick",
        state=0,
        plan=named.chosen.plan,
        sentence=named.sentence,
        told=named.told,
        against=named.against,
        needed=named.needed,
        proof=tuple(proof),
        front=marked(front),
        layers=_layers(chance, layers, by_head),
        additivity=Additivity(plan=named_plan, predicted=0.0103, measured=0.0121),
        tokens_by_head=tuple(
            tuple(2048 * share * (0.8 + 0.1 * head) for head in range(2)) for share in (0.9, 0.9, 0.1, 0.1, 0.2, 0.5)
        ),
        sizes=tuple(
            (context, batch, context * batch * 190, context * batch * 1536)
            for context in (1024, 2048, 4096, 8192)
            for batch in (1, 4)
        ),
        regret="Chosen by text alone it would be kivi4, with 18 of 40 answers right; the most is 33, by snapkv.",
        notes=("The text 'notes.txt' is short: 8 windows of the proof are all that it has.",),
        seconds=412.3,
        counts={"settings of stage 1": 54, "trials of stage 2": 28, "records": 512},
    )


def _point(plan: str, origin: str, label: str, share: float, loss: float, chance: random.Random) -> FrontPoint:
    wide = loss * (0.15 + 0.2 * chance.random())
    return FrontPoint(
        plan=plan,
        origin=origin,
        label=label,
        memory=round(share * FULL_BYTES * 1.02),
        bytes=round(share * FULL_BYTES),
        loss=Estimate(loss, loss - wide, loss + 1.3 * wide, 8),
    )


def _chosen(layers: int) -> str:
    """The plan, whose tables repeat after six layers."""
    weights, codecs = ([table[layer % 6] for layer in range(layers)] for table in (_WEIGHTS, _CODECS))
    return (
        f"snapkv(kernel=21) + table(weights={weights}) + by_layer(of=[kivi(bits=4, recent=32), "
        f"kivi(bits=8, recent=32), plain], layers={codecs}) @ tokens=1006"
    )


def _proof(named_plan: str, chance: random.Random, windows: int) -> list[Judged]:
    full = tuple(2.5 + chance.gauss(0, 0.3) for _ in range(windows))
    documents = tuple(float(number % 8) for number in range(windows))

    def judged(label: str, plan: str, origin: str, share: float, loss: float, right: Sequence[int]) -> Judged:
        families = tuple(
            Family(
                name=name,
                seen=name != "variable",
                hits=tuple(float(n < hits) for n in range(20)),
                full=tuple(float(n < able) for n in range(20)),
                nll=tuple(0.05 if n < hits else 1.85 for n in range(20)),
            )
            for name, hits, able in zip(("needle", "key_value", "variable"), right, (20, 16, 4), strict=True)
        )
        return Judged(
            label=label,
            plan=plan,
            origin=origin,
            bytes=round(share * FULL_BYTES),
            nll=full if origin == "full" else tuple(each + loss + chance.gauss(0, loss / 3) for each in full),
            full=full,
            documents=documents,
            families=families,
            seconds={"median": 0.0082, "q1": 0.0079, "q3": 0.0088, "count": 60},
            methods=plan.count(" + ") + 1,
        )

    found = [
        judged("full", "full", "full", 1.0, 0.0, (20, 16, 4)),
        judged(named_plan, named_plan, "layers", 0.12, 0.011, (20, 15, 3)),
        judged("snapkv", "snapkv @ tokens=252", "preset", 0.124, 0.034, (20, 14, 3)),
        judged("kivi2", "kivi(bits=2) @ tokens=900", "preset", 0.123, 0.09, (12, 3, 0)),
        judged(_IN_WORDS, _IN_WORDS, "words", 0.118, 0.03, (20, 15, 2)),
    ]
    untimed = replace(found[-1], seconds=None)
    broken = Judged(label="quest", plan="quest @ tokens=200", origin="preset", bytes=0, error="out of memory")
    return [*found[:-1], untimed, broken]


def _layers(chance: random.Random, layers: int, by_head: bool) -> LayerMap:
    widths, shares = (0, 8, 4, 2), (1.0, 0.5, 0.25, 0.1)

    def row(scale: float) -> tuple[float, ...]:
        return (0.0, *(scale * 6**step * chance.lognormvariate(0, 0.5) for step in range(3)))

    return LayerMap(
        score="snapkv(kernel=21)",
        widths=widths,
        shares=shares,
        keys=tuple(row(1e-4 / (1 + layer)) for layer in range(layers)),
        values=tuple(row(3e-5) for _ in range(layers)),
        kept=tuple(tuple(row(2e-4) for _ in range(2 if by_head else 1)) for _ in range(layers)),
        pieces=4,
    )
