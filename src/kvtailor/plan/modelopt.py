"""A plan as ModelOpt's schema of cache formats by layer, which no released engine reads.

A checkpoint of ModelOpt says in `hf_quant_config.json` how it was quantised. Version 1 of the schema adds to it, for a
cache whose layers differ, `kv_cache_quantized_layers`: the module name of each layer's attention and its format, "FP8"
or "NVFP4" of both sides, or "FP8_K_NVFP4_V". A layer that is not named keeps the model's dtype.

Read in November 2026: NVIDIA/Model-Optimizer, pull request 2272, merged in September after release 0.47.0, as its tests
of `convert_hf_quant_config_format` have the file. Its reader, vLLM's pull request 56116, was open, and takes no
layer whose two sides differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.errors import ArgumentError
from kvtailor.plan.engines import widths_by_layer
from kvtailor.plan.plan import Plan
from kvtailor.version import __version__

__all__ = ["FILE", "SCHEMA_VERSION", "SOURCE", "LayerFormats", "formats_of"]

FILE = "hf_quant_config.json"
SCHEMA_VERSION = 1
SOURCE = "NVIDIA/Model-Optimizer pull request 2272, merged after 0.47.0; its reader, vLLM pull request 56116, was open"
_MIXED = "MIXED_PRECISION"
_FORMATS = {"FP8": (8.0, 8.0), "FP8_K_NVFP4_V": (8.0, 4.0), "NVFP4": (4.0, 4.0)}
_WHOLE = (16.0, 16.0)


@dataclass(frozen=True, kw_only=True)
class LayerFormats:
    """The formats that come nearest to a plan's layers.

    Attributes:
        formats: by the name of a layer's attention; a layer that stays whole is not there.
        whole: how many layers stay whole.
        lacks: what of the plan they do not have, a sentence; empty where nothing is missing.
    """

    formats: dict[str, str]
    whole: int
    lacks: str

    def text(self) -> str:
        """Return the file, JSON with a line break at its end."""
        used = {*self.formats.values()}
        # A reader that knows no layers would take a single format for all of them.
        algorithm = used.pop() if len(used) == 1 and not self.whole else _MIXED
        cache = {
            "kv_cache_quant_algo": algorithm,
            "kv_cache_quantized_layers": {name: {"quant_algo": kind} for name, kind in self.formats.items()},
            "kv_cache_schema_version": SCHEMA_VERSION,
        }
        producer = {"name": "kvtailor", "version": __version__}
        return json.dumps({"producer": producer, "quantization": cache}, indent=2) + "\n"


def formats_of(plan: Plan, names: Sequence[str]) -> LayerFormats:
    """Return the formats that come nearest to a plan's, by the bits of keys and of values; of two, that of more bits.

    Args:
        plan: with a codec.
        names: of the attention of each layer that the plan compresses, such as "model.layers.0.self_attn".

    Raises:
        ArgumentError: the plan is for another number of layers, encodes nothing, or stores what is in no number of
            bits.
    """
    codec = plan.encode
    if codec.table_layers not in (None, len(names)):
        raise ArgumentError(
            f"asked for formats of {len(names)} layers, and the plan's table is for {codec.table_layers}: give the "
            "model that it was made for"
        )
    formats, differ, whole = {}, [], 0
    for name, found in zip(names, widths_by_layer(codec, len(names)), strict=True):
        if found is None:
            raise ArgumentError(
                "asked for formats of a plan that stores what is in no number of bits: give one whose codec has some, "
                "such as fp8 or nvfp4"
            )
        kind, bits = min([*_FORMATS.items(), ("", _WHOLE)], key=lambda each: (_distance(found, each[1]), -sum(each[1])))
        if kind:
            formats[name] = kind
        whole += not kind
        if bits != found:
            differ.append((found, bits))
    if not formats:
        raise ArgumentError(
            "asked for formats of a plan that leaves every layer whole: give one that encodes keys or values"
        )
    lacks = ["drops no tokens, which the plan does"] if plan.evicts else []
    if differ:
        (keys, values), (ours, theirs) = differ[0]
        lacks.append(
            f"stores other bits than the plan on {len(differ)} of {len(names)} layers, on the first of them {ours:g} "
            f"for keys and {theirs:g} for values instead of {keys:g} and {values:g}"
        )
    if codec.tail:
        lacks.append(f"keeps no newest tokens whole, and the plan keeps {codec.tail}")
    if "FP8_K_NVFP4_V" in formats.values():
        lacks.append("has layers whose sides differ, which the reader that was open refuses")
    return LayerFormats(formats=formats, whole=whole, lacks=f"It {'; '.join(lacks)}." if lacks else "")


def _distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
