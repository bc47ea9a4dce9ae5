"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["byte_unit", "flop_text", "milliseconds", "significant"]

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def byte_unit(most: float) -> tuple[str, int]:
    """The unit for an axis that goes up to so many bytes, and its size."""
    return next(((unit, size) for unit, size in _BYTES if most >= 2 * size), ("bytes", 1))


def flop_text(count: float) -> str:
    """Floating point operations in powers of 1000."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{significant(count / size)} {unit}FLOP"
    return f"{count:.0f} FLOP"


def milliseconds(seconds: float) -> str:
    """With three figures."""
    return significant(1000 * seconds)


def significant(value: float, figures: int = 3) -> str:
    """So many figures, never as a power of ten below a million."""
    if value == 0:
        return "0"
    if abs(value) >= 10**figures:
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.{figures}g}"
    return f"{value:.{figures}g}" if abs(value) >= 1e-4 else f"{value:.{figures - 1}e}"
