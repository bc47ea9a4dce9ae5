"""The nearest settings of other engines to a plan, where they can express it at all.

`ENGINES` has what each engine documents of its cache types, with the version and the source that were read. Of these
types the nearest is the one whose bits of keys and of values differ least from the plan's; of several, the one whose
codes are of the plan's form. Where it was measured what each layer loses by a width, and the engine can leave layers
whole, its types are compared by what the layers that they encode lost, at no more bits than the plan has.

Such a setting is a neighbour of the plan, not the plan: nothing of what was measured of the plan is true of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import isfinite
from typing import Any, Literal, Protocol

from kvtailor.encode.contract import Codec, CodecContext, TwoSided
from kvtailor.encode.fp8 import Fp8
from kvtailor.encode.sides import SidesCodec
from kvtailor.encode.static_fp8 import StaticFp8
from kvtailor.errors import ArgumentError, UnknownName
from kvtailor.plan import registry
from kvtailor.plan.arguments import nested, with_nested
from kvtailor.presets import FULL

__all__ = [
    "ENGINES",
    "WHO_DROPS",
    "CacheType",
    "Engine",
    "EngineSetting",
    "LayerLosses",
    "Side",
    "nearest_settings",
    "setting_of",
    "widths_by_layer",
]

Form = Literal["symmetric", "asymmetric", "floats", "levels"]


class LayerLosses(Protocol):
    """What each layer loses by itself; `fitting.layers.LayerMap` is one."""

    @property
    def widths(self) -> Sequence[int]:
        """Bits that were tried; 0: not encoded."""

    @property
    def keys(self) -> Sequence[Sequence[float]]:
        """[l][w] loss where the keys of layer l alone have widths[w]."""

    @property
    def values(self) -> Sequence[Sequence[float]]:
        """[l][w] the same for values."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """How keys, or values, are stored.

    Attributes:
        bits: of a code, without scales; 16 where it is not encoded. A plan's are a mean over its layers.
        forms: integers with a step (symmetric) or with a minimum beside it (asymmetric), small floats, or levels; of an
            engine's own first, and behind it those that it stands for where it has none nearer.
    """

    bits: float
    forms: tuple[Form, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CacheType:
    """A way in which an engine stores a cache.

    Attributes:
        option: what chooses it.
        keys, values: its sides.
        neighbours: plans of ours whose arithmetic is near, the nearest first; none where none was looked for.
        limits: what the engine documents of it, the rest of a sentence that begins with "It".
        ends: layers at each end of a dense model that the engine itself leaves whole, where there are enough.
        checked: whether `kvtailor check --engine` measures it; of pairs of types those that are asked for most.
    """

    option: str
    keys: Side
    values: Side
    neighbours: tuple[str, ...] = ()
    limits: str = ""
    ends: int = 0
    checked: bool = True

    def counterparts(self, whole: Sequence[bool]) -> tuple[str, ...]:
        """Return the plans of ours whose arithmetic is near, on a model of so many layers.

        Args:
            whole: for each layer that a plan compresses, whether a setting leaves it whole. The engine's own are added.
        """
        own = self.own_whole(len(whole))
        kinds = [int(each or place in own) for place, each in enumerate(whole)]
        if 0 not in kinds:
            return ()
        if 1 not in kinds:
            return self.neighbours
        return tuple(f"by_layer(of=[{each}, plain], layers={kinds})" for each in self.neighbours)

    def own_whole(self, count: int) -> frozenset[int]:
        """Return the places that the engine itself leaves whole, of so many layers: at most a half from each end."""
        ends = min(self.ends, count // 2)
        return frozenset((*range(ends), *range(count - ends, count)))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is documented of an engine's cache types.

    Attributes:
        name: as it is written.
        version: whose options were read.
        source: where.
        types: of two that are as near, the first is taken.
        skip: the option that leaves layers whole, which their indices follow; None where it has none.
        others: cache types that it offers and that are not among `types`, since no codec of ours has their arithmetic
            or it was not read.
        rounds: when tokens are encoded, the rest of a sentence that begins with "It".
    """

    name: str
    version: str
    source: str
    types: tuple[CacheType, ...]
    skip: str | None = None
    others: tuple[str, ...] = ()
    rounds: str = "rounds each token as it comes"


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """What comes nearest in one engine.

    Attributes:
        engine: its name.
        setting: its options; None where it has none that come near.
        lacks: what of the plan it cannot express, and its limits, a sentence; empty where nothing is missing.
        neighbours: plans of ours whose arithmetic is near the setting's, the nearest first.
        version: of the engine whose options were read.
        source: where they were read.
        skipped: layers that the setting leaves whole.
        skipping: by what they were chosen, or why none were, whole sentences; empty where the engine has no such
            option or the setting encodes nothing.
    """

    engine: str
    setting: str | None
    lacks: str
    neighbours: tuple[str, ...]
    version: str
    source: str
    skipped: tuple[int, ...] = ()
    skipping: str = ""


