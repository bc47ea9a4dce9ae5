"""Bytes and tokens that cannot be what a cache holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtailor.bench.checks.fraud import Finding
from kvtailor.bench.schema import Record

__all__ = ["of_holdings", "same_peaks"]

_RESIDENT_FACTOR = 1.5
_NOISE = 2**19
# Tensors are counted exactly; what is granted is for tables that all caches share and that grow by a little.
_ALIVE_FACTOR = 1.01
_ALIVE_NOISE = 2**12
_PEAK_FACTOR = 1.25
_TOKENS_FACTOR = 1.25


def of_holdings(records: Sequence[Record]) -> Iterator[Finding]:
    """The bytes held in each record, against its tokens, its peak, a fresh process, and the device."""
    for record in records:
        for name, sentence in itertools.chain(_bytes(record), _peak(record), _tokens(record)):
            yield Finding(name, sentence, (record,))
    yield from _constants(records)


def same_peaks(records: Sequence[Record]) -> Iterator[str]:
    """Sentences on peaks that are equal to the byte for plans that hold very different things.

    That may be honest, where all tokens are there when the first layer is cut, so it is no sanity check.
    """
    for _, group in _by(records, lambda r: (r.run, r.task, str(r.point))):
        known = [r for r in group if r.bytes_peak is not None and r.bytes_held]
        held = [r.bytes_held or 0 for r in known]
        if len(known) > 2 and len({r.bytes_peak for r in known}) == 1 and max(held) > 2 * min(held):
            yield (
                f"{', '.join(r.label for r in known)} peak at the same {known[0].bytes_peak} bytes: either the peak "
                "comes before anything is dropped, or the counter was not reset between them."
            )


def _bytes(record: Record) -> Iterator[tuple[str, str]]:
    held, form = record.bytes_held, record.bytes_closed_form
    if held is None:
        return
    plan = f"plan {record.label!r}"
    if form is not None and form != held:
        yield (
            "nominal bytes",
            f"{plan} holds {held} bytes in its storages, yet {form} by arithmetic: one of them is a constant and not a "
            "measurement",
        )
    splits = {"stage": record.bytes_by_stage, "tier": record.bytes_by_tier}
    parts = {name: sum(split.values()) for name, split in splits.items() if split is not None}
    if record.bytes_by_layer is not None:
        parts["layer"] = sum(record.bytes_by_layer)
    for name, total in parts.items():
        if total != held:
            yield "nominal bytes", f"{plan} claims to hold {held} bytes, yet by {name} they add up to {total}"
    if record.bytes_resident is not None and record.bytes_resident > _RESIDENT_FACTOR * held + _NOISE:
        yield (
            "hidden bytes",
            f"{plan} claims that its cache holds {held} bytes, yet a fresh process grew by {record.bytes_resident} for "
            "each such cache: something is kept that the ledger does not see",
        )
    here = _in_memory(record)
    if record.bytes_alive is not None and record.bytes_alive > _ALIVE_FACTOR * here + _ALIVE_NOISE:
        yield (
            "hidden bytes",
            f"{plan} claims that its cache holds {here} bytes in memory, yet one more such cache leaves "
            f"{record.bytes_alive} bytes of tensors alive: something is kept that the ledger does not list",
        )
    on_cpu = str(record.device).startswith("cpu")
    device = record.machine.get("memory_bytes" if on_cpu else "accelerator_bytes")
    near = here if on_cpu or record.bytes_by_tier is None else record.bytes_by_tier.get("device", 0)
    needs = max(near, record.bytes_peak or 0, record.bytes_peak_decode or 0) + (record.weight_bytes or 0)
    if isinstance(device, int) and needs > device:
        yield (
            "impossible bytes",
            f"{plan} needs {needs} bytes on a {'machine' if on_cpu else 'device'} that has {device} "
            f"({record.weight_bytes or 0} of them weights): they were never allocated, or spilled into slower memory, "
            "and then no time is this device's",
        )


def _peak(record: Record) -> Iterator[tuple[str, str]]:
    held, peak, decode = _in_memory(record), record.bytes_peak, record.bytes_peak_decode
    for what, most in (("a prefill", peak), ("decoding", decode)):
        least = max(held or 0, record.bytes_resident or 0) if what == "a prefill" else held or 0
        if most is not None and most < least - _NOISE:
            yield (
                "impossible peak",
                f"{what} under plan {record.label!r} peaked at {most} bytes, less than the {least} bytes that its "
                "cache takes: the counter was not reset, or read too early",
            )
    if held and peak is not None and peak == decode and peak > _PEAK_FACTOR * held + _NOISE:
        yield (
            "peak not reset",
            f"prefill and decoding under plan {record.label!r} both peaked at exactly {peak} bytes, where its cache "
            f"holds {held} while it decodes: the counter still shows the prefill",
        )


def _in_memory(record: Record) -> int:
    """What is held, but for files."""
    return (record.bytes_held or 0) - (record.bytes_by_tier or {}).get("disk", 0)


def _tokens(record: Record) -> Iterator[tuple[str, str]]:
    held, seen, taken, full = record.tokens_held, record.tokens_seen, record.bytes_held, record.bytes_full
    # An observation window's queries are no tokens, and are freed when the first token is decoded.
    observed = (record.bytes_by_stage or {}).get("observe", 0)
    if record.is_full and (
        (held is not None and seen is not None and held < seen) or (taken is not None and full and taken < full)
    ):
        yield (
            "full that holds less",
            f"plan 'full' holds {held} of {seen} tokens in {taken} of {full} bytes: what is measured against it means "
            "nothing",
        )
    elif held is not None and seen and taken and full and held <= seen / 2 and taken - observed >= full:
        yield (
            "nothing freed",
            f"plan {record.label!r} claims to hold {held:.0f} of {seen} tokens, yet they take {taken - observed} "
            f"bytes and those of all tokens {full}: the others are hidden by a mask and not dropped",
        )


def _constants(records: Sequence[Record]) -> Iterator[Finding]:
    """Equal bytes of one method at very different tokens, and equal peaks at different sizes."""
    weighed = [r for r in records if r.bytes_held and r.tokens_held and r.bytes_full and r.tokens_seen and not r.error]
    for (method, *_), group in _by(weighed, lambda r: (r.plan.split(" @ ")[0], r.model, r.dtypes, r.bytes_held)):
        least, most = min(group, key=_plain_bytes), max(group, key=_plain_bytes)
        if _plain_bytes(most) > _TOKENS_FACTOR * _plain_bytes(least):
            yield Finding(
                "nominal bytes",
                f"{method} takes {most.bytes_held} bytes for {least.tokens_held:.0f} tokens as {least.label!r} and for "
                f"{most.tokens_held:.0f} tokens as {most.label!r}: that is a constant and not a measurement",
                (least, most),
            )
    peaked = [r for r in records if r.bytes_peak is not None and r.bytes_full and r.error is None]
    for _, group in _by(peaked, lambda r: (r.run, r.plan_hash, r.task, r.bytes_peak)):
        least, most = min(group, key=lambda r: r.bytes_full or 0), max(group, key=lambda r: r.bytes_full or 0)
        if (most.bytes_full or 0) > (least.bytes_full or 0) + _NOISE:
            yield Finding(
                "peak not reset",
                f"plan {most.label!r} peaked at exactly {most.bytes_peak} bytes at {dict(least.point)} and at "
                f"{dict(most.point)}: one of them is what the other left in the counter",
                (least, most),
            )


def _plain_bytes(record: Record) -> float:
    """What the held tokens of all rows would take uncompressed."""
    return (record.bytes_full or 0) * (record.tokens_held or 0) / (record.tokens_seen or 1)


def _by(records: Sequence[Record], key: Callable[[Record], tuple[object, ...]]) -> list[tuple[Any, list[Record]]]:
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return list(found.items())
