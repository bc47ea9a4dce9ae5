"""The nearest settings of other engines to a plan, where they can express it at all.

What is written here is what each engine documents of its options (vLLM: `--kv-cache-dtype`, `calculate_kv_scales`;
llama.cpp: `--cache-type-k`, `--cache-type-v`; SGLang: `--kv-cache-dtype`; transformers: `cache_implementation`). Such a
setting is a neighbour of the plan, not the plan: nothing of what fit measured is true of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.schema import Record
from kvtailor.encode.contract import Codec, CodecContext, TwoSided
from kvtailor.encode.sides import SidesCodec
from kvtailor.errors import KvtailorError
from kvtailor.plan import Plan, registry
from kvtailor.plan.arguments import with_nested

__all__ = ["EngineSetting", "measured_losses", "nearest_settings"]


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """What comes nearest in one engine.

    Attributes:
        engine: its name.
        setting: its options; None where it has none that come near.
        lacks: what of the plan it cannot express, a sentence; empty where nothing is missing.
    """

    engine: str
    setting: str | None
    lacks: str


def nearest_settings(plan: Plan, layers: int | None = None) -> tuple[EngineSetting, ...]:
    """Return the nearest settings for a plan.

    Args:
        plan: of any kind.
        layers: how many the plan compresses; None: as many as its codec names.
    """
    keys, values, plain = _bits(plan, layers)
    lacks = []
    if plan.evicts:
        lacks.append(f"drops no tokens, so {registry.name_of(plan.score)} at {plan.tokens or plan.keep} is missing")
    found = []
    for engine, known in _ENGINES.items():
        own = list(lacks)
        option = known(keys, values, plain, own)
        words = "; ".join(own)
        found.append(EngineSetting(engine=engine, setting=option, lacks=f"It {words}." if words else ""))
    return tuple(found)


def measured_losses(plan: Plan, setting: EngineSetting, records: Sequence[Record]) -> dict[str, Estimate | None]:
    """Return the nats a token that the plan, and the codec of ours nearest to the setting, lose against 'full'.

    Each by a name for it, with a 95 % interval over windows of one text; None where the records have no such pair. A
    setting without a codec of ours that comes near has None: `fp8` stands for 8-bit floats in all layers, with
    scales of its own tokens where engines have one that is calibrated, or 1.

    Raises:
        KvtailorError: the records are of several models.
    """
    models = sorted({each.model for each in records})
    if len(models) > 1:
        raise KvtailorError(f"asked for losses on one model, found records of {', '.join(models)}: give those of one")
    losses = {"the plan": _loss(plan, records)}
    if setting.setting in ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8_e4m3"):
        losses["kvtailor's fp8, the setting's neighbour"] = _loss(Plan.parse("fp8"), records)
    elif setting.setting is not None:
        losses["the setting"] = None
    return losses


def _loss(plan: Plan, records: Sequence[Record]) -> Estimate | None:
    scored = [each for each in records if each.task == "perplexity" and each.error is None and each.values.get("nll")]
    for ours in (each for each in scored if each.plan == str(plan)):
        for full in (each for each in scored if each.is_full):
            if (ours.text_hash, ours.point, ours.dtype) == (full.text_hash, full.point, full.dtype):
                documents = ours.values.get("document", ())
                return mean_difference(ours.values["nll"], full.values["nll"], documents=documents)
    return None


def _bits(plan: Plan, layers: int | None) -> tuple[float | None, float | None, tuple[int, ...]]:
    """Mean bits of an element of keys and of values over the layers that are encoded, and those that are not."""
    count = layers or plan.encode.table_layers or 1
    keys, values, plain = [], [], []
    for layer in range(count):
        codec = plan.encode.for_layer(CodecContext(layer=layer, layers=count))
        if codec.exact:
            plain.append(layer)
            continue
        of_keys, of_values = _side_bits(codec, "keys"), _side_bits(codec, "values")
        if of_keys is None or of_values is None:
            # What is stored in no number of bits, as a projection or a dropped channel, no engine has a setting for.
            return None, None, tuple(plain)
        keys.append(of_keys)
        values.append(of_values)
    if not keys:
        return None, None, tuple(plain)
    return sum(keys) / len(keys), sum(values) / len(values), tuple(plain)


def _side_bits(codec: Codec, side: Literal["keys", "values"]) -> float | None:
    """Bits of an element of one side; 16 where it is not encoded, None of a codec that has no such number."""
    if isinstance(codec, SidesCodec):
        codec = codec.keys if side == "keys" else codec.values
    inner: Any = [each for each in with_nested(codec) if isinstance(each, Codec)][-1]
    if inner.exact or (isinstance(inner, TwoSided) and inner.only not in ("both", side)):
        return 16
    of_side = getattr(inner, f"{side[:-1]}_bits", None)
    bits = of_side or getattr(inner, "bits", None)
    return None if bits is None else float(bits)


def _vllm(keys: float | None, values: float | None, plain: tuple[int, ...], lacks: list[str]) -> str | None:
    if keys is None or values is None:
        return None
    if min(keys, values) < 7:
        lacks.append(f"stores 8 bits where the plan has {keys:g} for keys and {values:g} for values on average")
    skipped = f" --kv-cache-dtype-skip-layers {' '.join(map(str, plain))}" if plain else ""
    return f"--kv-cache-dtype fp8{skipped}"


def _sglang(keys: float | None, values: float | None, plain: tuple[int, ...], lacks: list[str]) -> str | None:
    if keys is None or values is None:
        return None
    if min(keys, values) < 7:
        lacks.append(f"stores 8 bits where the plan has {keys:g} for keys and {values:g} for values on average")
    if plain:
        lacks.append("has one setting for all layers")
    return "--kv-cache-dtype fp8_e4m3"


def _llama(keys: float | None, values: float | None, plain: tuple[int, ...], lacks: list[str]) -> str | None:
    if keys is None or values is None:
        return None
    if plain or keys != int(keys) or values != int(values):
        lacks.append("has one setting for all layers")
    return f"--flash-attn on --cache-type-k {_llama_type(keys)} --cache-type-v {_llama_type(values)}"


def _llama_type(bits: float) -> str:
    if bits > 8:
        return "f16"
    return "q8_0" if bits > 5 else "q5_0" if bits > 4 else "q4_0"


def _transformers(keys: float | None, values: float | None, plain: tuple[int, ...], lacks: list[str]) -> str | None:
    if keys is None or values is None:
        return None
    bits = 2 if min(keys, values) <= 2 else 4 if min(keys, values) <= 5 else 8
    if plain or keys != values:
        lacks.append("has one width for keys and values of all layers")
    backend = "hqq" if bits == 8 else "quanto"
    config = f'{{"backend": "{backend}", "nbits": {bits}}}'
    return f'model.generate(..., cache_implementation="quantized", cache_config={config})'


_ENGINES = {"vLLM": _vllm, "SGLang": _sglang, "llama.cpp": _llama, "transformers": _transformers}
