"""Which form of an operation runs: the one place where device, dtype, layout and what is installed are looked at.

Each operation has a plain form in torch, the reference of its tests, and may have faster ones.
`KVTAILOR_TWINS=reference`, or `using("reference")`, leaves the plain form alone in use. `triton` asks for the kernels
of GPUs: they agree with the reference in Triton's interpreter and compile for sm_80 and sm_90, but have not been timed
on a GPU, and until they have "auto" does not take them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.coded import Coded
from kvtailor.ops.codes import ChannelCodes, TokenCodes
from kvtailor.ops.cpu import quantise
from kvtailor.ops.cpu.attention import attend_coded, attend_keeping, unsuited
from kvtailor.ops.cpu.library import Library, library, why_none
from kvtailor.ops.triton.installed import missing

__all__ = ["MOST_QUERIES", "Choice", "Quantiser", "coded_attention", "explained", "forced", "quantiser", "using"]

# New tokens at once up to which a part is read as it is stored; from there on decoding it once is cheaper.
MOST_QUERIES = 16
_WHICH = ("auto", "reference", "triton")
_FORCED: ContextVar[str | None] = ContextVar("twins", default=None)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs for one operation.

    Attributes:
        operation: what is done.
        twin: the form that does it.
        why: why that one, a clause.
    """

    operation: str
    twin: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """What makes codes of states (m, s, c).

    Attributes:
        tokens: of states, bits and group, as `TokenCodes.of`.
        symmetric: of states and bits, as `TokenCodes.symmetric`.
        channels: of states, bits and group, as `ChannelCodes.of`.
    """

    tokens: Callable[[Tensor, int, int], TokenCodes]
    symmetric: Callable[[Tensor, int], TokenCodes]
    channels: Callable[[Tensor, int, int], ChannelCodes]


_PLAIN = Quantiser(tokens=TokenCodes.of, symmetric=TokenCodes.symmetric, channels=ChannelCodes.of)
_ON_CPU = Quantiser(tokens=quantise.token_codes, symmetric=quantise.symmetric_codes, channels=quantise.channel_codes)


def forced() -> str:
    """ "auto" or "reference": what `using` asked for, or else `KVTAILOR_TWINS`.

    Raises:
        ValueError: the variable has another value.
    """
    asked = _FORCED.get() or os.environ.get("KVTAILOR_TWINS") or "auto"
    if asked not in _WHICH:
        raise ValueError(f"KVTAILOR_TWINS={asked!r} is none of {', '.join(_WHICH)}")
    return asked


@contextmanager
def using(which: str) -> Iterator[None]:
    """Within it, `which` runs: "auto", what is known to be fastest; "reference", the plain forms; "triton", on a GPU.

    Raises:
        ValueError: `which` is none of them.
    """
    if which not in _WHICH:
        raise ValueError(f"twins={which!r} is none of {', '.join(_WHICH)}")
    token = _FORCED.set(which)
    try:
        yield
    finally:
        _FORCED.reset(token)


def coded_attention(
    query: Tensor, keys: Coded, values: Coded, *, mass: bool = False
) -> Callable[..., tuple[Any, ...]] | None:
    """What reads these sides as they are stored; None: they must be decoded.

    Args:
        query: (n, g, t, d) new tokens; the devices and dtypes of all are looked at.
        keys, values: the two sides of a part.
        mass: whether the attention that each slot receives is asked for: `ops.cpu.attention.attend_keeping` does that,
            and otherwise `attend_coded`.
    """
    asked = forced()
    if query.shape[-2] > MOST_QUERIES or asked == "reference":
        return None
    if asked == "triton" and query.device.type == "cuda" and missing() is None and not mass:
        from kvtailor.ops.triton import attend as on_gpu

        return on_gpu.attend_coded if on_gpu.suits(query, keys, values) is None else None
    built = library() if query.device.type == "cpu" else None
    if built is None or unsuited(keys, values) is not None:
        return None
    if mass:
        return attend_keeping if built.has("kvtailor_mass") else None
    return attend_coded


def quantiser(states: Tensor) -> Quantiser:
    """What makes codes of these states (m, s, c); every form gives the same bytes, steps and minima."""
    if forced() == "reference" or quantise.unsuited_states(states) is not None:
        return _PLAIN
    built = library()
    return _PLAIN if built is None or _why_not_quantised(built) else _ON_CPU


def explained(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """What runs on a device for a cache of this dtype, operation by operation."""
    asked = forced()
    few = f"attention of up to {MOST_QUERIES} new tokens"
    many = "attention of a prompt"
    if asked == "reference":
        return [Choice(operation=few, twin="torch, decoded parts", why="the reference is forced")]
    prompt = Choice(operation=many, twin="torch's fused attention", why="its tiles are filled")
    if device.type == "cuda":
        without = missing()
        if asked == "triton" and without is None:
            return [Choice(operation=few, twin="Triton", why="it was asked for"), prompt]
        why = without or "Triton's kernels are there, but not timed on a GPU yet: KVTAILOR_TWINS=triton asks for them"
        return [Choice(operation=few, twin="torch, decoded parts", why=why), prompt]
    if device.type != "cpu":
        why = f"there are no kernels for {device.type}"
        return [Choice(operation=few, twin="torch, decoded parts", why=why), prompt]
    built = library()
    if built is None:
        return [Choice(operation=few, twin="torch, heads folded", why=why_none()), prompt]
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return [Choice(operation=few, twin="torch, decoded parts", why=f"no kernel reads {dtype}"), prompt]
    threads = "torch's threads" if built.parallel_for else "one thread: torch older than 2.10"
    why_not = _why_not_quantised(built)
    return [
        Choice(operation=few, twin=f"C++, {built.variant}", why=f"built, and runs on this machine; {threads}"),
        prompt,
        Choice(
            operation="making codes of states",
            twin="torch" if why_not else f"C++, {built.variant}",
            why=why_not or "gives the bytes torch gives",
        ),
    ]


def _why_not_quantised(built: Library) -> str | None:
    return None if built.has("kvtailor_code") else "the C++ kernels were built from older sources: build them again"
