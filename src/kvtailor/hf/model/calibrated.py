"""Which calibration each method of a plan gets on a model, and the refusals."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod, Calibration, Shapes, calibrated, how_to, shipped
from kvtailor.errors import CalibrationError
from kvtailor.hf.model.config import RANDOM
from kvtailor.hf.model.fingerprint import remembered_fingerprint, turns_of
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested

__all__ = ["UNTRAINED", "calibrations_of", "tensors_of"]

UNTRAINED = "kvtailor_untrained"
"""The attribute that `hf.model.loading` puts on a model of random weights, which nothing can be measured on."""
_NO_VERDICT = "random numbers stand for a calibration, since the model is not trained"


def calibrations_of(plan: Plan, model: Any) -> dict[str, list[Calibration]]:
    """The calibrations that a plan reads on a model, by stage; stages that read none are left out.

    For the untrained model random ones of the right shapes, made here: what a method costs does not depend on them.

    Raises:
        CalibrationError: a file was made for other weights or shapes, or none is named and none is shipped for them.
    """
    wanted = {stage: methods for stage, part in plan.parts.items() if (methods := calibrated(with_nested(part)))}
    if not wanted:
        return {}
    own, geometry = remembered_fingerprint(model), Geometry.of(model.config)
    if not geometry.alike:
        raise CalibrationError(
            f"the plan {plan} reads a calibration, which has one number of heads and one head size, and the compressed "
            f"layers of this {geometry.model_type} differ in theirs"
        )
    made_up = bool(getattr(model, UNTRAINED, False))
    return {
        stage: [
            _random(each, own, geometry) if made_up and each.file is None else _for_model(each, own, geometry, model)
            for each in methods
        ]
        for stage, methods in wanted.items()
    }


def tensors_of(found: Sequence[Calibration], plan: Plan, device: Any) -> dict[str, Tensor]:
    """All tensors of some calibrations by name, on a device.

    Raises:
        CalibrationError: two different files give tensors of one name.
    """
    tensors: dict[str, Tensor] = {}
    owner: dict[str, Calibration] = {}
    for each in found:
        for name, tensor in each.tensors.items():
            if owner.setdefault(name, each).hash != each.hash:
                raise CalibrationError(
                    f"the plan {plan} reads {name!r} from {owner[name].name} and from {each.name}, which differ: name "
                    "one file for both"
                )
            tensors[name] = tensor.to(device)
    return tensors


def _for_model(method: CalibratedMethod, own: str | None, geometry: Geometry, model: Any) -> Calibration:
    kind, found = method.calibrates, method.calibration
    if found is None:
        for each in shipped(kind):
            if own in each.fingerprints:
                return each
        there = ", ".join(each.model for each in shipped(kind)) or "no model"
        raise CalibrationError(
            f"{kind}: no file is named, and of those that are shipped (for {there}) none was made for the weights of "
            f"this {geometry.model_type}: {how_to(kind)}"
        )
    sentence = method.misfit(layers=len(geometry.compressed), heads=geometry.kv_heads, size=geometry.head_dim)
    if sentence is not None:
        raise CalibrationError(sentence)
    if own is None:
        raise CalibrationError(
            f"{kind}: {found.name} was made for {found.model}, and the weights of this {geometry.model_type} cannot be "
            "read to compare them (some are nowhere in memory, or packed for this CPU): load the model anew"
        )
    if own not in found.fingerprints:
        raise CalibrationError(
            f"{kind}: {found.name} was made for {found.model}, and this {geometry.model_type} has other weights of the "
            f"same shapes, or weights in a dtype that the file has no fingerprint of: {how_to(kind)}"
        )
    if not _turns_alike(found.made.get("rotary"), model):
        raise CalibrationError(
            f"{kind}: {found.name} was made where this {geometry.model_type} turned its keys by other frequencies "
            f"(rope_theta, or a scaling of its positions): {how_to(kind)}"
        )
    return found


def _turns_alike(made: object, model: Any) -> bool:
    """Whether a model has the rotary frequencies that it had when a file was made; older files do not say."""
    if not isinstance(made, list):
        return True
    now = turns_of(model)
    # Frequencies of a model that was cast to 16 bits have 8 bits left, and the smallest in float16 fewer.
    return len(now) == len(made) and all(
        len(one) == len(other)
        and all(math.isclose(a, b, rel_tol=0.01, abs_tol=1e-6) for a, b in zip(one, other, strict=True))
        for one, other in zip(now, made, strict=True)
    )


def _random(method: CalibratedMethod, own: str | None, geometry: Geometry) -> Calibration:
    """Random tensors of a kind, the same at every call."""
    shapes = Shapes(
        layers=len(geometry.compressed),
        q_heads=geometry.q_heads,
        kv_heads=geometry.kv_heads,
        head_size=geometry.head_dim,
    )
    tensors = method.example_for(
        layers=shapes.layers,
        heads=shapes.kv_heads,
        group=shapes.q_heads // shapes.kv_heads,
        size=shapes.head_size,
        value_size=geometry.compressed_shapes[0].value_size,
        generator=torch.Generator().manual_seed(0),
    )
    head = {"fingerprints": [own or ""], "shapes": asdict(shapes), "made": {}, "facts": {"verdict": _NO_VERDICT}}
    told = {name: json.dumps(entry) for name, entry in head.items()}
    metadata = {"kind": method.calibrates, "model": RANDOM, "calibrated_on": "[]", **told}
    digest = hashlib.sha256(f"{_NO_VERDICT} {method.calibrates} {own}".encode()).hexdigest()
    return Calibration(name="random", hash=digest, kind=method.calibrates, tensors=tensors, metadata=metadata)
