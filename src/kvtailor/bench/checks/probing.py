"""Two experiments on one more cache of a plan: is what it lists read, and is what it lists all that it keeps?

*Read*: all that its segments hold is set to zero after the prefill, and the same targets are scored again. An attention
that reads what is held then gives other scores. One that reads something else (such as a copy of the full keys) gives
the same ones, but for rounding.

*All*: the tensors of this process are counted before the cache is made and after its prefill. What came to life and is
still there is the cache's, whether its ledger lists it or not. Files, and memory that no tensor of Python stands for,
are not seen; the task `memory` weighs those in a fresh process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.tensor_parallel import RankHeads, gather_objects

__all__ = ["fed_scores", "probe", "rounding_of"]

_BLOCK = 16
_ROWS = 32
"""Rows of logits that become log-probabilities at once: of a large vocabulary they stay in the processor's cache."""
_FIRST = 32
"""Targets that are fed first on an emptied cache: most plans have given other scores by then."""
_CLEARLY = 4
"""By how many roundings the first ones must differ to tell it, since they were scored in one piece with all others."""


def fed_scores(subject: Subject, logits: Tensor, cache: Any, targets: Tensor, chunk: int | None) -> Tensor:
    """Log-probability of each target (t,) on the CPU after a prefill that gave the last logits (1, V).

    Args:
        subject: the model.
        logits: of the prompt's last token.
        cache: after the prompt.
        targets: (t,) int64.
        chunk: so many of them are fed at once; None: all, and the cache is not to be used afterwards.
    """
    return torch.cat(list(_fed_pieces(subject, logits, cache, targets, chunk))).cpu()


def _fed_pieces(subject: Subject, logits: Tensor, cache: Any, targets: Tensor, chunk: int | None) -> Iterator[Tensor]:
    """The same piece by piece as they are fed, where the model is; the first target is told before any is."""
    yield _told(logits, targets[:1])
    fed, rest = targets[:-1], targets[1:]
    if fed.numel():
        size = chunk or fed.numel()
        for piece, wanted in zip(fed.split(size), rest.split(size), strict=True):
            found, cache = subject.forward(piece[None], cache, ends=chunk is None)
            yield _told(found[0], wanted)


