"""Causal attention of a prompt, and how much of it each slot received, in C++ and one pass.

`ops.attention.prompt` says the same in torch, where shares are written down and read again for each thing that is asked
of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.ops.cpu.library import DTYPES, Library, Prompt, library

__all__ = ["MASS_VARIANTS", "attend_with_mass", "unsuited_prompt"]

MASS_VARIANTS = ("avxvnni", "avx2")
"""Variants that `attend_with_mass` is built for; it was measured on the last."""
# `PARTS` of prompt.cpp: further threads would have nothing to do.
_PARTS = 16


def unsuited_prompt(query: Tensor, keys: Tensor, values: Tensor, using: Library) -> str | None:
    """Why `attend_with_mass` cannot take these, a clause; None where it can.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv).
        using: the variant.
    """
    if using.variant not in MASS_VARIANTS:
        return f"it is built for {' and '.join(MASS_VARIANTS)} alone, and this machine runs {using.variant}"
    if 0 in (*query.shape, *keys.shape, *values.shape):
        return "there is nothing to read"
    dtypes = {query.dtype, keys.dtype, values.dtype}
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        return f"it reads float32, bfloat16 and float16, of one dtype, found {' and '.join(sorted(map(str, dtypes)))}"
    return None


def attend_with_mass(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    weight: Tensor,
    sinks: Tensor | None = None,
    using: Library | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a prompt or of its next piece, and the attention that each slot received.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv), of which the last t are the queries' own; see
            `unsuited_prompt`.
        scaling: factor before the softmax.
        weight: (b, t) float32 how much each query counts for the mass.
        sinks: (q,) float32 logits that belong to no slot; None: none.
        using: the variant; None: the best.

    Returns:
        out (b, q, t, dv) in the query's dtype; mass (b, h, n) float32.

    Raises:
        RuntimeError: torch ran no threads.
    """
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    query, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values))
    rows, query_heads, queries, size = query.shape
    heads, slots, value_size = values.shape[1:]
    weight = weight.to(torch.float32).contiguous()
    sunk = None if sinks is None else sinks.to(torch.float32).contiguous()
    # Laid out as (b, t, q, dv), in which order the model joins the heads of a token.
    out = torch.empty((rows, queries, query_heads, value_size), dtype=torch.float32)
    mass = torch.empty((rows, heads, slots), dtype=torch.float32)
    call = Prompt(
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        weight=weight.data_ptr(),
        sinks=None if sunk is None else sunk.data_ptr(),
        out=out.data_ptr(),
        mass=mass.data_ptr(),
        rows=rows,
        heads=heads,
        group=query_heads // heads,
        queries=queries,
        slots=slots,
        size=size,
        value_size=value_size,
        kind=DTYPES[query.dtype],
        scaling=scaling,
    )
    for name, states in (("query", query), ("key", keys), ("value", values)):
        for of, stride in zip(("row", "head", "slot"), states.stride(), strict=False):
            setattr(call, f"{name}_{of}", stride * states.element_size())
    used.run("prompt", call, scratch="prompt_scratch", threads=min(_PARTS, torch.get_num_threads()))
    return out.transpose(1, 2).to(query.dtype), mass
