"""A layer's output projection as a matrix, for the plans that weigh values by it.

A plain layer's weight is read as it stands, and so is what LoRA adapters add to it. Of a quantised layer only its own
forward is what the model multiplies by (scales, codes and packing are its library's), so that is run on unit vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.devices import aligned, local_part, whole

__all__ = ["OutputProjection", "check_projections", "output_layer", "output_weight"]

_OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj", "wo")
# Layers whose forward is a product with their weight, and dtypes in which a weight is what it says.
_PLAIN = frozenset({"Linear", "NonDynamicallyQuantizableLinear", "Conv1D"})
_PLAIN_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


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
        self._checked: tuple[object, ...] | None = None
        self.check()

    def check(self) -> None:
        """Raise where the projection is another layer than at the last check, and cannot be read as a matrix.

        Asked before each forward, so that an adapter that was added meanwhile is refused before anything changes.
        """
        layer: Any = output_layer(self.module)
        told = ("active_adapters", "disable_adapters", "merged_adapters")
        now = (id(layer), id(getattr(layer, "base_layer", layer)), *(str(getattr(layer, each, None)) for each in told))
        if now != self._checked:
            _check_against_forward(self.module, self())
            self._checked = now

    def __call__(self) -> Tensor:
        """The weight as it is now, (q, dv, D)."""
        with aligned(output_layer(self.module) or self.module) as brought:
            weight = output_weight(self.module, self.q_heads, self.head_dim)
            # What waits on the CPU or a disk is here for as long as it takes to copy it.
            return weight.clone() if brought else weight

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputProjection:
        """A copy of a cache belongs to the same model."""
        return self


def check_projections(outputs: Iterable[object]) -> None:
    """Raise where one of the layers' output projections can no longer be read; see `OutputProjection.check`."""
    for output in outputs:
        if isinstance(output, OutputProjection):
            output.check()


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
    base: Any = getattr(layer, "base_layer", layer)
    if base is None:
        raise _unreadable(module, "none")
    if not _is_plain(base):
        by_input = _probed(module, base, q_heads * head_dim)
        by_input = by_input if base is layer else _with_adapters(module, layer, by_input)
        return by_input.unflatten(0, (q_heads, head_dim))
    weight: Tensor = base.weight
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


def _is_plain(base: Any) -> bool:
    """Whether a layer's forward is a product with its weight, which can be read as it stands."""
    weight = getattr(base, "weight", None)
    # A wrapper around codes and scales has a dtype, too; of those that are none, processes share a weight (DTensor).
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in _PLAIN_DTYPES:
        return False
    shared = local_part(weight) is not weight
    return type(base).__name__ in _PLAIN and (shared or not is_traceable_wrapper_subclass(weight))


@torch.no_grad()
def _probed(module: torch.nn.Module, base: torch.nn.Module, size: int) -> Tensor:
    """(size, D): what a layer makes of unit vectors, less what it makes of nothing.

    Takes size * size numbers of the model's dtype for as long as it runs.
    """
    device, dtype = _device(base), _dtype(module)
    try:
        found = base(torch.eye(size, device=device, dtype=dtype)).float()
        found = found - base(torch.zeros((1, size), device=device, dtype=dtype)).float()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise _unreadable(module, f"one of type {type(base).__name__} ({type(error).__name__}: {error})") from error
    return found.to(dtype)


def _kind(layer: Any) -> str:
    """What a layer is called, and what its weight is, where that is what is special about it."""
    kind, weight = type(layer).__name__, type(getattr(layer, "weight", None)).__name__
    return f"{kind} with {weight}" if kind in _PLAIN else kind


def _device(layer: torch.nn.Module) -> torch.device:
    tensors = [*layer.parameters(), *layer.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _dtype(module: torch.nn.Module) -> torch.dtype:
    """The dtype in which the model computes."""
    found = getattr(getattr(module, "config", None), "dtype", None)
    return found if found in _PLAIN_DTYPES else torch.float32


def _with_adapters(module: torch.nn.Module, layer: Any, by_input: Tensor) -> Tensor:
    """(q * dv, D): a wrapped layer's own weight and what its active LoRA adapters add."""
    kind = f"one that an adapter of type {type(layer).__module__}.{type(layer).__name__} changes"
    parts = [getattr(layer, name, None) for name in ("lora_A", "lora_B")]
    # Others that go by these names (AdaLoRA) hold matrices there, and multiply them with more.
    lora = all(part is not None and all(isinstance(each, torch.nn.Module) for each in part.values()) for part in parts)
    if not lora or not all(hasattr(layer, name) for name in ("scaling", "active_adapters")):
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
    """Raise where the forward of an adapted or quantised layer is not a product with `weight`, (q, dv, D), and a
    constant.

    A plain layer is not run: its weight is all that it has.
    """
    layer: Any = output_layer(module)
    base: Any = getattr(layer, "base_layer", layer)
    plain = _is_plain(base)
    if base is layer and plain:
        return
    dtype, device = (base.weight.dtype, base.weight.device) if plain else (_dtype(module), _device(base))
    values = (
        torch.linspace(-2, 2, weight.shape[0] * weight.shape[1], device=device, dtype=torch.float32)
        .sin()[None]
        .to(dtype)
    )
    with torch.no_grad():
        found = (layer(values) - layer(torch.zeros_like(values))).float()
        expected = values.float() @ weight.flatten(0, 1).float()
    # One unit of the dtype for each rounding of a sum of so many products.
    allowed = 8 * torch.finfo(dtype).eps * float(expected.abs().max().clamp(min=float(found.abs().max())))
    if not float((found - expected).abs().max()) <= allowed:
        what = f"one whose adapter of type {type(layer).__name__} does more than add a matrix to its weight"
        if base is layer:
            what = f"one of type {_kind(layer)} that does more than multiply by a matrix, such as round its input"
        raise _unreadable(module, what)


def _unreadable(module: torch.nn.Module, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the plan weighs values by the output projection, and {type(module).__name__} has {what}, which cannot be "
        "read as a plain matrix"
    )
