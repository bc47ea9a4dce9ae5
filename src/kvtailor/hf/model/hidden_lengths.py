"""How long the hidden states are that a layer's attention gets, while the model runs: what divides its queries' share.

A hook before each attention module reads its input and changes nothing. It is there for as long as the context is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.modules import modules_by_layer

__all__ = ["hidden_lengths"]

# A hidden state of zeros, as padding may have, has a logarithm all the same.
_LEAST = 1e-30


@contextmanager
def hidden_lengths(model: Any, geometry: Geometry) -> Iterator[Callable[[int], Tensor]]:
    """While it is open, (b, t) float32 logarithms of one over the length of the hidden states that the newest forward
    gave a compressed layer.

    Raises:
        UnsupportedModel: the model does not show the module of a layer, or, when the lengths are asked for, that module
            was given no hidden states (b, t, D).
    """
    modules = modules_by_layer(model)
    missing = [layer for layer in geometry.compressed if layer not in modules]
    if missing:
        raise UnsupportedModel(
            f"the plan needs the hidden states that attention gets, and this {geometry.model_type} does not show the "
            f"modules of layers {', '.join(map(str, missing))}"
        )
    found: dict[int, Tensor] = {}

    def of_layer(index: int) -> Tensor:
        if index not in found:
            raise UnsupportedModel(
                f"the plan needs the hidden states that attention gets, and {geometry.model_type} gives those of layer "
                f"{geometry.compressed[index]} in no known way"
            )
        return found[index]

    hooks = []
    try:
        for index, layer in enumerate(geometry.compressed):
            hooks.append(modules[layer].register_forward_pre_hook(partial(_measure, found, index), with_kwargs=True))
        yield of_layer
    finally:
        for hook in hooks:
            hook.remove()


def _measure(
    found: dict[int, Tensor], index: int, module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    hidden = named.get("hidden_states", given[0] if given else None)
    if isinstance(hidden, Tensor) and hidden.ndim == 3:
        found[index] = -hidden.detach().float().norm(dim=-1).clamp_min(_LEAST).log()
    else:
        found.pop(index, None)