def nearest_settings(
    codec: Codec,
    *,
    drops: str = "",
    beside: str = "",
    layers: int | Sequence[int] | None = None,
    measured: LayerLosses | None = None,
) -> tuple[EngineSetting, ...]:
    """Return the nearest setting of each engine for a plan.

    Args:
        codec: of the plan.
        drops: how the plan drops tokens, such as "snapkv @ tokens=100"; empty: it drops none.
        beside: what it does besides, such as "quest" or "disk", of which no engine's cache type has anything.
        layers: how many the plan compresses, or their numbers in the model, from 0; None: as many as the codec names,
            or as were measured.
        measured: what each of these layers loses by itself.

    Raises:
        ArgumentError: the numbers of layers do not agree, are above 100,000, or are not known and the plan's bits
            depend on them.
    """
    return tuple(_settings(ENGINES, codec, drops, layers, measured, beside))


def setting_of(
    engine: str,
    codec: Codec,
    *,
    drops: str = "",
    beside: str = "",
    layers: int | Sequence[int] | None = None,
    measured: LayerLosses | None = None,
) -> EngineSetting:
    """Return the nearest setting of one engine, whose name may be in any case; else as `nearest_settings`.

    Raises:
        UnknownName: there is no such engine here.
        ArgumentError: the numbers of layers do not agree, are above 100,000, or are not known and the plan's bits
            depend on them.
    """
    known = {each.name.lower(): each for each in ENGINES}
    if engine.lower() not in known:
        raise UnknownName("engine", engine, known)
    return next(_settings((known[engine.lower()],), codec, drops, layers, measured, beside))


def _settings(
    engines: Sequence[Engine],
    codec: Codec,
    drops: str,
    layers: int | Sequence[int] | None,
    measured: LayerLosses | None,
    beside: str,
) -> Iterator[EngineSetting]:
    numbers = _numbers(codec, layers, measured)
    if numbers is None and any(_stored(codec, count, drops) != _stored(codec, 1, drops) for count in _COUNTS):
        raise ArgumentError(
            "asked for a setting of an engine for a plan whose bits depend on how many layers the model has: say how "
            "many (--model NAME or --layers N; layers= in Python)"
        )
    stored = _stored(codec, 1 if numbers is None else len(numbers), drops)
    counted = layers is None or isinstance(layers, int)
    for engine in engines:
        yield _nearest(codec, stored, engine, drops, numbers, measured, counted, beside)


def widths_by_layer(codec: Codec, layers: int) -> list[tuple[float, float] | None]:
    """Return the bits of keys and of values on each layer, 16 where a side is not encoded; None: no number of bits.

    Args:
        codec: of a plan.
        layers: how many the plan compresses.
    """
    found: list[tuple[float, float] | None] = []
    for layer in range(layers):
        own = codec.for_layer(CodecContext(layer=layer, layers=layers))
        keys, values = _side(own, "keys"), _side(own, "values")
        found.append(None if keys is None or values is None else (keys.bits, values.bits))
    return found


