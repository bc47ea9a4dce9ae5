"""The stages of one fit, in their order, from records to the result."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.forks import one_thread
from kvtailor.bench.measure.kept_prompts import KeptPrompts
from kvtailor.bench.measure.memory_gauge import is_out_of_memory, out_of_memory
from kvtailor.bench.measure.statistics import mean
from kvtailor.bench.resources import CellResources
from kvtailor.bench.runner import plan_run
from kvtailor.bench.runner import run as run_bench
from kvtailor.bench.schema import Record
from kvtailor.bench.stages import Progress
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import Task, hash_of
from kvtailor.cluster import Executor
from kvtailor.errors import KvtailorError
from kvtailor.fitting.answer import FrontPoint, marked, short_plan
from kvtailor.fitting.effort import Effort
from kvtailor.fitting.layers import (
    Additivity,
    LayerMap,
    Solved,
    additivity,
    measure_layers,
    settings,
    solved_plan,
)
from kvtailor.fitting.material import Material
from kvtailor.fitting.measuring import CalibratedHere, Measured, Measurer, quiet
from kvtailor.fitting.pieces import TEXT
from kvtailor.fitting.proof import judged, proof_tasks, speed_task
from kvtailor.fitting.question import Question
from kvtailor.fitting.result import Fit
from kvtailor.fitting.search import Candidate, Searched, search
from kvtailor.fitting.sizing import Sizer
from kvtailor.fitting.space import Space
from kvtailor.fitting.verdict import DOABLE, Judged, fast_enough, regret_of_text, small_enough, verdict
from kvtailor.ops.files import read_bytes, seal_toml, write_whole
from kvtailor.ops.sizes import byte_text
from kvtailor.plan import Plan
from kvtailor.presets import FULL

__all__ = ["BEST_FILE", "Fitting"]

BEST_FILE = "best-so-far.toml"
FIRST_PLANS = "first plans"
WHICH_SCORER = "which scorer"
LAYERS = "stage 1: layers"
STRUCTURE = "stage 2: structure"
OTHER_MEMORIES = "other memories"
FEWER_BYTES = "fewer bytes"
PROOF = "stage 3: proof"

_OF_LAYERS = 0.6
"""What a step of stage 1 takes of any other, since layers below the one that changed are not computed again."""
_CLOSER = 3
_EARLY = ("kivi4", "kvquant4", "k3v3", "k3v2", "kvquant3", "kivi2", "kvquant2", "pyramidkv")
_EARLY_PLANS = 3
_QUICK_SCORES = ("snapkv", "snapkv(kernel=5)", "h2o", "tova", "keydiff", "expected")


@dataclass(kw_only=True)
class Fitting:
    """One fit under way."""

    subject: Subject
    sizer: Sizer
    question: Question
    material: Material
    effort: Effort
    folder: Path
    state: int
    without: tuple[str, ...]
    stages: tuple[str, ...]
    timed: bool
    executor: Executor | None
    resources: CellResources | None
    workers: int
    progress: Progress
    asked: Mapping[str, Any]
    kept: bool = False
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)
    _full: Measured | None = None
    _best: tuple[int, float] | None = None

    @cached_property
    def first(self) -> tuple[Any, ...]:
        """Pieces that every candidate is measured on."""
        return self.material.first(*self.effort.first)

    @cached_property
    def every(self) -> tuple[Any, ...]:
        """These and the others."""
        more = self.material.first(*(a + b for a, b in zip(self.effort.first, self.effort.rest, strict=True)))
        return (*self.first, *(piece for piece in more if not any(piece is each for each in self.first)))

    def measurer(self, advance: Callable[[str], None]) -> Measurer:
        """Return what measures plans, telling each piece."""
        return Measurer(
            self.subject,
            self.folder / "records",
            executor=self.executor,
            resources=self.resources,
            workers=self.workers,
            advance=advance,
            finish=self.progress.finish,
            calibrated=self._calibrated,
        )

    @cached_property
    def _calibrated(self) -> CalibratedHere:
        return CalibratedHere([*(piece.text for piece in self.every), self.material.proof.text])

    def result(self) -> Fit:
        """Return the answer."""
        self.notes += self.material.notes
        memory = self.question.memory or max(1, round(0.25 * self.sizer.full))
        if not self.effort.reads_twice:
            self.notes.append(
                f"Nothing that reads a prompt twice (kvzip and its line) was tried: effort {self.effort.name!r} leaves "
                "such plans out, effort 'normal' does not."
            )
        space = Space.of(self.sizer, None, without=self.without, reads_twice=self.effort.reads_twice)
        self._begin(space, memory)
        layers = self._layers(space) if "layers" in self.stages else None
        space = replace(space, layers=layers)
        searched = self._search(space, memory)
        front = self._front(space, searched, memory)
        finalists = self._finalists(space, searched, front, layers, memory)
        records, proved = self._proof(finalists)
        kept = [each for each in proved if each.origin != FULL]
        fitting = small_enough(kept, self.question.memory, self.notes)
        found = verdict(
            fast_enough(fitting, self.question.seconds, self.notes),
            aim=self.question.aim,
            loss=self.question.loss,
            points=self.question.points,
        )
        chosen = found.chosen
        added = self._additivity(space, layers, memory)
        plan = Plan.parse(chosen.plan)
        if plan.needs.reconstruction:
            self.notes.append(
                "This plan reads a context twice: `kvtailor run`, sessions, kvtailor.read and kvtailor.prefill do so, "
                "and plain generate() on a cache that has read nothing refuses it."
            )
        own = [record for record in records if record.plan_hash == plan.hash and record.tokens_by_head]
        return Fit(
            model=self.subject.name,
            dtype=str(self.subject.cache_dtype).removeprefix("torch."),
            question=self.question,
            full=self.sizer.full,
            effort=self.effort.name,
            state=self.state,
            plan=chosen.plan,
            sentence=found.sentence,
            told=found.told,
            against=found.against,
            needed=found.needed,
            proof=tuple(proved),
            front=front,
            layers=layers,
            additivity=added,
            tokens_by_head=own[0].tokens_by_head or () if own else (),
            sizes=self.sizer.elsewhere(plan),
            regret=regret_of_text(proved),
            notes=tuple(dict.fromkeys(self.notes)),
            asked=self.asked,
            counts={**self.counts, "records": self._records()},
        )

    def _begin(self, space: Space, memory: int) -> None:
        """Tell how long the stages take, and measure a few presets, so that there is a plan within minutes."""
        effort, pieces, every = self.effort, len(self.first), len(self.every)
        presets = space.starts(memory)
        early = _early(space, memory)
        self._gather_for([*(Plan.parse(f"{word} @ keep=0.25") for word in space.scores), *space.preset_plans])
        finalists = effort.fitted + effort.presets + 3
        tasks = self._proof_tasks()
        steps = {FIRST_PLANS: len(early) * pieces}
        if "layers" in self.stages:
            word = self._quick_scores(space)
            cut = settings(
                self.sizer.geometry,
                score=(word or ("",))[0],
                widths=effort.widths,
                shares=effort.shares,
                by_head=effort.by_head,
            )
            kept = self.subject.kept
            of_layers = _OF_LAYERS if isinstance(kept, KeptPrompts) and kept.off is None else 1.0
            steps |= {WHICH_SCORER: len(word) * pieces, LAYERS: round(of_layers * len(cut) * pieces)}
        trials = (effort.trials if "structure" in self.stages else 0) + len(presets)
        steps[STRUCTURE] = trials * pieces + trials // 3 * (every - pieces)
        steps[OTHER_MEMORIES] = (effort.front + 2) * len(effort.levels) * every
        if self.question.memory is None:
            steps[FEWER_BYTES] = _CLOSER * (effort.front + 2) * every
        steps[PROOF] = plan_run(tasks, [Contestant.of(FULL)])[1] * finalists
        seconds = None
        if self.executor is None:
            with one_thread(self.workers):
                seconds = self._seconds_of_a_step() / self.workers
        self.progress.expect(steps, seconds)
        with self.progress.stage(FIRST_PLANS, len(early) * pieces) as advance:
            for found in self.measurer(advance).measure(early, self.first) if early else ():
                self._keep_best(found, memory)

    def _gather_for(self, plans: Sequence[Plan]) -> None:
        """Have the one forward of each piece gather what these plans need, whichever is measured first."""
        if isinstance(self.subject.kept, KeptPrompts):
            self.subject.kept.gather_for(plans)

    def _seconds_of_a_step(self) -> float:
        """Seconds of the uncompressed cache on one piece, once the model has run before."""
        full, piece = Contestant.of(FULL), self.first[0]
        for _ in range(2):
            begin = time.perf_counter()
            _, cache = self.subject.prefill(piece.context[None], self.subject.new_cache(full), last_only=True)
            self.subject.forward(piece.targets[None, :-1], cache)
            self.subject.wait()
        return time.perf_counter() - begin

    def _keep_best(self, found: Measured, memory: int, *, only_meeting: bool = False) -> None:
        """Write a plan to `BEST_FILE` if it is the best so far: usable, and not yet judged on what was never seen.

        Where memory is given, the best has the least loss on the first pieces; where it is not, the fewest bytes of
        those that lose no more than was asked, as far as the text of the search tells.

        Args:
            found: on the first pieces.
            memory: bytes that the plan was made for.
            only_meeting: it was made for another memory than the others, so that its loss says nothing beside theirs.
        """
        if found.error is not None:
            return
        size, question = self.sizer.measured(found.plan, found.bytes_held or 0), self.question
        meets = question.memory is None and question.loss is not None and fmean(found.kl[TEXT]) <= question.loss
        if (question.memory is not None and size > memory) or (only_meeting and not meets):
            return
        rank = (0, float(size)) if meets else (1, found.loss)
        if self._best is not None and rank >= self._best:
            return
        self._best = rank
        pieces = sum(len(each) for each in found.kl.values())
        # The whole line of a plan with a number for each layer is long; the file has it.
        named = short_plan(str(found.plan)) if self.kept else str(found.plan)
        sentence = (
            f"best so far: {named}, {byte_text(size)} of {byte_text(self.sizer.full)}, {found.loss:.4f} nats lost on "
            f"{pieces} pieces"
        )
        if self.kept:
            head = "\n".join(
                f"# {line}"
                for line in (
                    f"kvtailor fit for {self.subject.name} has not ended: this is its best plan so far, unproved.",
                    f"{question.context} tokens, {question.batch} row(s), made for {byte_text(memory)}.",
                )
            )
            write_whole(self.folder / BEST_FILE, seal_toml(f"{head}\n\n{found.plan.to_toml()}"))
            sentence += f"; kvtailor run --plan {self.folder / BEST_FILE}"
        self.progress.tell(sentence)

    def _quick_scores(self, space: Space) -> list[str]:
        return [word for word in _QUICK_SCORES if word in space.scores]

    def _layers(self, space: Space) -> LayerMap:
        """Stage 1, with the scorer that loses least where all layers drop alike."""
        effort = self.effort
        widths = effort.widths
        scores = self._quick_scores(space)
        count = len(self.first)
        tried = [Plan.parse(f"{word} @ keep=0.25") for word in scores]
        with self.progress.stage(WHICH_SCORER, len(tried) * count) as advance:
            found = self.measurer(advance).measure(tried, self.first)
        able = [(each.loss, word) for each, word in zip(found, scores, strict=True) if each.error is None]
        score = min(able)[1] if able else ""
        plans = settings(self.sizer.geometry, score=score, widths=widths, shares=effort.shares, by_head=effort.by_head)
        self.counts["settings of stage 1"] = len(plans)
        with self.progress.stage(LAYERS, len(plans) * count) as advance:
            return measure_layers(
                self.measurer(advance),
                self.sizer.geometry,
                self.first,
                score=score,
                widths=widths,
                shares=effort.shares,
                by_head=effort.by_head,
            )

    def _search(self, space: Space, memory: int) -> Searched:
        """Stage 2; without it, stage 1's plan and the presets alone."""
        trials = self.effort.trials if "structure" in self.stages else 0
        most = trials + len(space.starts(memory))

        def told(tried: Candidate | None, skipped: int) -> None:
            if skipped:
                advance("given up early", skipped=skipped)
            if tried is not None:
                self._keep_best(tried.first, memory)

        with self.progress.stage(STRUCTURE, most * len(self.every)) as advance:
            found = search(
                space,
                self.measurer(advance),
                memory=memory,
                first=self.first,
                rest=self.every[len(self.first) :],
                trials=trials,
                state=self.state,
                storage=self.folder / "study.db",
                name=self._name(memory),
                told=told,
            )
        self.counts["trials of stage 2"] = found.trials
        if found.refused:
            self.notes.append(f"{len(found.refused)} points could not be measured, the first: {found.refused[0]}")
        return found

    def _front(self, space: Space, searched: Searched, memory: int) -> tuple[FrontPoint, ...]:
        """The best points of the search at other memories, beside all that it measured whole."""
        points: dict[str, FrontPoint] = {}
        for each in searched.best():
            if each.whole is not None:
                points[each.plan.hash] = self._front_point(each.point, each.whole, memory)
        best = [*searched.best(presets=False)[: self.effort.front], *searched.presets()[:2]]
        levels = [round(share * self.sizer.full) for share in self.effort.levels]
        levels = [level for level in levels if abs(level - memory) > 0.05 * memory]
        made = [(each.point, level, space.plan(each.point, level)) for each in best for level in levels]
        there = {plan.hash: (point, level, plan) for point, level, plan in made if plan is not None}
        with self.progress.stage(OTHER_MEMORIES, len(there) * len(self.every)) as advance:
            plans = [plan for _, _, plan in there.values()]
            measured = self.measurer(advance).measure(plans, self.every) if plans else []
        for (point, level, plan), found in zip(there.values(), measured, strict=True):
            if found.error is None:
                points.setdefault(plan.hash, self._front_point(point, found, level))
                self._keep_best(found, level, only_meeting=True)
        if self.question.memory is None:
            self._close_in([each.point for each in best if not each.is_preset], space, points)
        return marked(list(points.values()))

    def _close_in(self, best: Sequence[Mapping[str, Any]], space: Space, points: dict[str, FrontPoint]) -> None:
        """Where bytes are made small: measure between the fewest bytes that meet the limits and the next fewer."""
        with self.progress.stage(FEWER_BYTES, _CLOSER * len(best) * len(self.every)) as advance:
            for _ in range(_CLOSER):
                meeting = [each.bytes for each in points.values() if self._meets(each)]
                if not meeting:
                    return
                below = [each.memory for each in points.values() if each.memory < min(meeting)]
                level = round((min(meeting) * max(below)) ** 0.5) if below else min(meeting) // 2
                plans = {str(point): space.plan(point, level) for point in best}
                there = [(point, plan) for point in best if (plan := plans[str(point)]) is not None]
                measured = self.measurer(advance).measure([plan for _, plan in there], self.every) if there else []
                for (point, plan), found in zip(there, measured, strict=True):
                    if found.error is None:
                        points[plan.hash] = self._front_point(point, found, level)
                        self._keep_best(found, level, only_meeting=True)

    def _meets(self, point: FrontPoint) -> bool:
        """Whether a point loses no more than the question allows, as far as the search measured it."""
        loss, most = self.question.loss, self.question.points
        few = loss is None or (point.text is not None and point.text <= loss)
        return few and (most is None or (point.points_lost is not None and point.points_lost <= most))

    def _front_point(self, point: Mapping[str, Any], found: Measured, memory: int) -> FrontPoint:
        return FrontPoint(
            plan=str(found.plan),
            origin=str(point["how"]),
            label=str(point["preset"]) if point["how"] == "preset" else self._label(found.plan),
            memory=memory,
            bytes=self.sizer.measured(found.plan, found.bytes_held or 0),
            loss=mean(found.each()),
            text=fmean(found.kl[TEXT]),
            points_lost=self._points_lost(found),
        )

    def _points_lost(self, found: Measured) -> float | None:
        """See `FrontPoint`."""
        full = self.measurer(lambda label: None).measure([Plan()], self.every)[0] if self._full is None else self._full
        self._full = full
        lost = [
            100 * (fmean(full.hits[name]) - fmean(hits))
            for name, hits in found.hits.items()
            if fmean(full.hits[name]) >= DOABLE
        ]
        return max(0.0, *lost) if lost else None

    def _finalists(
        self, space: Space, searched: Searched, front: Sequence[FrontPoint], layers: LayerMap | None, memory: int
    ) -> list[tuple[Plan, str, str]]:
        """Plans that the proof has, each with its origin and label."""
        found: dict[str, tuple[Plan, str, str]] = {}

        def add(plan: Plan, origin: str, label: str) -> None:
            found.setdefault(plan.hash, (plan, origin, label))

        if self.question.memory is None:
            # Bytes are made small: the points of the front that lose no more, from the fewest bytes up.
            meeting = sorted((each for each in front if self._meets(each)), key=lambda each: each.bytes)
            if not meeting:
                least = min(front, key=lambda each: (each.points_lost or 0.0, each.text or 0.0))
                asked = [f"{self.question.loss} nats per token"] if self.question.loss is not None else []
                asked += [f"{self.question.points} points"] if self.question.points is not None else []
                raise KvtailorError(
                    f"no plan that was measured loses at most {' and '.join(asked)}: the least is "
                    f"{least.text or 0.0:.4f} nats on text (KL) and {_shown(least.points_lost)} points, by "
                    f"{least.label}. Allow a larger loss"
                )
            fitted = [each for each in meeting if each.origin != "preset"]
            presets_there = [each for each in meeting if each.origin == "preset"][: self.effort.presets]
            # The proof asks for more than the search: the upper end must be below the limit. So safer plans go too.
            count = min(2 * self.effort.fitted, len(fitted))
            spread = [fitted[place * (len(fitted) - 1) // max(1, count - 1)] for place in range(count)]
            for each in [*spread, *presets_there]:
                add(Plan.parse(each.plan), each.origin, f"{each.label} in {byte_text(each.bytes)}")
            return list(found.values())
        for made in searched.best(presets=False)[: self.effort.fitted]:
            add(made.plan, str(made.point["how"]), self._label(made.plan))
        if layers is not None:
            solved = self._stage_1_alone(layers, memory)
            if solved is not None:
                add(solved.plan, "layers", f"stage 1 alone: {short_plan(str(solved.plan))}")
                if solved.gap > 0:
                    self.notes.append(
                        f"The solver's time was over before it had shown that stage 1's plan is the best: another may "
                        f"lose {100 * solved.gap:.1g} % less in sum."
                    )
        presets = searched.presets()
        # Beside those that lose least, the one that keeps most answers: it may be another.
        kept_most = sorted(presets, key=lambda each: (-_right(each), each.first.loss))
        for shipped in [*presets[: self.effort.presets], *kept_most[:1]]:
            add(shipped.plan, "preset", str(shipped.point["preset"]))
        if not any(self._fits_on_any_text(plan, memory) for plan, _, _ in found.values()):
            # Heads that share one pool may hold more on the text of the proof, and then all of these would be out.
            sure = [each for each in searched.candidates if self._fits_on_any_text(each.plan, memory)]
            for made in sorted(sure, key=lambda each: (each.loss, str(each.plan)))[:1]:
                name = str(made.point["preset"]) if made.is_preset else self._label(made.plan)
                add(made.plan, str(made.point["how"]), name)
        return list(found.values())

    def _fits_on_any_text(self, plan: Plan, memory: int) -> bool:
        return self.sizer.size(plan).high <= memory

    def _label(self, plan: Plan) -> str:
        """A plan's methods, with a number behind where another plan has the same."""
        taken = self.labels.setdefault(short_plan(str(plan)), [])
        if plan.hash not in taken:
            taken.append(plan.hash)
        number = taken.index(plan.hash)
        return short_plan(str(plan)) + (f" ({number + 1})" if number else "")

    def _stage_1_alone(self, layers: LayerMap, memory: int) -> Solved | None:
        return solved_plan(
            layers,
            self.sizer.geometry,
            context=self.question.context,
            batch=self.question.batch,
            element=self.sizer.element,
            memory=memory,
            size=self.sizer.most,
        )

    def _proof_tasks(self) -> list[Task]:
        return proof_tasks(
            self.material,
            context=self.question.context,
            windows=self.effort.windows[0],
            documents=self.effort.windows[1],
        )

    def _proof(self, finalists: Sequence[tuple[Plan, str, str]]) -> tuple[list[Record], list[Judged]]:
        """Stage 3."""
        contestants = [replace(Contestant.of(str(plan)), label=label) for plan, _, label in finalists]
        full = Contestant.of(FULL)
        tasks = self._proof_tasks()
        everyone = [full, *contestants]
        # All of its plans are in one run.
        self._gather_for([])
        with self.progress.stage(PROOF, plan_run(tasks, everyone)[1]) as advance, quiet():
            records = run_bench(
                self.subject,
                everyone,
                tasks,
                out=self.folder / "records",
                advance=advance,
                finish=self.progress.finish,
                executor=self.executor,
                resources=self.resources,
                workers=self.workers,
            )
        if self.timed:
            records += self._times(contestants)
        sizes = {record.plan_hash: record.bytes_held for record in records if record.task == "perplexity"}
        plans = [(full, FULL, self.sizer.measured(Plan(), sizes.get(full.hash) or 0))]
        plans += [
            (contestant, origin, self.sizer.measured(plan, sizes.get(contestant.hash) or 0))
            for contestant, (plan, origin, _) in zip(contestants, finalists, strict=True)
        ]
        return records, judged(records, plans, kinds=self.material.kinds)

    def _times(self, contestants: Sequence[Contestant]) -> list[Record]:
        """The time of a token of each plan, in turns; without the full cache, which may not fit at this batch."""
        asked, rounds = self.question, self.effort.rounds
        task = speed_task(self.material, context=asked.context, batch=asked.batch, rounds=rounds)
        with self.progress.stage("time of a token", plan_run([task], contestants)[1]) as advance, quiet():
            try:
                found = run_bench(
                    self.subject,
                    contestants,
                    [task],
                    out=self.folder / "records",
                    advance=advance,
                    executor=self.executor,
                    resources=self.resources,
                )
            except (KvtailorError, MemoryError, RuntimeError) as error:
                if not isinstance(error, KvtailorError) and not is_out_of_memory(error):
                    raise
                why = out_of_memory(error) if is_out_of_memory(error) else str(error).splitlines()[0]
                self.notes.append(f"No times were measured: {why}")
                return []
        self.notes += [f"The time of {each.label} was not measured: {each.error}" for each in found if each.error]
        disturbed = [each.label for each in found if each.error is None and each.samples == 0]
        if disturbed:
            self.notes.append(
                f"No time is told of {', '.join(disturbed)}: other work took the processor in every round. On "
                "a quiet machine `kvtailor bench --tasks speed` measures it."
            )
        return [record for record in found if record.error is None]

    def _additivity(self, space: Space, layers: LayerMap | None, memory: int) -> Additivity | None:
        if layers is None:
            return None
        solved = self._stage_1_alone(layers, memory)
        if solved is None:
            return None
        with self.progress.stage("do losses add up", len(self.first)) as advance:
            found = self.measurer(advance).measure([solved.plan], self.first)[0]
        return None if found.error is not None else additivity(found, solved.loss)

    def _name(self, memory: int) -> str:
        """The name of the study: equal for the same search."""
        pieces = hash_of(*(each for piece in self.every for each in (piece.context, piece.targets)))
        asked = [
            self.subject.name,
            self.subject.fingerprint(),
            self.effort.name,
            memory,
            self.question.as_dict(),
            self.without,
            self.stages,
            self.state,
            pieces,
        ]
        digest = hashlib.sha256(json.dumps(asked, default=str, sort_keys=True).encode()).hexdigest()[:12]
        return f"fit-{digest}"

    def _records(self) -> int:
        folder = self.folder / "records"
        return sum(line.count(b"\n") for line in (read_bytes(path) for path in folder.glob("*.jsonl")))


def _early(space: Space, memory: int) -> list[Plan]:
    """A few presets that fill a memory and read a prompt once, those first that lose little on most models."""
    names = [*(name for name in _EARLY if name in space.presets), *space.presets]
    plans = (space.plan({"how": "preset", "preset": name}, memory) for name in dict.fromkeys(names))
    return list(islice((plan for plan in plans if plan is not None and not plan.needs.reconstruction), _EARLY_PLANS))


def _shown(points: float | None) -> str:
    return "an unknown number of" if points is None else f"{points:.1f}"


def _right(candidate: Candidate) -> float:
    return sum(sum(hits) for hits in candidate.first.hits.values())
