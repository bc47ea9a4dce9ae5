"""What a sink is: it takes each record of a run as soon as it is there, and is closed when the run has ended."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import ClassVar, Self

from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError

__all__ = ["RecordSink", "facts_of", "key_of", "lines_of", "numbers_of", "package"]

_ODD = re.compile(r"[^A-Za-z0-9 _\-./:]")
_LONGEST = 160


class RecordSink(ABC):
    """A place for records: `with sink:` around a run, and `take` for each record.

    A sink only passes on what a record has. It changes no number and fills no gap: what is null in a record is not
    there. It is a context manager, so that a run that ends with an error is closed as one.
    """

    name: ClassVar[str]

    @abstractmethod
    def take(self, record: Record) -> None:
        """Pass a record on."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End what was begun; `failed`: the run ended with an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def package(name: str) -> ModuleType:
    """Return the package of a sink; the extra of kvtailor that brings it has its name.

    Raises:
        KvtailorError: it is not installed, or it cannot be imported; the sentence says which.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise KvtailorError(
                f"asked to send records to {name}, which is not installed: `pip install 'kvtailor[{name}]'`, or leave "
                "it out"
            ) from error
        raise KvtailorError(
            f"asked to send records to {name}, which is installed and cannot be imported ({error}): mend it, or leave "
            "it out"
        ) from error
    except Exception as error:
        raise KvtailorError(
            f"asked to send records to {name}, which is installed and cannot be imported ({type(error).__name__}: "
            f"{error}): mend it, or leave it out"
        ) from error


def facts_of(record: Record) -> dict[str, str | int]:
    """Return what is the same for all records of one plan in one run: the model, the plan, the machine's versions."""
    found: dict[str, object] = {
        "bench_run": record.run,
        "model": record.model,
        "model_hash": record.model_hash,
        "dtype": record.dtype,
        "device": record.device,
        "parameters": record.parameters,
        "plan": record.plan,
        "plan_label": record.label,
        "plan_hash": record.plan_hash,
    }
    versions = ("kvtailor", "commit", "torch", "transformers", "python", "processor", "accelerator", "threads")
    found |= {name: record.machine.get(name) for name in versions}
    return {name: value for name, value in found.items() if isinstance(value, str | int)}


def key_of(record: Record) -> str:
    """Return where a record's numbers stand: its task, its text and the plain coordinates of its point.

    They are in the key, because trackers would take two points of one task for two steps of one curve. It has letters,
    digits and " _-./:" alone, which every tracker takes; where something else had to be replaced, a hash of the whole
    keeps two keys apart.
    """
    point = " ".join(f"{name} {value}" for name, value in record.point.items() if isinstance(value, int | float | str))
    whole = "/".join(part.replace("/", ":") for part in (record.task, record.text or "", point) if part)
    plain = _ODD.sub("_", whole)[:_LONGEST]
    return plain if plain == whole else f"{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:6]}"


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name; what was not measured is not there."""
    found: dict[str, float | int | None] = {
        name: getattr(record, name)
        for name in (
            "bytes_held",
            "bytes_full",
            "bytes_resident",
            "bytes_peak",
            "bytes_peak_decode",
            "tokens_held",
            "tokens_seen",
            "tokens_read",
            "floor_seconds",
            "wall_seconds",
            "samples",
        )
    }
    if record.bytes_held is not None and record.bytes_full:
        found["ratio"] = record.bytes_held / record.bytes_full
    found |= dict(record.metrics)
    for name, timing in record.timings.items():
        found |= {f"{name}_{which}_seconds": timing.get(which) for which in ("median", "q1", "q3")}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def lines_of(records: Sequence[Record]) -> str:
    """Return records as the bench writes them, a line each, so that nothing of them is lost."""
    return "".join(record.to_line() + "\n" for record in records)
