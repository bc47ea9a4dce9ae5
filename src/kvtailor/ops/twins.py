"""Which form of an operation runs: the one place where device, dtype, layout and what is installed are looked at.

Each operation has a plain form in torch, the reference of its tests, and may have faster ones.
`KVTAILOR_TWINS=reference`, or `using("reference")`, leaves the plain form alone in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.coded import Coded
from kvtailor.ops.cpu.attention import attend_coded, unsuited
from kvtailor.ops.cpu.library import library, why_none

__all__ = ["MOST_QUERIES", "Choice", "coded_attention", "explained", "forced", "using"]

# New tokens at once up to which a part is read as it is stored; from there on decoding it once is cheaper.
MOST_QUERIES = 16
_WHICH = ("auto", "reference")
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
    """Within it, `which` runs: "auto", the fastest that there is, or "reference", the plain forms.

    Raises:
        ValueError: `which` is neither.
    """
    if which not in _WHICH:
        raise ValueError(f"twins={which!r} is none of {', '.join(_WHICH)}")
    token = _FORCED.set(which)
    try:
        yield
    finally:
        _FORCED.reset(token)


def coded_attention(query: Tensor, keys: Coded, values: Coded) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What reads these sides as they are stored (see `ops.cpu.attention.attend_coded`); None: they must be decoded.

    Args:
        query: (..., t, d) new tokens.
        keys, values: the two sides of a part.
    """
    if query.device.type != "cpu" or query.shape[-2] > MOST_QUERIES or forced() == "reference":
        return None
    if library() is None or unsuited(keys, values) is not None:
        return None
    return attend_coded


def explained(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """What runs on a device for a cache of this dtype, operation by operation."""
    asked = forced()
    few = f"attention of up to {MOST_QUERIES} new tokens"
    many = "attention of a prompt"
    if asked == "reference":
        return [Choice(operation=few, twin="torch, decoded parts", why="the reference is forced")]
    prompt = Choice(operation=many, twin="torch's fused attention", why="its tiles are filled")
    if device.type != "cpu":
        return [
            Choice(operation=few, twin="torch, decoded parts", why=f"there are no kernels for {device.type}"),
            prompt,
        ]
    built = library()
    if built is None:
        return [Choice(operation=few, twin="torch, heads folded", why=why_none()), prompt]
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return [Choice(operation=few, twin="torch, decoded parts", why=f"no kernel reads {dtype}"), prompt]
    threads = "torch's threads" if built.parallel_for else "one thread: torch older than 2.10"
    return [
        Choice(operation=few, twin=f"C++, {built.variant}", why=f"built, and runs on this machine; {threads}"),
        prompt,
    ]
