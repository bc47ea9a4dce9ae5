"""Chunks of LMCache in the codec of a plan: the numbers that the codec gives, in as many bytes as are told before."""

from __future__ import annotations

import abc
import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor import lmcache_serde
from kvtailor.encode.contract import CodecContext
from kvtailor.errors import ArgumentError, FileError, KvtailorError
from kvtailor.lmcache_serde import Deserializer, Serializer
from kvtailor.plan import Plan
from kvtailor.types import Layout
from tests.support.segments_of import states

LAYERS, TOKENS, HEADS, SIZE = 3, 70, 2, 32
PLANS = (
    "fp8",
    "kivi4",
    "vector(bits=4)",
    "hadamard(of=gaussian(bits=3), signs=0)",
    "by_layer(of=[kivi(bits=4), kivi, plain], layers=[0, 1, 2])",
    "sides(keys=fp8, values=vector(bits=4, symmetric=false))",
    "ggml(type=q4_0)",
    "nuq",
    "nvfp4",
)


def chunk_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return states((2 * LAYERS, TOKENS, HEADS * SIZE), seed).view(2, LAYERS, TOKENS, HEADS * SIZE).to(dtype)


def layout_of(chunk: Tensor) -> SimpleNamespace:
    return SimpleNamespace(shapes=[chunk.shape], dtypes=[chunk.dtype])


def through(plan: str, chunk: Tensor, *, spare: int = 0) -> tuple[Tensor, int]:
    serializer = Serializer(plan, SIZE)
    size = serializer.estimate_serialized_size(layout_of(chunk))
    buffer = torch.full((size + spare,), 7, dtype=torch.uint8)
    written = serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=buffer), None)
    assert written == size
    back = torch.empty_like(chunk)
    Deserializer(plan, SIZE).deserialize(SimpleNamespace(tensor=buffer), SimpleNamespace(tensor=back), None)
    return back, size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_a_chunk_comes_back_as_the_codec_gives_it_in_the_bytes_that_were_told(plan: str, dtype: torch.dtype) -> None:
    chunk = chunk_of(dtype)
    back, size = through(plan, chunk, spare=33)
    codec = Plan.parse(plan).encode
    for layer in range(LAYERS):
        own = codec.for_layer(CodecContext(layer=layer, layers=LAYERS, heads=HEADS))
        sides = [side.view(TOKENS, HEADS, SIZE).transpose(0, 1).contiguous() for side in chunk[:, layer]]
        segment = own.encode(Layout(rows=1, heads=HEADS, size=TOKENS, start=0), *sides)
        for side, expected in enumerate(segment.decode()):
            assert torch.equal(back[side, layer], expected.transpose(0, 1).flatten(1)), (layer, side)
    assert size < chunk.numel() * 2


def test_bytes_of_a_chunk_are_those_of_its_codes_and_a_head() -> None:
    chunk = chunk_of()
    _, size = through("vector(bits=4)", chunk)
    codes = 2 * LAYERS * TOKENS * HEADS * (SIZE // 2 + 2)
    assert codes < size < codes + 1200


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("snapkv + kivi4 @ tokens=64", "drops tokens"),
        ("full", "encodes nothing"),
        ("minicache", "beside a chunk"),
        ("unrotated(of=nuq)", "beside a chunk"),
        ("lowrank", "names no calibration file"),
    ],
)
def test_a_plan_that_chunks_cannot_be_stored_under_is_refused(plan: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        Serializer(plan, SIZE)


def test_shapes_that_are_no_chunk_and_buffers_that_are_too_small_are_refused() -> None:
    chunk = chunk_of()
    serializer = Serializer("fp8", SIZE)
    for wrong in (chunk[:1], chunk[0], chunk[..., :40]):
        with pytest.raises(ArgumentError, match=r"expected \(2, layers, tokens, heads \* 32\)"):
            serializer.estimate_serialized_size(layout_of(wrong))
    with pytest.raises(ArgumentError, match="2 groups"):
        serializer.estimate_serialized_size(SimpleNamespace(shapes=[chunk.shape] * 2, dtypes=[chunk.dtype] * 2))
    with pytest.raises(ArgumentError, match="into a buffer of 9"):
        serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=torch.zeros(9).byte()), None)
    with pytest.raises(ArgumentError, match="no tensor"):
        serializer.serialize(SimpleNamespace(tensor=None), SimpleNamespace(tensor=chunk), None)
    with pytest.raises(ArgumentError, match="it has codecs for 3 layers; the plan compresses 2"):
        Serializer(PLANS[4], SIZE).estimate_serialized_size(layout_of(chunk[:, :2]))


