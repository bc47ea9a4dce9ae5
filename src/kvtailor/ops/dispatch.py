"""Which form of an operation runs: the one place that depends on device, dtype, layout and on what is installed.

Each operation has a plain form in torch, the reference of its tests, and may have faster ones.
`KVTAILOR_IMPLEMENTATION=reference`, or `using("reference")`, leaves the plain form alone in use. `triton` selects the
kernels of GPUs: they agree with the reference in Triton's interpreter and compile for sm_80 and sm_90, but have not
been timed on a GPU, and until they have "auto" does not take them. `WON_ON_CUDA` names those that it takes. In the
interpreter the CPU counts as a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError
from kvtailor.ops.attention import folded, folded_codes
from kvtailor.ops.attention.cpu import choose
from kvtailor.ops.attention.cpu.attention import attend_and_keep, attend_coded, unsuited_merge
from kvtailor.ops.attention.cpu.attention import merge as merge_on_cpu
from kvtailor.ops.attention.cpu.prompt import attend_with_mass, unsuited_prompt
from kvtailor.ops.attention.cpu.sides import map_queries, map_sums, unsuited, unsuited_coordinates, unsuited_turned
from kvtailor.ops.codes import quantise_cpu
from kvtailor.ops.codes.gaussian import GaussianCodes
from kvtailor.ops.codes.nonuniform import LevelCodes, coded_by_levels
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.cpu.library import Library, library
from kvtailor.ops.lanes import alike_cpu
from kvtailor.ops.segments.attention_inputs import Turned
from kvtailor.ops.segments.code_layout import CodeKind
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.ops.triton_launch import interpreting, missing
from kvtailor.types import Coordinates

__all__ = [
    "MOST_OVER_CODES",
    "MOST_QUERIES",
    "TRITON_OPERATIONS",
    "WON_ON_CUDA",
    "Quantiser",
    "asked_here",
    "best_pages",
    "chosen_attention",
    "coded_attention",
    "forced",
    "joint_attention",
    "maps_of",
    "newest_alike",
    "on_triton",
    "merged",
    "page_attention",
    "page_bounds",
    "prompt_mass",
    "quantiser",
    "reads_in_blocks",
    "turns_keys",
    "using",
]

# New tokens that a kernel reads a part for as it is stored.
MOST_QUERIES = 16
# New tokens up to which C++ kernels read codes so, in blocks: from some 200 on decoding all once is cheaper.
MOST_OVER_CODES = 128
WON_ON_CUDA: frozenset[str] = frozenset()
"""Operations whose Triton kernels "auto" takes on a GPU, of `TRITON_OPERATIONS`: those that were measured there and
won. `make gpu-day` prints this line (docs/gpu-day.md)."""
TRITON_OPERATIONS = ("attention", "levels", "small floats", "pages", "prompt mass", "codes")
"""Attention of few new tokens; the same over codes of levels or grids, and over small floats in blocks of channels;
over chosen pages; the attention mass of a prompt; making codes of states."""
_OF_KINDS = {CodeKind.LEVELS: "levels", CodeKind.POINTS: "levels", CodeKind.BLOCKS: "small floats"}
_WHICH = ("auto", "reference", "triton")
_FORCED: ContextVar[str | None] = ContextVar("implementations", default=None)


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """What makes codes of states (m, s, c).

    Attributes:
        tokens: of states, bits and group, as `TokenCodes.of`.
        symmetric: of states and bits, as `TokenCodes.symmetric`.
        channels: of states, bits and group, as `ChannelCodes.of`.
        levels: as `coded_by_levels`.
        bell: as `GaussianCodes.of`.
    """

    tokens: Callable[[Tensor, int, int], TokenCodes]
    symmetric: Callable[[Tensor, int], TokenCodes]
    channels: Callable[[Tensor, int, int], ChannelCodes]
    levels: Callable[..., LevelCodes]
    bell: Callable[..., GaussianCodes]


_PLAIN = Quantiser(
    tokens=TokenCodes.of,
    symmetric=TokenCodes.symmetric,
    channels=ChannelCodes.of,
    levels=coded_by_levels,
    bell=GaussianCodes.of,
)
_ON_CPU = Quantiser(
    tokens=quantise_cpu.token_codes,
    symmetric=quantise_cpu.symmetric_codes,
    channels=quantise_cpu.channel_codes,
    levels=quantise_cpu.level_codes,
    bell=quantise_cpu.bell_codes,
)


def forced() -> str:
    """ "auto", "reference" or "triton": what `using` asked for, or else `KVTAILOR_IMPLEMENTATION`.

    Raises:
        ArgumentError: the variable has another value.
    """
    asked = _FORCED.get() or os.environ.get("KVTAILOR_IMPLEMENTATION") or "auto"
    if asked not in _WHICH:
        raise ArgumentError(f"KVTAILOR_IMPLEMENTATION is {asked!r}, none of {', '.join(_WHICH)}")
    return asked


def asked_here() -> str | None:
    """Return what an enclosing `using` asks for; None outside of one."""
    return _FORCED.get()


@contextmanager
def using(which: str) -> Iterator[None]:
    """Within it, `which` runs: "auto", what is known to be fastest; "reference", the plain forms; "triton", on a GPU.

    Raises:
        ArgumentError: `which` is none of them.
    """
    if which not in _WHICH:
        raise ArgumentError(f"implementation={which!r} is none of {', '.join(_WHICH)}")
    token = _FORCED.set(which)
    try:
        yield
    finally:
        _FORCED.reset(token)


def reads_in_blocks(query: Tensor) -> bool:
    """Return whether kernels read codes for so many new tokens (..., t, d) a block after the other."""
    few = MOST_QUERIES < query.shape[-2] <= MOST_OVER_CODES
    return few and query.device.type == "cpu" and forced() == "auto" and library() is not None


def coded_attention(
    query: Tensor,
    keys: Coded,
    values: Coded,
    *,
    mass: bool = False,
    turned: Turned | None = None,
    offset: bool = False,
) -> Callable[..., tuple[Any, ...]] | None:
    """What reads these sides as they are stored; None: they must be decoded.

    Args:
        query: (n, g, t, d) new tokens; the devices and dtypes of all count.
        keys, values: the two sides of a part.
        mass: whether the attention that each slot receives is needed: an `attend_and_keep` gives it, which Triton has
            for plain keys alone, and otherwise an `attend_coded`.
        turned: how the keys are to be turned, which C++ kernels alone do; None: they are not.
        offset: whether the keys lack a constant, whose products C++ kernels alone add.
    """
    if query.shape[-2] > MOST_QUERIES or forced() == "reference":
        return None
    if offset and _built_for(query) is None:
        return None
    if turned is not None:
        if _built_for(query) is None or unsuited(keys, values) is not None or unsuited_turned(keys) is not None:
            return None
        return attend_and_keep if mass else attend_coded
    if all(on_triton(query.device, _reading(side)) for side in (keys, values)):
        from kvtailor.ops.attention.triton import attend as on_gpu

        if on_gpu.suits(query, keys, values) is not None:
            return None
        if not mass:
            return on_gpu.attend_coded
        from kvtailor.ops.attention.triton import mass as keeping

        return keeping.attend_and_keep if isinstance(keys, Whole) else None
    if query.device.type != "cpu":
        return None
    built = library()
    if built is None:
        return None if mass or folded_codes.unsuited(keys, values) is not None else folded_codes.attend_coded
    if unsuited(keys, values) is not None:
        return None
    return attend_and_keep if mass else attend_coded


def _reading(side: Coded) -> str:
    """The operation of `TRITON_OPERATIONS` that reads a side: each is chosen for itself, as it was measured."""
    return "attention" if side.code_layout is None else _OF_KINDS.get(side.code_layout.kind, "attention")


def joint_attention(device: torch.device) -> Any:
    """The module whose `attend_parts` reads several parts at once that its `attend_coded` reads one by one; or None."""
    if not on_triton(device, "attention"):
        return None
    from kvtailor.ops.attention.triton import attend as on_gpu

    return on_gpu


def merged(found: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the union of what disjoint parts saw; arguments as of `ops.attention.folded.merge`."""
    built = None
    # (n, g, t): torch merges those of many tokens by all threads.
    if found[0][1].shape[-1] <= MOST_QUERIES and (len(found) > 1 or sinks is not None) and forced() == "auto":
        built = library() if found[0][0].device.type == "cpu" else None
    if built is None or unsuited_merge(found) is not None:
        return folded.merge(found, sinks)
    return merge_on_cpu(found, sinks, built)


