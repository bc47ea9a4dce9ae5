"""One measurement, as it is written to a line of `records.jsonl`. A field that was not measured is None (JSON null).

Records are the only thing that a report reads: whatever a table or a plot shows is in here, or is computed from
`values` by `bench.measure.statistics`. Whether the numbers of a record agree with the samples that they were computed
from is checked when it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import fmean
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from kvtailor.bench.kinds import KINDS
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName
from kvtailor.ops.files import read_bytes, seal_json, unseal_json
from kvtailor.presets import FULL

__all__ = [
    "NoRecords",
    "Record",
    "RecordError",
    "SCHEMA",
    "TOLD_BY",
    "check_sums",
    "damaged_ends",
    "latest",
    "leave_out",
    "read_records",
    "say_unchecked",
    "unchecked",
]


def check_sums(
    task: str,
    samples: int | None,
    metrics: Mapping[str, float | None],
    values: Mapping[str, Sequence[float]],
) -> None:
    """Every list has a number for each sample, and every metric that is the mean of a list is that mean.

    Tasks whose lists are not one number for each sample, such as times, are not held against anything.

    Args:
        task: name of the task.
        samples, metrics, values: of its record.

    Raises:
        ArgumentError: one that does not agree, by its field.
    """
    if task not in KINDS or not KINDS[task].by_sample:
        return
    first = next(iter(values), None)
    for name, found in values.items():
        if samples is not None and len(found) != samples:
            raise ArgumentError(
                f"values.{name} has {len(found)} numbers, but samples is {samples}: the record was edited or damaged"
            )
        if first is not None and len(found) != len(values[first]):
            raise ArgumentError(
                f"values.{name} has {len(found)} numbers, but values.{first} has {len(values[first])}: the record was "
                "edited or damaged"
            )
    for metric, name in _means(task, metrics, values).items():
        said, listed = metrics.get(metric), values.get(name)
        # Predictions were averaged over tokens in float32.
        if said is not None and listed and not math.isclose(said, fmean(listed), rel_tol=1e-5, abs_tol=1e-6):
            raise ArgumentError(
                f"metrics.{metric} is {said}, but the mean of the {len(listed)} numbers in values.{name} is "
                f"{fmean(listed)}: the record was edited or damaged"
            )
    nll, perplexity = metrics.get("nll"), metrics.get("perplexity")
    if nll is None or perplexity is None or task != "perplexity":
        return
    if perplexity <= 0 or not math.isclose(math.log(perplexity), nll, rel_tol=1e-6, abs_tol=1e-6):
        raise ArgumentError(
            f"metrics.perplexity is {perplexity}, but metrics.nll is {nll} and a perplexity is its exponential: the "
            "record was edited or damaged"
        )


def _means(task: str, metrics: Mapping[str, float | None], values: Mapping[str, Sequence[float]]) -> Mapping[str, str]:
    if task != "longcontext":
        return {metric.name: metric.mean_of for metric in KINDS[task].metrics or () if metric.mean_of is not None}
    # The geometric mean of several ROUGE scores is the mean of no list.
    return {name: name for name in metrics if name in values and not (name == "score" and len(metrics) > 1)}


SCHEMA = 1
_PACKED = ".gz"
TOLD_BY = (
    "text",
    "label",
    "plan",
    "task",
    "model",
    "run",
    "key",
    "text_hash",
    "model_hash",
    "dtype",
    "cache_dtype",
    "device",
)
"""The fields of records by which `leave_out` tells them."""
_LARGEST = 2**63


class RecordError(KvtailorError, ValueError):
    """A line of a record file that is not a record of this schema."""


class NoRecords(RecordError):
    """A file or folder that holds no finished record."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one plan did at one point of one task.

    Attributes:
        schema: version of this list of fields.
        run: name shared by all records of one process, so that times are only compared within it.
        started: UTC time at which the run began, ISO 8601.
        model: name or folder that the model was loaded from.
        model_hash: of its config and of a sample of every weight; None where the model has no weights to look at.
        parameters: number of parameters of the model, tied ones counted once.
        weight_bytes: bytes of the unique storages of the weights.
        dtype: in which the model computes, such as "float32".
        cache_dtype: in which caches hold keys and values, where that is another; None: in `dtype`.
        device: device of the weights, such as "cpu" or "cuda:0".
        label: the plan as the user wrote it.
        plan: the plan in its canonical one-line form.
        plan_hash: content hash of the plan.
        missing: what the plan names that this kvtailor does not have; such a record has an error and no numbers.
        calibrated_on: what the plan's calibration was made from, `NAME SHA-256` each; empty where nothing was.
        task: name of the task.
        task_version: raised whenever the task's numbers may change for the same model and plan.
        point: the task's own coordinates (context length, depth, ...), JSON values only.
        asked: the task with its settings as a suite asked for it, in one line; None outside of suites.
        text: name of the text or generator that the tokens came from.
        text_hash: SHA-256 of all token ids that were given to the model, in order.
        state: random state of what was generated; None where nothing is random.
        samples: number of windows, documents or rounds behind the numbers.
        tokens_scored: tokens whose log-probability entered a metric.
        tokens_seen: tokens seen by the cache when it was weighed, padding included.
        tokens_held: mean over rows, layers and kv heads of the tokens held then.
        tokens_held_least: the least of them.
        tokens_held_most: the most of them.
        tokens_read: mean over rows, layers and kv heads of the tokens that the last token that was fed alone read; None
            where it read all that is held, or where none was fed alone: several tokens at a time read everything.
        tokens_by_head: tokens held by compressed layer and kv head then, mean over rows.
        bytes_held: unique storages of the whole cache when it was weighed; the largest over the samples.
        bytes_full: what uncompressed keys and values of the same tokens take, of the same sample.
        bytes_closed_form: what `bytes_held` must be by arithmetic, of the same sample.
        bytes_by_stage: `bytes_held` by what it is spent on.
        bytes_by_tier: `bytes_held` by where it lives.
        traffic: hits, misses and bytes that moved between tiers, of the same sample, see `store.contract.Traffic`;
            None where nothing did.
        bytes_by_layer: `bytes_held` by layer of the model.
        bytes_resident: growth of the resident memory of a fresh process per cache that it holds.
        bytes_alive: growth of all tensors of this process by one more such cache where it was weighed, files left
            out, and the 8 bytes on the host for each token by which a plan that is read by `kvtailor.prefill`
            recognises ids of another text (`hf.conversation`); see `bench.checks.probing`.
        bytes_peak: highest memory of that process during one prefill, above what it held before (weights, mostly);
            resident memory on the CPU, the allocator's on an accelerator.
        bytes_peak_decode: the same while it decodes after that prefill.
        metrics: the task's numbers by name; see the task's module for each.
        values: the same by sample, in an order that is equal for all plans of a run, so that they can be paired.
        rounding: most by which a token's log-probability differs where 'full' is fed in blocks of another size, in
            nats; of this model, dtype and text. None where no plan that holds less was probed.
        reads_held: the scores change by more than that where all that is held is set to zero; None where that could
            not be tried.
        timings: seconds by name, each with `median`, `q1`, `q3`, `p10`, `count` and `left_out` (disturbed samples).
        floor_seconds: time for one token if every byte of weights and cache were read once at `machine.read_bandwidth`.
        machine: versions, processor, threads, load and bandwidth, see `bench.measure.machine`; `methods`, where the
            plan has some of other packages: digests of their code by module.
        wall_seconds: time that this record took to make, warm-up included.
        prefill: "shared" where the plan's caches were filled from prompts that went through the model once for all
            plans, "own" where they read them themselves; None where there was no prompt, and of records from before.
        prefill_own: why a cache read its prompt itself, as the end of a sentence; None where none did.
        prefill_compared: one prompt of this record was read both ways, and all that the caches held was equal; None
            where it was another record's turn.
        notes: what a reader must know to judge the numbers, whole sentences.
        error: why there are no numbers, one sentence; None where there are.
    """

    schema: int = SCHEMA
    run: str
    started: str
    model: str
    model_hash: str | None = None
    parameters: int | None = None
    weight_bytes: int | None = None
    dtype: str | None = None
    cache_dtype: str | None = None
    device: str | None = None
    label: str
    plan: str
    plan_hash: str
    missing: tuple[str, ...] = ()
    calibrated_on: tuple[str, ...] = ()
    task: str
    task_version: int
    point: Mapping[str, object] = field(default_factory=dict)
    asked: str | None = None
    text: str | None = None
    text_hash: str | None = None
    state: int | None = None
    samples: int | None = None
    tokens_scored: int | None = None
    tokens_seen: int | None = None
    tokens_held: float | None = None
    tokens_held_least: int | None = None
    tokens_held_most: int | None = None
    tokens_read: float | None = None
    tokens_by_head: tuple[tuple[float, ...], ...] | None = None
    bytes_held: int | None = None
    bytes_full: int | None = None
    bytes_closed_form: int | None = None
    bytes_by_stage: Mapping[str, int] | None = None
    bytes_by_tier: Mapping[str, int] | None = None
    traffic: Mapping[str, float] | None = None
    bytes_by_layer: tuple[int, ...] | None = None
    bytes_resident: int | None = None
    bytes_alive: int | None = None
    bytes_peak: int | None = None
    bytes_peak_decode: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rounding: float | None = None
    reads_held: bool | None = None
    timings: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    floor_seconds: float | None = None
    machine: Mapping[str, object] = field(default_factory=dict)
    wall_seconds: float | None = None
    prefill: str | None = None
    prefill_own: str | None = None
    prefill_compared: bool | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def is_full(self) -> bool:
        """Whether it is of the null plan, which everything is compared with."""
        return self.plan == FULL

    @property
    def subject(self) -> tuple[str | None, ...]:
        """The model, its weights, the dtypes and the device: numbers of two of these never stand in one row."""
        return self.model, self.model_hash, self.dtypes, self.device

    @property
    def held_in(self) -> str | None:
        """The dtype in which caches hold keys and values."""
        return self.cache_dtype or self.dtype

    @property
    def dtypes(self) -> str | None:
        """In which the model computes, and caches hold, in words."""
        return self.dtype if self.cache_dtype is None else f"{self.dtype} with caches in {self.cache_dtype}"

    @property
    def key(self) -> str:
        """Name of what was measured: equal for the same model and weights, dtypes, device, plan, task, point, text and
        state, asked for by a suite in the same words or by none, whatever came out."""
        what = (
            self.model,
            self.model_hash,
            self.dtype,
            self.device,
            self.plan_hash,
            self.task,
            self.task_version,
            self.point,
            self.text_hash,
            self.state,
            *([] if self.cache_dtype is None else [{"cache_dtype": self.cache_dtype}]),
            *([] if self.asked is None else [self.asked]),
        )
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """One line of JSON.

        Raises:
            RecordError: a number is NaN or infinite: such a result is a fault, not a measurement.
        """
        try:
            return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise RecordError(
                f"the record of plan {self.label!r} in task {self.task!r} holds a NaN or an infinity ({error}): "
                "write None for what was not measured"
            ) from error

    def to_line(self) -> str:
        """`to_json` with a checksum as its last entry, as it is written to a file.

        Raises:
            RecordError: as `to_json`.
        """
        return seal_json(self.to_json())

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record that `to_json` or `to_line` wrote.

        Raises:
            RecordError: not as it was written, not JSON, another schema, unknown or missing fields, or numbers that
                are not those of its samples. A line without a checksum is read.
        """
        try:
            line, _ = unseal_json(line)
        except ValueError as error:
            raise RecordError(
                f"{error}: it is damaged or was edited. Take the line away, and run the bench again: it measures what "
                "is missing"
            ) from error
        try:
            found = json.loads(line, parse_constant=_no_number)
            if "\\ud" in line.lower():
                json.dumps(found, ensure_ascii=False).encode()  # half of a pair of surrogates is a UnicodeEncodeError
        # Python itself refuses numbers of thousands of digits, and brackets that are thousands deep.
        except (ValueError, RecursionError) as error:
            raise RecordError(f"expected one JSON object on a line, found {line[:60]!r}: {error}") from error
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            schema = found.get("schema") if isinstance(found, dict) else None
            raise RecordError(f"expected a record of schema {SCHEMA}, found {schema!r}: run the bench again")
        if "checksum" in found:
            raise RecordError(
                "a record has a checksum that is not in its place or form, so it is damaged, or another program wrote "
                "it anew: take the entry `checksum` out of its line, or the line out of its file"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(found) - known)
        if unknown:
            raise RecordError(f"a record of schema {SCHEMA} has no field {', '.join(unknown)}: run the bench again")
        lacking = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING and f.name not in found]
        if lacking:
            raise RecordError(f"a record lacks the fields {', '.join(lacking)}: run the bench again")
        hints = _hints()
        try:
            record = cls(**{name: _fitted(value, hints[name], name) for name, value in found.items()})
            check_sums(record.task, record.samples, record.metrics, record.values)
        except ValueError as error:
            raise RecordError(f"a record of plan {str(found['label'])[:60]!r} cannot be read: {error}") from error
        return record


