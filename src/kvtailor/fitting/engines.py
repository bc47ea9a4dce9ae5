"""The nearest settings of other engines to a plan, where they can express it at all.

`ENGINES` has what each engine documents of its cache types, with the version and the source that were read. Of these
types the nearest is the one whose bits of keys and of values differ least from the plan's; of several, the one whose
codes are of the plan's form. Such a setting is a neighbour of the plan, not the plan: nothing of what fit measured is
true of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.schema import Record
from kvtailor.encode.contract import Codec, CodecContext, TwoSided
from kvtailor.encode.sides import SidesCodec
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.plan import Plan, registry
from kvtailor.plan.arguments import with_nested

__all__ = [
    "ENGINES",
    "CacheType",
    "Engine",
    "EngineSetting",
    "Side",
    "measured_losses",
    "nearest_settings",
    "setting_of",
]

Form = Literal["symmetric", "asymmetric", "floats", "levels"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """How keys, or values, are stored.

    Attributes:
        bits: of a code, without scales; 16 where it is not encoded. A plan's are a mean over its layers.
        forms: integers with a step (symmetric) or with a minimum beside it (asymmetric), small floats, or levels.
    """

    bits: float
    forms: tuple[Form, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CacheType:
    """A way in which an engine stores a cache.

    Attributes:
        option: what chooses it.
        keys, values: its sides.
        neighbour: the plan of ours whose arithmetic is nearest; None where none was looked for.
        limits: what the engine documents of it, the rest of a sentence that begins with "It".
    """

    option: str
    keys: Side
    values: Side
    neighbour: str | None = None
    limits: str = ""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is documented of an engine's cache types.

    Attributes:
        name: as it is written.
        version: whose options were read.
        source: where.
        types: of two that are as near, the first is taken.
        skip: the option that leaves layers whole, which their indices follow; None where it has none.
    """

    name: str
    version: str
    source: str
    types: tuple[CacheType, ...]
    skip: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """What comes nearest in one engine.

    Attributes:
        engine: its name.
        setting: its options; None where it has none that come near.
        lacks: what of the plan it cannot express, and its limits, a sentence; empty where nothing is missing.
        neighbour: the plan of ours whose arithmetic is nearest to the setting's; None where none is.
        version: of the engine whose options were read.
        source: where they were read.
    """

    engine: str
    setting: str | None
    lacks: str
    neighbour: str | None
    version: str
    source: str


def nearest_settings(plan: Plan, layers: int | None = None) -> tuple[EngineSetting, ...]:
    """Return the nearest setting of each engine for a plan.

    Args:
        plan: of any kind.
        layers: how many the plan compresses; None: as many as its codec names.
    """
    stored = _stored(plan, layers)
    return tuple(_nearest(plan, stored, engine) for engine in ENGINES)


def setting_of(plan: Plan, engine: str, layers: int | None = None) -> EngineSetting:
    """Return the nearest setting of one engine, whose name may be in any case.

    Raises:
        UnknownName: there is no such engine here.
    """
    settings = {each.engine.lower(): each for each in nearest_settings(plan, layers)}
    if engine.lower() not in settings:
        raise UnknownName("engine", engine, settings)
    return settings[engine.lower()]


def measured_losses(plan: Plan, setting: EngineSetting, records: Sequence[Record]) -> dict[str, Estimate | None]:
    """Return the nats a token that the plan, and the codec of ours nearest to the setting, lose against 'full'.

    As "plan" and "neighbour", with a 95 % interval over windows of one text; None where the records have no such pair,
    or the setting has no neighbour.

    Raises:
        KvtailorError: the records are of several models.
    """
    models = sorted({each.model for each in records})
    if len(models) > 1:
        raise KvtailorError(f"asked for losses on one model, found records of {', '.join(models)}: give those of one")
    near = setting.neighbour
    return {"plan": _loss(plan, records), "neighbour": None if near is None else _loss(Plan.parse(near), records)}


def _loss(plan: Plan, records: Sequence[Record]) -> Estimate | None:
    scored = [each for each in records if each.task == "perplexity" and each.error is None and each.values.get("nll")]
    for ours in (each for each in scored if each.plan == str(plan)):
        for full in (each for each in scored if each.is_full):
            if (ours.text_hash, ours.point, ours.dtype) == (full.text_hash, full.point, full.dtype):
                documents = ours.values.get("document", ())
                return mean_difference(ours.values["nll"], full.values["nll"], documents=documents)
    return None


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """How a plan stores its layers: both sides, the layers that stay whole, and whether the others differ."""

    keys: Side
    values: Side
    whole: tuple[int, ...] = ()
    mixed: bool = False


