"""What the tests of the kernels share: attention in float64, and whether kernels can run at all."""

from __future__ import annotations

import inspect

import numpy
import pytest
import torch
from torch import Tensor

from kvtailor.ops.triton_launch import missing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def _why_no_loops() -> str | None:
    """Why kernels with a loop to a number of theirs cannot run, a sentence; None: they can."""
    if missing() is not None or DEVICE == "cuda":
        return missing()
    import triton
    from triton.runtime import interpreter

    try:
        int(numpy.zeros(1))
    except TypeError:
        if "int(self.handle.data)" in inspect.getsource(interpreter):
            return f"the interpreter of Triton {triton.__version__} needs numpy below 2.4, found {numpy.__version__}"
    return None


needs_loops = pytest.mark.skipif(_why_no_loops() is not None, reason=str(_why_no_loops()))


def exactly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    owner: list[int] | None = None,
    visible: Tensor | None = None,
    log_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the slots of its owner's lanes, one query at a time, in float64.

    Args:
        query: (n, g, t, d). keys: (m, s, d). values: (m, s, dv). visible: broadcasts to (m, t, s).

    Returns:
        out (n, g, t, dv), zeros where nothing is seen; lse (n, g, t), -inf there.
    """
    owners, group, new, _ = query.shape
    lanes, slots, width = values.shape
    out = torch.zeros((owners, group, new, width), dtype=torch.float64)
    lse = torch.full((owners, group, new), -torch.inf, dtype=torch.float64)
    of = list(range(lanes)) if owner is None else owner
    sees = torch.ones((lanes, new, slots), dtype=torch.bool) if visible is None else visible.expand(lanes, new, slots)
    for lane_owner in range(owners):
        for member in range(group):
            for token in range(new):
                logits, held = [], []
                for lane in range(lanes):
                    if of[lane] != lane_owner:
                        continue
                    each = keys[lane].double() @ query[lane_owner, member, token].double() * scaling
                    if log_weight is not None:
                        each = each + log_weight[lane].double()
                    logits.append(each[sees[lane, token]])
                    held.append(values[lane].double()[sees[lane, token]])
                if sum(len(each) for each in logits):
                    together = torch.cat(logits)
                    lse[lane_owner, member, token] = together.logsumexp(0)
                    out[lane_owner, member, token] = together.softmax(0) @ torch.cat(held)
    return out, lse


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the L2 norm."""
    return float((found.cpu().double() - wanted).norm() / wanted.norm())
