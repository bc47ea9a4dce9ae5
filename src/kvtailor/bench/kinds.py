"""The kinds of task that a suite may name: what each may be asked, how many tokens that takes, which numbers it gives.

Said here without importing any task, so that a suite can be checked, and a table read, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvtailor.bench.data.longsets import long_set
from kvtailor.bench.data.synthetic.documents import ALL_TASKS
from kvtailor.bench.tasks import Task
from kvtailor.errors import KvtailorError, UnknownName, suggest

__all__ = ["FIELDS", "GENERATED", "KINDS", "SHARES", "TEXTS", "Kind", "is_path", "measure_faults", "setting_faults"]

GENERATED = "generated"
TEXTS = ("wikitext2", "c4", "pg19", GENERATED)
_TASKS = "kvtailor.bench.tasks"
_GENERATED_TOKENS = 32  # what the needle and the memory task generate

FIELDS = (
    "tokens_held", "tokens_read", "tokens_seen", "bytes_held", "bytes_full", "bytes_resident", "bytes_peak",
    "bytes_peak_decode", "weight_bytes", "floor_seconds", "samples",
)  # fmt: skip
"""Fields of a record that a column may show."""
SHARES = ("kept", "reduction", "compression")
"""Computed from `bytes_held` and `bytes_full`: held/full, 1 - held/full, full/held."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of task.

    Attributes:
        module: of `bench.tasks`.
        class_name: in it.
        settings: what a suite may set; fields of the class but for `text`.
        needs: those of the settings that must be there.
        sizes: settings that count tokens; their sum (of a list, the largest) must fit into the model's positions.
        extra: tokens that it generates besides; `longcontext` generates what its set asks for.
        reads_text: it takes a text; the setting `text` names a corpus, a file, or 'generated'.
        reads_data: it takes the data folder.
        of_cost: it times and weighs, and judges no answer, so that an untrained model will do.
        metrics: names in `Record.metrics`; None: they are known only when it has run.
        values: names in `Record.values`.
        timings: names in `Record.timings`.
    """

    module: str
    class_name: str
    settings: tuple[str, ...]
    needs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    extra: int = 0
    reads_text: bool = False
    reads_data: bool = False
    of_cost: bool = False
    metrics: tuple[str, ...] | None = ()
    values: tuple[str, ...] = ()
    timings: tuple[str, ...] = ()

    def load(self) -> type[Task]:
        """The class.

        Raises:
            KvtailorError: it cannot be imported here.
        """
        try:
            return cast(type[Task], getattr(importlib.import_module(f"{_TASKS}.{self.module}"), self.class_name))
        except ImportError as error:
            raise KvtailorError(f"The task {self.module!r} cannot be imported: {error}") from error

    def default(self, setting: str) -> Any:
        """The task's own value where nothing is given; None where it has none."""
        try:
            found = {field.name: field.default for field in dataclasses.fields(cast(Any, self.load()))}.get(setting)
        except KvtailorError:
            return None
        return None if found is dataclasses.MISSING else found


KINDS: dict[str, Kind] = {
    "perplexity": Kind(
        module="perplexity",
        class_name="Perplexity",
        settings=("text", "context", "continuation", "chunk", "beyond", "windows", "state"),
        sizes=("context", "continuation"),
        reads_text=True,
        metrics=("nll", "perplexity", "bits_per_byte", "distinct_8grams"),
        values=("nll",),
    ),
    "fidelity": Kind(
        module="fidelity",
        class_name="Fidelity",
        settings=("text", "context", "continuation", "windows", "state"),
        sizes=("context", "continuation"),
        reads_text=True,
        metrics=("kl", "kl_p99", "top1", "ece", "key_error", "value_error", "retained_mass", "attention_cosine",
                 "output_error"),
        values=("kl", "top1"),
    ),
    "needle": Kind(
        module="needle",
        class_name="Needle",
        settings=("lengths", "depths", "documents", "kind", "question_outside", "state"),
        needs=("lengths",),
        sizes=("lengths",),
        extra=_GENERATED_TOKENS,
        metrics=("accuracy", "recall", "answer_nll"),
        values=("hit", "recall", "nll"),
    ),
    "speed": Kind(
        module="speed",
        class_name="Speed",
        settings=("text", "context", "batch", "tokens", "rounds", "warmup", "patience", "graphs"),
        sizes=("context", "tokens"),
        reads_text=True,
        of_cost=True,
        metrics=("tokens_per_second", "flops_prefill", "flops_token", "flops_method_prefill", "flops_method_token",
                 "achieved_gflops_prefill", "achieved_gflops_token", "floor_ttft_seconds"),
        values=("ttft", "tpot", "ttft_processor"),
        timings=("ttft", "tpot"),
    ),
    "speculation": Kind(
        module="speculation",
        class_name="Speculation",
        settings=("text", "context", "tokens", "rounds", "warmup", "patience", "draft", "draft_plan", "middle_plan",
                  "gamma", "inner_gamma", "refresh", "min_gain", "temperature", "top_p", "state"),
        sizes=("context", "tokens"),
        reads_text=True,
        metrics=("tokens_per_second", "plain_tokens_per_second", "acceptance", "emitted_per_verification",
                 "inner_acceptance", "speed_up", "speed_up_own", "identical", "device_bytes", "plain_device_bytes",
                 "draft_weight_bytes", "resident_hits", "bytes_read"),
        values=("generation", "plain", "acceptance", "emitted_per_verification", "identical", "speed_up",
                "speed_up_own"),
        timings=("generation", "plain"),
    ),
    "memory": Kind(
        module="memory",
        class_name="Memory",
        settings=("context", "batch", "caches", "limit"),
        sizes=("context",),
        extra=_GENERATED_TOKENS,
        of_cost=True,
    ),
    "capacity": Kind(
        module="capacity",
        class_name="Capacity",
        settings=("memory_bytes",),
        of_cost=True,
        metrics=("largest_batch", "longest_context", "bytes_per_token"),
    ),
    "longcontext": Kind(
        module="longcontext",
        class_name="LongContext",
        settings=("benchmark", "subset", "examples", "max_tokens", "state"),
        needs=("benchmark", "subset"),
        sizes=("max_tokens",),
        reads_data=True,
        metrics=("score",),
        values=("score",),
    ),
    "harness": Kind(
        module="harness",
        class_name="Harness",
        settings=("task", "limit", "fewshot", "outside"),
        needs=("task",),
        reads_data=True,
        metrics=None,
        values=("score",),
    ),
}  # fmt: skip
"""Kinds of task by the name that their records bear."""


