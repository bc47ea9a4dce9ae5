"""A layer's output projection as a matrix, with what LoRA adapters add to it, for the plans that weigh values by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.devices import aligned
from kvtailor.hf.model.sharded import local_part, whole

__all__ = ["OutputProjection", "output_layer", "output_weight"]

_OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj", "wo")


class OutputProjection:
    """Reads an attention module's output projection anew at each call, since adapters may change between two.

    Attributes:
        module: of one layer.
        q_heads: its query heads.
        head_dim: size of a value.

    Raises:
        UnsupportedModel: see `output_weight`; or the projection does something else than multiply by that matrix.
    """

    def __init__(self, module: torch.nn.Module, q_heads: int, head_dim: int):
        self.module, self.q_heads, self.head_dim = module, q_heads, head_dim
        _check_against_forward(module, self())

    def __call__(self) -> Tensor:
        """The weight as it is now, (q, dv, D)."""
        with aligned(output_layer(self.module) or self.module) as brought:
            weight = output_weight(self.module, self.q_heads, self.head_dim)
            # What waits on the CPU or a disk is here for as long as it takes to copy it.
            return weight.clone() if brought else weight

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputProjection:
        """A copy of a cache belongs to the same model."""
        return self


def output_layer(module: torch.nn.Module) -> torch.nn.Module | None:
    """The output projection of an attention module; None where it has none of a known name."""
    found = (getattr(module, name, None) for name in _OUTPUTS)
    return next((layer for layer in found if isinstance(layer, torch.nn.Module)), None)


def output_weight(module: torch.nn.Module, q_heads: int, head_dim: int) -> Tensor:
    """The output projection of an attention module, (q, dv, D).

    Without an adapter it is a view of the model's own weight. With active LoRA adapters that are not merged it is
    W + scaling * B A, summed over them (arXiv 2106.09685, section 4.1).

    Args:
        module: of one layer.
        q_heads: its query heads.
        head_dim: size of a value.

    Raises:
        UnsupportedModel: it has none that can be read as a plain matrix.
    """
    layer = output_layer(module)
    base = getattr(layer, "base_layer", layer)
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise _unreadable(module, "none" if base is None else f"one of type {type(base).__name__}")
    if base is layer:
        # Under tensor parallelism a process has the rows of its own heads; or it has all heads, and needs all rows.
        part = local_part(weight)
        weight = part if part.numel() == weight.shape[0] * q_heads * head_dim else whole(weight)
    elif local_part(weight) is not weight:
        raise _unreadable(module, "one that an adapter changes and that is sharded over processes")
    # GPT-2's Conv1D holds its weight the other way round.
    by_input = (weight if type(base).__name__ == "Conv1D" else weight.t()).detach()
    if base is not layer:
        by_input = _with_adapters(module, layer, by_input)
    if by_input.shape[0] != q_heads * head_dim:
        raise UnsupportedModel(
            f"the output projection of {type(module).__name__} takes {by_input.shape[0]} channels, which are not the "
            f"{q_heads} query heads of {head_dim} that the model's configuration names"
        )
    return by_input.unflatten(0, (q_heads, head_dim))


def _with_adapters(module: torch.nn.Module, layer: Any, by_input: Tensor) -> Tensor:
    """(q * dv, D): a wrapped layer's own weight and what its active LoRA adapters add."""
    kind = f"one that an adapter of type {type(layer).__module__}.{type(layer).__name__} changes"
    if not all(hasattr(layer, name) for name in ("lora_A", "lora_B", "scaling", "active_adapters")):
        raise _unreadable(module, f"{kind}, which is not LoRA")
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return by_input
    changed = by_input
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        variant = getattr(layer, "lora_variant", {}).get(name)
        if variant is not None or getattr(layer, "use_dora", {}).get(name, False):
            called = "DoRA" if variant is None else type(variant).__name__
            raise _unreadable(module, f"{kind}, by a variant of LoRA ({called}) that does more than add a matrix")
        first, second = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
        delta = (second.float() @ first.float()).t() * layer.scaling[name]
        changed = changed.float() + delta.to(changed.device)
    return changed


def _check_against_forward(module: torch.nn.Module, weight: Tensor) -> None:
    """Raises where an adapted layer's forward is not a product with `weight`, (q, dv, D), and a constant.

    A plain layer is not run: its weight is all that it has.
    """
    layer: Any = output_layer(module)
    base: Any = getattr(layer, "base_layer", layer)
    if base is layer:
        return
    own = base.weight
    values = torch.linspace(-2, 2, weight.shape[0] * weight.shape[1], device=own.device).sin()[None].to(own.dtype)
    with torch.no_grad():
        found = (layer(values) - layer(torch.zeros_like(values))).float()
        expected = values.float() @ weight.flatten(0, 1).float()
    # One unit of the dtype for each rounding of a sum of so many products.
    allowed = 8 * torch.finfo(own.dtype).eps * float(expected.abs().max().clamp(min=float(found.abs().max())))
    if float((found - expected).abs().max()) > allowed:
        raise _unreadable(
            module, f"one whose adapter of type {type(layer).__name__} does more than add a matrix to its weight"
        )


def _unreadable(module: torch.nn.Module, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the plan weighs values by the output projection, and {type(module).__name__} has {what}, which cannot be "
        "read as a plain matrix"
    )
