"""What a layer holds as padded rows, whatever its parts: the view that scorers and allocators get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtailor.engine.state import LayerState
from kvtailor.ops.lanes.ragged import places_of_slots, slots_of_part
from kvtailor.ops.segments.around import log_weight_of
from kvtailor.ops.segments.latent_keys import joined, parted
from kvtailor.types import Held, Needs, Segment, Visibility
from kvtailor.types.late_checks import send
from kvtailor.types.visibility import first_real

__all__ = ["by_column", "forget_evicted", "count_if_known", "stored_sides", "view_held"]


def view_held(
    state: LayerState, visible: Visibility, needs: Needs, layers: int, budget: Tensor | None = None
) -> tuple[Held, list[Tensor]]:
    """Return what the layer holds as padded rows, and the place of each part's slots in them.

    Args:
        state: of the layer.
        visible: of the forward that has just ended.
        needs: the evidence to show.
        layers: how many layers the plan compresses.
        budget: (b,) int64 tokens that each row may hold per kv head, on average.
    """
    parts = state.parts()
    b, h, seen = state.rows, state.heads, state.stored.seen
    device = parts[-1].decode()[0].device
    # (b * h,) on the CPU: tokens in the parts before, so that the number of slots is known without waiting.
    before = torch.zeros(b * h, dtype=torch.int64)
    slots = []
    for part in parts:
        slots.append(slots_of_part(part.layout, send(before, device)))
        before = before + part.layout.counts().flatten()
    longest = int(before.max())
    tail, known = state.stored.tail, visible.real is None
    positions = _padded(
        parts, slots, [p.layout.columns(device).expand(p.layout.lanes, -1) for p in parts], b * h, longest, -1
    )
    keys, values = _padded_states(parts, slots, b * h, longest)
    latents, evidence = state.model.latents, state.observed.evidence
    queries, sampled = evidence.queries, evidence.sampled
    if latents is not None:
        keys, values = joined(keys, values)
        queries = None if queries is None else latents.absorbed(queries)
        sampled = None if sampled is None else latents.absorbed(sampled)
    valid = (positions >= 0).view(b, h, -1)
    positions = positions.view(b, h, -1)
    first, real = torch.zeros(b, dtype=torch.int64, device=device), None
    if visible.real is not None:
        real = visible.real[:, :seen].to(device)
        first = first_real(real)
        row = torch.arange(b, device=device)[:, None, None]
        valid = valid & real[row, positions.clamp(min=0)]
    mass = None
    if needs.mass:
        mass = _padded(parts, slots, list(evidence.mass), b * h, longest, 0.0).view(b, h, -1)
    weights = [log_weight_of(part) for part in parts]
    log_weight = None
    if any(weight is not None for weight in weights):
        each = [torch.zeros(p.layout.lanes, p.layout.size, device=device, dtype=torch.float32) for p in parts]
        each = [zeros if weight is None else weight for zeros, weight in zip(each, weights, strict=True)]
        log_weight = _padded(parts, slots, each, b * h, longest, 0.0).view(b, h, -1)
    held = Held(
        keys=keys.view(b, h, longest, -1),
        values=values.view(b, h, longest, -1),
        positions=positions,
        valid=valid,
        first=first,
        seen=seen,
        layer=state.index,
        layers=layers,
        scaling=state.model.scaling,
        prompt=state.clock.prompt,
        real=real,
        budget=budget,
        queries=queries,
        query_columns=evidence.columns,
        query_span=evidence.span,
        mass=mass,
        sampled=sampled,
        sampled_columns=evidence.sampled_columns,
        moments=evidence.moments,
        output=state.model.output() if needs.output and state.model.output is not None else None,
        rotation=state.model.rotation if needs.rotation else None,
        calibration=state.model.calibration,
        log_weight=log_weight,
        softmax=state.model.softmax,
        front=before.view(b, h) if known else None,
        newest=(tail.run or 0) if known and tail is not None else 0,
        decoding=state.clock.decoding,
        share=state.model.share,
    )
    return _with_memories(held, state, needs).meeting_others(), slots


def by_column(numbers: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """Return scores (b, h, n) or notes (b, h, c, n), and their columns (b, h, n), valid tokens first.

    Columns of filler are larger than all others.
    """
    far = torch.iinfo(torch.int32).max
    columns = held.positions.to(torch.int32).masked_fill(~held.valid, far)
    columns, order = columns.sort(dim=-1, stable=True)
    return numbers.gather(-1, order if numbers.ndim == 3 else order[:, :, None].expand_as(numbers)), columns


def forget_evicted(state: LayerState, held: Held, keep: Tensor, longest: int) -> None:
    """Keep only the scorer's numbers of the tokens (b, h, n) that stay, at most `longest` for each head."""
    observed = state.observed
    if observed.scored is None or observed.scored_columns is None:
        return
    found = held.looked_back(observed.scored_columns, observed.scored)
    scored, columns = by_column(found, replace(held, valid=held.valid & keep))
    observed.scored, observed.scored_columns = scored[..., :longest].clone(), columns[..., :longest].clone()


