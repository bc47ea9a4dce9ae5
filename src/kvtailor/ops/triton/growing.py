"""A step of decoding over a cache of fixed addresses, as one CUDA graph: append, count, attend.

How many slots are filled is read on the device, so the same graph is replayed as the cache grows: its grid is that of
the full cache, and a program whose share is past the end leaves at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from kvtailor.ops.coded import Whole
from kvtailor.ops.triton.attend import plan_of
from kvtailor.ops.triton.call import Call
from kvtailor.ops.triton.kernels.append import append_kernel

__all__ = ["Growing", "append_call", "captured"]


def append_call(states: Tensor, into: Tensor, lengths: Tensor) -> Call:
    """The launch that writes states (m, t, c) behind the lengths (m,) int32 filled slots of `into` (m, s, c)."""
    lanes, new, size = states.shape
    return Call(
        kernel=append_kernel,
        grid=(lanes, new),
        arguments={
            "STATES": states,
            "INTO": into,
            "LENGTHS": lengths,
            "capacity": into.shape[1],
            "lane_stride": into.stride(0),
            "slot_stride": into.stride(1),
            "NEW": new,
            "SIZE": size,
            "PAD": triton.next_power_of_2(size),
        },
        warps=1,
        stages=1,
    )


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """`run` as a CUDA graph: it is run once to compile what it launches, then recorded and not run.

    Args:
        run: launches on fixed addresses only, without waiting for the device.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Growing:
    """Plain keys and values that grow in place, and attention over them.

    Attributes:
        keys: (n, s, d). values: (n, s, dv). Slots past the filled ones are never read.
        lengths: (n,) int32 filled slots of each lane. A caller may lower them (rejected drafts).
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        *,
        group: int,
        new: int,
        scaling: float,
        splits: int | None = None,
    ) -> None:
        """Of buffers that the caller filled up to `lengths`.

        Args:
            group: query heads of a kv head.
            new: t, tokens of a step.
            scaling: factor before the softmax.
            splits: see `attend_coded`.
        """
        lanes, _, size = keys.shape
        self.keys, self.values, self.lengths = keys, values, lengths
        self._query = keys.new_zeros((lanes, group, new, size))
        self._fresh = [side.new_zeros((lanes, new, side.shape[-1])) for side in (keys, values)]
        self._appends = [
            append_call(fresh, side, lengths) for fresh, side in zip(self._fresh, (keys, values), strict=True)
        ]
        self._plan = plan_of(
            self._query,
            Whole(states=keys),
            Whole(states=values),
            scaling=scaling,
            lengths=lengths,
            causal=True,
            splits=splits,
        )
        self._step: Callable[[], None] = self._run
        if keys.device.type == "cuda":
            before = lengths.clone()
            self._step = captured(self._run)
            # The run that compiled the kernels has appended zeros.
            lengths.copy_(before)

    def step(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends t tokens to every lane and attends over all that are then held.

        Args:
            query: (n, g, t, d). keys: (n, t, d). values: (n, t, dv).

        Returns:
            out (n, g, t, dv), lse (n, g, t), float32: the same memory at every step.
        """
        self._query.copy_(query)
        for fresh, given in zip(self._fresh, (keys, values), strict=True):
            fresh.copy_(given)
        self._step()
        return self._plan.out, self._plan.lse

    def _run(self) -> None:
        for append in self._appends:
            append()
        self.lengths.add_(self._fresh[0].shape[1])
        self._plan()
