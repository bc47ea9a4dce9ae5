"""One task of the lm-evaluation-harness, on the compressed cache, see `bench.lm_eval.model`.

Prompts, answers and metrics are the harness's own; it is told nothing of kvtailor but the model. Log-probabilities are
taken in float32, whatever the model's dtype (the harness's `softmax_dtype=float32`). There is no chat template.

Metrics: the harness's own by its own names, such as `acc,none`, and their standard errors, such as `acc_stderr,none`
(where the harness draws them by bootstrap, from 1000 draws). Values: `score`, the main metric of each document in the
harness's order: the metric that `point["metric"]` names, for a perplexity over words or bytes the mean log-likelihood
(nats) of one of them; higher is better, unless a note says otherwise. `loglikelihood`, where nothing is generated: the
sum (nats) of all that was scored of each document. It must differ from that of the full cache in at least one document,
else the run ends with a `Fraud`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.lm_eval import harness
from kvtailor.bench.lm_eval.results import is_ratio, likelihoods_of, main_metric, metrics_of, scores_of, versions
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.settings import EXAMPLES, Count, Shown, Whole, setting
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from kvtailor.bench.lm_eval.held import HeldSummary
    from kvtailor.bench.subject import Subject

__all__ = ["Harness"]

_STEPS = 100
_DRAWS = 1000


@dataclass(kw_only=True)
class _Loaded:
    """What all plans of a run have in common.

    Attributes:
        harness: what the harness loaded.
        group: the name under which the results stand.
        metric: the main one.
        requests: how many.
        likelihoods: those of the null plan, once it was scored.
    """

    harness: Mapping[str, Any]
    group: str
    metric: str
    requests: int
    likelihoods: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Harness(PlanByPlan):
    """One task or group of the harness.

    Attributes:
        task: its name in the harness, or the path of a YAML file.
        data: folder of local data sets, see `bench.lm_eval.local_data`; None: the harness loads what the task names.
        limit: so many documents of each task, the first ones; None: all.
        fewshot: examples before each question; None: as the task says.
        outside: tokens at the end of a context that are fed on the compressed cache, see `HarnessModel`. With 0 a
            task whose answers have one token says nothing about a plan, and its records say so.
    """

    name: ClassVar[str] = "harness"
    one_process: ClassVar[bool] = True
    version: ClassVar[int] = 1
    order: ClassVar[int] = 9
    metrics: ClassVar[None] = None
    shown: ClassVar[Shown] = Shown()
    values: ClassVar[tuple[str, ...]] = ("score",)
    by_sample: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True
    sets: ClassVar[Mapping[str, Mapping[str, str]]] = {"harness": {}}
    set_name: ClassVar[str] = "task"
    task: str = setting()
    data: Path | None = None
    limit: Count | None = setting(None, option=EXAMPLES)
    fewshot: Whole | None = setting(None)
    outside: Whole = setting(0)

    def steps(self) -> int:
        return _STEPS

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        # The tasks' files and the random numbers are the harness's own until all plans have been scored.
        from kvtailor.bench.lm_eval.isolated import randomness_restored, silence

        with TemporaryDirectory(prefix="kvtailor-") as folder, randomness_restored():
            random.seed(0)
            with silence():
                loaded, notes = harness.load_tasks(self.task, data=self.data, into=Path(folder), fewshot=self.fewshot)
            tasks: Mapping[str, Any] = loaded["tasks"]
            group = self._group(loaded)
            metric = main_metric(next(iter(tasks.values())))
            with silence():
                _build(tasks, self.limit)
            yield Sample(
                point={
                    "task": self.task,
                    "fewshot": self.fewshot,
                    "limit": self.limit,
                    "outside": self.outside,
                    "metric": metric,
                    "version": f"{versions(tasks)}, lm_eval {harness.version()}",
                },
                text=f"{self.task} of the lm-evaluation-harness",
                text_hash=_hash(subject, tasks),
                steps=_STEPS,
                notes=tuple(notes),
                label=self.task,
                scored=lambda: _texts(tasks),
                data=_Loaded(
                    harness=loaded,
                    group=group,
                    metric=metric,
                    requests=sum(len(task.instances) for task in tasks.values()),
                ),
            )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        from kvtailor.bench.checks import Fraud

        shared: _Loaded = sample.data
        scored, read = self._run(subject, contestant, shared, _Steps(advance, shared.requests))
        if _hash(subject, shared.harness["tasks"]) != sample.text_hash:
            raise Fraud("different data", f"{contestant.label} was asked other questions of {self.task}")
        if contestant.is_full:
            shared.likelihoods = scored.values.get("loglikelihood")
        elif read:
            self._check_touched(contestant, scored, shared)
        return scored

    def recall(self, contestant: Contestant, sample: Sample, values: Mapping[str, Sequence[float]]) -> None:
        if contestant.is_full:
            sample.data.likelihoods = values.get("loglikelihood")

    def _group(self, loaded: Mapping[str, Any]) -> str:
        """The name under which the results stand."""
        if self.task in loaded.get("groups", {}):
            return self.task
        if len(loaded["tasks"]) != 1:
            names = ", ".join(list(loaded["tasks"])[:6])
            raise KvtailorError(
                f"asked for {self.task!r}, which the harness does not sum up: ask for one of its tasks, such as {names}"
            )
        return str(next(iter(loaded["tasks"])))

    def _run(self, subject: Subject, contestant: Contestant, shared: _Loaded, steps: _Steps) -> tuple[Scored, bool]:
        """What was measured, and whether an answer came from the compressed cache."""
        import torch
        from lm_eval import evaluate

        from kvtailor.bench.lm_eval.isolated import one_process, silence
        from kvtailor.bench.lm_eval.model import HarnessModel

        loaded, group, metric = shared.harness, shared.group, shared.metric
        with silence() as loud:
            model = HarnessModel(subject, contestant, softmax_dtype="float32", outside=self.outside)
            model.quiet, model.advance = True, lambda requests: loud(lambda: steps.done(requests))
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(harness.TASK_SEED)
            torch.manual_seed(harness.TASK_SEED)
            with one_process():
                results = evaluate(model, dict(loaded), limit=self.limit, bootstrap_iters=_DRAWS)
        metrics, notes = metrics_of(results["results"][group])
        samples = [
            sample
            for name in loaded["tasks"]
            for sample in results["samples"][name]
            if sample["filter"] == metric.partition(",")[2]
        ]
        scores = scores_of([sample.get(metric.partition(",")[0]) for sample in samples])
        values = {} if scores is None else {"score": scores}
        if (likelihoods := likelihoods_of(samples)) is not None:
            values["loglikelihood"] = likelihoods
        if scores is None:
            notes.append(f"The harness gives no number of {metric} for one document, so plans cannot be paired.")
        better = results["higher_is_better"].get(next(iter(loaded["tasks"])), {}).get(metric.partition(",")[0])
        if better is False and not is_ratio(samples[0].get(metric.partition(",")[0])):
            notes.append(f"Of {metric} lower is better.")
        scored = Scored(
            samples=len(samples),
            metrics=metrics,
            tokens_scored=model.held.scored or None,
            values=values,
            notes=[*notes, *_held_notes(model.held, contestant)],
            held=model.held.heaviest,
        )
        return scored, bool(model.held.read)

    def _check_touched(self, contestant: Contestant, scored: Scored, shared: _Loaded) -> None:
        from kvtailor.bench.checks import Fraud

        likelihoods, held = scored.values.get("loglikelihood"), scored.held
        if likelihoods is not None and shared.likelihoods is not None and list(likelihoods) == list(shared.likelihoods):
            raise Fraud(
                "untouched cache",
                f"plan {contestant.label!r} holds {held['tokens_held']:g} of {held['tokens_seen']} tokens in "
                f"{held['bytes_held']} of {held['bytes_full']} bytes, yet no log-likelihood of {self.task} "
                "differs from 'full': the compressed cache was never read",
            )


class _Steps:
    """Turns answered requests into a fixed number of steps of a progress bar."""

    def __init__(self, advance: Callable[[], None], requests: int):
        self.advance, self.requests = advance, max(1, requests)
        self.answered = self.shown = 0

    def done(self, requests: int) -> None:
        self.answered += requests
        upto = min(_STEPS, self.answered * _STEPS // self.requests)
        while self.shown < upto:
            self.shown += 1
            self.advance()


def _build(tasks: Mapping[str, Any], limit: int | None) -> None:
    for task in tasks.values():
        task.set_fewshot_seed(harness.TASK_SEED)
        task.build_all_requests(limit=limit)


def _hash(subject: Subject, tasks: Mapping[str, Any]) -> str:
    """Of the tokens of everything that the model is asked, in the harness's order."""
    return hash_of(*(subject.prompt(text) for text in _texts(tasks)))


def _texts(tasks: Mapping[str, Any]) -> list[str]:
    return [text for task in tasks.values() for instance in task.instances for text in map(str, instance.args)]


def _held_notes(held: HeldSummary, contestant: Contestant) -> list[str]:
    notes = []
    if held.truncated:
        notes.append(f"Longer than the model's positions were {held.truncated} requests, which lost their beginning.")
    if contestant.is_own or contestant.is_full or not held.heaviest:
        return notes
    if not held.compressed:
        return [
            *notes,
            f"Nothing was compressed: each of the {held.contexts} contexts was held whole, so that these are the "
            "numbers of the full cache.",
        ]
    if held.compressed < held.contexts:
        notes.append(f"Of {held.contexts} contexts {held.compressed} were compressed; the others were held whole.")
    if not held.read:
        notes.append(
            "All answers come from the prefill's own logits, so that no compressed cache was read and these are the "
            "numbers of the full cache: ask with outside=1."
        )
    return notes