def read_records(path: Path) -> list[Record]:
    """The records of a JSONL file, or of all `*.jsonl` and `*.jsonl.gz` files of a folder in the order of their names.

    A last line that a killed process left unfinished (no line break at its end) is not a record and is passed over:
    `damaged_ends` names such files. Each line is held to its checksum; of lines without one a warning tells how many.

    Raises:
        RecordError: the path holds no record, or a finished line is none.
    """
    if not path.exists():
        raise NoRecords(f"asked for the records in {path}, which is not there: run `kvtailor bench --out {path}` first")
    found = [record for file in _files(path) for record in _records_of(file)]
    if not found:
        of_fit = path / "records"
        what = f"give {of_fit}, those of a fit" if of_fit.is_dir() else f"run `kvtailor bench --out {path}` first"
        raise NoRecords(f"asked for the records in {path}, found none: {what}")
    if count := unchecked(path):
        warnings.warn(f"{path}: {say_unchecked(count)}", stacklevel=2)
    return found


def damaged_ends(path: Path) -> list[Path]:
    """Of a JSONL file, or of all of a folder, those whose last line is cut, so that it was passed over."""
    return [file for file in _files(path) if _is_cut(file)]


def unchecked(path: Path) -> int:
    """Of a JSONL file, or of all of a folder, the lines without a checksum, of which no damage shows."""
    return sum(bool(line.strip()) and not _is_sealed(line) for file in _files(path) for line in _lines(file))


