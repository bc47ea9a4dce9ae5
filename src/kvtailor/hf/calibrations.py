"""Which calibration each method of a plan gets on a model, and the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvtailor.calibration import CalibratedMethod, Calibration, calibrated, how_to, shipped
from kvtailor.errors import CalibrationError
from kvtailor.hf.fingerprint import weight_fingerprint
from kvtailor.hf.geometry import Geometry
from kvtailor.plan import Plan
from kvtailor.plan_arguments import with_nested

__all__ = ["calibrations_of", "tensors_of"]


def calibrations_of(plan: Plan, model: Any) -> dict[str, list[Calibration]]:
    """The calibrations that a plan reads on a model, by room; rooms that read none are left out.

    Raises:
        CalibrationError: a file was made for other weights or shapes, or none is named and none is shipped for them.
    """
    wanted = {room: methods for room, part in plan.parts.items() if (methods := calibrated(with_nested(part)))}
    if not wanted:
        return {}
    own, geometry = weight_fingerprint(model), Geometry.of(model.config)
    return {room: [_for_model(each, own, geometry) for each in methods] for room, methods in wanted.items()}


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


def _for_model(method: CalibratedMethod, own: str, geometry: Geometry) -> Calibration:
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
    if own not in found.fingerprints:
        raise CalibrationError(
            f"{kind}: {found.name} was made for {found.model}, and this {geometry.model_type} has other weights of the "
            f"same shapes, or weights in a dtype that the file does not know: {how_to(kind)}"
        )
    return found
