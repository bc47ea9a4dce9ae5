"""The compiled kernels: which variant this machine runs, how it is called, and on whose threads.

The extension is plain C functions on pointers, so that one file serves every Python and every torch; its threads are
torch's own, by `torch_parallel_for` of torch's stable C interface (torch >= 2.10).
See docs/decisions/0011-cpu-kernels.md.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvtailor.errors import ArgumentError, FileError

__all__ = [
    "ABI",
    "DTYPES",
    "VARIANTS",
    "Alike",
    "Bell",
    "Call",
    "Choice",
    "Coding",
    "Ends",
    "Fitting",
    "Library",
    "Pages",
    "Magnitudes",
    "Map",
    "Offset",
    "PartCoordinates",
    "Prompt",
    "Side",
    "Step",
    "Turn",
    "Union",
    "built",
    "library",
    "load",
    "why_none",
]

# What kernels call them, see `Kind` of layouts.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Best first.
VARIANTS = ("avx512vnni", "avxvnni", "avx2", "dotprod", "portable")
_FOLDER = Path(__file__).parent
# `ABI` of layouts.h. Both are raised with each change of a structure below, or of what a function takes or means.
ABI = 7
# Functions that give a number of floats.
_COUNTS = (
    "kvtailor_scratch",
    "kvtailor_found",
    "kvtailor_found_of_any",
    "kvtailor_kept",
    "kvtailor_coding_scratch",
    "kvtailor_fitting_scratch",
    "kvtailor_bell_scratch",
    "kvtailor_choice_scratch",
    "kvtailor_pages_scratch",
    "kvtailor_prompt_scratch",
    "kvtailor_alike_scratch",
)


class Side(ctypes.Structure):
    """`Side` of layouts.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "step", "low", "row")),
        *((name, ctypes.c_int64) for name in ("lane_bytes", "slot_bytes", "kind", "scales")),
        *((name, ctypes.c_int64) for name in ("bits", "size", "group", "runs", "zero", "signed_steps")),
    ]


class Magnitudes(ctypes.Structure):
    """`Magnitudes` of magnitudes.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("of", "places", "whole")),
        *((name, ctypes.c_int64) for name in ("count", "kind")),
    ]


class Call(ctypes.Structure):
    """`Call` of attention.cpp.

    Attributes:
        made: what its sides point to that is no tensor, kept for as long as the call.
    """

    made: list[Any]
    _fields_ = [
        ("query", ctypes.c_void_p),
        ("keys", Side),
        ("values", Side),
        *((name, ctypes.c_void_p) for name in ("owner", "lengths", "visible", "log_weight")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "found", "scratch", "parallel_for")),
        *((name, ctypes.c_int64) for name in ("visible_lane", "visible_query", "visible_slot")),
        *((name, ctypes.c_int64) for name in ("owners", "lanes", "slots", "rows", "queries", "chunk", "threads")),
        ("scaling", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("kept", "counts", "mass")),
        ("softcap", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("firsts", "starts", "turn")),
        *((name, ctypes.c_void_p) for name in ("key_magnitudes", "value_magnitudes", "offset")),
    ]


class Choice(ctypes.Structure):
    """`Choice` of choose.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "bounds", "keys", "values")),
        *((f"{of}_{name}", ctypes.c_void_p) for of in ("key", "value") for name in ("lane", "slot")),
        *((name, ctypes.c_void_p) for name in ("slots", "listed", "span", "channels", "covered", "sinks", "scores")),
        *((name, ctypes.c_void_p) for name in ("key_rows", "value_rows", "scratch")),
        *((name, ctypes.c_int64) for name in ("owners", "rows", "size", "chunks", "count_listed", "after", "tokens")),
        *((name, ctypes.c_int64) for name in ("budget", "widest", "kind", "threads")),
        *((name, ctypes.c_double) for name in ("scaling", "softcap")),
    ]


