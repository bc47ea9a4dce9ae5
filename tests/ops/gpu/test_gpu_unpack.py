"""The unpacking of bytes into float16, and the PTX that does it on a GPU, played by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.ops.gpu.exact_attention import needs_triton

from kvtailor.ops.codes.quant import from_e4m3, unpack

pytestmark = needs_triton

WORD = 0xFFFFFFFF


def programs() -> dict[str, tuple[list[str], int]]:
    """The instructions of each function that writes PTX, and how many registers it gives back."""
    from kvtailor.ops.attention.triton.kernels import unpack as module

    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    found = {}
    for name, text, rest in re.findall(r'def (_\w+_ptx)\(.*?"""\{(.*?)\}""",\s+"(.*?)"', source, re.DOTALL):
        lines = [line.strip() for line in text.split(";") if line.strip() and not line.strip().startswith(".reg")]
        found[name] = (lines, rest.count("=r"))
    return found


def play(lines: list[str], results: int, word: int) -> list[int]:
    """What a program leaves in its result registers for one word of four bytes."""
    registers = {f"${results}": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in lines:
        operation, arguments = line.split(None, 1)
        into, *names = [each.strip() for each in arguments.split(",")]
        given = [value(name) for name in names]
        if operation == "mov.b32":
            result = given[0]
        elif operation == "and.b32":
            result = given[0] & given[1]
        elif operation == "shr.b32":
            result = given[0] >> given[1]
        elif operation == "prmt.b32":
            pool = [*given[0].to_bytes(4, "little"), *given[1].to_bytes(4, "little")]
            result = int.from_bytes(bytes(pool[given[2] >> (4 * place) & 7] for place in range(4)), "little")
        elif operation == "lop3.b32":
            table, result = given[3], 0
            for bit in range(32):
                index = sum((given[place] >> bit & 1) << (2 - place) for place in range(3))
                result |= (table >> index & 1) << bit
        else:
            raise AssertionError(f"no rule for {operation}")
        registers[into] = result & WORD
    return [registers[f"${place}"] for place in range(results)]


def halves(words: list[int]) -> torch.Tensor:
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    return torch.frombuffer(bytearray(packed), dtype=torch.float16)


@pytest.mark.parametrize(("name", "bits"), [("_eights_ptx", 8), ("_fours_ptx", 4), ("_twos_ptx", 2)])
def test_the_ptx_of_codes_gives_every_code_on_top_of_its_offset(name: str, bits: int) -> None:
    lines, results = programs()[name]
    for first in range(0, 256, 4):
        # A stride of 37 mixes high and low bits within a word.
        each = [(37 * (first + place)) % 256 for place in range(4)]
        found = halves(play(lines, results, int.from_bytes(bytes(each), "little"))).view(8 // bits, 4)
        codes = unpack(torch.tensor(each, dtype=torch.uint8)[:, None], bits, 8 // bits).T
        offsets = torch.tensor([2.0 ** (10 - part * bits) for part in range(8 // bits)])[:, None]
        assert torch.equal(found - offsets, codes.half())


def test_the_ptx_of_floats_gives_every_float() -> None:
    lines, results = programs()["_floats_ptx"]
    every = [code for code in range(256) if code & 127 != 127]
    for first in range(0, 252, 4):
        each = every[first : first + 4]
        found = halves(play(lines, results, int.from_bytes(bytes(each), "little")))
        wanted = from_e4m3(torch.tensor(each, dtype=torch.uint8), torch.ones(1))
        assert torch.equal(found.float() * 256, wanted)
