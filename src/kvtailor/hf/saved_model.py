"""What a saved cache records of the model that it was made with, and in what another model differs from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvtailor.hf.model.fingerprint import config_values, rotary_frequencies, weight_fingerprint
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.layer_shapes import LayerShape

__all__ = ["differences", "said_of_geometry", "said_of_model"]

# The same frequencies on another device differ in the last bit of float32; those of 16-bit numbers differ by 1e-3.
_SAME_FREQUENCY = 1e-5


def said_of_geometry(geometry: Geometry) -> dict[str, Any]:
    """Shapes of the model's cache, JSON-able."""
    said: dict[str, Any] = {
        "model_type": geometry.model_type,
        "windows": list(geometry.windows),
        "q_heads": geometry.q_heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
    }
    # Files of models that have no other kinds of layers than these stay as they were.
    if len({(s.q_heads, s.kv_heads, s.key_size, s.value_size, s.states, s.reads) for s in geometry.shapes}) > 1:
        said["shapes"] = [_said_of_layer(shape) for shape in geometry.shapes]
    return said


def _said_of_layer(shape: LayerShape) -> str:
    """What a layer keeps, in few words."""
    kept = [shape.kind]
    if shape.kv_heads:
        kept.append(f"{shape.q_heads} heads on {shape.kv_heads} of {shape.key_size} and {shape.value_size}")
    if shape.states:
        kept.append(f"{shape.states} states")
    if shape.reads is not None:
        kept.append(f"reads layer {shape.reads}")
    return ", ".join(kept)


def said_of_model(model: Any) -> dict[str, Any]:
    """What the meaning of a cache depends on beside shapes, JSON-able.

    It costs what `weight_fingerprint` does: all weights are read.

    Returns:
        dtype: of the model. config: its values, see `config_values`. rotary: see `rotary_frequencies`. weights: the
        fingerprint; None where they cannot be read.
    """
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": config_values(model.config),
        "rotary": rotary_frequencies(model),
        "weights": weight_fingerprint(model),
    }


def differences(saved: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Clauses on all in which two models differ, of what both record; none where they are the same.

    Args:
        saved, found: by name; what `said_of_geometry` or `said_of_model` gave. Entries of `config` that only one has
            are those of another release of transformers, and are left out.
    """
    clauses = []
    for name in sorted(found):
        there: Any = saved.get(name)
        here: Any = found[name]
        if name == "config":
            common = sorted(there.keys() & here.keys())
            other = [each for each in common if there[each] != here[each]]
            clauses += [f"{each} is {there[each]} there and {here[each]} here" for each in other]
        elif name == "rotary":
            clauses += _turned_otherwise(there, here)
        elif name == "weights":
            if None not in (there, here) and there != here:
                clauses.append(f"its weights or adapters have the fingerprint {there[:12]} there and {here[:12]} here")
        elif there != here:
            clauses.append(f"{name} is {there} there and {here} here")
    return clauses


def _turned_otherwise(there: Mapping[str, list[float]], here: Mapping[str, list[float]]) -> list[str]:
    clauses = []
    for name in sorted(there.keys() & here.keys()):
        pairs = list(zip(there[name], here[name], strict=False))
        apart = [pair for pair in pairs if not math.isclose(*pair, rel_tol=_SAME_FREQUENCY)]
        if apart or len(there[name]) != len(here[name]):
            one, other = apart[0] if apart else (len(there[name]), len(here[name]))
            clauses.append(f"the rotary frequencies {name} differ ({one:.6g} there and {other:.6g} here)")
    return clauses
