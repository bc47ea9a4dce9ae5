"""Attention from compressed bytes against attention over what the bytes decode to, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, error, exactly, needs_loops, needs_triton
from torch import Tensor

from kvtailor.ops.codes.floats import MxCodes, NvCodes
from kvtailor.ops.codes.gaussian import GaussianCodes
from kvtailor.ops.codes.ggml import GgmlCodes
from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.codes.sides import ChannelCodes, FloatCodes, TokenCodes
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, Whole

pytestmark = [needs_triton, needs_loops]

Encoding = Callable[[Tensor], Coded]

ENCODINGS: dict[str, Encoding] = {
    "whole": lambda x: Whole(states=x),
    "whole16": lambda x: Whole(states=x.half()),
    "floats": lambda x: FloatCodes.of(x, 16),
    **{f"symmetric{bits}": lambda x, bits=bits: TokenCodes.symmetric(x, bits) for bits in (2, 4, 8)},
    **{f"token{bits}": lambda x, bits=bits: TokenCodes.of(x, bits, x.shape[-1]) for bits in (2, 4, 8)},
    **{f"grouped{bits}": lambda x, bits=bits: TokenCodes.of(x, bits, x.shape[-1] // 2) for bits in (2, 4, 8)},
    **{f"channel{bits}": lambda x, bits=bits: ChannelCodes.of(x, bits, 16) for bits in (2, 4, 8)},
    **{f"uneven{bits}": lambda x, bits=bits: ChannelCodes.of(x, bits, 10) for bits in (2, 4, 8)},
    **{f"levels{bits}": lambda x, bits=bits: GaussianCodes.of(x, bits, keep_norm=True) for bits in (2, 4, 8)},
    **{f"grid{bits}": lambda x, bits=bits: GridCodes.of(x, bits, keep_norm=True) for bits in (2, 4)},
    "mxfp4": lambda x: MxCodes.of(x, "e2m1", 32),
    "mxfp8": lambda x: MxCodes.of(x, "e4m3", 32),
    "mxfp8_5": lambda x: MxCodes.of(x, "e5m2", 32),
    "nvfp4": lambda x: NvCodes.of(x, 16, 10),
}
# Over the dequantised states: 8 bits and floats 1e-3, 4 bits and fewer 2e-3; the query itself is float32 here.
BARS = {"whole": 1e-6, "whole16": 1e-3}


def bar(*names: str) -> float:
    return max(BARS.get(name, 2e-3 if name[-1] in "24" else 1e-3) for name in names)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(
    query: Tensor,
    keys: Coded,
    values: Coded,
    allowed: float,
    *,
    owner: list[int] | None = None,
    visible: Tensor | None = None,
    log_weight: Tensor | None = None,
    splits: int = 2,
) -> None:
    from kvtailor.ops.attention.triton.attend import attend_coded, suits

    scaling = query.shape[-1] ** -0.5
    decoded = keys.decode().float(), values.decode().float()
    wanted, lse = exactly(query, *decoded, scaling, owner, visible, log_weight)
    there = [type(side)(**{**side.numbers(), **moved(side.tensors())}) for side in (keys, values)]
    reason = suits(query.to(DEVICE), *there)
    assert reason is None or (DEVICE == "cpu" and reason == "Triton's kernels run on a CUDA device, found cpu")
    found, found_lse = attend_coded(
        AttentionInputs(
            query.to(DEVICE),
            *there,
            scaling=scaling,
            owner=None if owner is None else torch.tensor(owner, device=DEVICE),
            visible=None if visible is None else visible.to(DEVICE),
            log_weight=None if log_weight is None else log_weight.to(DEVICE),
        ),
        splits=splits,
    )
    assert found.dtype == found_lse.dtype == torch.float32
    assert error(found, wanted) < allowed
    some = lse > -torch.inf
    assert torch.equal(found_lse.cpu() > -torch.inf, some)
    assert (found_lse.cpu()[some] - lse[some]).abs().max() < 3 * allowed
    assert not found.cpu()[~some].any()


def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("keys", "values", "head"),
    [
        ("whole", "whole", 80),
        ("whole16", "whole16", 24),
        ("symmetric8", "symmetric8", 80),
        ("token4", "token4", 24),
        ("channel4", "token4", 64),
        ("channel2", "grouped2", 24),
        ("uneven4", "grouped4", 80),
        ("floats", "floats", 24),
        ("token2", "channel8", 24),
        ("levels4", "levels4", 24),
        ("levels2", "grid2", 80),
        ("grid4", "grid4", 33),
        ("grid2", "levels8", 24),
        ("mxfp4", "mxfp4", 80),
        ("nvfp4", "nvfp4", 24),
        ("mxfp8", "mxfp8_5", 33),
    ],
)
def test_equals_attention_over_what_the_bytes_say(keys: str, values: str, head: int) -> None:
    query, k, v = random(3, 2, 1, head, seed=1), random(3, 63, head, seed=2), random(3, 63, head, seed=3)
    check(query, ENCODINGS[keys](k), ENCODINGS[values](v), bar(keys, values))


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("head", [32, 96])
def test_steps_that_are_0_or_negative(format: str, head: int) -> None:
    """llama.cpp's blocks: of 32 channels a token has a single step, by which nothing may be divided."""
    query, k, v = random(2, 2, 1, head, seed=1), random(2, 40, head, seed=2), random(2, 40, head, seed=3)
    v[0, 3], v[1, 7] = 0.0, 2.0
    check(query, GgmlCodes.of(k, format), GgmlCodes.of(v, format), bar(format))