def say_unchecked(count: int) -> str:
    """A sentence on records without a checksum."""
    are = "1 record has" if count == 1 else f"{count} records have"
    return f"{are} no checksum, so damage there would not be noticed: an earlier kvtailor wrote them, or an editor."


def latest(records: Iterable[Record]) -> list[Record]:
    """Of records with the same key only the latest, in the order in which the keys first come."""
    found: dict[str, Record] = {}
    for record in records:
        earlier = found.setdefault(record.key, record)
        if record.started >= earlier.started:
            found[record.key] = record
    return list(found.values())


def _records_of(file: Path) -> Iterator[Record]:
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            try:
                yield Record.from_json(line)
            except RecordError as error:
                raise RecordError(f"{file}, line {number}: {error}") from error


def leave_out(records: Iterable[Record], asked: Sequence[str]) -> list[Record]:
    """Records without those that a caller names.

    Args:
        records: of a folder.
        asked: FIELD=VALUE each, such as "text=novel.txt"; what one of them names is left out.

    Raises:
        UnknownName: records are not told by such a field.
        RecordError: one of them is no such pair, or names no record.
    """
    left = list(records)
    for each in asked:
        name, sign, value = each.partition("=")
        if not sign:
            raise RecordError(f"asked to leave out {each!r}: write FIELD=VALUE, such as text=novel.txt")
        if name not in TOLD_BY:
            raise UnknownName("field of records that are left out", name, TOLD_BY)
        kept = [record for record in left if str(getattr(record, name)) != value]
        if len(kept) == len(left):
            there = dict.fromkeys(str(getattr(record, name)) for record in left)
            raise RecordError(
                f"asked to leave out {each!r}, which no record is; {name} is {', '.join(there) or 'none'}"
            )
        left = kept
    return left