def maps_of(query: Tensor) -> tuple[Callable[[Coordinates, Tensor], Tensor], Callable[..., Tensor]]:
    """What brings queries (n, g, t, d), and sums with their lse, into other coordinates; see `Coordinates`."""
    built = _built_for(query)
    if built is None or unsuited_coordinates(query) is not None:
        return Coordinates.of_queries, Coordinates.of_sums
    return partial(map_queries, used=built), partial(map_sums, used=built)


def turns_keys(query: Tensor) -> bool:
    """Whether what reads keys for a query (n, g, t, d) can turn them, so that it is worth while to ask for it."""
    return _built_for(query) is not None


def page_attention(query: Tensor, keys: Coded, values: Coded, page: int) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What reads chosen pages of these sides where they lie, such as `choose.attend_pages`; None: copy them.

    Args:
        query: (n, g, t, d) new tokens.
        keys, values: the two sides of a part.
        page: slots of a page.
    """
    if query.shape[-2] > MOST_QUERIES:
        return None
    if not on_triton(query.device, "pages"):
        built = _built_for(query)
        if built is None or choose.unsuited_pages(keys, values) is not None:
            return None
        return partial(choose.attend_pages, using=built)
    if page & (page - 1):
        return None
    coded = {_reading(side) for side in (keys, values)} - {"attention"}
    if not all(on_triton(query.device, operation) for operation in coded):
        return None
    from kvtailor.ops.attention.triton import attend as on_gpu

    return on_gpu.attend_pages if on_gpu.suits(query, keys, values) is None else None


def page_bounds(query: Tensor, low: Tensor, high: Tensor) -> Callable[..., Tensor] | None:
    """What finds how large a product with a key of each page can be, `choose.page_bounds`; None: torch must.

    Args:
        query: (n, g, d) one new token's. low, high: (m, p, d) least and greatest of each key channel over a page.
    """
    built = _built_for(query)
    if built is None or choose.unsuited_bounds(query, low, high) is not None:
        return None
    return partial(choose.page_bounds, using=built)


def best_pages(
    query: Tensor, states: Sequence[tuple[Tensor, Tensor]], bounds: Sequence[tuple[Tensor, Tensor] | None]
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """What chooses pages and reads them with all that has none, `choose.attend_best_pages`; None: step by step.

    Args:
        query: of one new token. states: keys and values (m, s, d) of each part, lane i of owner i.
        bounds: of the pages of each part; None for a part without pages.
    """
    built = _built_for(query)
    if built is None or choose.unsuited_best_pages(states, bounds) is not None:
        return None
    return partial(choose.attend_best_pages, using=built)


def chosen_attention(
    query: Tensor, states: Sequence[tuple[Tensor, Tensor]], bounds: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """What chooses tokens by chunks and reads them where they lie, `choose.attend_chosen`; None: torch must.

    Args:
        query: of one new token. states: keys and values (m, s, d) of each part, lane i of owner i.
        bounds: of chunks; None: there are none.
    """
    built = _built_for(query)
    if built is None or choose.unsuited_states(states, bounds) is not None:
        return None
    return partial(choose.attend_chosen, using=built)


def prompt_mass(query: Tensor, keys: Tensor, values: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What reads a prompt and sums its attention up by slots, an `attend_with_mass`; None: torch must.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv). No query sees a later slot, each all others.
    """
    if not on_triton(query.device, "prompt mass"):
        built = _built_for(query)
        if built is None or unsuited_prompt(query, keys, values, built) is not None:
            return None
        return partial(attend_with_mass, using=built)
    from kvtailor.ops.attention.triton import mass as on_gpu

    return on_gpu.attend_with_mass if on_gpu.unsuited(query, keys, values) is None else None


