"""What kvtailor reads of a model's own modules, for the plans that need it: output projections and rotary embeddings.

Nothing is hooked or changed. What is read is checked against the model's own code before it is used, since families
differ in how they pair the channels of a rotation and in how they lay out a projection.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import UnsupportedModel
from kvtailor.ops.rotate import turn
from kvtailor.types import Rotation

__all__ = ["attention_modules", "output_weight", "rotation_of"]

_OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj", "wo")
_SAME_AT_ANY_LENGTH = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def attention_modules(model: Any) -> list[torch.nn.Module]:
    """The model's attention modules by layer, those that have a `layer_idx` and an output projection."""
    found: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and _output_layer(module) is not None:
            found.setdefault(index, module)
    return [found[index] for index in sorted(found)]


def output_weight(module: torch.nn.Module, q_heads: int) -> Tensor:
    """The output projection of an attention module, (q, dv, D), as a view of the model's own weight.

    Args:
        module: of one layer.
        q_heads: its query heads.

    Raises:
        UnsupportedModel: it has none that can be read as a plain matrix.
    """
    layer = _output_layer(module)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        kind = "none" if layer is None else type(layer).__name__
        raise UnsupportedModel(
            f"the plan weighs values by the output projection, and {type(module).__name__} has {kind} that can be read "
            "as a plain matrix"
        )
    # GPT-2's Conv1D holds its weight the other way round.
    by_input = weight if type(layer).__name__ == "Conv1D" else weight.t()
    if by_input.shape[0] % q_heads:
        raise UnsupportedModel(
            f"the output projection of {type(module).__name__} takes {by_input.shape[0]} channels, which {q_heads} "
            "query heads do not divide"
        )
    return by_input.detach().unflatten(0, (q_heads, -1))


def rotation_of(model: Any, module: torch.nn.Module, layer_type: str | None, head_dim: int) -> Rotation:
    """The rotary embedding that an attention module's queries and keys went through.

    Args:
        model: a transformers causal language model.
        module: its attention module of the layer.
        layer_type: of the layer, for models with a rotary embedding for each kind; None where it has one.
        head_dim: d.

    Raises:
        UnsupportedModel: it has none, one that changes with the length, or one whose effect is not understood.
    """
    name = model.config.model_type
    rotary = _rotary(model, module)
    if rotary is None:
        raise UnsupportedModel(f"the plan turns queries or keys by positions, and {name} has no rotary embedding")
    kind = _rope_type(rotary, layer_type)
    if kind not in _SAME_AT_ANY_LENGTH:
        raise UnsupportedModel(
            f"the plan turns queries or keys by positions, and the rotary embedding of {name} is of type {kind!r}, "
            "whose angles depend on the length of the text"
        )
    device = next(model.parameters()).device
    cos, sin = _angles(rotary, torch.arange(8, device=device)[None], layer_type)
    for interleaved in (False, True):
        frequencies = _frequencies(cos, sin, interleaved)
        if frequencies is None:
            continue
        rotation = Rotation(frequencies=frequencies, interleaved=interleaved)
        if rotation.size <= head_dim and _agrees(rotation, module, cos, sin, head_dim):
            exact = _stored_frequencies(rotary, layer_type)
            if exact is not None and exact.shape == frequencies.shape and torch.allclose(exact, frequencies, atol=1e-4):
                rotation = Rotation(frequencies=exact.to(device), interleaved=interleaved)
            return rotation
    raise UnsupportedModel(
        f"the plan turns queries or keys by positions, and what {name} does with its rotary embedding is not understood"
    )


def _output_layer(module: torch.nn.Module) -> torch.nn.Module | None:
    found = (getattr(module, name, None) for name in _OUTPUTS)
    return next((layer for layer in found if isinstance(layer, torch.nn.Module)), None)


def _rotary(model: Any, module: torch.nn.Module) -> Any:
    base = getattr(model, "base_model", model)
    for owner in (base, getattr(base, "decoder", None), getattr(base, "language_model", None), module):
        found = getattr(owner, "rotary_emb", None)
        if found is not None:
            return found
    return None


def _rope_type(rotary: Any, layer_type: str | None) -> str:
    kinds = getattr(rotary, "rope_type", "default")
    return str(kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds)


def _angles(rotary: Any, positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    """cos and sin (8, r) as the model makes them."""
    like = torch.zeros(1, dtype=torch.float32, device=positions.device)
    kinds = isinstance(getattr(rotary, "rope_type", None), dict)
    cos, sin = rotary(like, positions, layer_type) if kinds else rotary(like, positions)
    return cos[0].float(), sin[0].float()


def _frequencies(cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
    """(r / 2,) angles of one position, if the channels are paired like this; None if not."""
    pairs = (cos[:, 0::2], cos[:, 1::2]) if interleaved else cos.chunk(2, -1)
    if cos.shape[-1] % 2 or not torch.equal(*pairs):
        return None
    wanted = sin[:, 0::2] if interleaved else sin.chunk(2, -1)[0]
    return torch.atan2(wanted[1], pairs[0][1])


def _stored_frequencies(rotary: Any, layer_type: str | None) -> Tensor | None:
    for name in (f"{layer_type}_inv_freq", "inv_freq"):
        found = getattr(rotary, name, None)
        if isinstance(found, Tensor):
            return found.detach().float()
    return None


def _agrees(rotation: Rotation, module: torch.nn.Module, cos: Tensor, sin: Tensor, head_dim: int) -> bool:
    """Whether turning by `rotation` is what the model's own function does, its constant factor apart."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return False
    states = torch.linspace(-1, 1, 8 * head_dim, device=cos.device).sin().view(1, 1, 8, head_dim)
    factor = float((cos[0] ** 2 + sin[0] ** 2).mean().sqrt())
    expected = turn(states, torch.arange(8, device=cos.device), rotation)
    for part in _turned_by_model(own, states, cos, sin, rotation.size):
        scaled = torch.cat([part[..., : rotation.size] / factor, part[..., rotation.size :]], -1)
        if torch.allclose(scaled, expected, atol=1e-5):
            return True
    return False


def _turned_by_model(own: Any, states: Tensor, cos: Tensor, sin: Tensor, size: int) -> Sequence[Tensor]:
    """What the model's function makes of all channels, and of the turned ones alone with the rest put back."""
    results = []
    for given in (states, states[..., :size]):
        try:
            turned = own(given, given, cos[None], sin[None])[0]
        except (RuntimeError, TypeError, IndexError):
            continue
        rest = states[..., turned.shape[-1] :]
        results.append(torch.cat([turned, rest], -1))
    return results
