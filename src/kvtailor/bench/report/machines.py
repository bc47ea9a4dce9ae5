"""On which machines and with which versions records were made: all of them, not those of one record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtailor.bench.schema import Record

__all__ = ["hardware_text", "machines_of", "versions_text"]

UNKNOWN = "unknown"
_VERSIONS = ("kvtailor", "commit", "torch", "transformers")
_NAMES = ("system", "processor", "accelerator", "cores", "threads", "processes", "python", *_VERSIONS)


def machines_of(records: Sequence[Record]) -> dict[str, tuple[str, ...]]:
    """The different values of what distinguishes machines and versions, by the names of
    `bench.measure.machine.describe`.

    What no record has is left out; what only some have has "unknown" among its values. The accelerator is of those
    records only that ran on one.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in _NAMES:
        asked = [r for r in records if name != "accelerator" or not str(r.device).startswith("cpu")]
        values = [r.machine.get(name) for r in asked]
        if any(value is not None for value in values):
            found[name] = tuple(dict.fromkeys(UNKNOWN if value is None else str(value) for value in values))
    return found


def hardware_text(machines: Mapping[str, tuple[str, ...]]) -> str:
    """Accelerators and processors."""
    accelerators = [" and ".join(machines["accelerator"])] if "accelerator" in machines else []
    # Pages of heads are cut in each process, so bytes of uneven heads depend on how many there were.
    shared = tuple(each for each in machines.get("processes", ()) if each not in ("1", UNKNOWN))
    processes = [f"a model shared by {' and '.join(shared)} processes"] if shared else []
    return ", ".join([*accelerators, " and ".join(machines.get("processor", ("unknown processor",))), *processes])


def versions_text(machines: Mapping[str, tuple[str, ...]]) -> str:
    """Versions and commits, each with all its values; empty where none is known."""
    return ", ".join(
        f"{name} {' and '.join(map(_short, machines[name]) if name == 'commit' else machines[name])}"
        for name in _VERSIONS
        if name in machines
    )


def _short(commit: str) -> str:
    digest, dash, dirty = commit.partition("-")
    return digest[:12] + dash + dirty
