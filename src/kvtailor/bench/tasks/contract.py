"""What a task is: samples of the model's text, and how a plan is scored on one of them.

A task is a frozen, keyword-only dataclass of its settings, in a file of its own in this folder. Most tasks score plan
by plan (`PlanByPlan`). Those whose plans must take turns within one process are `AllAtOnce`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvtailor.bench.tasks.settings import Declared, Metric, Shown, declared_of, value_faults
from kvtailor.errors import ArgumentError, KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.subject import Subject

__all__ = ["AllAtOnce", "Demand", "NotANumber", "PlanByPlan", "Sample", "Scored", "Task", "Turns", "hash_of"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one record of each plan is about: the same tokens for every plan.

    Attributes:
        point: the task's coordinates, JSON values only; in every record.
        text: name of the text or generator.
        text_hash: of all token ids that the model is given, see `hash_of`.
        state: random state of what was generated; None where nothing is random.
        steps: how often scoring one plan calls `advance` at most.
        notes: what a reader must know of the sample, for every plan's record; whole sentences.
        label: what progress calls it; empty: the task's name.
        scored: the scored texts, for the check that no plan was calibrated on them; None: there is no text to compare.
            One function for several samples is called once for each plan.
        whole: the text that `scored` are pieces of, where it is known.
        data: whatever the task needs to score it. It may remember what several plans share, such as a reference.
    """

    point: Mapping[str, object] = field(default_factory=dict)
    text: str | None = None
    text_hash: str | None = None
    state: int | None = None
    steps: int = 1
    notes: tuple[str, ...] = ()
    label: str = ""
    scored: Callable[[], Sequence[str]] | None = None
    whole: str | None = None
    data: Any = None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What one plan did on one sample. What was not measured is None, or is left out.

    Attributes:
        samples: windows, documents or rounds behind the numbers.
        tokens_scored: tokens whose log-probability entered a metric.
        metrics: by the names that the task declares.
        values: the same by window, document or round, in an order that is equal for all plans.
        timings: see `Record.timings`.
        floor_seconds: see `Record.floor_seconds`.
        notes: whole sentences about this plan's numbers.
        held: what the cache held, as fields of a `Record`, see `bench.measure.cache_fields.weigh`; and other fields
            that were read from the machine.
    """

    samples: int | None = None
    tokens_scored: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    timings: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    floor_seconds: float | None = None
    notes: Sequence[str] = ()
    held: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What scoring one plan on all samples feeds a model, for an estimate of its time.

    Attributes:
        prompts: how many prompts of so many tokens are read, each into a new cache.
        following: tokens that are fed together after a prompt, over all prompts.
        decoded: tokens that are fed one at a time after a prompt, over all prompts, at most.
    """

    prompts: Mapping[int, int]
    following: int = 0
    decoded: int = 0


# What to do about results that are no numbers.
_WIDER = "ask for a dtype with a wider range (float16 ends at 65504), or give the plan other settings"


class NotANumber(KvtailorError):
    """Something that a plan gave on a sample is NaN or infinite.

    It is the plan's error like any other, but of 'full', which all plans are compared with, it ends the task, and
    outside of suites the run.
    """

    @classmethod
    def of_logits(cls) -> NotANumber:
        """Return the error of a plan under which the model's logits are no numbers."""
        return cls(f"the model gave a log-probability that is not a number: {_WIDER}")

    @classmethod
    def of_results(cls, names: Iterable[str]) -> NotANumber:
        """Return the error of a plan whose results are no numbers.

        Args:
            names: of those results.
        """
        return cls(
            f"NaN or infinity came out as {', '.join(names)}, and a record holds numbers alone: {_WIDER}; a task gives "
            "None for what is not there"
        )


class Turns(Protocol):
    """How plans take turns on one sample, for `AllAtOnce.score_all`.

    Attributes:
        machine: what is known of the machine, see `bench.measure.machine.describe`.
    """

    @property
    def machine(self) -> Mapping[str, object]:
        """See the class."""

    def __call__(self, contestant: Contestant) -> AbstractContextManager[bool]:
        """Return the context of one turn, which gives whether the plan is still in the run.

        An error within it is the plan's: it goes into its record, and the plan is out. The turn counts as a step.
        """

    def live(self, contestant: Contestant) -> bool:
        """Return whether the plan has had no error."""