# More than any model has, and few enough for every list of them.
_MOST_LAYERS = 100_000
# Numbers of layers by which it is seen whether a plan depends on them.
_COUNTS = (2, 3, 1000)


def _numbers(codec: Codec, layers: int | Sequence[int] | None, measured: LayerLosses | None) -> tuple[int, ...] | None:
    """The model's numbers of the layers that are compressed, or 0, 1, ... where only their count is known.

    None: not even that is.
    """
    _check_given(layers, measured)
    known = {
        "the layers that were given": None if layers is None else layers if isinstance(layers, int) else len(layers),
        "the plan's table": codec.table_layers,
        "the layers that were measured": None if measured is None else len(measured.keys),
    }
    counts = {what: count for what, count in known.items() if count is not None}
    most = max(counts.values(), default=0)
    if most > _MOST_LAYERS:
        raise ArgumentError(
            f"asked for a setting of an engine for {most:,} layers: at most {_MOST_LAYERS:,} are taken; give as many "
            "as the model has"
        )
    if len({*counts.values()}) > 1:
        told = ", ".join(f"{what} are for {count}" for what, count in counts.items())
        raise ArgumentError(f"asked for a setting of an engine, but numbers of layers differ: {told}")
    if layers is not None and not isinstance(layers, int):
        return tuple(layers)
    return tuple(range(next(iter(counts.values())))) if counts else None


def _check_given(layers: object, measured: LayerLosses | None) -> None:
    """Refuse numbers that no model's layers have, and losses that are not one for each width."""
    if layers is not None:
        numbers = [layers] if not isinstance(layers, Sequence) or isinstance(layers, str) else layers
        least = 1 if numbers is not layers else 0
        whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= least for each in numbers)
        if not numbers or not whole or any(one >= other for one, other in pairwise(numbers)):
            raise ArgumentError(
                f"asked for a setting of an engine for layers {str(layers)[:60]}: give how many there are, from 1 on, "
                "or their numbers in the model, from 0 on and ascending"
            )
    if measured is not None:
        rows = [*measured.keys, *measured.values]
        even = len(measured.keys) == len(measured.values) and {*map(len, rows)} <= {len(measured.widths)}
        if not even or not all(isfinite(loss) for row in rows for loss in row):
            raise ArgumentError(
                "asked for a setting of an engine by measured losses of layers, which are not one finite number for "
                "the keys and one for the values of each layer at each width: fit again"
            )


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """How a plan stores its layers: both sides, the layers that stay whole, and whether the others differ."""

    keys: Side
    values: Side
    whole: tuple[int, ...] = ()
    mixed: bool = False


def _stored(codec: Codec, count: int, drops: str) -> _Stored | None:
    """None of a codec that changes nothing, or stores what is in no number of bits, as a projection.

    Where tokens are dropped and nothing is encoded, 8-bit floats are what engines have instead.
    """
    whole, sides = [], []
    for layer in range(count):
        own = codec.for_layer(CodecContext(layer=layer, layers=count))
        if own.exact:
            whole.append(layer)
            continue
        keys, values = _side(own, "keys"), _side(own, "values")
        if keys is None or values is None:
            return None
        sides.append((keys, values))
    if all(keys.bits == values.bits == 16 for keys, values in sides):
        floats = Side(bits=8, forms=("floats",))
        return _Stored(keys=floats, values=floats) if drops else None
    of_keys, of_values = (
        Side(bits=sum(each.bits for each in column) / len(column), forms=column[0].forms)
        for column in zip(*sides, strict=True)
    )
    return _Stored(keys=of_keys, values=of_values, whole=tuple(whole), mixed=len(set(sides)) > 1)


