"""Codecs of kvtailor for the disk and remote tiers of LMCache: a serializer and a deserializer, chosen by a plan.

LMCache stores a chunk of tokens as one tensor (2, layers, tokens, kv heads * head size), keys first, and gives it to
the serde of a tier before it is written there. A server loads this module by its path, which registers the serde:

    --server-module '{"module_path": "kvtailor.lmcache_serde"}'
    {"type": "fs", "base_path": "/cache", "serde": {"type": "kvtailor", "plan": "kivi4", "head_size": 64}}

The engine's attention still reads its own pages: what is smaller is what is stored and moved. lmcache is imported when
the serde is registered, and not before. Names and signatures are those of lmcache 0.5.6.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from kvtailor.calibration_file import calibrated, how_to
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.errors import ArgumentError, FileError
from kvtailor.ops.cpu.checksum import crc32
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested
from kvtailor.types import Layout, Segment

__all__ = ["Deserializer", "Serializer", "build_server_modules", "register"]

NAME = "kvtailor"
# Then 8 bytes with the size of the chunk, 4 with that of its head, and 4 with the CRC-32 of both and of what follows.
_MAGIC = b"kvtailor-chunk-2"
_ALIGNED = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class MemoryObject(Protocol):
    """What is used of LMCache's `MemoryObj`."""

    @property
    def tensor(self) -> Tensor | None:
        """The chunk, or the bytes that it is written to."""


class LayoutDescription(Protocol):
    """What is used of LMCache's `MemoryLayoutDesc`."""

    @property
    def shapes(self) -> Sequence[torch.Size]:
        """Of each group of a chunk."""

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """The same."""