@pytest.mark.parametrize("uneven", [pytest.param(False, marks=pytest.mark.long), True])
def test_several_parts_have_one_softmax(uneven: bool) -> None:
    """Codes, plain states and another number of splits for each; with lanes of several owners, an owner has none."""
    from kvtailor.ops.attention.triton.attend import LanesRead, attend_parts

    query = random(3, 2, 1, 24, seed=1)
    owners = [[0, 0, 2, 2], None, [0, 1]] if uneven else [None, None, None]
    wanted, parts = [], []
    for i, (owner, name, slots) in enumerate(zip(owners, ("channel4", "whole", "token2"), (63, 9, 20), strict=True)):
        lanes = 3 if owner is None else len(owner)
        sides = [ENCODINGS[name](random(lanes, slots, 24, seed=10 * i + j)) for j in range(2)]
        weight = random(lanes, slots, seed=7) if i == 1 else None
        wanted.append(exactly(query, *(side.decode().float() for side in sides), 0.2, owner, None, weight))
        there = [type(side)(**{**side.numbers(), **moved(side.tensors())}) for side in sides]
        held = None if owner is None else torch.tensor(owner, device=DEVICE)
        weight = None if weight is None else weight.to(DEVICE)
        inputs = AttentionInputs(query.to(DEVICE), *there, scaling=0.2, owner=held, log_weight=weight)
        parts.append(LanesRead(inputs=inputs, splits=i + 1))
    lses = torch.stack([lse for _, lse in wanted])
    out = ((lses - lses.logsumexp(0)).exp()[..., None] * torch.stack([each for each, _ in wanted])).sum(0)
    for _ in range(2):
        found, found_lse = attend_parts(parts)
        assert error(found, out) < 2e-3
        assert (found_lse.cpu() - lses.logsumexp(0)).abs().max() < 6e-3
    # The same owners with other numbers of programs are not those that were kept.
    shorter = [replace(part, splits=2) for part in parts]
    assert error(attend_parts(shorter)[0], out) < 2e-3
    assert error(attend_parts(shorter[::-1])[0], out) < 2e-3


@pytest.mark.long
@pytest.mark.parametrize(("keys", "values"), list(itertools.product(ENCODINGS, repeat=2)))
def test_equals_it_for_every_pair_of_encodings(keys: str, values: str) -> None:
    head = (24, 64, 80, 128)[(len(keys) + len(values)) % 4]
    query, k, v = random(1, 3, 2, head, seed=1), random(1, 63, head, seed=2), random(1, 63, head - 8, seed=3)
    check(query, ENCODINGS[keys](k), ENCODINGS[values](v), bar(keys, values), splits=3)


@pytest.mark.parametrize("name", ["whole", "channel4"])
def test_lanes_of_several_owners_masks_and_weights(name: str) -> None:
    owner = [0, 0, 1, 3, 3, 3, 4]
    query, k, v = random(5, 3, 2, 24, seed=4), random(7, 20, 24, seed=5), random(7, 20, 24, seed=6)
    weight, generator = random(7, 20, seed=7), torch.Generator().manual_seed(8)
    visible = torch.rand((7, 2, 20), generator=generator) > 0.3
    visible[2] = False
    visible[6, 1] = False
    other = "token4" if name == "channel4" else name
    check(
        query,
        ENCODINGS[name](k),
        ENCODINGS[other](v),
        bar(name),
        owner=owner,
        visible=visible,
        log_weight=weight,
    )


