"""Duo: retrieval heads hold what they can, streaming heads a few tokens each.

*Idea*: some heads attend to relevant text anywhere before, the others to the first tokens and the newest. A gate for
each head tells which kind it is. Every head is sure of `streaming` tokens, enough for sinks and the recent window, and
the rest of the budget fills up one head after the other, that of the highest gate first.

*Paper*: "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", arXiv 2410.10819,
section 2; our gates = its alpha, our `streaming` = its sinks and the recent window, 64 and 256 as its repository gives
them.

*Source*: the paper and its repository's description (MIT).

*Departs*: the budget decides how many heads are retrieval heads, and not a threshold or a share of heads: a share r of
the heads holds everything at keep = r + (1 - r) * streaming / n. The last head that is filled may hold a part, and
heads of one gate fill up alike. With the score `position` streaming heads hold what the paper's do; with another score
they hold their best tokens. The paper learns its gates by gradient descent; `kvtailor calibrate duo` measures how much
each head attends to an earlier occurrence of the same text. Prompts are attended in full, where the paper's streaming
heads see sinks and the recent window only. Where the budget has less than `streaming` tokens for each head, all get the
same.

*Cost*: none; each layer is cut as soon as it is done. Heads hold different numbers of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.calibration_file import CalibratedMethod
from kvtailor.method import Serves
from kvtailor.ops.lanes.apportion import apportion

__all__ = ["Duo"]


@dataclass(frozen=True, kw_only=True)
class Duo(CalibratedMethod, Allocator):
    """Heads in the order of their gates.

    Attributes:
        gates: for each layer one number for each kv head; the larger, the more of a retrieval head. None: those of a
            calibration.
        file: of `kvtailor calibrate duo`, without `gates`; None: the one that is shipped for the model.
        streaming: tokens that every head is sure of, what must stay among them.
    """

    gates: tuple[tuple[float, ...], ...] | None = None
    streaming: int = 320
    calibrates: ClassVar[str] = "duo"
    per_head: ClassVar[tuple[str, ...]] = ("gates",)
    examples: ClassVar[tuple[str, ...]] = (
        "duo",
        "duo(streaming=8)",
        "duo(gates=[[0.9, 0.1], [0.3, 0.3], [0.0, 1.0]], streaming=8)",
        "duo(gates=[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], streaming=0)",
    )
    serves: ClassVar[Serves] = Serves(
        latents="it gives each kv head a kind of its own, and such a layer holds one latent for all heads"
    )

    def __post_init__(self) -> None:
        if self.gates is not None:
            widths = {len(row) for row in self.gates}
            if len(widths) != 1 or 0 in widths:
                raise ValueError(
                    f"duo: gates must be a list for each layer with one number for each kv head, found {self.gates}"
                )
            if not all(math.isfinite(gate) for row in self.gates for gate in row):
                raise ValueError(f"duo: gates must be finite, found {self.gates}")
            if self.file is not None:
                raise ValueError("duo: there are gates and a file of gates: give one of them")
        super().__post_init__()
        if self.streaming < 0:
            raise ValueError(f"duo: streaming must be 0 or more tokens, found {self.streaming}; the paper uses 320")

    @property
    def wants_calibration(self) -> bool:
        return self.gates is None

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """Gates of other layers or kv heads than the model's."""
        if self.gates is None:
            return super().misfit(layers=layers, heads=heads, size=size)
        found = len(self.gates), len(self.gates[0])
        if found == (layers, heads):
            return None
        return (
            f"duo: its gates are for {found[0]} layers with {found[1]} kv heads, but {layers} with {heads} are "
            "compressed: give one for each"
        )

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: the gates are of another number of layers or heads, or none were given.
        """
        heads = request.capacity.shape[-1]
        gates = self._gates(request)
        if request.layers == tuple(range(request.num_layers)):
            return self._filled(gates, request.total, request.floor, request.capacity)
        shares = []
        for i, layer in enumerate(request.layers):
            own = request.capacity[:, i : i + 1]
            # For a layer alone, the other layers are taken to hold all that a head can hold.
            others = own if request.row_tokens is None else torch.maximum(request.row_tokens[:, None, None], own)
            shape = (-1, request.num_layers, heads)
            due = self._filled(gates, request.total, request.floor[:, i : i + 1].expand(shape), others.expand(shape))
            shares.append(torch.minimum(due[:, layer], own[:, 0]))
        return torch.stack(shares, 1)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: gates are compared, never computed with."""
        return 0

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Gates (layers, heads) from 0 to 1."""
        return {"gates": torch.rand(layers, heads, generator=generator, dtype=torch.float32)}

    def _gates(self, request: BudgetRequest) -> Tensor:
        """(L, h) float64 on the CPU."""
        heads = request.capacity.shape[-1]
        if self.gates is None:
            if request.calibration is None:
                raise ValueError("duo fills heads by their gates, but none were given; see `kvtailor calibrate duo`")
            return request.calibration["gates"].double().cpu()
        sentence = self.misfit(layers=request.num_layers, heads=heads, size=0)
        if sentence is not None:
            raise ValueError(sentence)
        return torch.tensor(self.gates, dtype=torch.float64)

    def _filled(self, gates: Tensor, total: Tensor, floor: Tensor, high: Tensor) -> Tensor:
        """(b, L, h) the budgets of all heads of all layers, from bounds (b, L, h)."""
        shape, floor, high = high.shape, floor.flatten(1), high.flatten(1)
        sure = torch.maximum(floor, high.clamp_max(self.streaming))
        low = apportion(torch.ones(floor.shape[-1], dtype=torch.float32), total, floor, sure)
        levels, level = gates.flatten().neg().unique(return_inverse=True)
        wanted = torch.zeros(len(low), len(levels), dtype=torch.int64).index_add_(1, level, high - low)
        # Levels, the highest gate first, that are full before the budget is spent; the next one gets what is left.
        full = (wanted.cumsum(-1) <= (total - low.sum(-1))[:, None]).sum(-1, keepdim=True)
        low = torch.where(level < full, high, low)
        return apportion((level == full).double(), total, low, high).view(shape)
