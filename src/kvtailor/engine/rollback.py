"""Forwards whose tokens can be taken back: assisted decoding, and speculation of our own.

Tokens that come after a prompt in such a forward count as decoded if they stay, however many come at once: they are
observed, evicted and encoded as if they had come one by one. There are two ways of doing it:

- While a cache *speculates* (`speculate`), the caller sends at most `tokens_until_action` tokens, so that the plan does
  not act among them. Forwards are collected until `settle`; before that, `take_back` removes the newest tokens.
- While it *records* (transformers' assisted decoding), a forward may have any number of tokens. If the plan acts after
  some of them, it does so before the next token is read. A crop then restores the layer as it was before, and reads the
  tokens that stay again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from kvtailor.engine.engine import Engine
from kvtailor.engine.phase import Recording, Speculating
from kvtailor.engine.state import DraftTokens, LayerState, Pending
from kvtailor.errors import CacheMisuse
from kvtailor.types import Visibility

__all__ = [
    "attend_draft",
    "check_crop",
    "check_draft",
    "crop",
    "end_recording",
    "prompt_of",
    "tokens_until_action",
    "settle",
    "speculating",
    "take_back",
]


@contextmanager
def speculating(engine: Engine) -> Iterator[None]:
    """Allow forwards to be taken back inside; at the end the plan acts on the tokens that stay."""
    with engine.switch.speculating():
        yield
        settle(engine)


def settle(engine: Engine) -> None:
    """Let the plan act on all tokens that were not taken back."""
    for state in engine.states:
        engine.commit(state, rejected=0)


def tokens_until_action(engine: Engine) -> int | None:
    """Return the least `LayerState.tokens_until_action` of all layers."""
    counts = [count for state in engine.states if (count := state.tokens_until_action(engine.plan)) is not None]
    return min(counts) if counts else None


def take_back(engine: Engine, state: LayerState, count: int) -> None:
    """Forget the newest tokens of recorded forwards; the cache continues to speculate."""
    check_crop(engine, state, count)
    pending = state.pending
    if count == 0 or pending is None:
        return
    left = pending.tokens - count
    state.forget_newest(count)
    if not left:
        state.pending, state.observed.carry = None, pending.carry
        return
    shorter = replace(pending, query=pending.query[:, :, :left], visible=pending.visible.without_last(count))
    if state.observed.carry:
        state.observed.carry = pending.carry
        state.observed.carry = engine.read(state, shorter.query, shorter.visible, want_mass=False).carry
        engine.leave(state)
    state.pending = shorter


def prompt_of(engine: Engine, state: LayerState, new: int) -> int:
    """Return how many of the new tokens are a prompt or plain tokens and no draft, the same for every layer."""
    phase = engine.phase
    if isinstance(phase, Speculating):
        return new
    if state.pending is not None:
        # No crop came, so the recording has ended, which transformers never says.
        _end_recording(engine, state)
        engine.switch.end_recording(windows_go_on=True)
        return new
    if not isinstance(phase, Recording):
        return new
    if state.stored.seen:
        return 0
    return new if phase.prompt is None else min(new, phase.prompt)


def check_draft(engine: Engine, state: LayerState, tokens: int) -> None:
    """Raise if the plan would act on several layers at once within the recorded tokens."""
    if not isinstance(engine.phase, Recording) or state.pending is not None or not state.stored.seen:
        return
    # What several layers do at once: they evict where they share a budget, and encode where they share a segment.
    most = state.tokens_until_eviction(engine.plan) if engine.plan.scope != "layer" else None
    if state.layer_group:
        most = state.tokens_until_action(engine.plan)
    if most is not None and most < tokens:
        raise CacheMisuse(
            f"{tokens} recorded tokens came at once, and {engine.plan} acts on several layers at a time after "
            f"{most} of them: feed at most {most}, or draft with kvtailor.generate"
        )


def attend_draft(
    engine: Engine,
    state: LayerState,
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    visible: Visibility,
    scaling: float,
) -> Tensor:
    """Append the tokens of a recorded forward as decoded ones, and return their attention.

    If the plan evicts or encodes after some of them, it does so before the next is read, as in plain decoding.

    Args:
        engine: of the cache.
        state: of the layer; it has seen a prompt.
        keys: (b, h, t, d). values: (b, h, t, dv).
        query: (b, q, t, d) post-RoPE.
        visible: what each of them may see.
        scaling: the model's own factor before the softmax.

    Returns:
        (b, q, t, dv).
    """
    state.model.scaling = scaling
    most = _tokens_at_once(engine, state)
    acts = most is not None and most < query.shape[2]
    # Copies: keys may be a view of the model's whole projection, and these wait for a crop.
    draft = DraftTokens(keys=keys.clone(), values=values.clone(), query=query.detach().clone(), visible=visible)
    state.draft = replace(draft, before=state.checkpoint() if acts else None)
    output = _read_draft(engine, state, draft)
    engine.leave(state)
    return output


def check_crop(engine: Engine, state: LayerState, count: int) -> None:
    """Raise if the newest tokens of a layer cannot be removed; nothing is changed."""
    waiting = state.draft or state.pending
    if isinstance(engine.phase, Speculating):
        if count and (state.pending is None or count > state.pending.tokens):
            came = 0 if state.pending is None else state.pending.tokens
            raise CacheMisuse(f"asked to take back {count} tokens, and {came} have come since the cache settled")
    elif waiting is None:
        state.check_crop(count, exact=not engine.needs.mass)
    elif count > waiting.tokens:
        raise CacheMisuse(
            f"asked to take back {count} tokens; the last forward brought {waiting.tokens}, and what "
            "came before it is already compressed. Crop no more than the last forward."
        )


def crop(engine: Engine, state: LayerState, count: int) -> None:
    """End a recorded forward: forget its last `count` tokens, then let the plan act on the rest."""
    check_crop(engine, state, count)
    draft = state.draft
    if draft is None or draft.before is None or not count:
        state.end_draft()
        engine.commit(state, rejected=count)
        return
    state.restore(draft.before)
    state.end_draft()
    if count < draft.tokens:
        _read_draft(engine, state, draft.piece(0, draft.tokens - count))
        engine.commit(state, rejected=0)
    engine.leave(state)


def end_recording(engine: Engine) -> None:
    """End the recording, if there is one: later tokens can no longer be removed."""
    if not isinstance(engine.phase, Recording):
        return
    for state in engine.states:
        _end_recording(engine, state)
    engine.switch.end_recording()


def _end_recording(engine: Engine, state: LayerState) -> None:
    state.end_draft()
    if state.pending is not None:
        engine.commit(state, rejected=0)


def _tokens_at_once(engine: Engine, state: LayerState) -> int | None:
    """Return how many tokens one layer can read at once as if they came one by one; None: any number."""
    return state.tokens_until_action(engine.plan) if engine.plan.attend.reads_alike else 1


def _read_draft(engine: Engine, state: LayerState, draft: DraftTokens) -> Tensor:
    """Return the attention (b, q, t, dv) of a draft, read in pieces; the plan acts after each but the last."""
    outputs, first = [], 0
    while first < draft.tokens:
        most, left = _tokens_at_once(engine, state), draft.tokens - first
        piece = draft.piece(first, left if most is None else min(most, left))
        state.append(piece.keys, piece.values, exactly=False)
        before = state.observed.carry
        attended = engine.read(state, piece.query, piece.visible, want_mass=False)
        state.observed.tokens_read, state.observed.carry = attended.tokens_read, attended.carry
        outputs.append(attended.output)
        state.pending = Pending(query=piece.query, visible=piece.visible, carry=before, decoded=True)
        first += piece.tokens
        if first < draft.tokens:
            engine.commit(state, rejected=0)
    return torch.cat(outputs, 2)