def test_one_mask_for_all_lanes() -> None:
    query, k, v = random(2, 1, 2, 24, seed=4), random(2, 20, 24, seed=5), random(2, 20, 24, seed=6)
    visible = (torch.arange(20) % 3 > 0)[None, None]
    check(query, Whole(states=k), Whole(states=v), 1e-6, visible=visible, splits=1)
    check(query, Whole(states=k), Whole(states=v), 1e-6, visible=visible[0, 0].expand(2, 1, 20), splits=1)


@pytest.mark.parametrize("name", ["channel4", "floats", "nvfp4"])
def test_tokens_that_have_moved(name: str) -> None:
    generator = torch.Generator().manual_seed(9)
    lane, slot = torch.randint(0, 2, (2, 21), generator=generator), torch.randint(0, 40, (2, 21), generator=generator)
    query = random(2, 2, 1, 24, seed=10)
    keys, values = (ENCODINGS[name](random(2, 40, 24, seed=seed)).regather(lane, slot) for seed in (11, 12))
    check(query, keys, values, bar(name), splits=1)


def test_large_and_small_steps_neither_overflow_nor_vanish() -> None:
    query, k, v = random(1, 2, 1, 24, seed=13), random(1, 32, 24, seed=14), random(1, 32, 24, seed=15)
    k = k * torch.logspace(-3, 1, 24)
    v = v * torch.logspace(-5, 3, 32)[:, None]
    check(query, ENCODINGS["channel8"](k), ENCODINGS["token8"](v), 2e-3)


@pytest.mark.parametrize("name", ["levels4", "grid4", "mxfp4", "nvfp4"])
def test_values_of_zeros_count_and_add_nothing(name: str) -> None:
    """Their scale is 0 where codes are levels, none of which is; and scales of very different sizes stand together."""
    query, k, v = random(1, 2, 1, 32, seed=13), random(1, 32, 32, seed=14), random(1, 32, 32, seed=15)
    k, v = k * torch.logspace(-3, 0, 32)[:, None], v * torch.logspace(-5, 2, 32)[:, None]
    k[:, 5], v[:, 3::4] = 0, 0
    check(query, ENCODINGS[name](k), ENCODINGS[name](v), 2e-3)


def test_slots_past_the_length_are_not_read() -> None:
    from kvtailor.ops.attention.triton.attend import attend_coded

    query, k, v = random(3, 2, 1, 24, seed=16), random(3, 40, 24, seed=17), random(3, 40, 24, seed=18)
    lengths = [40, 7, 0]
    for lane, length in enumerate(lengths):
        k[lane, length:] = torch.nan
        v[lane, length:] = torch.nan
    visible = torch.arange(40)[None, None] < torch.tensor(lengths)[:, None, None]
    wanted, lse = exactly(query, k, v, 0.3, None, visible)
    found, found_lse = attend_coded(
        AttentionInputs(
            query.to(DEVICE),
            Whole(states=k.to(DEVICE)),
            Whole(states=v.to(DEVICE)),
            scaling=0.3,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        ),
        splits=3,
    )
    assert error(found, wanted) < 1e-6
    assert torch.equal(found_lse.cpu() > -torch.inf, lse > -torch.inf)


def test_says_what_it_cannot_read() -> None:
    from kvtailor.ops.attention.triton.attend import suits

    query, side = torch.zeros((2, 5, 13, 24), device=DEVICE), Whole(states=torch.zeros((2, 8, 24), device=DEVICE))
    assert suits(query, side, side) == (
        "at most 32 query rows for each kv head are read at once, found 5 heads x 13 tokens"
    )
    odd = TokenCodes.of(torch.randn(2, 8, 24), 3, 24)
    assert suits(query[:, :, :1], odd, side) == "keys: codes of 2, 4 or 8 bits are read, found 3"
    for bits, size, words in ((3, 24, "points of 2 or 4 bits"), (2, 26, "two pairs fill each byte, found 13 pairs")):
        grid = GridCodes.of(torch.randn(2, 8, size), bits, keep_norm=True)
        assert words in str(suits(query[:, :, :1], grid, side))
    assert "found 3" in str(suits(query[:, :, :1], side, GaussianCodes.of(torch.randn(2, 8, 24), 3, keep_norm=True)))
    apart = Whole(states=torch.zeros((2, 24, 8)).transpose(1, 2))
    assert "side by side" in str(suits(query[:, :, :1], side, apart))
    meta = torch.zeros((2, 5, 1, 24), device="meta")
    assert "run on a CUDA device, found meta" in str(suits(meta, side, side))
