"""Attention in float64 over what codes stand for, and what is asked of every form that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.ops.cpu.coded_layouts import LAYOUTS, exact, states_of, width_of
from torch import Tensor

from kvtailor.ops.attention.cpu.attention import attend_coded
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.types import Softmax

__all__ = ["attend_by", "merges_ragged_lanes", "same", "truth"]


def attend_by(library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the kernel of one variant as a function of query, keys, values and the fields of `AttentionInputs`."""

    def attend(query: Tensor, keys: Coded, values: Coded, **fields: Any) -> tuple[Tensor, Tensor]:
        return attend_coded(AttentionInputs(query, keys, values, scaling=0.1, **fields), using=library)

    return attend


def truth(
    query: Tensor,
    keys: Coded,
    values: Coded,
    visible: Tensor | None = None,
    log_weight: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """By owner, (n, g, t, dv) and (n, g, t)."""
    owners, group, new, size = query.shape
    mask = None if visible is None else visible[None]
    weight = None if log_weight is None else log_weight[None].double()
    rows = query.double().reshape(1, owners * group, new, size)
    out, lse, _ = reference(rows, exact(keys)[None], exact(values)[None], mask, 0.1, weight, Softmax(softcap=softcap))
    return out.view(owners, group, new, -1), lse.view(owners, group, new)


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-5) -> bool:
    out, lse = (each.double() for each in found)
    blind = expected[1] == -torch.inf
    if not (torch.equal(lse == -torch.inf, blind) and bool((out[blind] == 0).all())):
        return False
    error = (out - expected[0]).norm() / expected[0].norm().clamp_min(1e-30)
    return bool(error <= tolerance) and torch.allclose(lse[~blind], expected[1][~blind], atol=tolerance, rtol=tolerance)


def merges_ragged_lanes(attend: Callable[..., tuple[Tensor, ...]], layout: str, tolerance: float) -> None:
    """Pages of 64 slots: an owner of three, one of none, one of one, and one of five; each is read to its length."""
    pages, lengths = [3, 0, 1, 5], torch.tensor([64, 64, 7, 1, 64, 64, 64, 64, 33], dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(pages))
    keys, values = (LAYOUTS[layout](states) for states in states_of(4, torch.bfloat16, 9, 64, 32))
    query = torch.randn(4, 3, 2, width_of(keys))
    if isinstance(keys, Whole) and isinstance(values, Whole):
        for lane, length in enumerate(lengths.tolist()):
            keys.states[lane, length:] = values.states[lane, length:] = torch.nan
    out, lse = attend(AttentionInputs(query, keys, values, scaling=0.1, owner=owner, lengths=lengths))
    for mine in range(4):
        lanes = [lane for lane in range(9) if owner[lane] == mine]
        if not lanes:
            assert (lse[mine] == -torch.inf).all() and (out[mine] == 0).all()
            continue
        k, v = (torch.cat([exact(side)[lane, : lengths[lane]] for lane in lanes])[None] for side in (keys, values))
        alone = truth(query[mine : mine + 1], Whole(states=k), Whole(states=v))
        assert same((out[mine : mine + 1], lse[mine : mine + 1]), alone, tolerance)
