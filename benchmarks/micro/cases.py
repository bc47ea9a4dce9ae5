"""The shapes that micro benches run on, the sides that are compared, and when an answer is right. One set for all.

Attention has the heads of Llama 3.1 8B (32 query heads on 8 kv heads of 128) or 32 single ones. The model around it is
`random-llama-gqa` (`hf.model.config.RANDOM_SHAPES`): four layers of those heads, untrained. Nothing here says anything
about quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtailor.errors import KvtailorError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.loading import random_model
from kvtailor.hf.run.stock import fill, layer_makers
from kvtailor.ops.attention.cpu.attention import attend_coded
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.attention.lanes import Lanes, joint
from kvtailor.ops.codes.floats import MxCodes, NvCodes
from kvtailor.ops.codes.gaussian import GaussianCodes
from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.codes.sides import ChannelCodes, FloatCodes, TokenCodes
from kvtailor.ops.cpu.library import library, why_none
from kvtailor.ops.dispatch import forced
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.ops.triton_launch import missing

__all__ = [
    "APART",
    "GRID",
    "GROUP",
    "HEADS",
    "LEVELS",
    "MODEL",
    "SCALE",
    "SIDES",
    "SIZE",
    "VOCABULARY",
    "Attend",
    "Half",
    "Kernels",
    "bytes_of",
    "coded",
    "exact_side",
    "fill_at_random",
    "kernels_of",
    "layer_states",
    "layers_apart",
    "model_states",
    "query_of",
    "ragged_owners",
    "random_llama",
    "random_of",
    "states",
    "stock_caches",
    "stock_steps",
    "torch_attention",
    "verdict",
]

MODEL = "random-llama-gqa"
# Few rows, so that the output head, which no cache changes, is next to nothing of a token.
VOCABULARY = 512
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


def _whole(each: Tensor) -> Coded:
    return Whole(states=each)


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
# What the case `levels` reads.
GRID = "grid of 256 points"
LEVELS: dict[str, tuple[Callable[[Tensor], Coded], Callable[[Tensor], Coded]]] = {
    "4-bit levels": (partial(GaussianCodes.of, bits=4, keep_norm=True),) * 2,
    GRID: (partial(GridCodes.of, bits=4, keep_norm=True),) * 2,
    "mxfp4": (partial(MxCodes.of, element="e2m1", block=32),) * 2,
    "mxfp8": (partial(MxCodes.of, element="e4m3", block=32),) * 2,
    "fp8": (partial(FloatCodes.of, group=32),) * 2,
    "nvfp4": (partial(NvCodes.of, block=16, group=32),) * 2,
}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The compiled kernels of one device, and how they are asked.

    Attributes:
        device: where they run.
        variant: which build of them, as JSON has it.
        name: the same for a reader.
        dtype: of plain states.
        query_dtype: of queries: those on a CPU read float32, those of a GPU what the states are.
        blocks: new tokens at once that are compared with a single one.
        attend: `attend_coded` of the device.
        attend_pages: what reads chosen pages where they lie; None: nothing does.
    """

    device: torch.device
    variant: str
    name: str
    dtype: torch.dtype
    query_dtype: torch.dtype
    blocks: tuple[int, ...]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_pages: Callable[..., tuple[Tensor, Tensor]] | None

    @property
    def on_triton(self) -> bool:
        """Whether these are the kernels of GPUs, which may also run in an interpreter on the CPU."""
        return self.attend_pages is not None

    def ours(self, query: Tensor, sides: Sequence[tuple[Coded, Coded]], owner: Tensor | None = None) -> Attend:
        """Our kernel: a query (lanes, g, t, d) over the sides of layer i."""
        return lambda layer: self.attend(AttentionInputs(query, *sides[layer], scaling=SCALE, owner=owner))[0]

    def decoded_first(self, query: Tensor, sides: Sequence[tuple[Coded, Coded]]) -> Attend:
        """What runs without a kernel: the codes are decoded to memory, and then read."""

        def attend(layer: int) -> Tensor:
            keys, values = (side.decode() for side in sides[layer])
            if self.on_triton:
                return torch_attention(query, [(keys, values)], fold=True)(0)
            return joint(query.to(self.dtype), [Lanes(keys=keys, values=values)], SCALE)[0]

        return attend


def kernels_of(device: torch.device) -> Kernels:
    """The kernels of a device; those of GPUs also on a CPU where `using("triton")` asks for them.

    Raises:
        KvtailorError: there are none, and why.
    """
    if device.type == "cuda" or forced() == "triton":
        reason = missing()
        if reason is None:
            from kvtailor.ops.attention.triton import attend

            # Triton's interpreter multiplies bfloat16 wrongly.
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
            # A program holds 32 query rows at most: 4 query heads of 8 tokens.
            return Kernels(
                device=device,
                variant="Triton",
                name=name,
                dtype=dtype,
                query_dtype=dtype,
                blocks=(1, 4, 8),
                attend=attend.attend_coded,
                attend_pages=attend.attend_pages,
            )
    else:
        built = library() if device.type == "cpu" else None
        reason = why_none() if device.type == "cpu" else f"there are no kernels for {device.type}"
        if built is not None:
            return Kernels(
                device=device,
                variant=built.variant,
                name=f"{built.variant}, {torch.get_num_threads()} threads",
                dtype=torch.bfloat16,
                query_dtype=torch.float32,
                blocks=(1, 4, 16),
                attend=attend_coded,
                attend_pages=None,
            )
    raise KvtailorError(f"{reason}, and this bench is about its kernels")


