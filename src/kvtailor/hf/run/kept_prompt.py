"""A prompt that has gone through the model once, and the caches of any number of plans that are built from it.

A prompt's own attention is exact and comes before the plan acts. So what its forward computes does not depend on the
plan, and what a plan sees of it are keys, values and the evidence that its methods declare in `needs`. A cache under
the null plan keeps all of that (`keep`). Another cache takes it in layer by layer (`fill`), by the calls of the engine
that a forward makes, and is then what it would have been had it read the prompt itself, bit for bit.

A kept prompt is read and never continued, and shares no storage with the caches that are filled from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine.saving import state_of
from kvtailor.engine.state import Observed
from kvtailor.errors import KvtailorError
from kvtailor.hf.cache import KvCache
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.of_cache import copy_layer
from kvtailor.hf.layers.states import StatesMixin
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.make_cache import make_gathering_cache
from kvtailor.hf.mask import LazyMask, lazy_mask
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.run.later_layers import Answers, hidden_states
from kvtailor.ledger import storage_bytes
from kvtailor.plan import Plan
from kvtailor.plan.registry import name_of
from kvtailor.types import Needs, Repetition, Visibility

__all__ = ["CannotKeep", "KeptPrompt", "difference", "fill", "keep", "why_own"]


class CannotKeep(KvtailorError):
    """What a prompt's forward does on this model is more than a kept prompt holds."""


@dataclass(kw_only=True)
class KeptPrompt:
    """What the forward of a prompt has left.

    Attributes:
        cache: under the null plan. It holds all keys and values, the evidence for `needs`, and what layers that no plan
            compresses have kept.
        needs: the evidence that was gathered.
        logits: (b, 1, V) or (b, n, V).
        mask: (b, n), 0 for padding; None: no padding.
        answers: by the ids of tokens behind the prompt, what each layer of the model gave for them; see
            `hf.run.later_layers`.
        repeated: what the passes that repeat the context have left of each compressed layer, by how it was repeated and
            the ids of the instruction.
    """

    cache: KvCache
    needs: Needs
    logits: Tensor
    mask: Tensor | None
    answers: dict[tuple[int, ...], Answers] = field(default_factory=dict)
    repeated: dict[tuple[Repetition, tuple[int, ...]], list[Observed]] = field(default_factory=dict)

    def serves(self, plan: Plan) -> bool:
        """Whether a cache under a plan can be filled from it."""
        return why_own(plan) is None and self.needs.covers(plan.needs)

    def is_of(self, model: Any) -> bool:
        """Whether it has gone through this very model."""
        of = self.cache.guard.model
        return of is not None and of() is model

    @property
    def bytes(self) -> int:
        """Of all storages that it keeps alive."""
        found = [self.logits]
        for answers in self.answers.values():
            found += hidden_states(answers)
        for layers in self.repeated.values():
            for each in layers:
                found += each.memories().values()
                found += [] if each.repeated is None else each.repeated.tensors().values()
        return self.cache.ledger().total + storage_bytes(found)

    def take_repetition(self, cache: KvCache, instruction: Tensor) -> bool:
        """Give a cache, in the phase `Deferred`, what the same passes left for another plan; False: there were none."""
        found = self.repeated.get(_name_of(cache, instruction))
        if found is None:
            return False
        for state, kept in zip(cache.engine.states, found, strict=True):
            copied = _copied(kept)
            state.observed.reconstruction = copied.reconstruction
            state.observed.repeated, state.observed.repeated_real = copied.repeated, copied.repeated_real
        return True

    def keep_repetition(self, cache: KvCache, instruction: Tensor) -> None:
        """Keep what the passes have left in a cache that has read the same prompt, before it is compressed."""
        self.repeated[_name_of(cache, instruction)] = [_copied(state.observed) for state in cache.engine.states]


def why_own(plan: Plan) -> str | None:
    """Return why a cache under a plan has to read a prompt itself, as the end of a sentence; None: it need not."""
    if plan.encode.rounds_on_write:
        return f"{name_of(plan.encode)} rounds tokens before their own prompt reads them"
    if plan.prompt_pass is None:
        return f"{name_of(plan.attend)} reads a prompt in a way of its own"
    return None


