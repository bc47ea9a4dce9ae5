"""How much the end of a model depends on what each layer's attention adds, token by token.

The tokens that repeat a piece of a context go through the model once with gradients, behind the keys and values that
the cache holds, and are not kept. What is asked is the gradient of the sum of squares of the last layer's hidden states
by what each attention module gives back. The model's parameters take no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kvtailor.errors import ArgumentError, CacheMisuse, KvtailorError
from kvtailor.hf.attention import uncounted
from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.modules import modules_by_layer
from kvtailor.hf.versions import hand_cache

__all__ = ["check_gradients", "log_gradients"]

# A token that the end does not depend on has a logarithm all the same.
_LEAST = 1e-30
_PROBED = 3


class _Beside(DynamicLayer):
    """What a layer of a cache holds, in front of new tokens that it does not keep."""

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sides = ((self.keys, key_states), (self.values, value_states))
        keys, values = (torch.cat([held.to(new.dtype), new], -2) for held, new in sides)
        return keys, values


def check_gradients(model: Any, cache: KvCache, ids: Tensor) -> None:
    """Raise where such a gradient cannot be had of a model. Nothing is fed to the cache: a few tokens go without one.

    Args:
        model: a transformers decoder-only model.
        cache: for it.
        ids: (b, n) of its prompt, on its device.

    Raises:
        CacheMisuse: no finite gradient comes back, or modules are not shown.
    """
    ending: list[str] = []
    try:
        few = ids[:1, :_PROBED]
        with _watched(model, ending):
            found = _gradients(model, cache.geometry, few, torch.ones_like(few))
        finite = all(bool(each.isfinite().all()) for each in found)
    except KvtailorError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise CacheMisuse(_refused(cache, f"its forward with gradients fails ({error})")) from error
    if ending:
        raise CacheMisuse(_refused(cache, f"{', '.join(ending[:3])} let none through"))
    if not finite:
        raise CacheMisuse(_refused(cache, "they are no finite numbers"))


def log_gradients(model: Any, cache: KvCache, ids: Tensor, real: Tensor, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """(b, t) float32 logarithms of the gradients' lengths, for each compressed layer.

    Args:
        model: a transformers decoder-only model.
        cache: which holds its whole context, nothing of it evicted or encoded.
        ids: (b, t) new tokens.
        real: (b, t) bool: this new token is one, and not padding.
        inputs: what tells the model of padding and positions, by the names of its forward.

    Raises:
        CacheMisuse: a gradient is no finite number.
    """
    held = []
    for state in cache.engine.states:
        assert state.stored.tail is not None and not state.stored.segments, "gradients come before anything is dropped"
        part = state.stored.tail.as_segment()
        held.append(tuple(side.unflatten(0, (state.rows, state.heads)) for side in (part.keys, part.values)))
    found = _gradients(model, cache.geometry, ids, real, held, inputs)
    # One wait for all layers.
    device = found[0].device
    if not bool(torch.stack([each.isfinite().all().to(device) for each in found]).all()):
        raise CacheMisuse(_refused(cache, f"those of a repetition in {held[0][0].dtype} are no finite numbers"))
    return [each.clamp_min(_LEAST).log() for each in found]


def _refused(cache: KvCache, why: str) -> str:
    return (
        f"{cache.plan} weighs a repetition by gradients, and this {cache.geometry.model_type} gives none: {why}. "
        "Load it in bfloat16 or float32 with weights that are not quantised, or take kvzip_plus, which needs none"
    )


def _gradients(
    model: Any,
    geometry: Geometry,
    ids: Tensor,
    real: Tensor,
    held: Sequence[tuple[Tensor, ...]] | None = None,
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Tensor]:
    """(b, t) float32 lengths for each layer; `held`: for each layer keys and values (b, h, n, d), None for none."""
    modules = modules_by_layer(model)
    named = {module: name for name, module in model.named_modules()}
    missing = [layer for layer in geometry.compressed if layer not in modules]
    block = None if missing else _block(model, named[modules[geometry.compressed[-1]]])
    if block is None:
        raise CacheMisuse(
            f"asked for gradients by what attention adds, and this {geometry.model_type} does not show the modules of "
            "its layers: take kvzip_plus"
        )
    taps: dict[int, Tensor] = {}
    ends: list[Tensor] = []
    # Tensors that were made in inference mode can be read here, and what is made of them has gradients.
    with ExitStack() as open_until_done:
        for context in (torch.inference_mode(False), torch.enable_grad(), uncounted(), _frozen(model)):
            open_until_done.enter_context(context)
        for layer in geometry.compressed:
            hook = modules[layer].register_forward_hook(partial(_tap, taps, layer))
            open_until_done.callback(hook.remove)
        hook = block.register_forward_hook(partial(_end, ends))
        open_until_done.callback(hook.remove)
        options: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
        if held is not None:
            layers = [_Beside(keys, values) for keys, values in held]
            options |= {"use_cache": True, **hand_cache(Cache(layers=layers))}
        # Clones, since what inference mode made cannot be kept for a gradient.
        model(input_ids=ids.clone(), **{name: each.clone() for name, each in inputs.items()}, **options)
        if len(ends) != 1 or len(taps) != len(geometry.compressed) or not ends[0].requires_grad:
            raise ArgumentError("no gradient leads from its last layer back to its attention")
        objective = (ends[0].float().square() * real.clone().to(ends[0].device)[..., None]).sum()
        wanted = [taps[layer] for layer in geometry.compressed]
        gradients = torch.autograd.grad(objective, wanted)
    return [each.detach().float().norm(dim=-1) for each in gradients]


@contextmanager
def _watched(model: Any, ending: list[str]) -> Iterator[None]:
    """While it is open, modules that get something with a gradient and give only numbers without one are named.

    Such a module, as of quantised weights without a backward, would leave a gradient that is a part of the true one.
    """

    def look(name: str, module: torch.nn.Module, given: Any, named: Any, output: Any) -> None:
        came = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
        gone = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        gone = [each for each in gone if each.is_floating_point()]
        if gone and any(each.requires_grad for each in came) and not any(each.requires_grad for each in gone):
            ending.append(f"{name} ({type(module).__name__})")

    # Angles are made for states, and not of them.
    hooks = [
        module.register_forward_hook(partial(look, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and "rotary" not in type(module).__name__.lower()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _block(model: Any, name: str) -> torch.nn.Module | None:
    """The layer of the decoder that an attention module belongs to: the innermost part that is one of a list."""
    words = name.split(".")
    while words and not words[-1].isdigit():
        words.pop()
    found: torch.nn.Module | None = model.get_submodule(".".join(words)) if words else None
    return found


def _tap(into: dict[int, Tensor], layer: int, module: torch.nn.Module, given: Any, output: Any) -> Any:
    """Keep what an attention module gives back; the graph begins at the first."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor) or first.ndim != 3:
        return output
    if not first.requires_grad:
        first = first.detach().requires_grad_()
    into[layer] = first
    return (first, *output[1:]) if isinstance(output, tuple) else first


def _end(into: list[Tensor], module: torch.nn.Module, given: Any, output: Any) -> None:
    into.append(output[0] if isinstance(output, tuple) else output)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Parameters that learn do not while it is open: no gradient by them is wanted, and none is kept room for."""
    learned = [each for each in model.parameters() if each.requires_grad]
    for each in learned:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in learned:
            each.requires_grad_()