def test_bytes_of_another_plan_or_damaged_ones_are_refused() -> None:
    chunk = chunk_of()
    serializer = Serializer("kivi4", SIZE)
    buffer = torch.zeros(serializer.estimate_serialized_size(layout_of(chunk)), dtype=torch.uint8)
    serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=buffer), None)
    place = SimpleNamespace(tensor=torch.empty_like(chunk))
    with pytest.raises(FileError, match="not under this plan"):
        Deserializer("fp8", SIZE).deserialize(SimpleNamespace(tensor=buffer), place, None)
    for end in (10, 40, 400, len(buffer) - 200):
        with pytest.raises(FileError):
            Deserializer("kivi4", SIZE).deserialize(SimpleNamespace(tensor=buffer[:end]), place, None)
    with pytest.raises(FileError, match="not written by kvtailor"):
        Deserializer("kivi4", SIZE).deserialize(SimpleNamespace(tensor=buffer.flip(0)), place, None)
    with pytest.raises(KvtailorError, match="asked for one of"):
        other = SimpleNamespace(tensor=chunk[:, :2].clone())
        Deserializer("kivi4", SIZE).deserialize(SimpleNamespace(tensor=buffer), other, None)


@pytest.mark.parametrize("plan", ["kivi4", "fp8"])
def test_any_flipped_bit_of_a_chunk_is_found(plan: str) -> None:
    chunk = chunk_of()[:, :1, :20].contiguous()
    serializer = Serializer(plan, SIZE)
    buffer = torch.zeros(serializer.estimate_serialized_size(layout_of(chunk)), dtype=torch.uint8)
    serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=buffer), None)
    reader, place = Deserializer(plan, SIZE), SimpleNamespace(tensor=torch.empty_like(chunk))
    everywhere = torch.randint(len(buffer), (500,), generator=torch.Generator().manual_seed(0)).tolist()
    for number, at in enumerate((*range(48), *everywhere, len(buffer) - 1)):
        damaged = buffer.clone()
        damaged[at] ^= 1 << number % 8
        with pytest.raises(FileError, match=r"damaged|cut|not written by kvtailor"):
            reader.deserialize(SimpleNamespace(tensor=damaged), place, None)
    reader.deserialize(SimpleNamespace(tensor=buffer), place, None)


@pytest.mark.parametrize("size", [0, -32, 64.5, 64.0, True, "64", None])
@pytest.mark.parametrize("side", [Serializer, Deserializer])
def test_a_head_without_channels_is_refused(side: type, size: int) -> None:
    with pytest.raises(ArgumentError, match=f"head_size={size!r}: give the channels"):
        side("kivi4", size)


def test_chunks_and_places_of_integers_are_refused() -> None:
    chunk = chunk_of()
    integers = torch.zeros_like(chunk, dtype=torch.int8)
    serializer = Serializer("kivi4", SIZE)
    buffer = torch.zeros(serializer.estimate_serialized_size(layout_of(chunk)), dtype=torch.uint8)
    serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=buffer), None)
    with pytest.raises(ArgumentError, match=r"a chunk of torch\.int8"):
        serializer.estimate_serialized_size(layout_of(integers))
    with pytest.raises(ArgumentError, match=r"a chunk of torch\.int8"):
        serializer.serialize(SimpleNamespace(tensor=integers), SimpleNamespace(tensor=buffer), None)
    with pytest.raises(ArgumentError, match=r"a chunk of torch\.int8"):
        Deserializer("kivi4", SIZE).deserialize(SimpleNamespace(tensor=buffer), SimpleNamespace(tensor=integers), None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64], ids=str)
def test_chunks_of_other_floats_are_refused(dtype: torch.dtype) -> None:
    chunk = chunk_of().to(dtype)
    with pytest.raises(ArgumentError, match="floats of 16 or 32 bits"):
        Serializer("kivi4", SIZE).estimate_serialized_size(layout_of(chunk))


@pytest.mark.parametrize("empty", [1, 2, 3])
def test_chunks_without_numbers_are_refused(empty: int) -> None:
    sizes = [0 if place == empty else size for place, size in enumerate((2, LAYERS, TOKENS, HEADS * SIZE))]
    with pytest.raises(ArgumentError, match="which has no numbers"):
        Serializer("kivi4", SIZE).estimate_serialized_size(layout_of(torch.empty(sizes, dtype=torch.bfloat16)))