def layers_apart(floor_bytes: int) -> int:
    """How many layers of so many bytes lie `APART` bytes apart; 8 at most, since they all must fit in memory."""
    return max(1, min(8, APART // floor_bytes))


def states(
    device: torch.device, lanes: int, tokens: int, layers: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values (lanes, tokens, d) of each layer."""
    found = []
    for layer in range(layers):
        generator = torch.Generator(device).manual_seed(layer)
        shape = (lanes, tokens, SIZE)
        keys, values = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        found.append((keys, values))
    return found


def query_of(kernels: Kernels, *shape: int) -> Tensor:
    """A random query (*shape, d)."""
    generator = torch.Generator(kernels.device).manual_seed(9)
    return torch.randn((*shape, SIZE), generator=generator, device=kernels.device).to(kernels.query_dtype)


def coded(name: str, half: Half) -> list[tuple[Coded, Coded]]:
    """The two sides of each layer, encoded as `SIDES` or `LEVELS` names it."""
    of_keys, of_values = SIDES[name] if name in SIDES else LEVELS[name]
    return [(of_keys(keys), of_values(values)) for keys, values in half]


def bytes_of(sides: Sequence[tuple[Coded, Coded]]) -> int:
    """Bytes of one layer's tensors, which attention over it must read."""
    return sum(tensor.nbytes for side in sides[0] for tensor in side.tensors().values())


def exact_side(side: Coded) -> Tensor:
    """What a side stands for, without the rounding to 16 bits that decoding it ends with."""
    wide = {name: tensor.double() for name, tensor in side.tensors().items() if tensor.is_floating_point()}
    return replace(side, **wide).decode()


def verdict(name: str, query: Tensor, found: Tensor, keys: Tensor, values: Tensor) -> tuple[bool, str]:
    """Whether an answer is attention over keys and values (lanes, tokens, d), by float64; and how far it is off.

    Args:
        name: of the side.
        query: (lanes, g, t, d).
        found: the answer, (lanes, g, t, dv) or so many numbers in another shape.
    """
    out, _, _ = reference(query.double().flatten(0, 1)[None], keys.double()[None], values.double()[None], None, SCALE)
    error = float((found.double().reshape(out.shape) - out).norm() / out.norm())
    # Not `error > _RIGHT`: a NaN must not pass.
    right = error <= _RIGHT
    return right, f"  {name:34s} relative error {error:.1e}{'' if right else '  RED: not timed'}"


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


def stock_caches() -> int:
    """How many of transformers' own caches `stock_steps` can make here."""
    found = 0
    for make in _stock_makers().values():
        with suppress(ImportError):
            make()
            found += 1
    return found


def _stock_makers() -> dict[str, Callable[[], Any]]:
    return layer_makers(bits=4, group=GROUP, tail=128)


def stock_steps(query: Tensor, half: Half, notes: list[str]) -> list[tuple[str, Attend]]:
    """Steps of transformers' own caches; those whose library is missing are left out, and named in `notes`.

    Args:
        query: (lanes, g, 1, d).
        half: what the cache of each layer is filled with.
        notes: gets a line for each that is left out.
    """
    made: list[tuple[str, Attend]] = []
    for name, make in _stock_makers().items():
        try:
            caches = [make() for _ in half]
        except ImportError as missing_library:
            notes.append(f"  {name} is left out: {str(missing_library).strip().split('. ')[0]}")
            continue
        held = [cache.update(keys[None], values[None]) for cache, (keys, values) in zip(caches, half, strict=True)]
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
    # What rounding left over goes to the last head, so that both kinds have as many pages in all.
    each[-1] += pages - int(each.sum())
    counts = (("uniform", torch.full((heads,), pages // heads)), ("ragged", each))
    return [(name, torch.repeat_interleave(torch.arange(heads), count)) for name, count in counts]


def random_llama(dtype: torch.dtype, device: torch.device) -> Any:
    """The random Llama of the benches that run a whole model; each call gives another one with the same weights."""
    return random_of(MODEL, dtype, device)


def random_of(name: str, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> Any:
    """A random model of `hf.model.config.RANDOM_SHAPES`; each call gives another one with the same weights."""
    return random_model(name, dtype=dtype, device=device, vocab_size=VOCABULARY, layers=layers)


def layer_states(model: Any, rows: int, context: int) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Random keys and values (b, h, n, d) of one layer after the other: all at once they may fill the device."""
    parameter = next(model.parameters())
    generator = torch.Generator(parameter.device).manual_seed(1)
    for layer, shape in enumerate(Geometry.of(model.config).shapes):
        if shape.compressed:
            sizes = [(rows, shape.kv_heads, context, size) for size in (shape.key_size, shape.value_size)]
            keys, values = (
                torch.randn(size, generator=generator, device=parameter.device, dtype=parameter.dtype) for size in sizes
            )
            yield layer, (keys, values)


def fill_at_random(cache: Any, model: Any, rows: int, context: int) -> None:
    """Put `layer_states` into a cache, as `hf.run.stock.fill` does."""
    for layer, states in layer_states(model, rows, context):
        fill(cache, {layer: states})


def model_states(model: Any, context: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Random keys and values (1, h, context, d) for each layer of a model that keeps any, to be put into its cache."""
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    found = {}
    for layer, shape in enumerate(Geometry.of(model.config).shapes):
        if shape.compressed:
            sides = [(1, shape.kv_heads, context, size) for size in (shape.key_size, shape.value_size)]
            keys, values = (torch.randn(side, generator=generator).to(parameter.dtype) for side in sides)
            found[layer] = keys.to(parameter.device), values.to(parameter.device)
    return found