def count_if_known(held: Held, window: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return how many tokens heads hold and must keep, if the host knows it without waiting for the device.

    Args:
        held: what `view_held` returned.
        window: (b,) int64 on the CPU: the newest tokens of each row that must stay.

    Returns:
        (b, h) int64 on the CPU: the tokens that are held, and those of them in the window. None with padding, with
        heads on other processes, and if heads may lack some of the newest tokens.
    """
    if held.front is None or held.share.ranks > 1 or held.newest < min(int(window.max()), held.seen):
        return None
    return held.front, window.clamp(max=held.seen)[:, None].expand_as(held.front)


def stored_sides(state: LayerState, held: Held) -> tuple[Tensor, Tensor]:
    """Return the states of a view as the layer stores them: keys and values, or latents and rotated keys."""
    return (held.keys, held.values) if state.model.latents is None else parted(held.keys, held.values)


def _with_memories(held: Held, state: LayerState, needs: Needs) -> Held:
    """Add what earlier evictions and the reconstruction have left for the tokens that are still held."""
    if needs.previous:
        b, h, n = held.positions.shape
        shape = (b, h, needs.notes, n) if needs.notes else (b, h, n)
        previous = torch.full(shape, float("nan"), device=held.positions.device, dtype=torch.float32)
        if state.observed.scored is not None and state.observed.scored_columns is not None:
            previous = held.looked_back(state.observed.scored_columns, state.observed.scored)
        held = replace(held, previous=previous)
    if needs.reconstruction and state.observed.reconstruction is not None:
        seen = state.observed.reconstruction.shape[-1]
        found = state.observed.reconstruction.gather(-1, held.positions.clamp(0, seen - 1))
        found = found.masked_fill(held.positions >= seen, -1.0).masked_fill(~held.valid, 0.0)
        held = replace(held, reconstruction=found)
    sample, latents = state.observed.repeated, state.model.latents
    if sample is not None and sample.sampled is not None and sample.sampled_columns is not None:
        repeated = sample.sampled if latents is None else latents.absorbed(sample.sampled)
        held = replace(held, repeated=repeated, repeated_columns=sample.sampled_columns)
    return held


def _padded_states(
    parts: Sequence[Segment], slots: Sequence[Tensor], owners: int, longest: int
) -> tuple[Tensor, Tensor]:
    decoded = [part.decode() for part in parts]
    if len(parts) == 1 and parts[0].layout.owner is None and parts[0].layout.lengths is None:
        return decoded[0]
    keys = _padded(parts, slots, [keys for keys, _ in decoded], owners, longest, 0.0)
    return keys, _padded(parts, slots, [values for _, values in decoded], owners, longest, 0.0)


def _padded(
    parts: Sequence[Segment],
    slots: Sequence[Tensor],
    pieces: Sequence[Tensor],
    owners: int,
    longest: int,
    filler: float,
) -> Tensor:
    """Return (b * h, longest, ...) in time order, from a piece (m, s, ...) of each part."""
    inner, slots_in_all = pieces[0].shape[2:], owners * longest
    # One more slot takes the filler of ragged lanes: which slots those are is known to the device alone.
    whole = torch.full((slots_in_all + 1, *inner), filler, dtype=pieces[0].dtype, device=pieces[0].device)
    for part, slot, piece in zip(parts, slots, pieces, strict=True):
        whole[places_of_slots(part.layout, slot, longest)] = piece.flatten(0, 1)
    return whole[:slots_in_all].view(owners, longest, *inner)