class _Chunks:
    """Chunks in the codec of a plan, and back.

    Args:
        plan: one line, or the path of what `Plan.load` reads; it drops no tokens.
        head_size: channels of a kv head.

    Raises:
        ArgumentError: the plan drops tokens, changes nothing, or has a codec that needs what LMCache does not have; or
            the head size is no whole number from 1 on.
    """

    def __init__(self, plan: str, head_size: int):
        _check_count("head_size", head_size, "the channels of a kv head")
        parsed = Plan.named(plan)
        self.plan, self.codec, self.head_size = parsed, parsed.encode, head_size
        why = _why_not(parsed)
        if why is not None:
            raise ArgumentError(f"asked to store chunks of LMCache under the plan {parsed}, {why}")
        tensors: dict[str, Tensor] = {}
        for each in calibrated(with_nested(self.codec)):
            if each.calibration is None:
                raise ArgumentError(
                    f"asked to store chunks of LMCache under the plan {parsed}, which names no calibration file: "
                    f"{how_to(each.calibrates)}"
                )
            tensors |= each.calibration.tensors
        self._calibration = tensors or None

    def packed(self, chunk: Tensor) -> bytes:
        """Return the bytes of a chunk (2, layers, tokens, heads * head size).

        Raises:
            ArgumentError: it has another shape, or numbers that are no floats.
        """
        _check_floats(chunk.dtype)
        heads = self._heads(chunk.shape)
        _, layers, tokens, _ = chunk.shape
        layout = Layout(rows=1, heads=heads, size=tokens, start=0)
        kinds: list[str] = []
        numbers: list[int] = []
        parts: list[bytes] = []
        for layer in range(layers):
            keys, values = (side.unflatten(-1, (heads, -1)).transpose(0, 1).contiguous() for side in chunk[:, layer])
            fields, tensors = self._on(layer, layers, heads).encode(layout, keys, values).state()
            told = [[name, str(each.dtype).removeprefix("torch."), [*each.shape]] for name, each in tensors.items()]
            kind = json.dumps({"fields": fields, "tensors": told})
            numbers.append(kinds.index(kind) if kind in kinds else len(kinds))
            kinds += [kind] if kind not in kinds else []
            parts += [
                _padded(each.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
                for each in tensors.values()
            ]
        dtype = str(chunk.dtype).removeprefix("torch.")
        head = {"codec": str(Plan(encode=self.codec)), "dtype": dtype, "shape": [*chunk.shape], "layers": numbers}
        text = json.dumps({**head, "kinds": [json.loads(kind) for kind in kinds]}).encode()
        rest = b"".join([_padded(text), *parts])
        sizes = (len(_MAGIC) + _ALIGNED + len(rest)).to_bytes(8, "little") + len(text).to_bytes(4, "little")
        return b"".join([_MAGIC, sizes, _checksum(sizes, _bytes_of(rest)).to_bytes(4, "little"), rest])

    def unpacked(self, data: Tensor) -> Tensor:
        """Return the chunk of bytes (n,) uint8 that `packed` made; what stands behind them is not read.

        Raises:
            FileError: they are none of this plan's, or damaged.
        """
        start = len(_MAGIC) + _ALIGNED
        front = data[:start].numpy().tobytes()
        if not front.startswith(_MAGIC):
            raise FileError(
                "a chunk of LMCache was not written by kvtailor, or by an older one: take it away, or give its serde"
            )
        sizes = front[len(_MAGIC) : -4]
        total, size = int.from_bytes(sizes[:8], "little"), int.from_bytes(sizes[8:], "little")
        if len(front) < start or total > data.numel():
            raise FileError(f"a chunk of LMCache is cut: {data.numel()} bytes are there of {total}; take it away")
        data = data[:total]
        if _checksum(sizes, data[start:]) != int.from_bytes(front[-4:], "little"):
            raise FileError("a chunk of LMCache is damaged (its checksum is of other bytes): take it away")
        try:
            head = json.loads(data[start : start + size].numpy().tobytes())
            if head["codec"] != str(Plan(encode=self.codec)):
                raise FileError(f"a chunk of LMCache was stored under {head['codec']}, and not under this plan")
            return self._restored(head, data, start + size + -size % _ALIGNED)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
            raise FileError(f"a chunk of LMCache is damaged ({error}): take it away") from error

    def _restored(self, head: Mapping[str, Any], data: Tensor, at: int) -> Tensor:
        shape = torch.Size(head["shape"])
        heads, dtype = self._heads(shape), getattr(torch, head["dtype"])
        layout = Layout(rows=1, heads=heads, size=shape[2], start=0)
        chunk = torch.empty(shape, dtype=dtype)
        for layer, number in enumerate(head["layers"]):
            kind, tensors = head["kinds"][number], {}
            for name, kept, sizes in kind["tensors"]:
                one = getattr(torch, kept)
                end = at + prod(sizes) * one.itemsize
                tensors[name] = data[at:end].clone().view(one).view(sizes)
                at = end + -end % _ALIGNED
            segment: Segment = self._on(layer, shape[1], heads).restore(layout, kind["fields"], tensors)
            for side, states in enumerate(segment.decode()):
                if states.shape != (heads, shape[2], self.head_size):
                    raise FileError(
                        f"a chunk of LMCache was stored with heads of {states.shape[-1]} channels, and head_size is "
                        f"{self.head_size}: give the serde that it was stored with, or take it away"
                    )
                chunk[side, layer] = states.transpose(0, 1).flatten(1)
        return chunk

    def _on(self, layer: int, layers: int, heads: int) -> Codec:
        return self.codec.for_layer(
            CodecContext(layer=layer, layers=layers, heads=heads, calibration=self._calibration)
        )

    def _heads(self, shape: torch.Size) -> int:
        if len(shape) != 4 or shape[0] != 2 or shape[3] % self.head_size:
            raise ArgumentError(
                f"asked to store a chunk of {tuple(shape)}: expected (2, layers, tokens, heads * {self.head_size}), as "
                "LMCache has it for attention with keys and values; head_size is an argument of the serde"
            )
        if 0 in shape:
            raise ArgumentError(f"asked to store a chunk of {tuple(shape)}, which has no numbers: leave it out")
        heads = int(shape[3] // self.head_size)
        if faults := self.plan.misfits(layers=shape[1], heads=heads, size=self.head_size):
            raise ArgumentError(f"asked to store a chunk of {tuple(shape)} under a plan that does not fit: {faults[0]}")
        return heads


class Serializer:
    """LMCache's `Serializer`: chunks to bytes. Arguments as of `_Chunks`."""

    def __init__(self, plan: str, head_size: int):
        self._chunks = _Chunks(plan, head_size)
        self._sizes = cache(self._size)

    def serialize(self, src: MemoryObject, dst: MemoryObject, key: object) -> int:
        """Write a chunk into a buffer; return how many bytes it took. The key is not looked at.

        Raises:
            ArgumentError: one of them has no tensor, the chunk has no floats, or the buffer is too small.
        """
        chunk, buffer = _tensor_of(src), _tensor_of(dst)
        if not buffer.is_contiguous():
            raise ArgumentError("asked to write a chunk into a buffer whose bytes do not lie one after another")
        data = self._chunks.packed(chunk)
        room = buffer.flatten().view(torch.uint8)
        if room.numel() < len(data):
            raise ArgumentError(f"asked to write {len(data)} bytes of a chunk into a buffer of {room.numel()}")
        room[: len(data)].copy_(_bytes_of(data))
        return len(data)

    def estimate_serialized_size(self, layout_desc: LayoutDescription) -> int:
        """Return the bytes of a chunk of this layout, which do not depend on its numbers.

        Raises:
            ArgumentError: it is of several groups, of another shape, or of numbers that are no floats.
        """
        if len(layout_desc.shapes) != 1:
            raise ArgumentError(f"asked to store a chunk of {len(layout_desc.shapes)} groups, and one is known how to")
        return self._sizes(torch.Size(layout_desc.shapes[0]), layout_desc.dtypes[0])

    def _size(self, shape: torch.Size, dtype: torch.dtype) -> int:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return len(self._chunks.packed(drawn.to(dtype)))


class Deserializer:
    """LMCache's `Deserializer`: bytes to chunks. Arguments as of `_Chunks`."""

    def __init__(self, plan: str, head_size: int):
        self._chunks = _Chunks(plan, head_size)

    def deserialize(self, src: MemoryObject, dst: MemoryObject, key: object) -> None:
        """Write the chunk that bytes hold into its place. The key is not looked at.

        Raises:
            ArgumentError: one of them has no tensor, or the place is of another shape or of no floats.
            FileError: the bytes are none of this plan's, or damaged.
        """
        data, place = _tensor_of(src).contiguous().flatten().view(torch.uint8).cpu(), _tensor_of(dst)
        _check_floats(place.dtype)
        chunk = self._chunks.unpacked(data)
        if (chunk.shape, chunk.dtype) != (place.shape, place.dtype):
            raise ArgumentError(
                f"a chunk of {tuple(chunk.shape)} in {chunk.dtype} is stored, asked for one of {tuple(place.shape)} in "
                f"{place.dtype}"
            )
        place.copy_(chunk)


def register() -> None:
    """Make LMCache know the serde `kvtailor`, with the arguments `plan`, `head_size` and `max_workers`.

    Raises:
        ImportError: lmcache is not installed.
        ValueError: it is registered already.
    """
    base = import_module("lmcache.v1.distributed.serde.base")
    threads = import_module("lmcache.v1.distributed.serde.async_processor")
    base.Serializer.register(Serializer)
    base.Deserializer.register(Deserializer)

    def made(arguments: Mapping[str, Any]) -> Any:
        given = {name: value for name, value in arguments.items() if name != "type"}
        if not {"plan", "head_size"} <= given.keys() <= {"plan", "head_size", "max_workers"}:
            raise ArgumentError(
                f"asked for the serde {NAME} of LMCache with {', '.join(sorted(given)) or 'nothing'}: give plan and "
                "head_size, and max_workers where more than one thread is to work"
            )
        plan, head_size, workers = given["plan"], given["head_size"], given.get("max_workers", 1)
        if not isinstance(plan, str):
            raise ArgumentError(f"asked for the serde {NAME} of LMCache with plan={plan!r}: give a plan in one line")
        _check_count("max_workers", workers, "a number of threads")
        return threads.AsyncSerdeProcessor(
            Serializer(plan, head_size), Deserializer(plan, head_size), max_workers=workers
        )

    import_module("lmcache.v1.distributed.serde.factory").register_serde_factory(NAME, made)


def build_server_modules(context: object) -> tuple[object, ...]:
    """Register the serde, as LMCache asks of a server module; there is no module beside it."""
    register()
    return ()


def _why_not(plan: Plan) -> str | None:
    """Why chunks cannot be stored under a plan, the rest of a sentence; None where they can."""
    codec = plan.encode
    if plan.evicts:
        return "which drops tokens: a stored chunk has all of its tokens; give a plan with a codec alone"
    if codec.exact:
        return "which encodes nothing: leave the serde out, or give a plan with a codec"
    if codec.across or codec.needs_rotation or codec.needs_offset or codec.needs.window:
        return "whose codec needs layers, positions or queries beside a chunk: give one that codes each token by itself"
    return None


def _check_count(name: str, value: object, what: str) -> None:
    """Refuse all but whole numbers from 1 on; a number with a fraction would be cut in silence."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"asked to store chunks of LMCache with {name}={value!r}: give {what}")


def _check_floats(dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise ArgumentError(
            f"asked to store or read a chunk of {dtype}: the codecs of plans take floats of 16 or 32 bits, so let the "
            "engine keep its cache in bfloat16, float16 or float32, or leave the serde out"
        )


def _checksum(sizes: bytes, rest: Tensor) -> int:
    """Of the bytes that tell sizes, and (n,) uint8 of head and tensors."""
    return crc32(rest, zlib.crc32(sizes))


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED)


def _tensor_of(given: MemoryObject) -> Tensor:
    if given.tensor is None:
        raise ArgumentError("asked to store or read a chunk of LMCache that has no tensor")
    return given.tensor