def setting_faults(
    name: str, settings: Mapping[str, object], subject: str = "", positions: int | None = None
) -> list[str]:
    """What is wrong with the settings of a task, whole sentences.

    Args:
        name: one of `KINDS`.
        settings: as a suite writes them.
        subject: name of the model, for the sentence about its positions.
        positions: most tokens of the model; None: any number.
    """
    if name not in KINDS:
        return [str(UnknownName("task", name, KINDS))]
    kind = KINDS[name]
    faults = [
        f"{name} has no setting {each!r}{suggest(each, kind.settings)}"
        for each in settings
        if each not in kind.settings
    ]
    faults += [f"{name} needs the setting {each!r}: give it" for each in kind.needs if each not in settings]
    text = settings.get("text", GENERATED)
    if not isinstance(text, str) or not (text in TEXTS or is_path(text)):
        faults.append(f"text is {text!r}, which is neither a path nor a text that is known{suggest(str(text), TEXTS)}")
    if name == "needle" and settings.get("kind", ALL_TASKS[0]) not in ALL_TASKS:
        faults.append(str(UnknownName("kind of document", str(settings["kind"]), ALL_TASKS)))
    extra, sizes = kind.extra, {}
    if name == "longcontext" and all(each in settings for each in kind.needs):
        try:
            extra += long_set(str(settings["benchmark"]), str(settings["subset"])).generation
        except UnknownName as error:
            faults.append(str(error))
    for each in kind.sizes:
        size = _largest(settings[each] if each in settings else kind.default(each))
        if isinstance(size, str):
            faults.append(f"{each} is {settings[each]!r}: {size}")
        elif size is not None:
            sizes[each] = size
    total = sum(sizes.values()) + extra
    if sizes and positions is not None and total > positions and settings.get("beyond") is not True:
        asked = " + ".join(f"{each}={size}" for each, size in sizes.items())
        more = f" and {extra} more to generate" if extra else ""
        faults.append(
            f"asked for {name} with {asked}{more}, {total} tokens, but {subject} has {positions} positions: give a "
            f"smaller {' or '.join(sizes)}"
        )
    return faults


def measure_faults(name: str, measure: str) -> list[str]:
    """What is wrong with a measure that a column asks of a kind of task, whole sentences."""
    kind = KINDS[name]
    head, _, tail = measure.partition(".")
    if not tail:
        known = (*FIELDS, *SHARES)
        return [] if measure in known else [f"there is no measure {measure!r}{suggest(measure, known)}"]
    of_samples = dict.fromkeys(("mean", "geometric", "paired"), kind.values)
    groups = {"metrics": kind.metrics, "timings": kind.timings, **of_samples}
    if head not in groups:
        return [f"there is no measure {measure!r}: begin with one of {', '.join(groups)}"]
    found = groups[head]
    if found is None or tail in found:
        return []
    return [f"{name} has no measure {measure!r}{suggest(measure, [f'{head}.{each}' for each in found])}"]


def is_path(text: str) -> bool:
    """Whether the setting `text` names a file and no corpus."""
    return bool(Path(text).suffix) or len(Path(text).parts) > 1


def _largest(value: object) -> int | str | None:
    """The largest of the counts; a sentence where it is no count; None where nothing is asked."""
    each = list(value) if isinstance(value, list | tuple) else [value]
    if each == [None]:
        return None
    counts = [x for x in each if isinstance(x, int) and not isinstance(x, bool) and x > 0]
    return max(counts) if counts and len(counts) == len(each) else "give a number of tokens, at least 1"