def keep(model: Any, ids: Tensor, needs: Needs, mask: Tensor | None = None, *, last_only: bool = True) -> KeptPrompt:
    """Return what one forward of a prompt leaves.

    Args:
        model: of transformers.
        ids: (b, n), n at least 2, where the model's input goes.
        needs: the evidence that the plans which it is for need together.
        mask: (b, n), 0 for padding; None: no padding.
        last_only: keep the logits of the last token alone.

    Raises:
        CannotKeep: the model masks more than causality and padding ask for.
        KvtailorError: the model cannot have a cache, or its modules do not show what the needs take.
    """
    cache = make_gathering_cache(model, needs)
    plain: list[bool] = []

    def look(layer: int, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> None:
        plain.append(isinstance(visible, LazyMask) and visible.only_padding)

    mask = None if mask is None or bool(mask.all()) else mask
    with cache.guard.observed(look):
        logits = fed(model, cache, ids, mask, keep=int(last_only))
    if not all(plain):
        raise CannotKeep("this model masks a prompt otherwise than causally")
    # It is not continued. So the model gets its own attention back as if this cache were gone.
    cache.lease = None
    return KeptPrompt(cache=cache, needs=needs.of_prompt, logits=logits, mask=mask)


def fill(cache: KvCache, kept: KeptPrompt) -> None:
    """Let a new cache take in a prompt, as if it had read it: its plan acts at once, or waits in the phase `Deferred`.

    Args:
        cache: new, of the same model, under a plan that the prompt `serves`.
        kept: stays as it is.

    Raises:
        CannotKeep: the prompt was kept in another dtype than the cache holds.
        KvtailorError: what the plan raises in a prompt's forward; the cache is refused then, as after a forward.
    """
    source, guard, engine = kept.cache, cache.guard, cache.engine
    if guard.stored_dtype is not source.guard.stored_dtype:
        raise CannotKeep(
            f"a prompt that was kept in {source.layers[source.geometry.compressed[0]].dtype} cannot fill a cache in "
            f"{guard.stored_dtype or 'the dtype of its model'}: let it read the prompt itself"
        )
    rows, tokens = source.rows, source.seen
    readers = cache.geometry.readers
    # The layers that read what another one holds, each with that one; what follows it waits for the last of them.
    read_by = {reader: layer for layer, each in readers.items() for reader in each}
    needs, device = cache.plan.needs.of_prompt, kept.logits.device.type
    changing = guard.changing("a kept prompt, taken in by this cache,")
    with changing, torch.no_grad(), torch.autocast(device, enabled=False):
        guard.check_opened()
        visible: Visibility | None = None
        for index, (layer, own) in enumerate(zip(cache.layers, source.layers, strict=True)):
            at = read_by.get(index, index)
            found: Any = cache.layers[at]
            if isinstance(found, CompressedLayer):
                kept_state = source.layers[at].state
                if visible is None:
                    visible = lazy_mask(rows, tokens, tokens, 0, attention_mask=kept.mask, device=own.device)
                if at == index:
                    _append(found, kept_state, visible)
                engine.begin_reading(found.state)
                if index == max(readers.get(at, (at,))):
                    engine.take_prompt(found.state, kept_state.observed.evidence.within(needs), visible)
            copy_layer(layer, own)
        guard.rope.copy_from(source.guard.rope)


def difference(one: KvCache, two: KvCache) -> str | None:
    """Return in what two caches that have seen the same prompt differ, bit for bit, in words; None where they do not.

    What is on a tier is read for it.
    """
    for index, (mine, theirs) in enumerate(zip(one.layers, two.layers, strict=True)):
        if isinstance(mine, CompressedLayer):
            (facts, tensors), (other_facts, others) = state_of(mine.state), state_of(theirs.state)
            if facts != other_facts:
                return f"what layer {index} of the model says of itself"
            for name in tensors:
                if not _bits_equal(tensors[name], others[name]):
                    return f"{name} of layer {index} of the model"
        elif isinstance(mine, WindowLayer) and not (
            _bits_equal(mine.keys, theirs.keys) and _bits_equal(mine.values, theirs.values)
        ):
            return f"the window of layer {index} of the model"
        if isinstance(mine, StatesMixin):
            states, others = mine.states(), theirs.states()
            if states.keys() != others.keys() or not all(_bits_equal(states[name], others[name]) for name in states):
                return f"the states of layer {index} of the model"
    return None if one.ledger() == two.ledger() else "the bytes of its ledger"


def _bits_equal(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one, two) or bool(((one == two) | (one.isnan() & two.isnan())).all())


def _append(layer: CompressedLayer, kept: Any, visible: Visibility) -> None:
    """Let the keys and values of a prompt join a new layer, as its attention does it."""
    guard = layer.guard
    layer.take_softmax(kept.model.softmax)
    held = kept.stored.tail.as_segment()
    keys, values = (each.unflatten(0, (kept.rows, kept.heads)) for each in (held.keys, held.values))
    guard.check_padding(layer.layer_idx, visible)
    layer.initialize_as(keys[:, :, :0])
    guard.engine.append(layer.state, keys, values)
    guard.take_padding(layer.layer_idx, visible)
    layer.state.model.scaling = kept.model.scaling


def _name_of(cache: KvCache, instruction: Tensor) -> tuple[Repetition, tuple[int, ...]]:
    how = cache.plan.needs.reconstruction
    assert how is not None
    return how, tuple(instruction.tolist())


def _copied(observed: Observed) -> Observed:
    """What the passes of a repetition have left, in storages of its own."""

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone()

    repeated = observed.repeated
    if repeated is not None:
        repeated = replace(repeated, sampled=own(repeated.sampled), sampled_columns=own(repeated.sampled_columns))
    return Observed(
        reconstruction=own(observed.reconstruction), repeated=repeated, repeated_real=own(observed.repeated_real)
    )
