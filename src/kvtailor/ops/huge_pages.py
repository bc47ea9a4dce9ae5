"""Memory for large tensors on the CPU, for which the system is asked to use huge pages before the first write.

A decoded token reads all of a cache once. In pages of 4 KiB most of these reads miss the processor's table of
addresses; in huge pages (2 MiB on x86) they do not. Most Linux systems give huge pages to those programs alone that ask
for them (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled), and there they are asked for here. Where the system
gives them to all programs or to none, on another system, on another device, and for tensors smaller than a huge page,
tensors are torch's own, as without this module.

Such a tensor lies in a mapping of its own, which begins at a huge page: torch's allocator gives addresses inside its
mappings, so that at the ends of each tensor up to a whole huge page would be lost, and memory that was used before, to
which the system would not give other pages. Only whole huge pages inside the tensor are asked for, so it never takes
more memory than its bytes, rounded up to a small page. The mapping goes back to the system when the last tensor over it
is gone.

`KVTAILOR_HUGE_PAGES=0`, or `asking(False)`, leaves all tensors to torch.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError
from kvtailor.ops.lanes.slots import at_slots

__all__ = ["asking", "copied", "empty", "explained", "new_empty", "picked", "read_buffer", "size_asked_for"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_VARIABLE = "KVTAILOR_HUGE_PAGES"
# The smallest huge page of any system: nothing at all is looked up for tensors below it.
_LEAST = 1 << 21
# Up to here glibc gives memory again that was given back (the most that its threshold for mappings grows to), which
# costs less than the zeros of a new mapping: decoding codes into 4 to 16 MiB took 1.15 to 1.4 times as long in huge
# pages, into 64 MiB half as long.
_GIVEN_AGAIN = 1 << 25
_ASKED: ContextVar[bool | None] = ContextVar("huge pages", default=None)


@contextmanager
def asking(wanted: bool) -> Iterator[None]:
    """Within it, huge pages are asked for, or not, whatever `KVTAILOR_HUGE_PAGES` is."""
    token = _ASKED.set(wanted)
    try:
        yield
    finally:
        _ASKED.reset(token)


def size_asked_for() -> int | None:
    """Return the bytes from which on huge pages are asked for, for tensors on the CPU; None: they are not.

    Raises:
        ArgumentError: `KVTAILOR_HUGE_PAGES` is neither 0 nor 1.
    """
    wanted = _ASKED.get()
    if wanted is None:
        text = os.environ.get(_VARIABLE, "")
        if text not in ("", "0", "1"):
            raise ArgumentError(
                f"{_VARIABLE} is {text!r}: write 0 (never ask for huge pages) or 1 (ask where the system leaves it to "
                "programs), or leave it unset, which is the same as 1"
            )
        wanted = text != "0"
    return _page_bytes() if wanted else None


def explained() -> str:
    """Return in a clause what becomes of large tensors on the CPU."""
    asked = size_asked_for()
    if asked is not None:
        return f"asked for in tensors of {asked // 2**20} MiB and more"
    word = _setting()
    if word == "madvise":
        return f"not asked for: {_VARIABLE} is 0"
    if word is None:
        return "not asked for: this system does not offer them"
    return f"not asked for: the system gives them to {'all programs' if word == 'always' else 'no program'} ({word})"


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor on the CPU with anything in it, as `torch.empty` does."""
    made = _asked(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype) if made is None else made


def new_empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a contiguous tensor of another's dtype and device with anything in it, as `like.new_empty` does."""
    made = _asked(shape, like.dtype) if type(like) is Tensor and like.device.type == "cpu" else None
    return like.new_empty(tuple(shape)) if made is None else made


def read_buffer(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same for what is read once and given back: in huge pages only above 32 MiB."""
    if math.prod(shape) * like.dtype.itemsize <= _GIVEN_AGAIN:
        return like.new_empty(tuple(shape))
    return new_empty(like, shape)


def copied(states: Tensor) -> Tensor:
    """Return a contiguous copy in a storage of its own size."""
    if _is_small(states.shape, states.dtype):
        return states.clone(memory_format=torch.contiguous_format)
    return new_empty(states, states.shape).copy_(states)


def picked(states: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """Return `states[at]`, for what `slots.at_slots` takes."""
    shape = (*torch.broadcast_shapes(at[0].shape, at[1].shape), *states.shape[2:])
    # Only what is written into given memory can be asked for before the first write, and autograd forbids it.
    asks = type(states) is Tensor and states.device.type == "cpu" and not states.requires_grad
    return at_slots(states, at, out=_asked(shape, states.dtype) if asks else None)


def _is_small(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether no huge page of any system fits."""
    return math.prod(shape) * dtype.itemsize < _LEAST


def _asked(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Return a tensor in a mapping of its own; None where it is to be torch's."""
    if _is_small(shape, dtype):
        return None
    page, size = size_asked_for(), math.prod(shape) * dtype.itemsize
    if page is None or size < page:
        return None
    made = torch.empty(0, dtype=dtype)
    # Where a mode of torch makes tensors of another class (fake ones, which have no memory), they stay what they are.
    if type(made) is not Tensor:
        return None
    run = _mapped(size, page)
    # An operation that torch dispatches, so that what counts the storages of operations sees this one as well.
    return None if run is None else made.set_(run.untyped_storage()).view(tuple(shape))


def _mapped(size: int, page: int) -> Tensor | None:
    """Return (size,) uint8 that begins at a huge page; None where the system refuses the memory or the advice."""
    try:
        # One page more, so that a huge page begins within the first; what no tensor has is never written, and takes
        # no memory. Private: a forked process gets a copy of its own.
        mapping = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = -_address(mapping) % page
        # The last piece, which is smaller than a huge page, would take more memory than the tensor has.
        _advise(mapping, first, size // page * page)
    except OSError:
        return None
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=first)


def _address(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def _advise(mapping: mmap.mmap, first: int, size: int) -> None:
    """Ask for huge pages in `size` bytes from byte `first` of a mapping on.

    Raises:
        OSError: the system refuses.
    """
    mapping.madvise(mmap.MADV_HUGEPAGE, first, size)


@cache
def _page_bytes() -> int | None:
    """Bytes of a huge page where the system leaves it to programs to ask for them; None elsewhere."""
    if _setting() != "madvise":
        return None
    size = _read("hpage_pmd_size")
    return int(size) if size is not None and size.isdecimal() and int(size) >= _LEAST else None


@cache
def _setting() -> str | None:
    """Which programs get huge pages: "always", "madvise" or "never"; None where the system does not have them."""
    if sys.platform != "linux":
        return None
    size = _read("hpage_pmd_size")
    # Since Linux 6.8 each size has a setting of its own, which may be that of all sizes.
    names = [f"hugepages-{int(size) // 1024}kB/enabled"] if size is not None and size.isdecimal() else []
    for name in (*names, "enabled"):
        word = (_read(name) or "").partition("[")[2].partition("]")[0]
        if word not in ("", "inherit"):
            return word
    return None


def _read(name: str) -> str | None:
    try:
        return (_SETTINGS / name).read_text().strip()
    except OSError:
        return None
