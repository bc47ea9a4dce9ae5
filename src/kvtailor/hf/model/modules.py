"""What kvtailor finds in a model for the plans that need it: its attention modules and its rotary embedding.

Nothing is hooked or changed. What is read is checked against the model's own code before it is used, since families
differ in how they pair the channels of a rotation and in how they lay out a projection.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.devices import runs_on
from kvtailor.hf.model.probe import Attending
from kvtailor.hf.model.projection import output_layer
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Rotation
from kvtailor.types.late_checks import require_none

__all__ = [
    "attending_by_source",
    "attention_modules",
    "is_part_of",
    "modules_by_layer",
    "rotation_of",
    "angles_at",
]

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "kv_a_proj_with_mqa")
_SAME_AT_ANY_LENGTH = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
# What a layer calls to hand its new keys to a cache, under each name that transformers' families have for it.
_READS_CACHE = re.compile(r"\b(\w*past_key_values?|layer_past|\w*cache|past)\.update\(")
# Whether an attention module turns its keys, found once: finding it costs a forward of a few tokens.
# On a GPU the answer stays there, so that the host waits for those of all layers at once.
_turning: weakref.WeakKeyDictionary[torch.nn.Module, bool | Tensor] = weakref.WeakKeyDictionary()


# Modules of models that were asked for.
_parts: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[torch.nn.Module]] = weakref.WeakKeyDictionary()


def is_part_of(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether a module is a part of a model, or was when one of its caches was used before."""
    # Every cache asks for each of its layers, and a walk through a large model takes milliseconds.
    if module not in _parts.get(model, ()):
        _parts[model] = weakref.WeakSet(model.modules())
    return module in _parts[model]


def attention_modules(model: Any) -> list[torch.nn.Module]:
    """The decoder's attention modules in the order of their layers; see `modules_by_layer`."""
    return list(modules_by_layer(model).values())


def modules_by_layer(model: Any, *, attending: Collection[int] = ()) -> dict[int, torch.nn.Module]:
    """The decoder's attention modules by layer: those that have a `layer_idx` and an output projection.

    A layer that keeps a state and has no attention is there as well, by the module that writes the state.

    Args:
        model: a transformers causal language model.
        attending: layers that both keep a state and attend, of which the attention is wanted or nothing: one module
            may attend for several layers (Zamba), and shows the number of one.
    """
    text = model.config.get_text_config(decoder=True)
    found: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        # A vision encoder's modules may count their layers too.
        if not isinstance(index, int) or getattr(module, "config", text) is not text or output_layer(module) is None:
            continue
        # A layer may have both, an attention and what writes its state.
        if index not in found or (_projects_keys(module) and not _projects_keys(found[index])):
            found[index] = module
    return {i: found[i] for i in sorted(found) if i not in attending or _projects_keys(found[i])}


def _projects_keys(module: torch.nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), torch.nn.Module) for name in _KEY_PROJECTIONS)


def attending_by_source(model: Any) -> Attending:
    """What the source of a model's classes says of its attention, where `probed` has no answer.

    An attention that can be replaced looks its function up in `ALL_ATTENTION_FUNCTIONS`, as transformers' own
    `set_attn_implementation` has it. These words change with transformers; what is not found is refused.
    """
    kinds = dict.fromkeys(type(module) for module in model.modules())
    sources = {kind.__name__: _source(kind) for kind in kinds}
    reading = {name: source for name, source in sources.items() if _READS_CACHE.search(source)}
    itself = tuple(name for name, source in reading.items() if "ALL_ATTENTION_FUNCTIONS" not in source)
    return Attending(hands_over=bool(reading), itself=itself)


def _source(kind: type) -> str:
    """The source of a class and of those it derives from; of one that was made while the program runs there is none."""
    found = []
    for base in kind.__mro__:
        if issubclass(base, torch.nn.Module) and base is not torch.nn.Module:
            with suppress(OSError, TypeError):
                found.append(inspect.getsource(base))
    return "\n".join(found)


def rotation_of(
    model: Any,
    module: torch.nn.Module,
    layer_type: str | None,
    head_dim: int,
    known: dict[object, Rotation] | None = None,
) -> Rotation:
    """The rotary embedding that an attention module's queries and keys went through.

    Args:
        model: a transformers causal language model.
        module: its attention module of the layer.
        layer_type: of the layer, for models with a rotary embedding for each kind; None where it has one.
        head_dim: d.
        known: what this function found for other layers of the model a moment ago, which it adds to: layers that get
            the same angles and put them on their states by the same function are not worked out one by one.

    Raises:
        UnsupportedModel: it has none, one that changes with the length, one that this layer does not use, or one whose
            effect is not understood.
    """
    name = model.config.model_type
    rotary = _rotary(model, module)
    if rotary is None:
        raise UnsupportedModel(f"the plan turns queries or keys by positions, and {name} has no rotary embedding")
    layer = getattr(module, "layer_idx", None)
    if not _has_angles(model, rotary, layer, layer_type):
        raise _does_not_turn(name, layer)
    kind = _rope_type(rotary, layer_type)
    if kind not in _SAME_AT_ANY_LENGTH:
        raise UnsupportedModel(
            f"the plan turns queries or keys by positions, and the rotary embedding of {name} is of type {kind!r}, "
            "whose angles depend on the length of the text"
        )
    device = runs_on(module)
    try:
        angles = _angles(rotary, torch.arange(8, device=runs_on(rotary))[None], layer_type)
    except IndexError as error:
        # Before transformers 5.23 some of these take positions of three axes alone.
        raise _not_understood(name) from error
    cos, sin = (each.to(device) for each in angles)
    alike, known = (id(rotary), layer_type, head_dim, type(module), device), {} if known is None else known
    if alike in known:
        _check_turns(module, cos, sin, name)
        return known[alike]
    for frequencies, interleaved in _candidates(cos, sin):
        rotation = Rotation(frequencies=frequencies, interleaved=interleaved)
        if rotation.size <= head_dim and _agrees(rotation, module, cos, sin, head_dim):
            _check_turns(module, cos, sin, name)
            exact = _stored_frequencies(rotary, layer_type)
            exact = None if exact is None else exact.to(device)
            if exact is not None and exact.shape == frequencies.shape and torch.allclose(exact, frequencies, atol=1e-4):
                rotation = Rotation(frequencies=exact, interleaved=interleaved)
            known[alike] = rotation
            return rotation
    raise _not_understood(name)