def _side(codec: Codec, side: Literal["keys", "values"]) -> Side | None:
    inner = _coder(codec, side)
    if inner.exact or (isinstance(inner, TwoSided) and inner.only not in ("both", side)):
        return Side(bits=16)
    named = (getattr(inner, name, None) for name in (f"bits_of_{side}", f"{side[:-1]}_bits", "bits"))
    bits = next(filter(None, named), None) or _FLOATS.get(registry.name_of(inner))
    return None if bits is None else Side(bits=float(bits), forms=(_form(inner, side),))


def _coder(codec: Codec, side: Literal["keys", "values"]) -> Any:
    """The codec inside of all others that codes a side; of several ages that of the oldest tokens."""
    given = [codec.keys if side == "keys" else codec.values] if isinstance(codec, SidesCodec) else nested(codec)
    inside = [each for each in given if isinstance(each, Codec)]
    return _coder(inside[-1], side) if inside else codec


_FLOATS = {"fp8": 8, "static_fp8": 8, "mxfp8": 8, "nvfp4": 4, "mxfp4": 4}


def _form(codec: Any, side: Literal["keys", "values"]) -> Form:
    name = registry.name_of(codec)
    if name in _FLOATS:
        return "floats"
    if name == "ggml":
        kind = (codec.key_type if side == "keys" else codec.value_type) or codec.type
        return "symmetric" if kind.endswith("_0") else "asymmetric"
    if name == "kivi" or (name == "vector" and not codec.symmetric):
        return "asymmetric"
    return "symmetric" if name == "vector" else "levels"


def _nearest(
    codec: Codec,
    stored: _Stored | None,
    engine: Engine,
    drops: str,
    numbers: tuple[int, ...] | None,
    measured: LayerLosses | None,
    counted: bool,
    beside: str,
) -> EngineSetting:
    """The nearest setting of one engine; `counted`: the numbers are counts, not the model's; None: not known."""
    lacks = [f"drops no tokens, so {drops} is missing"] if drops else []
    lacks += [f"does nothing of {beside}"] if beside else []
    setting, skipping = None, ""
    neighbours: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    if stored is not None:
        chosen = min(engine.types, key=lambda each: _distance(stored, each))
        if engine.skip:
            chosen, places, skipping = _skip(engine, stored, chosen, 1 if numbers is None else len(numbers), measured)
            skipped = () if numbers is None else tuple(numbers[place] for place in places)
            if skipped and counted:
                skipping += " Layers are counted as the plan counts them, among those that it compresses."
        setting = chosen.option
        if skipped:
            setting += f" {engine.skip} {' '.join(map(str, skipped))}"
        if codec.exact:
            widths = f"{chosen.keys.bits:g} bits for keys and {chosen.values.bits:g} for values"
            lacks.append(f"stores all tokens instead, in {widths}")
        elif (chosen.keys.bits, chosen.values.bits) != (stored.keys.bits, stored.values.bits):
            lacks.append(
                f"stores {chosen.keys.bits:g} bits for keys and {chosen.values.bits:g} for values where the plan has "
                f"{stored.keys.bits:g} and {stored.values.bits:g} on average"
            )
        lacks += _codes_missing(stored, chosen) + _methods_missing(codec, chosen)
        if stored.mixed or (stored.whole and not engine.skip):
            lacks.append(f"has one setting for all layers{' that it encodes' if engine.skip else ''}")
        lacks += _scales_missing(codec, chosen)
        if codec.tail:
            lacks.append(
                f"{engine.rounds}, so that the newest {codec.tail}, which the plan keeps whole, have no counterpart"
            )
        if any(each.across for each in with_nested(codec) if isinstance(each, Codec)):
            lacks.append("has no layers that share their keys and values, as the plan's do")
        if chosen.limits:
            lacks.append(chosen.limits)
        if numbers is not None:
            neighbours = chosen.counterparts([number in skipped for number in numbers])
        elif not chosen.ends:
            neighbours = chosen.neighbours
        else:
            lacks.append(
                "has no plan of kvtailor beside it before it is known how many layers the model has (--model NAME or "
                "--layers N; layers= in Python)"
            )
    return EngineSetting(
        engine=engine.name,
        setting=setting,
        lacks=f"It {'; '.join(lacks)}." if lacks else "",
        neighbours=neighbours,
        version=engine.version,
        source=engine.source,
        skipped=skipped,
        skipping=skipping,
    )


