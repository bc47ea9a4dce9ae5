"""Reference: what every other way to read the cache is measured against.

*Idea* Each row and kv head gathers what it holds, decoded, into one run, and takes one softmax with the whole matrix
in memory. Values are decoded even where others read them as they are stored.
*Paper* None.
*Source* None.
*Departs* Nothing known.
*Cost* A copy of the cache and t x n float32 probabilities at every forward, head by head: for tests and short texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.attend.contract import Attended, Attention, AttentionRequest, FlopsRequest
from kvtailor.ops.attention.definition import reference
from kvtailor.types import Segment

__all__ = ["Reference"]


@dataclass(frozen=True, kw_only=True)
class Reference(Attention):
    """Reads every held token, slowly; computes in float32 (float64 where the query is)."""

    gives_mass: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True

    def attend(self, request: AttentionRequest) -> Attended:
        """See `Attention.attend`."""
        query, parts, visible, real_queries = request.query, request.parts, request.visible, request.real_queries
        b, q, t, _ = query.shape
        device, h = query.device, parts[-1].layout.heads
        group = q // h
        states = [part.decode() for part in parts]
        weights_of = [part.view().log_weight for part in parts]
        zeros = [torch.zeros(keys.shape[:2], device=device, dtype=torch.float32) for keys, _ in states]
        extra = [z if w is None else w for z, w in zip(zeros, weights_of, strict=True)]
        width = states[0][1].shape[-1]
        output = query.new_zeros((b, q, t, width))
        lse = torch.full((b, q, t), -torch.inf, device=device, dtype=torch.float32)
        mass = [torch.zeros(keys.shape[:2], device=device, dtype=torch.float32) for keys, _ in states]
        real = torch.ones((b, t), device=device, dtype=torch.float32) if real_queries is None else real_queries.to(lse)
        for row in range(b):
            for head in range(h):
                mine = [_slots_of(part, row * h + head, device) for part in parts]
                columns = [p.layout.columns(device).expand(m.shape)[m] for p, m in zip(parts, mine, strict=True)]
                keys = torch.cat([k[m] for (k, _), m in zip(states, mine, strict=True)])
                values = torch.cat([v[m] for (_, v), m in zip(states, mine, strict=True)])
                added = torch.cat([x[m] for x, m in zip(extra, mine, strict=True)])[None, None]
                seen = visible.at(torch.tensor([row], device=device), torch.cat(columns)[None])
                heads = slice(head * group, (head + 1) * group)
                mask = seen.expand(1, t, keys.shape[0])
                out, sums, weights = reference(
                    query[row : row + 1, heads],
                    keys[None, None],
                    values[None, None],
                    mask[:, None],
                    request.scaling,
                    added,
                    request.softmax.of_heads(head * group, group),
                )
                output[row, heads], lse[row, heads] = out[0].to(query.dtype), sums[0].float()
                received = torch.einsum("gtn,t->n", weights[0, 0], real[row].to(weights.dtype)).float()
                shares = received.split([int(m.sum()) for m in mine])
                for total, m, share in zip(mass, mine, shares, strict=True):
                    total[m] = share
        return Attended(output=output, lse=lse, mass=mass if request.want_mass else None)

    def flops(self, request: FlopsRequest) -> int:
        """0: nothing beyond the reading."""
        return 0


def _slots_of(part: Segment, owner: int, device: torch.device) -> Tensor:
    """(m, s) bool: filled slots of one row and kv head."""
    lanes = (part.layout.owners(device) == owner)[:, None].expand(-1, part.layout.size)
    filled = part.layout.filled(device)
    return lanes if filled is None else lanes & filled