def _not_understood(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the plan turns queries or keys by positions, and what {name} does with its rotary embedding is not understood"
    )


def _does_not_turn(name: str, layer: int | None) -> UnsupportedModel:
    return UnsupportedModel(
        f"the plan turns queries or keys by positions, and layer {layer} of this {name} does not turn its own: it has "
        "no rotary embedding"
    )


def _has_angles(model: Any, rotary: Any, layer: int | None, layer_type: str | None) -> bool:
    """Whether the model gives this layer angles at all, as far as its configuration and its embedding show."""
    bases = getattr(model.config.get_text_config(decoder=True), "layer_rope_theta", None)
    if bases is not None and layer is not None and not bases[layer]:
        return False
    kinds = getattr(rotary, "rope_type", None)
    return not isinstance(kinds, dict) or layer_type in kinds


@torch.no_grad()
def _check_turns(module: torch.nn.Module, cos: Tensor, sin: Tensor, name: str) -> None:
    """Raise where this attention module does not use the angles that it is given, as several families in some layers.

    Its forward runs on eight made-up tokens, once with the angles and once with cos and sin exchanged. Without a
    rotation both outputs are the same bits.
    """
    if module not in _turning:
        turns = _turns(module, cos, sin, name)
        _turning[module] = bool(turns) if turns.device.type == "cpu" else turns
    turns = torch.as_tensor(_turning[module])
    require_none(~turns, lambda: _does_not_turn(name, getattr(module, "layer_idx", None)))


def _turns(module: torch.nn.Module, cos: Tensor, sin: Tensor, name: str) -> Tensor:
    """() bool: whether it does, on the device of the angles; see `_check_turns`."""
    tokens, config, like = cos.shape[0], getattr(module, "config", None), next(module.parameters())
    taken = inspect.signature(module.forward).parameters
    given = {"attention_mask": None, "position_ids": torch.arange(tokens, device=cos.device)[None]}
    given = {argument: value for argument, value in given.items() if argument in taken}
    said = []
    try:
        width = getattr(config, "hidden_size", like.shape[-1])
        hidden = (
            torch.linspace(-9, 9, tokens * width, device=cos.device, dtype=torch.float32)
            .sin()
            .mul(4)
            .view(1, tokens, width)
        )
        for pair in ((cos, sin), (sin, cos)):
            angles = tuple(each[None].to(like.dtype) for each in pair)
            output = module.forward(hidden.to(like.dtype), position_embeddings=angles, **given)
            said.append(output[0] if isinstance(output, tuple) else output)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnsupportedModel(
            f"the plan turns queries or keys by positions, and whether {type(module).__name__} of {name} turns its own "
            f"cannot be told: {type(error).__name__}: {error}"
        ) from error
    return (said[0] != said[1]).any()


def _rotary(model: Any, module: torch.nn.Module) -> Any:
    # An adapter has the model that it wraps as its base model; the method belongs to that one.
    model = getattr(getattr(model, "set_attn_implementation", None), "__self__", model)
    base = getattr(model, "base_model", model)
    parts = (getattr(base, name, None) for name in ("decoder", "language_model", "text_model"))
    for owner in (base, *parts, module):
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


def angles_at(
    model: Any, module: torch.nn.Module, layer_type: str | None, positions: Tensor
) -> tuple[Tensor, Tensor] | None:
    """cos and sin (1, t, r) of positions (t,), as the model makes them; None: it has no rotary embedding."""
    rotary = _rotary(model, module)
    if rotary is None:
        return None
    cos, sin = _angles(rotary, positions[None].to(runs_on(rotary)), layer_type)
    return cos[None], sin[None]


def _candidates(cos: Tensor, sin: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """(r / 2,) angles of one position, and whether channels are interleaved, as the angles may be meant."""
    if cos.shape[-1] % 2 == 0:
        if torch.equal(*cos.chunk(2, -1)):
            # GLM gives them as halves, and turns neighbours.
            for interleaved in (False, True):
                yield torch.atan2(sin.chunk(2, -1)[0][1], cos.chunk(2, -1)[0][1]), interleaved
        if torch.equal(cos[:, 0::2], cos[:, 1::2]):
            yield torch.atan2(sin[1, 0::2], cos[1, 0::2]), True
    # Some families give each angle once (gpt-oss).
    for interleaved in (False, True):
        yield torch.atan2(sin[1], cos[1]), interleaved


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
    states = torch.linspace(-1, 1, 8 * head_dim, device=cos.device, dtype=torch.float32).sin().view(1, 1, 8, head_dim)
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
