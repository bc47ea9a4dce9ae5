"""`kvtailor.check_model`: which plans are safe on a model, measured on it in minutes, and which to take."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvtailor.bench.build import Text, make_task
from kvtailor.bench.checks.fraud import Fraud
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.data.texts import named_texts
from kvtailor.bench.forks import chosen_workers, one_thread
from kvtailor.bench.measure.kept_prompts import KeptPrompts
from kvtailor.bench.measure.statistics import FEWEST
from kvtailor.bench.runner import contestants_of, plan_run, run
from kvtailor.bench.safety.keys import cause_of, key_shape
from kvtailor.bench.safety.page import BETWEEN, PAGE, page, parted
from kvtailor.bench.safety.plans import CheckedPlan, candidates_of, length_of
from kvtailor.bench.safety.result import ModelCheck
from kvtailor.bench.safety.verdict import HARMFUL, Verdict, judged
from kvtailor.bench.schema import Record
from kvtailor.bench.stages import Progress, Silent
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import Task
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call

__all__ = ["MARGIN", "check_model"]

MARGIN = 0.01
"""Nats a token that a safe plan loses at most: 1 % of perplexity, a half of what the bench counts as no loss."""
WINDOWS = (6, 10)
"""Windows for all plans, and further ones for those that are not shown to be harmful by then.

