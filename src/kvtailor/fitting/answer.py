"""The answer of a fit as data: what its page is made of, and what `Fit` saves and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.front import front_of
from kvtailor.fitting.layers import Additivity, LayerMap
from kvtailor.fitting.question import Question
from kvtailor.fitting.verdict import Judged
from kvtailor.plan import Plan, registry
from kvtailor.plan.engines import EngineSetting

__all__ = ["Answer", "FrontPoint", "marked", "short_plan"]


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan that was measured on the pieces of the search.

    Attributes:
        plan: in one line.
        origin: "fitted", "layers", "words" or "preset".
        label: the preset's name, or the plan.
        memory: the limit that it was made for, bytes.
        bytes: of all rows, from what was measured on one.
        loss: KL to the full cache on text, and the mean KL on answers on top, with its interval.
        text: KL on text alone, nats per token.
        points_lost: most points of percent of right answers that it lost in a family of the search, of those that the
            full cache can do; None where none was asked.
        best: no other point has fewer bytes and loses less.
    """

    plan: str
    origin: str
    label: str
    memory: int
    bytes: int
    loss: Estimate
    text: float | None = None
    points_lost: float | None = None
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a question: the plan, the evidence, the front.

    Attributes:
        model: its name.
        dtype: of the cache.
        question: what was asked.
        full: bytes of the uncompressed cache at the question's context and batch.
        effort: how much was tried.
        state: random state.
        plan: the plan, in one line.
        sentence: what was shown of it.
        told: by label of each other plan of the proof, "better", "worse" or "not told apart".
        against: by label, the paired difference of the loss to that plan.
        needed: windows that would tell it from the best preset; None where it is told, or none is beside it.
        proof: every plan that the proof measured, 'full' apart; the plan itself among them.
        front: what the search measured at several memories.
        layers: what stage 1 found; None where it did not run.
        additivity: whether its losses added up.
        tokens_by_head: tokens that each layer and kv head was measured to hold under the plan.
        sizes: bytes of the plan at other contexts and batches: (context, batch, bytes, full bytes).
        regret: what choosing by text alone would have cost in right answers, a sentence; None where no answers were
            asked.
        notes: whole sentences: what is not as it was asked, and what a reader must know.
        asked: texts, tasks and methods that were left out, as they were asked for.
        seconds: that the whole took, since it was last started.
        counts: how much was measured, by name.
    """

    model: str
    dtype: str
    question: Question
    full: int
    effort: str
    state: int
    plan: str
    sentence: str
    told: Mapping[str, str]
    against: Mapping[str, Estimate]
    needed: int | None
    proof: tuple[Judged, ...]
    front: tuple[FrontPoint, ...]
    layers: LayerMap | None
    additivity: Additivity | None
    tokens_by_head: tuple[tuple[float, ...], ...] = ()
    sizes: tuple[tuple[int, int, int, int], ...] = ()
    regret: str | None = None
    notes: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def chosen(self) -> Judged:
        """The plan as the proof measured it."""
        return next(each for each in self.proof if each.plan == self.plan)

    @property
    def short(self) -> str:
        """The plan by the names of its methods."""
        return short_plan(self.plan)

    @property
    def python(self) -> str:
        """The line of Python that uses the plan."""
        return f'cache = kvtailor.cache_for(model, "{self.plan}")'

    @property
    def engines(self) -> tuple[EngineSetting, ...]:
        """The nearest settings of other engines."""
        return Plan.parse(self.plan).exports(measured=self.layers)

    def export(self, engine: str, *, layers: Sequence[int] | None = None) -> EngineSetting:
        """Return the nearest setting of one engine: "vllm", "sglang", "tensorrt-llm", "llama.cpp" or "transformers".

        Where the engine can leave layers whole, these are chosen by what each layer was measured to lose.

        Args:
            engine: its name.
            layers: numbers in the model of the layers that the plan compresses; None: it compresses all.

        Raises:
            UnknownName: there is no such engine here.
            ArgumentError: the numbers of layers do not agree.
        """
        return Plan.parse(self.plan).export(engine, layers=layers, measured=self.layers)

    def toml(self) -> str:
        """Return the plan as TOML, with where it comes from."""
        head = [
            f"# Fitted by kvtailor for {self.model}: {self.question.context} tokens, {self.question.batch} row(s).",
            *(f"# {line}" for line in _wrapped(self.sentence)),
        ]
        return "\n".join([*head, "", Plan.parse(self.plan).to_toml()])


def marked(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Return points from the fewest bytes up, each with whether no other has fewer bytes and loses less."""
    best = {id(each) for each in front_of(points, _place)}
    return tuple(replace(each, best=id(each) in best) for each in sorted(points, key=_place))


def _place(point: FrontPoint) -> tuple[float, float]:
    return point.bytes, point.loss.value


def short_plan(text: str) -> str:
    """Return a plan by the names of its methods and its budget: 'snapkv + table + by_layer @ tokens=316'."""
    plan = Plan.parse(text)
    named = [registry.name_of(part) for stage, part in plan.parts.items() if part is not None]
    nulls = {registry.null(stage) for stage in registry.stages()}
    budget = text.partition(" @ ")[2]
    return (" + ".join(name for name in named if name not in nulls) or "full") + (f" @ {budget}" if budget else "")


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]