class Pages(ctypes.Structure):
    """`Pages` of choose.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "low", "high")),
        *((f"{of}_{name}", ctypes.c_void_p) for of in ("key", "value") for name in ("lane", "slot")),
        *((name, ctypes.c_void_p) for name in ("slots", "key_rows", "value_rows", "lengths", "scratch")),
        *((name, ctypes.c_int64) for name in ("owners", "rows", "size", "parts", "pages", "page", "wanted", "room")),
        *((name, ctypes.c_int64) for name in ("kind", "threads")),
    ]


class Map(ctypes.Structure):
    """`Map` of coordinates.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "mean", "picked")),
        *((name, ctypes.c_int64) for name in ("picked_row", "picked_bytes", "heads", "wide", "narrow", "blocks")),
        ("scale", ctypes.c_double),
    ]


class Turn(ctypes.Structure):
    """`Turn` of turned.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("frequencies", "positions", "first", "map")),
        *((name, ctypes.c_int64) for name in ("planes", "interleaved", "start", "joined", "size", "alike")),
        ("before", ctypes.c_void_p),
        ("count_before", ctypes.c_int64),
    ]


class Offset(ctypes.Structure):
    """`Offset` of offset.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "vectors", "frequencies", "weights", "functions")),
        *((name, ctypes.c_void_p) for name in ("positions", "first")),
        *((name, ctypes.c_int64) for name in ("planes", "interleaved", "start", "size", "heads", "rank", "wide")),
    ]


class PartCoordinates(ctypes.Structure):
    """`Coordinates` of step.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "query", "between", "sums", "out")),
        *((name, ctypes.c_int64) for name in ("keys_count", "values_count")),
    ]


class Ends(ctypes.Structure):
    """`Ends` of step.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "turned")),
        *((name, ctypes.c_int64) for name in ("first", "planes", "interleaved")),
    ]


class Step(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "parts", "tail_keys", "tail_values")),
        *((name, ctypes.c_void_p) for name in ("positions", "asked", "merged", "sinks", "parallel_for")),
        *((name, ctypes.c_void_p) for name in ("lse", "counts", "masses", "before", "slots_before", "coordinates")),
        ("ends", ctypes.c_void_p),
        *((f"{name}_{of}", ctypes.c_int64) for name in ("query", "key", "value") for of in ("row", "head")),
        *((f"tail_{name}_{of}", ctypes.c_int64) for name in ("key", "value") for of in ("lane", "slot")),
        *((name, ctypes.c_int64) for name in ("position_lane", "count", "rows", "heads", "group")),
        *((name, ctypes.c_int64) for name in ("size", "value_size", "kind", "threads", "widest", "slot", "column")),
        *((name, ctypes.c_void_p) for name in ("pages", "tokens_read")),
        ("given", ctypes.c_int64),
    ]


class Union(ctypes.Structure):
    """`Union` of step.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parts", "sinks", "merged", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "size")),
    ]


class Prompt(ctypes.Structure):
    """`Prompt` of prompt.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "weight", "sinks", "out", "mass", "scratch")),
        ("parallel_for", ctypes.c_void_p),
        *((f"{name}_{of}", ctypes.c_int64) for name in ("query", "key", "value") for of in ("row", "head", "slot")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "group", "queries", "slots", "size", "value_size")),
        *((name, ctypes.c_int64) for name in ("kind", "threads")),
        ("scaling", ctypes.c_double),
    ]


class Alike(ctypes.Structure):
    """`Alike` of alike.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("vectors", "rows", "columns", "newest", "scratch", "parallel_for")),
        *((name, ctypes.c_int64) for name in ("size", "row_count", "column_count", "newer", "threads")),
        ("above", ctypes.c_double),
    ]


class Coding(ctypes.Structure):
    """`Coding` of quantise.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "codes", "step", "low", "scratch", "parallel_for")),
        *((name, ctypes.c_int64) for name in ("lane_bytes", "slot_bytes", "kind")),
        *((name, ctypes.c_int64) for name in ("lanes", "slots", "size", "bits", "group", "by_run", "threads")),
        ("limit", ctypes.c_double),
    ]