def _stored(plan: Plan, layers: int | None) -> _Stored | None:
    """None of a plan that changes nothing, or stores what is in no number of bits, as a projection.

    Where tokens are dropped and nothing is encoded, 8-bit floats are what engines have instead.
    """
    count = layers or plan.encode.table_layers or 1
    whole, sides = [], []
    for layer in range(count):
        codec = plan.encode.for_layer(CodecContext(layer=layer, layers=count))
        if codec.exact:
            whole.append(layer)
            continue
        keys, values = _side(codec, "keys"), _side(codec, "values")
        if keys is None or values is None:
            return None
        sides.append((keys, values))
    if not sides:
        floats = Side(bits=8, forms=("floats",))
        return _Stored(keys=floats, values=floats) if plan.evicts else None
    of_keys, of_values = (
        Side(bits=sum(each.bits for each in column) / len(column), forms=column[0].forms)
        for column in zip(*sides, strict=True)
    )
    return _Stored(keys=of_keys, values=of_values, whole=tuple(whole), mixed=len(set(sides)) > 1)


def _side(codec: Codec, side: Literal["keys", "values"]) -> Side | None:
    if isinstance(codec, SidesCodec):
        codec = codec.keys if side == "keys" else codec.values
    inner: Any = [each for each in with_nested(codec) if isinstance(each, Codec)][-1]
    if inner.exact or (isinstance(inner, TwoSided) and inner.only not in ("both", side)):
        return Side(bits=16)
    bits = getattr(inner, f"{side[:-1]}_bits", None) or getattr(inner, "bits", None)
    bits = bits or _FLOATS.get(registry.name_of(inner))
    return None if bits is None else Side(bits=float(bits), forms=(_form(inner),))


_FLOATS = {"fp8": 8, "mxfp8": 8, "nvfp4": 4, "mxfp4": 4}


def _form(codec: Any) -> Form:
    name = registry.name_of(codec)
    if name in _FLOATS:
        return "floats"
    if name == "kivi" or (name == "vector" and not codec.symmetric):
        return "asymmetric"
    return "symmetric" if name == "vector" else "levels"


def _nearest(plan: Plan, stored: _Stored | None, engine: Engine) -> EngineSetting:
    lacks = []
    if plan.evicts:
        lacks.append(f"drops no tokens, so {registry.name_of(plan.score)} at {plan.tokens or plan.keep} is missing")
    chosen = None if stored is None else min(engine.types, key=lambda each: _distance(stored, each))
    setting = neighbour = None
    if stored is not None and chosen is not None:
        setting = chosen.option
        if engine.skip and stored.whole:
            setting += f" {engine.skip} {' '.join(map(str, stored.whole))}"
        if plan.encode.exact:
            lacks.append("stores all tokens in fewer bits instead")
        elif (chosen.keys.bits, chosen.values.bits) != (stored.keys.bits, stored.values.bits):
            lacks.append(
                f"stores {chosen.keys.bits:g} bits for keys and {chosen.values.bits:g} for values where the plan has "
                f"{stored.keys.bits:g} and {stored.values.bits:g} on average"
            )
        if stored.mixed or (stored.whole and not engine.skip):
            lacks.append(f"has one setting for all layers{' that it encodes' if engine.skip else ''}")
        if chosen.limits:
            lacks.append(chosen.limits)
        neighbour = None if stored.whole and engine.skip else chosen.neighbour
    return EngineSetting(
        engine=engine.name,
        setting=setting,
        lacks=f"It {'; '.join(lacks)}." if lacks else "",
        neighbour=neighbour,
        version=engine.version,
        source=engine.source,
    )


def _distance(stored: _Stored, offered: CacheType) -> tuple[float, int, float]:
    """Bits that differ, sides whose codes are of another form, and, since more bits lose less, the fewer bits."""
    pairs = ((stored.keys, offered.keys), (stored.values, offered.values))
    bits = sum(abs(ours.bits - theirs.bits) for ours, theirs in pairs)
    forms = sum(not set(ours.forms) & set(theirs.forms) for ours, theirs in pairs)
    return bits, forms, -sum(theirs.bits for _, theirs in pairs)


_INTEGERS: tuple[Form, ...] = ("symmetric", "asymmetric")


def _both(
    option: str, bits: float, forms: tuple[Form, ...], neighbour: str | None = None, limits: str = ""
) -> CacheType:
    side = Side(bits=bits, forms=forms)
    return CacheType(option=option, keys=side, values=side, neighbour=neighbour, limits=limits)


