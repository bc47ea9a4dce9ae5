"""Numbers out of the records: of a table, a side, a ratio of two. None wherever one of them was not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Reading", "Readings", "extra_peak", "fastest", "field", "linked", "packed", "ratio", "share_of_floor"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Readings:
    """All tables of the newest records of steps that ended well.

    Attributes:
        tables: rows by the table's name.
        bench: records of the bench by task.
        tests: by step, counts and names.
    """

    tables: Mapping[str, Sequence[Row]]
    bench: Mapping[str, Sequence[Row]]
    tests: Mapping[str, Row]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Readings:
        """Out of all lines of `records.jsonl`, of which the last of each step counts."""
        newest = {record["step"]: record for record in records}
        tables: dict[str, list[Row]] = {}
        bench: dict[str, list[Row]] = {}
        for record in newest.values():
            if record["status"] != "done":
                continue
            for name, rows in (record.get("tables") or {}).items():
                # `decode` runs twice, under two implementations: the tables of the second have its name.
                key = f"{name} ({record['step']})" if record["step"] == "decode-triton" else name
                tables[key] = rows
            for each in record.get("bench_records") or ():
                bench.setdefault(each["task"], []).append(each)
        tests = {name: record["tests"] for name, record in newest.items() if record.get("tests")}
        return cls(tables=tables, bench=bench, tests=tests)

    def row(self, table: str, side: str) -> Row | None:
        """The row of a side, also where it is marked as not recorded in a graph."""
        rows = self.tables.get(table) or ()
        names = (side, f"{side}, not recorded")
        return next((row for row in rows if isinstance(row, dict) and row.get("name") in names), None)

    def value(self, table: str, side: str, name: str = "median_ms") -> float | None:
        """A number of a side's row; its median in milliseconds unless told otherwise."""
        row = self.row(table, side)
        found = None if row is None else row.get(name)
        return None if found is None else float(found)


# Looks something up; None where it was not measured.
Reading = Callable[[Readings], float | None]


def fastest(found: Readings, table: str, sides: Sequence[str]) -> float | None:
    """The shortest median of some sides; None where none was measured."""
    times = [found.value(table, side) for side in sides]
    return min((each for each in times if each is not None), default=None)


def ratio(table: str, over: str | Sequence[str], under: str | Sequence[str]) -> Reading:
    """The fastest of `over`, divided by the fastest of `under`: how many times as long it takes."""
    above, below = ((each,) if isinstance(each, str) else tuple(each) for each in (over, under))

    def read(found: Readings) -> float | None:
        high, low = fastest(found, table, above), fastest(found, table, below)
        return None if high is None or not low else high / low

    return read


def share_of_floor(table: str, sides: Sequence[str]) -> Reading:
    """The floor of the fastest of some sides over its time."""

    def read(found: Readings) -> float | None:
        best = fastest(found, table, sides)
        side = next((each for each in sides if best is not None and found.value(table, each) == best), None)
        floor = None if side is None else found.value(table, side, "floor_ms")
        return None if floor is None or not best else floor / best

    return read


def packed(table: str, side: str) -> Reading:
    """Bytes read and written while codes are made, per second, over those of a copy of the same states."""

    def read(found: Readings) -> float | None:
        copy, made = (found.row(table, name) for name in ("a copy of the states", side))
        if copy is None or made is None:
            return None
        values = [row.get(name) for row in (copy, made) for name in ("median_ms", "cache_bytes")]
        if any(value is None for value in values):
            return None
        copy_ms, states, made_ms, codes = (float(value or 0) for value in values)
        return ((states + codes) / made_ms) / (2 * states / copy_ms) if made_ms and states else None

    return read


def extra_peak(table: str, side: str, base: str, tokens: int) -> Reading:
    """Megabytes for each 1,000 tokens of a prompt that a side takes at its peak above another one."""

    def read(found: Readings) -> float | None:
        mine, other = (found.value(table, name, "peak_bytes") for name in (side, base))
        return None if mine is None or other is None else (mine - other) / 1e6 / (tokens / 1000)

    return read


def linked(context: int, codec: str, kept: str, name: str) -> Reading:
    """A number of the bench `link`."""

    def read(found: Readings) -> float | None:
        for row in found.tables.get(str(context)) or ():
            if row.get("codec") == codec and row.get("kept") == kept:
                value = row.get(name)
                return None if value is None else float(value)
        return None

    return read


def field(task: str, plan: str, metric: str) -> Reading:
    """A metric, or else a field, of the bench's record of a task and plan."""

    def read(found: Readings) -> float | None:
        for record in found.bench.get(task) or ():
            if str(record.get("plan")).startswith(plan):
                value = (record.get("metrics") or {}).get(metric, record.get(metric))
                return None if value is None else float(value)
        return None

    return read
