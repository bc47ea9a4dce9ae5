"""How a layer that holds latents is read: as one kv head of latents, or as the heads that they expand to.

Both are the same attention (`types.latent_attention`). A token that is decoded reads latents, r + e numbers of each
held token. A long prompt has fewer products on expanded keys, d + dv for each pair of a query and a token in place of
2 r + e, once its many queries have paid for the expansion. Expanded states live no longer than the call.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtailor.attend.contract import Attended, Attention, AttentionRequest
from kvtailor.ops.segments.latent_keys import as_one_head
from kvtailor.ops.segments.weighted import log_weight_of
from kvtailor.types import PlainSegment, Segment
from kvtailor.types.checked_returns import check_attended
from kvtailor.types.latent_attention import LatentAttention

__all__ = ["read_latents"]


def read_latents(method: Attention, request: AttentionRequest, latents: LatentAttention) -> Attended:
    """Return the attention of the new tokens over latents, with the output (b, H, t, dv) of the model's own heads.

    Args:
        method: how the cache is read. It gets either form.
        request: its query (b, H, t, d) is as the model made it, and its parts are as they are stored.
        latents: of the layer.

    Raises:
        MethodError: the method returns something else than its contract promises.
    """
    query, parts = request.query, request.parts
    held = sum(part.layout.size for part in parts)
    if all(map(_is_even, parts)) and latents.expands_cheaply(query.shape[2], held):
        asked = replace(request, parts=[_expanded(part, latents, query) for part in parts])
        attended = _checked(method, asked)
        if attended.mass is None:
            return attended
        # (b * H, s) for each head of the model becomes (b, s) for the one kv head: the sum over its query heads.
        summed = [each.unflatten(0, (query.shape[0], -1)).sum(1) for each in attended.mass]
        return replace(attended, mass=summed)
    asked = replace(request, query=latents.absorbed(query), parts=[as_one_head(part) for part in parts])
    attended = _checked(method, asked)
    return replace(attended, output=latents.lifted(attended.output))


def _checked(method: Attention, request: AttentionRequest) -> Attended:
    attended = method.attend(request)
    check_attended(method, attended, request.query, request.parts, want_mass=request.want_mass)
    return attended


def _is_even(part: Segment) -> bool:
    """Whether each row is one full lane, so that heads can be laid out beside each other."""
    return part.layout.owner is None and part.layout.lengths is None and log_weight_of(part) is None


def _expanded(part: Segment, latents: LatentAttention, query: Tensor) -> PlainSegment:
    """The part (b lanes of one kv head) as b * H lanes, one for each head of the model, in the dtype of its queries."""
    keys, values = latents.expanded(*(states.to(query.dtype) for states in part.decode()))
    layout, heads = part.layout, keys.shape[1]
    positions = None if layout.positions is None else layout.positions.repeat_interleave(heads, 0)
    wide = replace(layout, heads=heads, positions=positions)
    return PlainSegment(layout=wide, keys=keys.flatten(0, 1), values=values.flatten(0, 1))