def _files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.jsonl"), *path.glob(f"*.jsonl{_PACKED}")]) if path.is_dir() else [path]


def _bytes_of(file: Path) -> bytes:
    """What a file of records holds, unpacked where its name says that it is packed.

    Raises:
        RecordError: it is packed and damaged.
        OSError: as `read_bytes`.
    """
    found = read_bytes(file)
    if file.suffix != _PACKED:
        return found
    try:
        return gzip.decompress(found)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"asked for the records in {file}, which cannot be unpacked: {error}") from error


def _lines(file: Path) -> list[str]:
    """All lines that end."""
    try:
        text = _bytes_of(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(f"asked for the records in {file}, which is no text in UTF-8: {error}") from error
    except OSError as error:
        raise RecordError(f"asked for the records in {file}, which cannot be read: {error}") from error
    # Not splitlines(): a name in a record may hold other line separators of Unicode.
    return text.split("\n")[:-1]


def _is_sealed(line: str) -> bool:
    return unseal_json(line)[1]


def _is_cut(file: Path) -> bool:
    text = _bytes_of(file)
    return bool(text[text.rfind(b"\n") + 1 :].strip())


@cache
def _hints() -> Mapping[str, Any]:
    return get_type_hints(Record)


def _no_number(name: str) -> float:
    raise ArgumentError(f"{name} is no number that a record may hold")


def _fitted(value: Any, hint: Any, where: str) -> Any:
    """A JSON value as a field's annotation says, lists as tuples.

    Raises:
        ArgumentError: it is of another kind.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        if value is None:
            return None
        [hint] = [each for each in inner if each is not NoneType]
        return _fitted(value, hint, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_fitted(each, inner[0], where) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _fitted(each, inner[1], f"{where}.{name}") for name, each in value.items()}
    if hint is object:
        return value
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return value
    if hint is int and type(value) is int and abs(value) < _LARGEST:
        return value
    if hint in (str, bool) and type(value) is hint:
        return value
    wanted = "a list" if origin is tuple else "an object" if origin is Mapping else f"a {hint.__name__}"
    raise ArgumentError(f"{where} is {str(value)[:60]!r}, but it must be {wanted}")