def newest_alike(directions: Tensor) -> Callable[..., Tensor] | None:
    """What finds the newest of some directions (n, d) that is like each, `alike_cpu.newest_alike`; None: torch must."""
    built = _built_for(directions)
    if built is None or built.variant not in alike_cpu.ALIKE_VARIANTS or directions.dtype != torch.float32:
        return None
    return partial(alike_cpu.newest_alike, using=built)


def quantiser(states: Tensor) -> Quantiser:
    """What makes codes of these states (m, s, c); every form gives the same bytes, steps and minima on a CPU."""
    if forced() == "reference":
        return _PLAIN
    if on_triton(states.device, "codes"):
        return _packed_by_triton()
    if quantise_cpu.unsuited_states(states) is not None:
        return _PLAIN
    return _PLAIN if library() is None else _ON_CPU


def _built_for(query: Tensor) -> Library | None:
    """The C++ kernels, where they were built and "auto" may take them for this query."""
    return library() if query.device.type == "cpu" and forced() == "auto" else None


def on_triton(device: torch.device, operation: str) -> bool:
    """Whether Triton's kernel of this operation was selected, or has won, and can run on tensors of this device."""
    asked = forced()
    if asked == "auto" and device.type == "cuda" and operation in WON_ON_CUDA:
        asked = "triton"
    if asked != "triton" or missing() is not None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and interpreting())


def _packed_by_triton() -> Quantiser:
    from kvtailor.ops.codes import quantise_triton as on_gpu

    def tokens(states: Tensor, bits: int, group: int) -> TokenCodes:
        made = on_gpu.token_codes if on_gpu.why_not_packed(states, bits, group) is None else TokenCodes.of
        return made(states, bits, group)

    def symmetric(states: Tensor, bits: int) -> TokenCodes:
        made = on_gpu.symmetric_codes if on_gpu.why_not_packed(states, bits) is None else TokenCodes.symmetric
        return made(states, bits)

    def channels(states: Tensor, bits: int, group: int) -> ChannelCodes:
        made = on_gpu.channel_codes if on_gpu.why_not_packed(states, bits) is None else ChannelCodes.of
        return made(states, bits, group)

    return replace(_PLAIN, tokens=tokens, symmetric=symmetric, channels=channels)