def test_a_chunk_is_read_only_as_it_was_stored() -> None:
    chunk, serializer = chunk_of(), Serializer("kivi4", SIZE)
    buffer = torch.zeros(serializer.estimate_serialized_size(layout_of(chunk)), dtype=torch.uint8)
    serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=buffer), None)
    for size, place, why in (
        (SIZE, torch.empty_like(chunk, dtype=torch.float16), r"in torch\.bfloat16 is stored, asked for one"),
        (2 * SIZE, torch.empty_like(chunk), f"stored with heads of {SIZE} channels, and head_size is {2 * SIZE}"),
    ):
        with pytest.raises(KvtailorError, match=why):
            Deserializer("kivi4", size).deserialize(SimpleNamespace(tensor=buffer), SimpleNamespace(tensor=place), None)
    apart = torch.zeros(buffer.numel(), 2, 2, dtype=torch.uint8)[..., 0]
    with pytest.raises(ArgumentError, match="do not lie one after another"):
        serializer.serialize(SimpleNamespace(tensor=chunk), SimpleNamespace(tensor=apart), None)


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "scales.safetensors"
    kvtailor.calibrate("demo", "static_fp8", {"text": "word " * 400}, out=made, tokens=64, context=64)
    with pytest.raises(ArgumentError, match="under a plan that does not fit"):
        Serializer(f"static_fp8(file='{made}')", SIZE).estimate_serialized_size(layout_of(chunk_of()))


def lmcache_of_the_same_shape() -> dict[str, ModuleType]:
    """The modules of lmcache that are used, with its abstract methods."""

    class TheirSerializer(abc.ABC):
        @abc.abstractmethod
        def serialize(self, src, dst, key): ...
        @abc.abstractmethod
        def estimate_serialized_size(self, layout_desc): ...

    class TheirDeserializer(abc.ABC):
        @abc.abstractmethod
        def deserialize(self, src, dst, key): ...

    known: dict[str, object] = {}
    names = ("lmcache", "lmcache.v1", "lmcache.v1.distributed", "lmcache.v1.distributed.serde")
    modules = {name: ModuleType(name) for name in (*names, *(f"{names[-1]}.{each}" for each in THEIRS))}
    modules[f"{names[-1]}.base"].__dict__.update(Serializer=TheirSerializer, Deserializer=TheirDeserializer)
    modules[f"{names[-1]}.async_processor"].AsyncSerdeProcessor = lambda *both, max_workers: (*both, max_workers)
    modules[f"{names[-1]}.factory"].register_serde_factory = known.__setitem__
    modules["lmcache"].known = known
    return modules


THEIRS = ("base", "async_processor", "factory")


def test_a_server_that_loads_the_module_knows_the_serde(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = lmcache_of_the_same_shape()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert lmcache_serde.build_server_modules(object()) == ()
    made = modules["lmcache"].known["kvtailor"]({"plan": "kivi4", "head_size": 32, "max_workers": 2})
    base = modules["lmcache.v1.distributed.serde.base"]
    assert isinstance(made[0], base.Serializer) and isinstance(made[1], base.Deserializer) and made[2] == 2
    whole = {"type": "kvtailor", "plan": "kivi4", "head_size": 32}
    assert modules["lmcache"].known["kvtailor"](whole)[2] == 1
    for wrong, why in (
        ({"head_size": 64.5}, r"head_size=64\.5: give the channels"),
        ({"max_workers": 1.5}, r"max_workers=1\.5: give a number of threads"),
        ({"max_workers": 0}, "max_workers=0: give"),
        ({"plan": 4}, "plan=4: give a plan"),
        ({"max_worker": 2}, "with head_size, max_worker, plan: give plan and head_size"),
    ):
        with pytest.raises(ArgumentError, match=why):
            modules["lmcache"].known["kvtailor"]({**whole, **wrong})
    for name in ("plan", "head_size"):
        with pytest.raises(ArgumentError, match="give plan and head_size"):
            modules["lmcache"].known["kvtailor"]({key: value for key, value in whole.items() if key != name})


@pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed, so its source is not"
)
def test_methods_have_the_arguments_of_lmcache_s_own_source() -> None:
    """Read and not imported: lmcache needs more packages than its wheel."""
    folder = Path(importlib.util.find_spec("lmcache").submodule_search_locations[0]) / "v1" / "distributed" / "serde"
    found = {}
    for file in THEIRS:
        for node in ast.walk(ast.parse((folder / f"{file}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name] = {
                    each.name: [argument.arg for argument in each.args.args]
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
            elif isinstance(node, ast.FunctionDef) and node.name == "register_serde_factory":
                found[node.name] = [argument.arg for argument in node.args.args]
    for ours in (Serializer, Deserializer):
        for name, arguments in found[ours.__name__].items():
            assert [*inspect.signature(getattr(ours, name)).parameters] == arguments, name
    assert found["AsyncSerdeProcessor"]["__init__"] == ["self", "serializer", "deserializer", "max_workers"]
    assert found["register_serde_factory"] == ["name", "factory"]
