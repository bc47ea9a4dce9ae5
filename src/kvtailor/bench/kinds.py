"""The kinds of task that there are, and what is wrong with settings and measures that a suite asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtailor.bench.declared import Kind, found_kinds
from kvtailor.bench.tasks.settings import Metric
from kvtailor.errors import KvtailorError, UnknownName, suggest

__all__ = [
    "FIELDS",
    "GENERATED",
    "KINDS",
    "SHARES",
    "TEXTS",
    "Kind",
    "Metric",
    "is_path",
    "measure_faults",
    "metric_of",
    "setting_faults",
]

GENERATED = "generated"
TEXTS = ("wikitext2", "c4", "pg19", GENERATED)
FIELDS = (
    "tokens_held",
    "tokens_read",
    "tokens_seen",
    "bytes_held",
    "bytes_full",
    "bytes_resident",
    "bytes_peak",
    "bytes_peak_decode",
    "weight_bytes",
    "floor_seconds",
    "samples",
)
"""Fields of a record that a column may show."""
SHARES = ("kept", "reduction", "compression")
"""Computed from `bytes_held` and `bytes_full`: held/full, 1 - held/full, full/held."""
KINDS: dict[str, Kind] = found_kinds()
"""Kinds of task by the name that their records bear."""


def metric_of(task: str, name: str) -> Metric | None:
    """Return what a task declares of a metric; None for a metric or a task that no file declares.

    Args:
        task: of a record.
        name: in `Record.metrics`, with or without the number of a layer.
    """
    stem = name.rstrip("0123456789").removesuffix("_")
    told = {metric.name: metric for metric in KINDS[task].told} if task in KINDS else {}
    return told.get(name) or told.get(stem)


def setting_faults(
    name: str, settings: Mapping[str, object], subject: str = "", positions: int | None = None
) -> list[str]:
    """Return what is wrong with the settings of a task, whole sentences.

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
    for each in kind.declared:
        choices = each.setting.choices
        if choices and each.name in settings and settings[each.name] not in choices:
            what = each.setting.what or f"{each.name} of {name}"
            faults.append(str(UnknownName(what, str(settings[each.name]), choices)))
    try:
        extra = kind.load().generated(settings)
    except UnknownName as error:
        extra = 0
        faults.append(str(error))
    except KvtailorError:
        # It cannot be imported here; who makes it is told so.
        extra = kind.extra
    sizes: dict[str, int] = {}
    for size_name in kind.sizes:
        size = _largest(settings[size_name] if size_name in settings else kind.default(size_name))
        if isinstance(size, str):
            faults.append(f"{size_name} is {settings[size_name]!r}: {size}")
        elif size is not None:
            sizes[size_name] = size
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
    """Return what is wrong with a measure that a column asks of a kind of task, whole sentences."""
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
    """Return whether the setting `text` names a file and no corpus."""
    return bool(Path(text).suffix) or len(Path(text).parts) > 1


def _largest(value: object) -> int | str | None:
    """The largest of the counts; a sentence where it is no count; None where nothing is asked."""
    each = list(value) if isinstance(value, list | tuple) else [value]
    if each == [None]:
        return None
    counts = [x for x in each if isinstance(x, int) and not isinstance(x, bool) and x > 0]
    return max(counts) if counts and len(counts) == len(each) else "give a number of tokens, at least 1"
