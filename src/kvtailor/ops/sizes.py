"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvtailor.errors import ArgumentError, shown

__all__ = ["asked_bytes", "byte_text", "bytes_of", "write_bytes"]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?)?B?", re.IGNORECASE)
_LONGEST = 40
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def bytes_of(text: str) -> int:
    """The number of bytes that `64MiB`, `1.5G` or `4096` stands for: K, M, G are powers of 1000, KiB, MiB, GiB of 1024.

    Raises:
        ArgumentError: not a size, or not a whole number of bytes.
    """
    hit = _SIZE.fullmatch(text.strip())
    number = Fraction(hit[1]) * _UNITS[(hit[2] or "").lower()] if hit and len(text) <= _LONGEST else None
    if number is None or number.denominator != 1:
        raise ArgumentError(f"{shown(text)} is not a whole number of bytes: write for example 64MiB, 1.5G or 4096")
    return number.numerator


def write_bytes(count: int) -> str:
    """The shortest exact spelling that `bytes_of` reads back: 67108864 is `64MiB`."""
    for unit in ("Gi", "Mi", "Ki"):
        if count > 0 and count % _UNITS[unit.lower()] == 0:
            return f"{count // _UNITS[unit.lower()]}{unit}B"
    return str(count)


def byte_text(count: float) -> str:
    """Return bytes for people, with three figures in powers of 1024: 1234567 is `1.18 MiB`."""
    for unit in ("Gi", "Mi", "Ki"):
        size = _UNITS[unit.lower()]
        if count >= size:
            return f"{count / size:.3g} {unit}B" if count / size < 999.5 else f"{count / size:.0f} {unit}B"
    return f"{count:.0f} B"


def asked_bytes(asked: int | str | None, what: str) -> int | None:
    """The number of bytes of a method's argument; None: it was not given.

    Args:
        asked: a number, or text for `bytes_of`.
        what: which argument of which method, such as "disk: resident_bytes"; the sentence of an error begins with it.

    Raises:
        ArgumentError: no size, or below 0.
    """
    try:
        size = bytes_of(asked) if isinstance(asked, str) else asked
    except ValueError as error:
        raise ArgumentError(f"{what} is not a size: {error}") from error
    if size is not None and size < 0:
        raise ArgumentError(f"{what} must be 0 bytes or more, found {size}; write for example 64MiB")
    return size