def _told(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability (t,) float32 of targets (t,) under logits (t, V)."""
    wanted = targets.to(logits.device)[:, None].split(_ROWS)
    pieces = zip(logits.split(_ROWS), wanted, strict=True)
    return torch.cat([rows.float().log_softmax(-1).gather(1, each)[:, 0] for rows, each in pieces])


def rounding_of(
    subject: Subject, full: Contestant, context: Tensor, targets: Tensor, scores: Tensor, chunk: int | None
) -> float:
    """Largest difference of a target's log-probability, in nats, where 'full' is fed in blocks of another size.

    Both ways are exact, so this is what rounding does to this model in its dtype.

    Args:
        subject: the model.
        full: the null plan.
        context: (n,) int64. targets: (t,) int64.
        scores: (t,) of the targets under 'full', the context fed at once and the targets in pieces of `chunk`.
        chunk: see `fed_scores`.
    """
    cache, half = subject.new_cache(full), max(1, context.numel() // 2)
    for piece in context.split(half):
        logits, cache = subject.forward(piece[None], cache, last_only=True)
    other = _BLOCK if chunk != _BLOCK else _BLOCK // 2
    return float((fed_scores(subject, logits[0, -1:], cache, targets, other) - scores).abs().max())


def probe(
    subject: Subject,
    contestant: Contestant,
    context: Tensor,
    targets: Tensor,
    scores: Tensor,
    rounding: float,
    chunk: int | None,
) -> dict[str, Any]:
    """Makes both experiments, and gives `rounding`, `reads_held` and `bytes_alive` of a `Record`.

    A cache that is not kvtailor's has no segments to look at; its `reads_held` and `bytes_alive` are None.

    Args:
        subject: the model. A cache of the plan after a context of this length must have been made before, so that what
            all caches share is there already.
        contestant: the plan.
        context: (n,) int64. targets: (t,) int64.
        scores: (t,) of the targets under the plan.
        rounding: see `rounding_of`.
        chunk: see `fed_scores`.
    """
    gc.collect(0)
    collecting = gc.isenabled()
    # What is new stays in the youngest generation, so that its garbage is distinguished from what is kept.
    gc.disable()
    try:
        before = _alive()
        logits, cache = subject.prefill(context[None], subject.new_cache(contestant), last_only=True)
        if chunk is not None:
            # The record's bytes were weighed after the targets, of which a codec may have encoded some by then.
            fed_scores(subject, logits[0, -1:], cache, targets, chunk)
        row = logits[0, -1:].tolist()
        dtype = logits.dtype
        del logits
        if not _can_be_emptied(cache):
            return {"rounding": rounding, "reads_held": None, "bytes_alive": None}
        gc.collect(0)
        alive = _alive() - before - (cache.conversation.bytes if isinstance(cache, KvCache) else 0)
        if isinstance(cache, KvCache) and isinstance(cache.share, RankHeads):
            # The ledger of a record is that of all processes, and so is what is held against it.
            alive = sum(gather_objects(cache.share, alive))
    finally:
        if collecting:
            gc.enable()
    if chunk is not None or _is_placed(cache):
        cache = subject.new_cache(_unplaced(contestant) if _is_placed(cache) else contestant)
        subject.prefill(context[None], cache, last_only=True)
    found: dict[str, Any] = {"rounding": rounding, "reads_held": None, "bytes_alive": alive}
    if _is_placed(cache):
        return found
    first = torch.tensor(row, dtype=dtype, device=subject.device)
    if chunk is None and targets.numel() > 2 * _FIRST:
        told = _changes(subject, first, cache, targets[:_FIRST], scores[:_FIRST], _CLEARLY * rounding, None)
        if told is not False:
            return found | {"reads_held": told}
        cache = subject.new_cache(contestant)
        subject.prefill(context[None], cache, last_only=True)
    return found | {"reads_held": _changes(subject, first, cache, targets, scores, rounding, chunk)}


def _changes(
    subject: Subject, first: Tensor, cache: Any, targets: Tensor, scores: Tensor, most: float, chunk: int | None
) -> bool | None:
    """Whether scores differ by more than so much where all that a cache holds is zero; None where it holds nothing."""
    stored = list(_held_storages(cache))
    if not stored:
        return None
    # A calibration's tensors may be among them, which other caches share: all are put back.
    kept = [each.clone() for each in stored]
    for each in stored:
        each.zero_()
    try:
        were = iter(scores.tolist())
        # A difference that is not a number is one.
        return any(
            not abs(now - next(were)) <= most
            for piece in _fed_pieces(subject, first, cache, targets, chunk)
            for now in piece.tolist()
        )
    finally:
        for each, was in zip(stored, kept, strict=True):
            each.copy_(was)


def _alive() -> int:
    """Bytes of the unique storages of all tensors that Python's garbage collector finds.

    A tensor around others (a `DTensor`, of a model that processes share) has no storage; those inside are found.
    """
    kinds = {kind for kind in _kinds(Tensor) if not hasattr(kind, "__tensor_flatten__")}
    charged: dict[tuple[str, int], int] = {}
    for each in gc.get_objects():
        # Asking an arbitrary object for its class may run its code; its type does not.
        # torch.compile leaves tensors behind that stand for others and have no storage (FakeTensor).
        real = type(each) in kinds and not isinstance(each, FakeTensor)
        if real and each.layout is torch.strided and each.device.type != "meta":
            storage = each.untyped_storage()
            charged[str(each.device), storage.data_ptr()] = storage.nbytes()
    return sum(charged.values())


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _kinds(each)


def _can_be_emptied(cache: Any) -> bool:
    return isinstance(cache, KvCache)


def _is_placed(cache: Any) -> bool:
    return bool(cache.engine.plan.store.moves)


def _unplaced(contestant: Contestant) -> Contestant:
    """The plan with its segments left on the device: where they live changes nothing of what is read."""
    from kvtailor.plan import Plan

    assert contestant.plan is not None, "its cache was made from it"
    plan = replace(contestant.plan, store=Plan().store)
    return replace(contestant, text=str(plan), plan=plan)


def _held_storages(cache: Any) -> Iterator[Tensor]:
    """The storages of each layer's segments, or of its tail where it has none, as flat tensors, each once.

    Of a segment those of real numbers, or all where it has none: a code or an index of 0 is valid everywhere. Where its
    tokens sit stays as it is.
    """
    seen: set[tuple[str, int]] = set()
    for state in cache.engine.states:
        parts = state.stored.segments or (
            [state.stored.tail.as_segment()] if state.stored.tail is not None and state.stored.tail.length else []
        )
        for part in parts:
            where = part.layout.tensors()
            own = [tensor for name, tensor in part.tensors().items() if name not in where]
            for tensor in [each for each in own if each.is_floating_point()] or own:
                storage = tensor.untyped_storage()
                key = str(tensor.device), storage.data_ptr()
                if storage.nbytes() and key not in seen:
                    seen.add(key)
                    yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