_FORM_WORDS: dict[Form, str] = {
    "symmetric": "integers with a step",
    "asymmetric": "integers with a step and a minimum",
    "floats": "small floats",
    "levels": "levels that are no even steps",
}


def _codes_missing(stored: _Stored, chosen: CacheType) -> list[str]:
    """Where a setting's codes are of another form than the plan's, the rest of a sentence; else nothing."""
    pairs = {"keys": (stored.keys, chosen.keys), "values": (stored.values, chosen.values)}
    other = {
        side: (_FORM_WORDS[theirs.forms[0]], _FORM_WORDS[ours.forms[0]])
        for side, (ours, theirs) in pairs.items()
        if ours.forms and theirs.forms and ours.forms[0] != theirs.forms[0]
    }
    alike = len(other) == 2 and other["keys"] == other["values"]
    return [
        f"stores {theirs}{'' if alike else f' for {side}'} where the plan has {ours}"
        for side, (theirs, ours) in ([("", other["keys"])] if alike else other.items())
    ]


def _methods_missing(codec: Codec, chosen: CacheType) -> list[str]:
    """What a plan does to states around its codes and a setting's counterpart does not, the rest of a sentence."""
    there = {"sides", "by_layer", *(word for each in chosen.neighbours for word in re.findall(r"\w+", each))}
    around = dict.fromkeys(
        registry.name_of(each)
        for each in with_nested(codec)
        if nested(each) and not (isinstance(each, Codec) and each.across)
    )
    missing = [name for name in around if name not in there]
    return [f"has nothing of {' or '.join(missing)}, inside of which the plan's codes lie"] if missing else []


def _scales_missing(codec: Codec, chosen: CacheType) -> list[str]:
    """What a setting lacks of a plan's own scales, calibrated or given ones, the rest of a sentence; else nothing."""
    if _UNSCALED in chosen.neighbours and any(isinstance(each, Fp8) for each in with_nested(codec)):
        return ["has the scale 1, or the checkpoint's, and not the plan's own for each head and run of tokens"]
    scales = {each.scale for each in with_nested(codec) if isinstance(each, StaticFp8)} - {1.0}
    if not scales:
        return []
    missing = (
        "the calibrated scales, which kvtailor export compressed-tensors writes into a checkpoint for vLLM"
        if None in scales
        else "the plan's scale"
    )
    return [f"has the scale 1 and not {missing}" if _UNSCALED in chosen.neighbours else f"does not have {missing}"]


def _skip(
    engine: Engine, stored: _Stored, nearest: CacheType, count: int, measured: LayerLosses | None
) -> tuple[CacheType, tuple[int, ...], str]:
    """The type and the places of the layers to leave whole, with a sentence on how they were chosen."""
    if measured is None:
        told = (
            "These are the layers that the plan leaves whole; what each layer loses was not measured"
            if stored.whole
            else f"No layer is named for {engine.skip}: what each layer loses was not measured"
        )
        return nearest, stored.whole, f"{told} (a fit measures it: kvtailor export {engine.name.lower()} FOLDER)."
    coded = count - len(stored.whole)
    # Bits of a key's and a value's numbers together, summed over the layers.
    room = coded * (stored.keys.bits + stored.values.bits) + 32 * len(stored.whole)
    choices = []
    for each in engine.types:
        found = _least_loss(each, room, count, measured)
        if found is not None:
            choices.append((found[1], _distance(stored, each), each, found[0], found[2]))
    if not choices:
        told = f"No layer is named for {engine.skip}: no cache type has as few bits as the plan and a width that was "
        return nearest, (), f"{told}measured ({', '.join(str(width) for width in measured.widths if width)})."
    left, _, chosen, places, total = min(choices, key=lambda choice: choice[:2])
    widths = f"{chosen.keys.bits:g} and {chosen.values.bits:g} bits of keys and values"
    told = (
        f"Layers were compared by what each lost alone in {widths}, measured with kivi's codes: in sum {total:.4f}, "
        f"of which {left:.4f} in the layers that are encoded; of the engine's own codes it is no forecast."
    )
    return chosen, places, told


