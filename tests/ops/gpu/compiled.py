"""What the compiler makes of the kernels for a GPU that need not be there: registers, spills, instructions.

Run as a program it compiles the variants named on the command line, or all, and writes a line of JSON for each:

    python -m tests.ops.gpu.compiled [NAME ...]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtailor.ops.attention.triton.attend import LanesRead, plan_of
from kvtailor.ops.attention.triton.mass import mass_call
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.codes.quantise_triton import channel_call, token_call
from kvtailor.ops.codes.sides import ChannelCodes, FloatCodes, TokenCodes
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.ops.triton_launch import Launch

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
ARCHITECTURES = (80, 90)
LANES, SLOTS, HEAD = 8, 4096, 128


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def whole(dtype: torch.dtype = torch.bfloat16, head: int = HEAD) -> Coded:
    return Whole(states=empty(LANES, SLOTS, head, dtype=dtype))


def tokens(bits: int, groups: int = 1, symmetric: bool = False, head: int = HEAD) -> Coded:
    step = empty(LANES, SLOTS, groups)
    codes = empty(LANES, SLOTS, packed_size(head, bits), dtype=torch.uint8)
    return TokenCodes(bits=bits, size=head, codes=codes, step=step, low=None if symmetric else torch.empty_like(step))


def channels(bits: int, group: int, head: int = HEAD) -> Coded:
    step = empty(LANES, -(-SLOTS // group), head)
    codes = empty(LANES, SLOTS, packed_size(head, bits), dtype=torch.uint8)
    return ChannelCodes(group=group, bits=bits, size=head, codes=codes, step=step, low=torch.empty_like(step))


def floats(group: int = 64) -> Coded:
    codes = empty(LANES, SLOTS, HEAD, dtype=torch.uint8)
    return FloatCodes(group=group, codes=codes, scale=empty(LANES, -(-SLOTS // group), 1))


def decoding(
    keys: Coded, values: Coded, *, group: int = 4, new: int = 1, head: int = HEAD, **more: Any
) -> list[Launch]:
    query = empty(LANES, group, new, head)
    own = {name: more.pop(name) for name in ("causal", "pages", "page", "splits") if name in more}
    inputs = AttentionInputs(query, keys, values, scaling=0.1, **more)
    plan = plan_of([LanesRead(inputs=inputs, **own)], processors=132)
    return list(plan.calls)


def pages(count: int) -> Tensor:
    return empty(LANES, count, dtype=torch.int32)


def lse(heads: int) -> Tensor:
    return empty(1, heads, SLOTS, dtype=torch.float32)


def masked() -> dict[str, Any]:
    """A mask of every slot, weights of slots, and lanes of several owners."""
    return {
        "visible": empty(LANES, 1, SLOTS, dtype=torch.bool),
        "log_weight": empty(LANES, SLOTS, dtype=torch.float32),
        "owner": torch.arange(LANES),
    }


def mass_of_few() -> Launch:
    """As decoding has it: the heads of a group are so many queries of one head."""
    query, keys = empty(LANES, 1, 4, HEAD), empty(LANES, 1, SLOTS, HEAD)
    sums, counts = (torch.empty(shape, dtype=torch.float32) for shape in ((LANES, 1, 4), (LANES, 4)))
    return mass_call(query, keys, sums, 0.1, weight=counts, causal=False)[0]


VARIANTS: dict[str, Callable[[], Launch]] = {
    "bf16": lambda: decoding(whole(), whole())[0],
    "fp32": lambda: decoding(whole(torch.float32), whole(torch.float32))[0],
    "vector8": lambda: decoding(tokens(8, symmetric=True), tokens(8, symmetric=True))[0],
    "vector4": lambda: decoding(tokens(4), tokens(4))[0],
    "vector2": lambda: decoding(tokens(2), tokens(2))[0],
    "fp8": lambda: decoding(floats(), floats())[0],
    "kivi8": lambda: decoding(channels(8, 64), tokens(8))[0],
    "kivi4": lambda: decoding(channels(4, 64), tokens(4))[0],
    "kivi4_128": lambda: decoding(channels(4, 128), tokens(4))[0],
    "kivi4_32": lambda: decoding(channels(4, 32), tokens(4, groups=4))[0],
    "kivi2": lambda: decoding(channels(2, 64), tokens(2))[0],
    "kivi2_32": lambda: decoding(channels(2, 32), tokens(2, groups=4))[0],
    "kivi4_mha": lambda: decoding(channels(4, 64), tokens(4), group=1)[0],
    "kivi4_16_rows": lambda: decoding(channels(4, 64), tokens(4), new=4)[0],
    "kivi4_32_rows": lambda: decoding(channels(4, 64), tokens(4), new=8)[0],
    "kivi4_head_256": lambda: decoding(channels(4, 64, head=256), tokens(4, head=256), head=256)[0],
    "kivi4_head_80": lambda: decoding(channels(4, 64, head=80), tokens(4, head=80), head=80)[0],
    "kivi4_pages": lambda: decoding(channels(4, 64), tokens(4), pages=pages(64), page=16)[0],
    "kivi4_masked": lambda: decoding(channels(4, 64), tokens(4), **masked())[0],
    "bf16_32_rows": lambda: decoding(whole(), whole(), new=8)[0],
    "bf16_head_256": lambda: decoding(whole(head=256), whole(head=256), head=256)[0],
    "bf16_pages": lambda: decoding(whole(), whole(), pages=pages(64), page=16)[0],
    "bf16_pages_masked": lambda: decoding(whole(), whole(), pages=pages(64), page=16, **masked())[0],
    "bf16_growing": lambda: decoding(whole(), whole(), lengths=empty(LANES, dtype=torch.int32))[0],
    "merge": lambda: decoding(whole(), whole())[1],
    "merge_ragged": lambda: decoding(whole(), whole(), owner=torch.arange(LANES))[1],
    "mass": lambda: mass_call(empty(1, 32, SLOTS, HEAD), empty(1, LANES, SLOTS, HEAD), lse(32), 0.1)[0],
    "mass_of_few": mass_of_few,
    "pack_tokens_4": lambda: token_call(empty(LANES, SLOTS, HEAD), 4, HEAD)[0],
    "pack_tokens_4_32": lambda: token_call(empty(LANES, SLOTS, HEAD), 4, 32)[0],
    "pack_symmetric_8": lambda: token_call(empty(LANES, SLOTS, HEAD), 8, HEAD, symmetric=True)[0],
    "pack_channels_4": lambda: channel_call(empty(LANES, SLOTS, HEAD), 4, 64)[0],
    "pack_channels_2": lambda: channel_call(empty(LANES, SLOTS, HEAD), 2, 32)[0],
}


def compiled(call: Launch, architecture: int) -> dict[str, Any]:
    """What a launch is made of: registers, spilled bytes, instructions, and those of its longest loop."""
    constants = {param.name for param in call.kernel.params if param.is_constexpr}
    general = {param.name for param in call.kernel.params if param.do_not_specialize}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(call.kernel.arg_names):
        value = call.arguments[name]
        if name in constants or value is None:
            signature[name], values[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in general:
            signature[name], values[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in general:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=call.kernel, signature=signature, constexprs=values, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=call.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage, listing = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    instructions = list(_instructions(listing))
    loop = _longest_loop(instructions)
    spills = re.search(r"STACK:(\d+)", usage)
    registers = re.search(r"REG:(\d+)", usage)
    assert spills is not None and registers is not None
    count = Counter(text.split()[0].split(".")[0] for _, text in loop)
    return {
        "registers": int(registers[1]),
        "stack": int(spills[1]),
        "local": sum(text.split()[0].startswith(("STL", "LDL")) for _, text in instructions),
        "shared": made.metadata.shared,
        "warps": call.warps,
        "block": call.arguments.get("BLOCK"),
        "instructions": len(instructions),
        "loop": len(loop),
        "mma": count["HMMA"] + count["HGMMA"],
        "asynchronous": count["LDGSTS"],
        "most": dict(count.most_common(12)),
    }


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def _instructions(listing: str) -> Iterator[tuple[int, str]]:
    for line in listing.splitlines():
        found = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line)
        if found is not None:
            yield int(found[1], 16), found[2]


def _longest_loop(instructions: list[tuple[int, str]]) -> list[tuple[int, str]]:
    longest: list[tuple[int, str]] = []
    for at, text in instructions:
        jump = re.match(r"BRA.*?0x([0-9a-f]+)", text)
        if jump is not None and int(jump[1], 16) < at:
            loop = [each for each in instructions if int(jump[1], 16) <= each[0] <= at]
            longest = max(longest, loop, key=len)
    return longest


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print("\n".join(VARIANTS))
        sys.exit()
    for each in sys.argv[1:] or VARIANTS:
        for architecture in ARCHITECTURES:
            print(
                json.dumps({"name": each, "sm": architecture, **compiled(VARIANTS[each](), architecture)}), flush=True
            )