A preset that goes back through the model by its gradients has the first ones alone: SmolLM2's further ones took 56
seconds of one core with `kvgrad`, and 125 with all other plans together.
"""
_SIZE = 512
# Of SmolLM2-135M on two cores, 384 tokens: `kvzip` and `kvcompose` took 1.8 prefills more than other plans, `kvgrad` 5.
_REPEATED, _GRADED = 2, 5
_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Beyond the documents of every --state of the bench (10,000 each), and before its generated texts.
_DOCUMENTS = 499_000


@check_call
def check_model(
    model: str | Path | Subject | Any,
    texts: str | Path | Sequence[str | Path] | None = None,
    *,
    plans: str | Plan | Sequence[str | Plan] = (),
    tokenizer: Any = None,
    context: int | None = None,
    margin: float = MARGIN,
    out: str | Path | None = None,
    again: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ModelCheck:
    """Return which plans are safe on a model, which harm it and why, and which to take, measured on the model.

    ```python
    found = kvtailor.check_model(model, tokenizer=tokenizer)    # every preset, in minutes
    print(found)
    found.verdict("turboquant4").word       # "safe", "harmful", or "not shown"
    found.take["a quarter"].plan            # None in its place where no plan of so few bytes is safe
    ```

    It is the bench on short windows: each plan against the uncompressed cache on the same tokens, with a 95 % interval.
    All plans read the first windows; those that are not shown to be harmful by then read further ones, but for presets
    that need the model's gradients, which must be named for that. Then those that drop tokens answer questions, which
    stand inside the prompt or come after it: all that `plans` names, and of the presets those that lose no more than
    `margin` as far as was seen, since no answer makes another one safe.

    Args:
        model: a transformers model (then with `tokenizer`), or the name or folder of one.
        texts: a text or the path of one, or several; None: passages of eight books that the package has, 42,000
            characters.
        plans: which to measure, with their budgets; empty: every preset, those that evict at `keep=0.25`.
        tokenizer: of a model that is given as an object.
        context: tokens of a window that are compressed; the third of them that follows is scored. None: 384, or what
            the model has positions for.
        margin: nats a token that a safe plan loses at most.
        out: folder for the records; what it has already is not measured again. None: nothing is written.
        again: measure anew what `out` has.
        workers: so many plans are measured side by side, each in one thread (Linux, on the CPU); None: as many as there
            are threads, or as free memory allows. What `out` has of another number of threads is measured anew.
        progress: what is told meanwhile; None: nothing.

    Raises:
        KvtailorError: the model is refused, is not trained, or has too few positions; the text is too short.
        PlanError: a plan has faults, or the model refuses it.
        Fraud: results that cannot be what they say.
    """
    if not margin > 0:
        raise ArgumentError(f"asked for a margin of {margin} nats a token: give a number above 0")
    subject, told = Subject.of(model, tokenizer, "a check"), progress or Silent()
    subject.answer_for("which plans are safe")
    geometry = Geometry.of(subject.model.config)
    if not geometry.compressed:
        raise KvtailorError(
            f"asked which plans are safe on {subject.name}: no layer of it keeps the keys of all tokens, so there is "
            "nothing that a plan could compress"
        )
    size = _sizes(subject, context)
    parts = _parts(texts, subject, size)
    lines = [plans] if isinstance(plans, str | Plan) else list(plans)
    candidates, without = candidates_of(subject, [str(each) for each in lines])
    if not candidates:
        raise KvtailorError(f"asked which plans are safe on {subject.name}: there is none that it can have")
    chosen = chosen_workers(subject, workers, plans=len(candidates))
    check = _Check(
        subject, candidates, parts, size, margin, None if out is None else Path(out), again, chosen, told, bool(lines)
    )
    with warnings.catch_warnings():
        # What such a warning says is measured here.
        warnings.filterwarnings("ignore", message=".*key projections have a bias")
        records = check.run()
    found = judged(records, margin)
    shape = key_shape(subject, subject.prompt(parts[0].text)[: sum(size)])
    verdicts = tuple(_filled(each, found[each.contestant.hash], shape, geometry) for each in candidates)
    return ModelCheck(
        model=subject.name,
        dtype=str(subject.dtype).removeprefix("torch."),
        text=parts[0].source.rpartition(",")[0],
        context=size[0],
        continuation=size[1],
        margin=margin,
        length=length_of(subject),
        facts=tuple(_heads(geometry) + shape.facts()),
        verdicts=verdicts,
        without=without,
        records=tuple(records),
        out=check.out,
        unanswered=check.unanswered,
    )


class _FirstWindows(Perplexity):
    """`perplexity`, whose sanity checks take a small part of the time.

    The null plan is held against the model's own cache on one window. A plan at its whole budget is tried in the
    model's own dtype, where an error of ours that half precision hides would count as the plan's loss; so it would for
    whoever uses the plan. The tokens behind the context are fed at once, as in the windows that judge.
    """

    own_windows: ClassVar[int | None] = 1
    finely: ClassVar[bool] = False
    whole_chunk: ClassVar[int | None] = None


class _FurtherWindows(Perplexity):
    """`perplexity` of plans that the first windows have checked; the null plan is held on one window again."""

    own_windows: ClassVar[int | None] = 1
    probes: ClassVar[bool] = False


class _Check:
    """A check while it runs: its subject, its plans, and what has been measured."""

    def __init__(
        self,
        subject: Subject,
        candidates: Sequence[CheckedPlan],
        parts: tuple[Text, Text],
        size: tuple[int, int],
        margin: float,
        out: Path | None,
        again: bool,
        workers: int,
        progress: Progress,
        named: bool,
    ):
        # One for all stages, so that filled and read caches are compared once.
        self.subject = replace(subject, kept=KeptPrompts())
        self.margin, self.named = margin, named
        # Where plans are scored side by side, one that takes long must not be the last.
        self.candidates = sorted(candidates, key=lambda each: -_readings(each.contestant))
        self.out, self.again, self.workers, self.progress = out, again, workers, progress
        self.tasks: list[Perplexity] = [
            kind(
                text=part.text,
                source=part.source,
                starts=part.starts,
                context=size[0],
                continuation=size[1],
                windows=count,
            )
            for kind, part, count in zip((_FirstWindows, _FurtherWindows), parts, WINDOWS, strict=True)
        ]
        for task in self.tasks:
            # Before the first step: else a plan that needs no further windows would pass on a text that others do not.
            task.cut_distinct(self.subject)
        self.questions = [
            make_task(
                "needle",
                {
                    "lengths": [size[0]],
                    "depths": list(_DEPTHS),
                    "documents": 1,
                    "question_outside": outside,
                    "state": _DOCUMENTS,
                },
                subject,
                data=None,
            )
            for outside in (False, True)
        ]
        self.size, self.unanswered = size, ""

    def run(self) -> list[Record]:
        """Measure stage by stage, and return all records."""
        everyone = contestants_of([each.contestant.label for each in self.candidates])
        droppers = [each for each in everyone if each.plan is not None and each.plan.evicts]
        stages = {
            "all plans": plan_run(self.tasks[:1], everyone)[1],
            "those that may be safe": plan_run(self.tasks[1:], self._further(everyone))[1],
            "questions": plan_run(self.questions, [everyone[0], *droppers])[1] if droppers else 0,
        }
        with one_thread(self.workers):
            seconds = self._seconds(everyone)
        self.progress.expect(stages, seconds / self.workers)
        records = self._stage("all plans", self.tasks[:1], everyone)
        left = self._further(self._left(everyone, records))
        if len(left) > 1:
            records += self._stage("those that may be safe", self.tasks[1:], left)
        asked = worth_asking(droppers, records, math.inf if self.named else self.margin)
        if asked:
            try:
                records += self._stage("questions", self.questions, [everyone[0], *asked])
            except Fraud:
                raise
            except KvtailorError as error:
                # A model of few positions has no room for a document; the losses stand without it.
                self.unanswered = str(error)
        elif worth_asking(droppers, records, math.inf):
            self.unanswered = (
                f"each plan that drops tokens lost more than {self.margin:g} nats here; one that is named is asked"
            )
        return records

    def _further(self, contestants: Sequence[Contestant]) -> list[Contestant]:
        """Those that may read further windows."""
        return [each for each in contestants if self.named or not _is_graded(each)]

    def _left(self, contestants: Sequence[Contestant], records: Sequence[Record]) -> list[Contestant]:
        """Those that are not shown to be harmful."""
        found = judged(records, self.margin)
        bad = {plan for plan, each in found.items() if each.word == HARMFUL or each.loss is None}
        return [each for each in contestants if each.hash not in bad]

    def _stage(self, name: str, tasks: Sequence[Task], contestants: Sequence[Contestant]) -> list[Record]:
        with self.progress.stage(name, plan_run(tasks, contestants)[1]) as advance:
            return run(
                self.subject,
                contestants,
                tasks,
                out=self.out,
                advance=advance,
                finish=self.progress.finish,
                bandwidth=False,
                resume=not self.again,
                workers=max(1, min(self.workers, len(contestants) - 1)),
            )

    @torch.inference_mode()
    def _seconds(self, contestants: Sequence[Contestant]) -> float:
        """Of a step, as the model's own cache takes it: a part of a prefill, and a window's targets.

        A plan that reads the context again adds readings of its own to each window.
        """
        context, continuation = self.size
        ids = self.subject.prompt(self.tasks[0].texts().popitem()[1])[: context + continuation]
        begun = time.perf_counter()
        _, cache = self.subject.forward(ids[None, :context], self.subject.new_cache(OWN), last_only=True)
        middle = time.perf_counter()
        self.subject.forward(ids[None, context:], cache)
        readings = (2 + sum(map(_readings, contestants))) / len(contestants)
        return readings * (middle - begun) + time.perf_counter() - middle


def worth_asking(plans: Sequence[Contestant], records: Sequence[Record], margin: float) -> list[Contestant]:
    """Return those that lose no more than the margin as far as was seen: no answer makes another one safe."""
    losses = {plan: each.loss for plan, each in judged(records, margin).items()}
    return [each for each in plans if (loss := losses.get(each.hash)) is not None and loss.value <= margin]


def _readings(contestant: Contestant) -> int:
    """How many prefills a window of a plan takes besides the one that all plans share, about."""
    if contestant.plan is None or contestant.plan.needs.reconstruction is None:
        return 0
    return _GRADED if _is_graded(contestant) else _REPEATED


def _is_graded(contestant: Contestant) -> bool:
    """Whether a plan goes back through the model by its gradients."""
    again = None if contestant.plan is None else contestant.plan.needs.reconstruction
    return again is not None and again.graded


def _sizes(subject: Subject, context: int | None) -> tuple[int, int]:
    """Tokens of a window's context and of its continuation.

    Raises:
        KvtailorError: the model has fewer positions.
    """
    positions = subject.positions
    if context is not None and context < 32:
        raise ArgumentError(f"asked for windows with a context of {context} tokens: give 32 or more")
    size = min(_SIZE, positions or _SIZE) if context is None else context + context // 3
    if positions is not None and size > positions:
        raise KvtailorError(
            f"asked for windows of {context} + {size - (context or 0)} tokens, but {subject.name} has {positions} "
            f"positions: give at most --tokens {3 * positions // 4}"
        )
    if size < 43:
        raise KvtailorError(f"{subject.name} has {positions} positions, too few for a window of 32 + 11 tokens")
    return (size - size // 4, size // 4) if context is None else (context, context // 3)


def _parts(texts: object, subject: Subject, size: tuple[int, int]) -> tuple[Text, Text]:
    """The two parts of the text.

    Raises:
        KvtailorError: it is too short for an interval.
    """
    given = {PAGE: page()} if texts is None else named_texts(texts)
    name = next(iter(given)) if len(given) == 1 else f"{len(given)} texts"
    parts = parted(BETWEEN.join(given.values()), name)
    stride = sum(size) - subject.start().numel()
    tokens = [subject.tokens(part.text).ids.numel() for part in parts]
    if min(tokens) < stride or sum(each // stride for each in tokens) < FEWEST:
        raise KvtailorError(
            f"asked to measure on {name}, which has {sum(tokens)} tokens: {2 * FEWEST * stride} are enough for "
            f"{FEWEST} windows of {size[0]} + {size[1]}, and {sum(WINDOWS) * stride} for all {sum(WINDOWS)}: give a "
            "longer text, or a smaller --tokens"
        )
    return parts


def _filled(candidate: CheckedPlan, verdict: Verdict, shape: Any, geometry: Geometry) -> Verdict:
    plan = candidate.contestant.plan
    assert plan is not None
    cause = cause_of(plan, shape, geometry)
    if verdict.loss is not None and verdict.loss.value == 0 and verdict.loss.low is None:
        cause = "it changed nothing in prompts of this length: give a longer --tokens"
    return replace(verdict, bytes=candidate.bytes, cause=cause)


def _heads(geometry: Geometry) -> list[str]:
    first = geometry.first
    if geometry.has_latents or not first.kv_heads:
        return []
    served = first.q_heads // first.kv_heads
    return [
        f"{len(geometry.compressed)} of {geometry.layers} layers are compressed, with {first.kv_heads} kv heads for "
        f"{first.q_heads} query heads: an error in a key reaches {served} of these"
    ]
