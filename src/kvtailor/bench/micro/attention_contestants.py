"""What the benches of kernels share: shapes, sides, when an answer is right, and what a user has instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtailor.hf.run.stock import layer_makers
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.segments.coded import Coded, Whole

__all__ = [
    "APART",
    "GROUP",
    "HEADS",
    "RAGGED_PAGE",
    "SCALE",
    "SIDES",
    "SIZE",
    "Attend",
    "Half",
    "coded",
    "exact_side",
    "is_right",
    "ragged_owners",
    "stock_steps",
    "torch_attention",
]

SIZE, SCALE, GROUP = 128, 128**-0.5, 64
# Title, kv heads, query heads of each.
HEADS = (("grouped heads, 32 on 8", 8, 4), ("single heads, 32 on 32", 32, 1))
# Layers are rotated over until so many bytes of bfloat16 lie between two visits: several times any last-level cache.
APART = 1 << 28
RAGGED_PAGE = 256
# Relative error that is right: bfloat16 sums, and a rounded probability where torch takes one.
_RIGHT = 2e-2
# Attention over layer i, and keys and values (lanes, tokens, d) of each layer.
Attend = Callable[[int], Tensor]
Half = Sequence[tuple[Tensor, Tensor]]


def _whole(states: Tensor) -> Coded:
    return Whole(states=states)


SIDES: dict[str, tuple[Callable[[Tensor], Coded], Callable[[Tensor], Coded]]] = {
    "bfloat16": (_whole, _whole),
    **{f"int{bits}": (partial(TokenCodes.symmetric, bits=bits),) * 2 for bits in (8, 4)},
    **{
        f"kivi {bits} bits": (
            partial(ChannelCodes.of, bits=bits, group=GROUP),
            partial(TokenCodes.of, bits=bits, group=GROUP),
        )
        for bits in (4, 2)
    },
}


def coded(name: str, half: Half) -> list[tuple[Coded, Coded]]:
    """The two sides of each layer, encoded as `SIDES` names it."""
    of_keys, of_values = SIDES[name]
    return [(of_keys(keys), of_values(values)) for keys, values in half]


def exact_side(side: Coded) -> Tensor:
    """What a side stands for, without the rounding to 16 bits that decoding it ends with."""
    wide = {name: tensor.double() for name, tensor in side.tensors().items() if tensor.is_floating_point()}
    return replace(side, **wide).decode()


def is_right(name: str, query: Tensor, found: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether an answer is attention over keys and values (lanes, tokens, d), by float64; prints how far it is off.

    Args:
        name: whose answer it is.
        query: (lanes, g, t, d).
        found: the answer, (lanes, g, t, dv) or so many numbers in another shape.
    """
    out, _, _ = reference(query.double().flatten(0, 1)[None], keys.double()[None], values.double()[None], None, SCALE)
    error = float((found.double().reshape(out.shape) - out).norm() / out.norm())
    print(f"  {name:34s} relative error {error:.1e}{'' if error <= _RIGHT else '  RED: not timed'}")
    return error <= _RIGHT


def torch_attention(query: Tensor, half: Half, *, fold: bool) -> Attend:
    """torch's fused attention: as transformers calls it, or with the heads of a group folded into query rows."""
    heads, group, new, size = query.shape
    asked = query.to(half[0][0].dtype)

    def attend(layer: int) -> Tensor:
        keys, values = (each[None] for each in half[layer])
        if fold:
            return scaled_dot_product_attention(asked.view(1, heads, group * new, size), keys, values, scale=SCALE)
        rows = asked.view(1, heads * group, new, size)
        return scaled_dot_product_attention(rows, keys, values, scale=SCALE, enable_gqa=group > 1)

    return attend


def stock_steps(query: Tensor, layers: int, states: Callable[[int], tuple[Tensor, Tensor]]) -> list[tuple[str, Attend]]:
    """Steps of transformers' own caches; those whose library is missing are left out, and named.

    Args:
        query: (lanes, g, 1, d).
        states: of a layer, keys and values (1, lanes, tokens, d) that its cache is filled with.
    """
    made: list[tuple[str, Attend]] = []
    for name, make in layer_makers(bits=4, group=GROUP, tail=128).items():
        try:
            caches = [make() for _ in range(layers)]
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
            continue
        held = [cache.update(*states(layer)) for layer, cache in enumerate(caches)]
        made.append((f"{name} + sdpa", _stock_step(query.to(held[0][0].dtype), caches)))
    return made


def _stock_step(query: Tensor, caches: Sequence[Any]) -> Attend:
    """One decoded token through a cache of transformers: it takes the new token, and attention reads what it gives."""
    heads, group, _, size = query.shape
    rows, new = query.view(1, heads * group, 1, size), query.new_zeros((1, heads, 1, size))

    def attend(layer: int) -> Tensor:
        keys, values = caches[layer].update(new, new)
        return scaled_dot_product_attention(rows, keys, values, scale=SCALE, enable_gqa=group > 1)

    return attend


def ragged_owners(heads: int, tokens: int) -> list[tuple[str, Tensor]]:
    """The head (m,) of each page of `RAGGED_PAGE` slots, as many pages in all: uniform heads, and ragged ones.

    Those hold from a quarter to four times the mean.
    """
    pages = max(heads, heads * tokens // RAGGED_PAGE)
    shares = 4.0 ** torch.linspace(-1, 1, heads)
    each = (shares / shares.sum() * pages).long().clamp_min(1)
    each[-1] += pages - int(each.sum())
    counts = (("uniform", torch.full((heads,), pages // heads)), ("ragged", each))
    return [(name, torch.repeat_interleave(torch.arange(heads), count)) for name, count in counts]
