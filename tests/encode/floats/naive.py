"""Small floats number by number, from the definitions of the OCP specifications: what the codecs are compared with.

Nothing of kvtailor is used here. A format has a sign, exponent bits and mantissa bits: a code with the exponent 0 is
2^(1 - bias) * m / 2^mantissa, all others are 2^(exponent - bias) * (1 + m / 2^mantissa).
"""

from __future__ import annotations

import math

import numpy as np

# Exponent bits, mantissa bits, bias, and the largest code of a number (above it are infinities and NaN).
FORMATS = {"e2m1": (2, 1, 1, 0b111), "e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B)}
LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}


def magnitude(code: int, element: str) -> float:
    """What a code without its sign stands for."""
    _, mantissa, bias, _ = FORMATS[element]
    exponent, rest = code >> mantissa, code & (2**mantissa - 1)
    if exponent == 0:
        return 2.0 ** (1 - bias) * rest / 2**mantissa
    return 2.0 ** (exponent - bias) * (1 + rest / 2**mantissa)


MAGNITUDES = {name: [magnitude(code, name) for code in range(top + 1)] for name, (*_, top) in FORMATS.items()}


def nearest(x: float, element: str) -> float:
    """The element nearest to x: of two that are equally near the one with the even code."""
    found = min(range(len(MAGNITUDES[element])), key=lambda c: (abs(abs(x) - MAGNITUDES[element][c]), c % 2))
    return math.copysign(MAGNITUDES[element][found], x)


def mx(token: list[float], element: str, block: int) -> list[float]:
    """A token's channels after MX with blocks of so many: OCP MX 1.0, section 6.3."""
    made: list[float] = []
    for first in range(0, len(token), block):
        part = token[first : first + block]
        largest = max(abs(x) for x in part)
        shared = -127
        if largest > 0:
            shared = math.floor(math.log2(largest)) - math.floor(math.log2(LARGEST[element]))
            # log2 of a double may round up to the next whole number.
            shared -= 2.0 ** (shared + math.floor(math.log2(LARGEST[element]))) > largest
        shared = max(-127, min(127, shared))
        made += [nearest(x / 2.0**shared, element) * 2.0**shared for x in part]
    return made


def nv(run: list[list[float]], block: int) -> list[list[float]]:
    """The tokens of a run after NVFP4, whose scales are computed in single precision."""
    single = np.float32
    largest = max(abs(x) for token in run for x in token)
    outer = single(largest) / single(448 * 6) if largest else single(1)
    made = []
    for token in run:
        out: list[float] = []
        for first in range(0, len(token), block):
            part = token[first : first + block]
            scale = nearest(float(single(max(abs(x) for x in part)) / single(6) / outer), "e4m3")
            each = single(scale) * outer
            out += [nearest(float(single(x) / each), "e2m1") * float(each) if each else 0.0 for x in part]
        made.append(out)
    return made
