"""Elements and scales of small floats against their definition, code by code, and against torch's own types."""

from __future__ import annotations

import math

import pytest
import torch
from tests.encode.floats.naive import FORMATS, LARGEST, MAGNITUDES, nearest

from kvtailor.ops.codes.floats import ELEMENTS, element_codes, exponent_scales, levels_of

every_element = pytest.mark.parametrize("element", FORMATS)


@every_element
def test_each_code_stands_for_what_the_specification_says(element: str) -> None:
    exponent, mantissa, _, _ = FORMATS[element]
    kind, levels = ELEMENTS[element], levels_of(element)
    assert kind.bits == 1 + exponent + mantissa and levels.shape == (2**kind.bits,)
    assert kind.most == LARGEST[element] == max(MAGNITUDES[element])
    assert kind.most_exponent == math.floor(math.log2(kind.most))
    half = 2 ** (kind.bits - 1)
    for code, wanted in enumerate(MAGNITUDES[element]):
        assert levels[code] == wanted and levels[half + code] == -wanted
    assert levels.isfinite().all()


@every_element
def test_numbers_become_the_nearest_element_and_ties_the_even_code(element: str) -> None:
    """All numbers at, between and next to the elements, and beyond the largest."""
    levels = torch.tensor(MAGNITUDES[element])
    middle = (levels[1:].double() + levels[:-1].double()) / 2
    x = torch.cat([levels, middle.float(), levels[-1:] * 1.2, levels[-1:] * 1e4])
    assert torch.equal(middle.float().double(), middle)
    infinity = torch.full_like(x, torch.inf)
    x = torch.cat([x, torch.nextafter(x, infinity), torch.nextafter(x, -infinity)])
    x = torch.cat([x, -x, torch.randn(500, generator=torch.Generator().manual_seed(1)) * levels[-1] / 3])
    found = levels_of(element)[element_codes(x, element).int()]
    assert found.tolist() == [nearest(each, element) for each in x.tolist()]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_bytes_are_those_of_torchs_own_type(element: str) -> None:
    kind = ELEMENTS[element]
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2)) * torch.logspace(-8, 1, 4096) * kind.most / 8
    x = x.clamp(-kind.most, kind.most)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    assert torch.equal(element_codes(x, element), x.to(dtype).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(dtype).float()
    real = theirs.isfinite()
    assert torch.equal(levels_of(element)[real], theirs[real])


def test_powers_of_two_are_those_of_torchs_own_type() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    found = exponent_scales(codes)
    assert found.tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert torch.equal(found, codes.view(torch.float8_e8m0fnu).float())
