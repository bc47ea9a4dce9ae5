"""Caches of one model that see the same text: one prefill fills them all, and one that holds all remakes another.

What a plan keeps of a prompt depends on the keys, values and queries of its layers alone. So a second cache need not
run the model again: while one cache is prefilled the others take in each layer, and later the one that still holds
all tokens can hand them on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from kvtailor.engine.view import stored_sides, view_held
from kvtailor.hf.cache import KvCache
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.of_cache import copy_layer
from kvtailor.hf.mask import lazy_mask
from kvtailor.plan import Plan
from kvtailor.types import Needs, Visibility
from kvtailor.types.evidence import Evidence

__all__ = ["can_follow", "can_remake", "forget_queries", "keep_queries", "sharing_prefill", "remake"]


def can_follow(plan: Plan) -> bool:
    """Whether a cache under this plan can be filled by sharing another's prefill: all but those that read twice, or
    whose codec rounds tokens before their own prompt reads them."""
    return plan.needs.reconstruction is None and not plan.encode.rounds_on_write


def can_remake(source: Plan, plan: Plan) -> bool:
    """Whether a cache under `plan` can be made anew from one under `source`, which must hold everything.

    Evidence that goes back to the beginning of the text is gathered by no other plan.
    """
    needs = plan.needs
    gathered = needs.mass or needs.rows or needs.moments or needs.reconstruction is not None
    rounded = plan.encode.rounds_on_write or source.encode.rounds_on_write
    return not (source.evicts or gathered or rounded or (needs.window and source.encode.needs.window))


def keep_queries(source: KvCache, plan: Plan) -> None:
    """Let a cache keep the newest queries that another plan will need when its cache is made anew."""
    source.engine.gather(Needs(window=plan.needs.window))


def forget_queries(source: KvCache) -> None:
    """End `keep_queries`."""
    source.engine.gather(Needs())


@contextmanager
def sharing_prefill(source: KvCache, others: Sequence[KvCache]) -> Iterator[None]:
    """Inside, new caches of the same model take in what a new cache reads, each after its own plan.

    Only for drafts, so that no layer is read by others: see `Geometry.taking_back_refusal`.
    """

    def take_in(index: int, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> None:
        for other in others:
            layer, guard = other.layers[index], other.guard
            assert isinstance(layer, CompressedLayer)
            layer.take_softmax(source.layers[index].state.model.softmax)
            guard.check_padding(index, visible)
            if not layer.is_initialized:
                layer.initialize_as(keys)
            guard.engine.append(layer.state, keys, values)
            guard.take_padding(index, visible)
            guard.engine.act_unread(layer.state, query, visible, scaling)

    with ExitStack() as changes:
        for other in others:
            changes.enter_context(other.guard.changing("a forward of another cache, taken in by this one,"))
        with source.guard.observed(take_in):
            yield
        for other in others:
            _copy_others(source, other)
            other.guard.rope.copy_from(source.guard.rope)


def remake(cache: KvCache, source: KvCache, mask: Tensor | None) -> None:
    """Fills a new cache with all that another holds, as if it were a prompt, and lets its plan compress it.

    Args:
        cache: new, of the same model; see `can_remake`.
        source: holds everything that it has seen, and has settled.
        mask: (b, columns) of what it has seen, 0 for padding; None: no padding.
    """
    rows, seen = source.engine.states[0].rows, source.seen
    device = source.layers[source.geometry.compressed[0]].device
    visible = lazy_mask(rows, seen, seen, 0, attention_mask=mask, device=device)
    layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    for layer, state in zip(layers, source.engine.states, strict=True):
        held, _ = view_held(state, visible, Needs(), len(layers))
        source.engine.offload.rest()
        # Padding was dropped when it was encoded; its columns are there, and no token sees them.
        place = held.positions.clamp(min=0).masked_fill(~held.valid, seen)[..., None]
        states = []
        for each in stored_sides(state, held):
            whole = each.new_zeros((*each.shape[:2], seen + 1, each.shape[-1]))
            states.append(whole.scatter(2, place.expand(-1, -1, -1, each.shape[-1]), each)[:, :, :seen])
        layer.initialize_as(states[0][:, :, :0])
        layer.state.append(*states, exactly=True)
        layer.state.model.scaling = state.model.scaling
        layer.take_softmax(state.model.softmax)
        layer.state.clock.reindex = True
        wanted = cache.plan.needs.window
        if wanted and state.observed.evidence.queries is not None and state.observed.evidence.columns is not None:
            newest = (
                state.observed.evidence.queries[:, :, -wanted:].clone(),
                state.observed.evidence.columns[-wanted:].clone(),
            )
            layer.state.observed.evidence = Evidence(queries=newest[0], columns=newest[1])
    _copy_others(source, cache)
    if layers:
        cache.guard.take_padding(layers[0].layer_idx, visible)
        cache.engine.release(visible)
    cache.guard.rope.copy_from(source.guard.rope)


def _copy_others(source: KvCache, other: KvCache) -> None:
    for layer, own in zip(source.layers, other.layers, strict=True):
        copy_layer(own, layer)