def _least_loss(
    each: CacheType, room: float, count: int, measured: LayerLosses
) -> tuple[tuple[int, ...], float, float] | None:
    """The layers to leave whole of this type, the sum of the others' losses, and of all losses.

    The room is bits of a key's and a value's numbers together, summed over layers. None: the type has more bits, or
    a width that was not measured.
    """
    wanted = (each.keys.bits, each.values.bits)
    if any(bits not in measured.widths for bits in wanted):
        return None
    at_keys, at_values = (list(measured.widths).index(int(bits)) for bits in wanted)
    losses = [keys[at_keys] + values[at_values] for keys, values in zip(measured.keys, measured.values, strict=True)]
    own = each.own_whole(count)
    spare = room - 32 * len(own) - sum(wanted) * (count - len(own))
    most = int(spare // (32 - sum(wanted))) if sum(wanted) < 32 else 0
    if spare < 0:
        return None
    # As many bits for each layer: the worst are left whole first, and none that lost nothing.
    worst = [place for place in range(count) if place not in own and losses[place] > 0]
    worst.sort(key=lambda place: -losses[place])
    places = tuple(sorted(worst[:most]))
    left = sum(loss for place, loss in enumerate(losses) if place not in own and place not in places)
    return places, left, sum(losses)


def _distance(stored: _Stored, offered: CacheType) -> tuple[float, int, float]:
    """Bits that differ, sides whose codes are of another form, and, since more bits lose less, the fewer bits."""
    pairs = ((stored.keys, offered.keys), (stored.values, offered.values))
    bits = sum(abs(ours.bits - theirs.bits) for ours, theirs in pairs)
    forms = sum(not set(ours.forms) & set(theirs.forms) for ours, theirs in pairs)
    return bits, forms, -sum(theirs.bits for _, theirs in pairs)


# TriAttention in TensorRT-LLM 1.3.0rc27 and CacheEvictionConfig in OpenVINO GenAI are as their documentation has them.
WHO_DROPS = (
    "Tokens are dropped by kvtailor's cache inside transformers; OpenVINO GenAI (CacheEvictionConfig) and TensorRT-LLM "
    "(TriAttention, with a calibration file of its own) drop tokens by their own rules, which kvtailor does not write."
)
"""Where a plan that drops tokens can go."""
_INTEGERS: tuple[Form, ...] = ("symmetric", "asymmetric")
_TRITON = "needs Triton attention"
# What a cache in 8-bit floats has whose checkpoint brings no scales.
_UNSCALED = "static_fp8(scale=1.0)"


def _written(nearest: str, *others: str) -> tuple[str, ...]:
    """The plans of an engine that reads each token from its code, those of its prompt among them: the nearest so, too.

    llama.cpp's attention and vLLM's FlashAttention and Triton backends are handed the cache, and not the new keys.
    """
    return (f"on_write(of={nearest})", nearest, *others)


def _both(option: str, bits: float, forms: tuple[Form, ...], *neighbours: str, limits: str = "") -> CacheType:
    side = Side(bits=bits, forms=forms)
    return CacheType(option=option, keys=side, values=side, neighbours=neighbours, limits=limits)


def _turboquant(name: str, keys: int, values: int) -> CacheType:
    """Keys as levels of a rotated vector, values as integers with a minimum; 8-bit keys are floats, not rotated."""
    of_keys = "fp8" if keys == 8 else f"hadamard(of=gaussian(bits={keys}), signs=0)"
    return CacheType(
        option=f"--kv-cache-dtype {name}",
        keys=Side(bits=keys, forms=("floats",) if keys == 8 else ("levels",)),
        values=Side(bits=values, forms=("asymmetric", "levels")),
        neighbours=(f"sides(keys={of_keys}, values=vector(bits={values}, symmetric=false))",),
        limits="leaves the first and last two layers of dense models whole",
        ends=2,
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
    wider = {"q8_0": "vector(bits=8)", "q4_0": "hadamard(of=vector(bits=4))"}
    return tuple(
        CacheType(
            option=f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}",
            keys=known[keys],
            values=known[values],
            neighbours=(
                (FULL,)
                if keys == values == "f16"
                else _written(_blocks(keys, values), *([wider[keys]] if keys == values and keys in wider else []))
            ),
            limits=""
            if keys == values and keys in wider
            else "has this pair on CUDA only in a build whose GGML_CUDA_FA_QUANTS names it",
            checked=keys == values or keys == "q8_0",
        )
        for keys, values in product(known, known)
    )


def _blocks(keys: str, values: str) -> str:
    """The plan of a pair of llama.cpp's types, turned as llama.cpp does where 64 divides the head size."""
    if "f16" in (keys, values):
        side, kind = ("keys", keys) if values == "f16" else ("values", values)
        return f"hadamard(of=ggml(type={kind}, only={side}), only={side})"
    types = f"type={keys}" if keys == values else f"key_type={keys}, value_type={values}"
    return f"hadamard(of=ggml({types}))"


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
        source="the wheel: config/cache.py, layers/attention/attention.py, TurboQuantConfig, backends/flash_attn.py",
        skip="--kv-cache-dtype-skip-layers",
        types=(
            _both("--kv-cache-dtype fp8", 8, ("floats",), *_written(_UNSCALED, "fp8")),
            _both("--kv-cache-dtype fp8_per_token_head", 8, ("floats",), *_written("fp8(group=1)"), limits=_TRITON),
            _both("--kv-cache-dtype int8_per_token_head", 8, _INTEGERS, *_written("vector(bits=8)"), limits=_TRITON),
            _both("--kv-cache-dtype nvfp4", 4, ("floats",), "nvfp4"),
            _both(
                "--kv-cache-dtype int4_per_token_head",
                4,
                _INTEGERS,
                *_written("hadamard(of=vector(bits=4, symmetric=false))"),
                limits=_TRITON,
            ),
            _turboquant("turboquant_k8v4", 8, 4),
            _turboquant("turboquant_4bit_nc", 4, 4),
            _turboquant("turboquant_k3v4_nc", 3, 4),
            _turboquant("turboquant_3bit_nc", 3, 3),
        ),
        others=("fp8_e5m2", "nvfp4_4over6", "octave_*", "ultraquant_4bit"),
    ),
    Engine(
        name="SGLang",
        version="0.5.23",
        source="the wheel: choices of --kv-cache-dtype",
        types=(
            _both("--kv-cache-dtype fp8_e4m3", 8, ("floats",), _UNSCALED, "fp8"),
            _both("--kv-cache-dtype nvfp4", 4, ("floats",), "nvfp4"),
        ),
        others=("fp8_e5m2", "mxfp8", "fp4_mx_block16"),
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
                limits="needs a checkpoint that ModelOpt has quantised",
            ),
        ),
    ),
    Engine(
        name="llama.cpp",
        version="in llama-cpp-python 0.3.36",
        source="common/arg.cpp, docs/build.md",
        types=_of_llama_cpp(),
        others=("iq4_nl", "bf16"),
    ),
    Engine(
        name="transformers",
        version="5.24.0",
        source="cache_utils.py: the widths that quanto and hqq take, and when they round",
        types=_of_transformers(),
        rounds="rounds a prompt at once, and newer tokens when they are residual_length (128)",
    ),
)