def _turboquant(name: str, keys: int, values: int) -> CacheType:
    """Keys as levels of a rotated vector, values as integers with a minimum; 8-bit keys are floats, not rotated."""
    of_keys = "fp8" if keys == 8 else f"hadamard(of=gaussian(bits={keys}), signs=0)"
    return CacheType(
        option=f"--kv-cache-dtype {name}",
        keys=Side(bits=keys, forms=("floats",) if keys == 8 else ("levels",)),
        values=Side(bits=values, forms=("asymmetric", "levels")),
        neighbour=f"sides(keys={of_keys}, values=vector(bits={values}, symmetric=false))",
        limits="leaves the first and last two layers of dense models whole",
    )


def _of_llama_cpp() -> tuple[CacheType, ...]:
    known: dict[str, Side] = {
        "q8_0": Side(bits=8, forms=("symmetric", "asymmetric", "floats", "levels")),
        "q5_0": Side(bits=5, forms=("symmetric", "floats", "levels")),
        "q5_1": Side(bits=5, forms=("asymmetric",)),
        "q4_0": Side(bits=4, forms=("symmetric", "floats", "levels")),
        "q4_1": Side(bits=4, forms=("asymmetric",)),
        "f16": Side(bits=16),
    }
    neighbours = {"q8_0": "vector(bits=8)", "q4_0": "hadamard(of=vector(bits=4))"}
    return tuple(
        CacheType(
            option=f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}",
            keys=known[keys],
            values=known[values],
            neighbour=neighbours.get(keys) if keys == values else None,
            limits=""
            if keys == values and keys in neighbours
            else "has this pair on CUDA only in a build whose GGML_CUDA_FA_QUANTS names it",
        )
        for keys, values in product(known, known)
    )


def _of_transformers() -> tuple[CacheType, ...]:
    types = []
    for backend, bits in (("quanto", 4), ("quanto", 2), ("hqq", 8), ("hqq", 3), ("hqq", 1)):
        config = f'{{"backend": "{backend}", "nbits": {bits}}}'
        option = f'model.generate(..., cache_implementation="quantized", cache_config={config})'
        types.append(_both(option, bits, ("asymmetric",)))
    return tuple(types)


# The rotation and the minimum of int4_per_token_head are as users of vLLM 0.28.0 describe it; its code was not read.
ENGINES = (
    Engine(
        name="vLLM",
        version="0.33.0",
        source="the wheel: config/cache.py, layers/attention/attention.py, TurboQuantConfig",
        skip="--kv-cache-dtype-skip-layers",
        types=(
            _both("--kv-cache-dtype fp8", 8, ("floats",), "fp8"),
            _both("--kv-cache-dtype int8_per_token_head", 8, _INTEGERS, "vector(bits=8)", "needs Triton attention"),
            _both("--kv-cache-dtype nvfp4", 4, ("floats",), "nvfp4"),
            _both(
                "--kv-cache-dtype int4_per_token_head",
                4,
                _INTEGERS,
                "hadamard(of=vector(bits=4, symmetric=false))",
                "needs Triton attention",
            ),
            _turboquant("turboquant_k8v4", 8, 4),
            _turboquant("turboquant_4bit_nc", 4, 4),
            _turboquant("turboquant_k3v4_nc", 3, 4),
            _turboquant("turboquant_3bit_nc", 3, 3),
        ),
    ),
    Engine(
        name="SGLang",
        version="0.5.23",
        source="the wheel: choices of --kv-cache-dtype",
        types=(
            _both("--kv-cache-dtype fp8_e4m3", 8, ("floats",), "fp8"),
            _both("--kv-cache-dtype nvfp4", 4, ("floats",), "nvfp4"),
        ),
    ),
    Engine(
        name="TensorRT-LLM",
        version="1.3.0rc27",
        source="https://nvidia.github.io/TensorRT-LLM/1.3.0rc27/features/quantization.html",
        types=(
            _both("LLM(..., kv_cache_config=KvCacheConfig(dtype='fp8'))", 8, ("floats",), "fp8"),
            _both(
                "LLM(..., kv_cache_config=KvCacheConfig(dtype='nvfp4'))",
                4,
                ("floats",),
                "nvfp4",
                "needs a checkpoint that ModelOpt has quantised",
            ),
        ),
    ),
    Engine(
        name="llama.cpp",
        version="in llama-cpp-python 0.3.36",
        source="common/arg.cpp, docs/build.md",
        types=_of_llama_cpp(),
    ),
    Engine(
        name="transformers",
        version="5.24.0",
        source="cache_utils.py: the widths that quanto and hqq take",
        types=_of_transformers(),
    ),
)