class Task(ABC):
    """One question asked of all plans. A task derives from `PlanByPlan` or `AllAtOnce`, not from this class.

    Its file is imported for `kvtailor bench --help`: what takes long to import stands inside of its functions. The
    values of its settings are checked against their annotations where one is made.

    Attributes:
        name: its name in records, suites and the command line; that of its file.
        version: raised whenever its numbers may change for the same model and plan.
        metrics: the numbers of its records; None: they are known only when it has run.
        shown: its columns in the report's tables; None: each of the metrics, by its own words.
        values: names in `Record.values` that its records may have.
        timings: names in `Record.timings`.
        by_sample: every list in `Record.values` has one number for each of `Record.samples`.
        of_cost: it times and weighs, and judges no answer, so that an untrained model will do.
        one_process: it cannot run where several processes share the model; nor can a task that is `of_cost`.
        own_cache: it also measures the model's own cache, without kvtailor.
        reads_text: it has fields `text` and `source`; the setting `text` names a corpus, a file, or 'generated'.
        of_each_text: of several texts it is asked once for each; else of the first alone.
        reads_data: it has a field `data`, the folder of data sets.
        generates: tokens that it generates besides its settings that count tokens.
        sets: where it is asked as SET:NAME, the settings that each SET stands for.
        set_name: the setting that NAME becomes.
        order: its place in lists; tasks with the same stand in the order of their names.
        usual: `kvtailor bench` measures it where no task is named.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    metrics: ClassVar[Sequence[Metric] | None] = ()
    shown: ClassVar[Shown | None] = None
    values: ClassVar[tuple[str, ...]] = ()
    timings: ClassVar[tuple[str, ...]] = ()
    by_sample: ClassVar[bool] = False
    of_cost: ClassVar[bool] = False
    one_process: ClassVar[bool] = False
    own_cache: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    of_each_text: ClassVar[bool] = False
    reads_data: ClassVar[bool] = False
    generates: ClassVar[int] = 0
    sets: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    set_name: ClassVar[str] = ""
    order: ClassVar[int] = 100
    usual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the values of the settings.

        Raises:
            ArgumentError: with all that cannot be.
        """
        values = {each.name: getattr(self, each.name) for each in self.declared()}
        if faults := list(value_faults(type(self), values)):
            raise ArgumentError("; ".join(faults))

    @classmethod
    def declared(cls) -> tuple[Declared, ...]:
        """Return the settings, but for the text."""
        return declared_of(cls)

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the value of a setting where nothing is given; None where it has none."""
        found = next((each.default for each in cls.declared() if each.name == name), None)
        return None if found is MISSING else found

    @classmethod
    def sizes(cls) -> tuple[str, ...]:
        """Return the settings that count tokens; their sum (of a list, the largest) must fit the model's positions."""
        return tuple(each.name for each in cls.declared() if each.setting.counts_tokens)

    @classmethod
    def asked_as(cls) -> tuple[str, ...]:
        """Return the words by which `--tasks` names it: its sets, or its own name."""
        return tuple(cls.sets) or (cls.name,)

    @classmethod
    def generated(cls, settings: Mapping[str, object]) -> int:
        """Return how many tokens it generates with these settings, which may be incomplete.

        Raises:
            UnknownName: a setting names something that there is not.
        """
        return cls.generates

    @property
    def exclusive(self) -> bool:
        """Whether it times or weighs, so that its numbers mean something only where nothing else runs beside it."""
        return self.of_cost or bool(self.timings)

    def texts(self) -> dict[str, str]:
        """Return the texts that it scores, by the names under which they are reported; none where they are made."""
        return {}

    def points(self) -> int:
        """Return how many samples it has."""
        return 1

    def steps(self) -> int:
        """Return how often scoring one plan on all samples calls `advance` at most."""
        return self.points()

    def cells(self, contestants: int) -> int:
        """Return how many records it gives."""
        return self.points() * (contestants + self.own_cache)

    def units(self, contestants: int) -> int:
        """Return how often `advance` is going to be called at most."""
        return self.steps() * (contestants + self.own_cache)

    def demand(self) -> Demand | None:
        """Return what scoring one plan feeds the model; None where that is not known before."""
        return None

    @abstractmethod
    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterable[Sample]:
        """Yield the samples, each of which all plans are scored on before the next one is asked for.

        Args:
            subject: the model.
            contestants: the plans, the null plan first; without the model's own cache.

        Raises:
            KvtailorError: the task cannot be done at all (a text too short, say), or a sanity check failed.
        """


class PlanByPlan(Task):
    """A task that scores one plan after the other. A plan that failed is not tried on the samples that follow.

    Any plan may be scored alone, in a process of its own: `score` may remember in `Sample.data` what others can use,
    but must give the same numbers without. What it must know of another plan's results comes through `recall`.
    """

    @abstractmethod
    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        """Return what a plan does on a sample.

        Args:
            subject: the model.
            contestant: the plan.
            sample: one of `samples`.
            advance: to be called after each step, see `Sample.steps`.

        Raises:
            Fraud: a sanity check failed: of this plan alone, see `checks.OF_ONE_PLAN`, or the run ends.
            KvtailorError, ValueError: this plan cannot be scored. Its record says so, and the others go on. Of 'full' a
                `NotANumber` ends the task.
            MemoryError, RuntimeError: the memory did not suffice for this plan, see `is_out_of_memory` in
                `bench.measure.memory_gauge`. Its record says so, and the others go on. Any other RuntimeError ends
                the run.
        """

    def recall(self, contestant: Contestant, sample: Sample, values: Mapping[str, Sequence[float]]) -> None:
        """Take note of a plan whose record is known from an earlier run, so that `score` is not called for it.

        Args:
            contestant: the plan.
            sample: what it was scored on.
            values: those of its record.
        """


class AllAtOnce(Task):
    """A task that scores all plans of a sample together, such as in interleaved rounds.

    Attributes:
        of_one_run: numbers of several runs cannot be compared, so that all records are known from one run, or none is.
    """

    of_one_run: ClassVar[bool] = True

    @abstractmethod
    def score_all(
        self, subject: Subject, contestants: Sequence[Contestant], sample: Sample, turns: Turns
    ) -> Mapping[str, Scored]:
        """Return what each plan did on a sample, by plan hash; those whose turn had an error may be left out.

        Args:
            subject: the model.
            contestants: those to be measured; the model's own cache first where the task declares `own_cache`.
            sample: one of `samples`.
            turns: around each piece of work of one plan.

        Raises:
            Fraud: a sanity check failed outside of a plan's turn, or is not of one plan alone, and the run ends.
            NotANumber: outside of a plan's turn, of 'full'.
            KvtailorError: no plan can be scored.
            MemoryError, RuntimeError: outside of a plan's turn the memory did not suffice, which ends the task.
        """


def hash_of(*ids: Tensor) -> str:
    """Return the SHA-256 of token ids (n,), in order, for `Sample.text_hash`."""
    digest = hashlib.sha256()
    for each in ids:
        digest.update(each.long().cpu().contiguous().numpy(force=True).tobytes())
        digest.update(b"|")
    return digest.hexdigest()
