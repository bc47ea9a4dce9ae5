"""A forward behind a prompt that begins at a later layer of the model.

Where a cache holds in its first layers what it would hold uncompressed, these layers give for the same tokens what they
gave on the uncompressed cache. So what each layer gave there is taken down once (`record`), and a forward on a cache
that differs from a later layer on gets it in place of computing it anew (`begin_later`). No modelling code is copied:
a layer's module answers with what it answered before.

A cache is spoilt by it, since its first layers have not taken in these tokens, and refuses to be used afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvtailor.hf.cache import KvCache
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.model.modules import modules_by_layer
from kvtailor.plan import Plan

__all__ = ["Answers", "answering_layers", "begin_later", "first_change", "hidden_states", "record"]

Answers = list[Any]
"""What each layer of the model gave, from the first on: hidden states (b, t, hidden), or a tuple that begins with
them."""


def hidden_states(answers: Answers) -> list[Tensor]:
    """Return the hidden states (b, t, hidden) that each layer gave."""
    return [each if isinstance(each, Tensor) else each[0] for each in answers]


def answering_layers(model: Any, cache: KvCache) -> list[torch.nn.Module] | None:
    """Return the modules of the model's layers, from the first on; None where its layers hand on more than they give.

    Layers that keep states, or read what another layer holds, do.
    """
    geometry = cache.geometry
    if geometry.has_states or geometry.readers or len(cache.layers) < 2:
        return None
    attending = modules_by_layer(model)
    if sorted(attending) != list(range(len(cache.layers))):
        return None
    for modules in model.modules():
        if isinstance(modules, torch.nn.ModuleList) and len(modules) == len(attending):
            found = list(modules)
            if all(attending[index] in set(layer.modules()) for index, layer in enumerate(found)):
                return found
    return None


def first_change(cache: KvCache, whole: KvCache) -> int:
    """Return the first layer of the model in which two caches that have seen the same prompt differ.

    Args:
        cache: of any plan. One that reads in a way of its own differs from the first layer on.
        whole: of the null plan, or of one that gathers evidence alone.

    Returns:
        The number of layers where none differs.
    """
    if cache.plan.attend != Plan().attend:
        return 0
    for index, (mine, theirs) in enumerate(zip(cache.layers, whole.layers, strict=True)):
        if isinstance(mine, CompressedLayer) and not _holds_all(mine, theirs):
            return index
    return len(cache.layers)


@contextmanager
def record(layers: Sequence[torch.nn.Module]) -> Iterator[Answers]:
    """Take down inside what each layer gives in one forward."""
    found: Answers = []
    hooks = [layer.register_forward_hook(lambda module, args, output: found.append(output)) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def begin_later(cache: KvCache, layers: Sequence[torch.nn.Module], answers: Answers, first: int) -> Iterator[None]:
    """Let one forward of tokens behind a prompt begin at a layer; the cache refuses to be used afterwards.

    Args:
        cache: equal to the uncompressed one below `first`.
        layers: of the model, see `answering_layers`.
        answers: what they gave for the same tokens on the uncompressed cache.
        first: the first layer that is computed, at least 1 and less than the number of layers.
    """
    own = [layer.__dict__.get("forward") for layer in layers[:first]]
    given = _own_copy(answers[first - 1])
    guard = cache.guard
    try:
        for layer in layers[:first]:
            layer.forward = lambda *args, **kwargs: given
        # What follows the last layer's attention would act on all of them.
        cache.engine.switch.stop()
        guard.begin_at(first)
        yield
    finally:
        for layer, before in zip(layers[:first], own, strict=True):
            if before is None:
                del layer.forward
            else:
                layer.forward = before
        guard.break_off("a forward that began at a later layer")


def _holds_all(mine: CompressedLayer, theirs: Any) -> bool:
    """Whether a layer holds every token that another one holds, in full precision and to the last bit."""
    stored, whole = mine.state.stored, theirs.state.stored
    if stored.segments or stored.tail is None or stored.tail.length != stored.seen:
        return False
    one, two = stored.tail.as_segment(), whole.tail.as_segment()
    return torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values)


def _own_copy(answer: Any) -> Any:
    """The answer of a layer, with hidden states that the next layer may write into."""
    if isinstance(answer, Tensor):
        return answer.clone()
    return type(answer)((answer[0].clone(), *answer[1:]))