class Fitting(ctypes.Structure):
    """`Fitting` of fitting.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "dense", "given", "codes", "low", "reach", "levels", "far")),
        *((name, ctypes.c_void_p) for name in ("scratch", "parallel_for")),
        *((name, ctypes.c_int64) for name in ("lane_bytes", "slot_bytes", "kind")),
        *((name, ctypes.c_int64) for name in ("lanes", "slots", "size", "bits", "group", "by_token", "threads")),
        *((name, ctypes.c_double) for name in ("share", "largest")),
    ]


class Bell(ctypes.Structure):
    """`Bell` of bell.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "borders", "squares", "codes", "scale")),
        *((name, ctypes.c_void_p) for name in ("scratch", "parallel_for")),
        *((name, ctypes.c_int64) for name in ("lane_bytes", "slot_bytes", "kind")),
        *((name, ctypes.c_int64) for name in ("lanes", "slots", "size", "bits", "threads")),
        ("largest", ctypes.c_double),
    ]


@dataclass(frozen=True)
class Library:
    """One loaded variant.

    Attributes:
        variant: its name, one of `VARIANTS`.
        functions: the shared library.
        parallel_for: address of torch's `torch_parallel_for`.
    """

    variant: str
    functions: Any
    parallel_for: int | None

    def run(self, function: str, call: Any, *, scratch: str, threads: int) -> None:
        """Run a kernel that takes one structure with `scratch`, `threads` and `parallel_for` among its fields.

        Args:
            function: its name behind `kvtailor_`.
            call: the structure; all other fields are set.
            scratch: the name behind `kvtailor_` of what gives the floats that it works in.
            threads: at most so many, where torch runs any for us.

        Raises:
            RuntimeError: torch ran no threads.
        """
        call.threads = 1
        if threads > 1 and self.parallel_for is not None:
            call.threads, call.parallel_for = threads, self.parallel_for
        at = ctypes.byref(call)
        room = torch.empty(getattr(self.functions, f"kvtailor_{scratch}")(at), dtype=torch.float32)
        call.scratch = room.data_ptr()
        if getattr(self.functions, f"kvtailor_{function}")(at):
            raise RuntimeError(f"torch_parallel_for refused to run kvtailor_{function}")


@cache
def library() -> Library | None:
    """The best variant that was built and that this machine runs; None where there is none, see `why_none`.

    `KVTAILOR_CPU` names another one of `VARIANTS`.

    Raises:
        ArgumentError: `KVTAILOR_CPU` names what was not built or does not run here.
        FileError: see `load`.
    """
    asked = os.environ.get("KVTAILOR_CPU")
    found = (load(path) for name, path in built().items() if asked in (None, "", name))
    loaded = next((each for each in found if each is not None), None)
    if asked and loaded is None:
        raise ArgumentError(
            f"KVTAILOR_CPU={asked}: no such variant was built or runs here; built are {', '.join(built()) or 'none'}"
        )
    if loaded is None:
        warnings.warn(f"{why_none()}: attention of single tokens on the CPU is slower", stacklevel=2)
    return loaded


def why_none() -> str:
    """Why `library()` gives None, as a sentence without its end."""
    if not built():
        reasons = "no C++ compiler was found at installation, or a wheel without kernels was installed"
        return f"kvtailor's C++ kernels are missing ({reasons})"
    return "kvtailor's C++ kernels do not load on this machine"


def built() -> dict[str, Path]:
    """The variants that were built, best first, and their files."""
    paths = {name: _FOLDER / f"kernels_{name}.so" for name in VARIANTS}
    return {name: path for name, path in paths.items() if path.exists()}


def load(path: Path) -> Library | None:
    """The variant in a file; None where this machine cannot load or run it.

    Raises:
        FileError: it was built from sources of another ABI than this Python's.
    """
    try:
        functions = ctypes.CDLL(str(path))
    except OSError:
        return None
    # Before any other function is called.
    abi = functions.kvtailor_abi() if hasattr(functions, "kvtailor_abi") else 0
    if abi != ABI:
        raise FileError(
            f"{path} was built from other sources than this Python's (ABI {abi}, needed is {ABI}): install kvtailor "
            "again, or run `python setup.py build_ext --inplace` in a checkout"
        )
    if not functions.kvtailor_runs():
        return None
    loaded = Library(path.stem.removeprefix("kernels_"), functions, _parallel_for())
    for name in _COUNTS:
        getattr(functions, name).restype = ctypes.c_int64
    return loaded


@cache
def _parallel_for() -> int | None:
    """Address of torch's `torch_parallel_for`; None where this torch has none: one thread then."""
    try:
        # Our own libraries end in .so everywhere; those of torch end as the system wants it.
        name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        return ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
