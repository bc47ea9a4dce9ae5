"""Erank: layers share the budget by the effective rank of their attention (RankKV).

*Idea*: a layer whose attention rows are all alike needs few tokens, one whose rows all differ needs many. The effective
rank counts how many directions the rows span, and the budget is split in proportion.

*Paper*: RankKV has none. The effective rank: Roy and Vetterli, "The effective rank: a measure of effective
dimensionality", EUSIPCO 2007, of the causal attention matrix averaged over heads.

*Source*: a description of RankKV's repository (no licence), and a reading of its budget rules; nothing was taken. Our
`least` = its minimal budget, 4 in its class and 32, the window, in its benchmarks.

*Departs*: the rank is that of the newest `rows` rows: RankKV's own where the prompt has no more, else smaller, since no
matrix has more rank than rows. Neighbouring rows keep the differences between layers: on the demo model, shares by 128
of 2048 rows lie within 0.03 of those by all, where as many rows spread over the prompt are independent in every layer
and make all shares alike. It is the rank of the prompt itself, as in RankKV's dynamic variant, without running the
prompt twice and without the tokens that follow. Integers by largest remainder, at most what a layer holds, what that
cuts off going to the others; RankKV gives layers more than the prompt has, and so spends less than its budget. `least`
gives way where the budget is too small for it. When tokens are evicted again, the matrix has columns for what is held.
RankKV's static variant is `static`: ranks of whole matrices, averaged over texts that `kvtailor calibrate erank` was
given, where RankKV took the test text.

A high rank does not mean that many tokens matter: a head that looks at the newest token alone has the highest rank of
all and needs one, and one that looks at all tokens alike has rank 1. Compare with `entropy` and `coverage`.

*Cost*: waiting for all layers; where not `static`, `rows` queries of every query head until the first token is decoded,
time O(q * rows * n * d + rows**2 * n), scratch float32 (rows, n) twice: 16 MiB for 128 rows of 16 thousand tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.calibration_file import CalibratedMethod
from kvtailor.ops.attention.observed import mean_attention
from kvtailor.ops.codes.rank import effective_rank
from kvtailor.ops.lanes.apportion import even_shares
from kvtailor.types import Held, Needs

__all__ = ["Erank"]

Weighting = Literal["proportional", "softmax", "power", "adaptive"]


@dataclass(frozen=True, kw_only=True)
class Erank(CalibratedMethod, Allocator):
    """Layers by effective rank, equal for the heads of a layer.

    Attributes:
        static: take the ranks of a calibration and not those of the prompt.
        file: of `kvtailor calibrate erank`, with `static`; None: the one that is shipped for the model.
        rows: newest rows of the attention matrix that are looked at.
        weighting: from ranks to shares: "proportional"; "softmax" of rank / temperature; "power", rank ** exponent;
            "adaptive", 0.5 below the 25th percentile of the layers' ranks, 1.5 above the 75th, else 1.
        temperature: of "softmax".
        exponent: of "power".
        least: tokens that each layer and head is sure of, what must stay among them.
    """

    static: bool = False
    rows: int = 128
    weighting: Weighting = "proportional"
    temperature: float = 1.0
    exponent: float = 2.0
    least: int = 4
    scope: ClassVar[str] = "prompt"
    even_heads: ClassVar[bool] = True
    calibrates: ClassVar[str] = "erank"
    examples: ClassVar[tuple[str, ...]] = ("erank", "erank(static=true)")

    def __post_init__(self) -> None:
        if self.file is not None and not self.static:
            raise ValueError("erank: a file is named, but ranks are to be those of the prompt: write static=true too")
        super().__post_init__()
        if self.rows < 2:
            raise ValueError(f"erank: rows must be at least 2, or every rank is 1, found {self.rows}")
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"erank: weighting must be one of {get_args(Weighting)}, found {self.weighting!r}")
        if not self.temperature > 0:
            raise ValueError(f"erank: temperature must be above 0, found {self.temperature}")
        if not self.exponent >= 0:
            raise ValueError(f"erank: exponent must be 0 (all layers alike) or more, found {self.exponent}")
        if self.least < 0:
            raise ValueError(f"erank: least must be 0 or more tokens, found {self.least}")

    @property
    def wants_calibration(self) -> bool:
        return self.static

    @property
    def needs(self) -> Needs:
        return Needs() if self.static else Needs(window=self.rows)

    def measure(self, held: Held) -> Tensor | None:
        """(b,) float64: the effective rank of the newest attention rows, from 1 to `rows`; None where `static`."""
        if self.static:
            return None
        return torch.stack([effective_rank(mean_attention(held, row)) for row in range(held.keys.shape[0])])

    def weights(self, ranks: Tensor) -> Tensor:
        """(b, l) float64, not negative: how much of the budget each layer gets.

        Args:
            ranks: (b, l) effective rank of each layer.
        """
        ranks = ranks.double()
        if self.weighting == "softmax":
            return torch.softmax(ranks / self.temperature, -1)
        if self.weighting == "power":
            return ranks**self.exponent
        if self.weighting == "adaptive":
            lower, upper = (ranks.quantile(each, -1, keepdim=True) for each in (0.25, 0.75))
            return torch.ones_like(ranks) - 0.5 * (ranks < lower).double() + 0.5 * (ranks > upper).double()
        return ranks

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: a layer is absent, or none was measured or calibrated.
        """
        weights = self.weights(self._ranks(request))
        sure = torch.maximum(request.floor, request.capacity.clamp_max(self.least))
        low = even_shares(torch.ones_like(weights), request.total, request.floor, sure, request.layers)
        return even_shares(weights, request.total, low, request.capacity, request.layers)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """g m n (2 d + 5) + a head's part of m**2 (2 n + 2 m), for m rows.

        For each query and token 2 d for the logit, 4 for the softmax, 1 for the mean over heads; for the layer the
        products of all rows with each other, and 2 m**3 for the eigenvalues of what they give. 0 where `static`.
        """
        if self.static:
            return 0
        rows = min(self.rows, tokens)
        return group * rows * tokens * (2 * size + 5) + rows**2 * (2 * tokens + 2 * rows) // heads

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Ranks (layers,) from 1 up."""
        return {"erank": 1 + 99 * torch.rand(layers, generator=generator, dtype=torch.float32)}

    def _ranks(self, request: BudgetRequest) -> Tensor:
        """(b, l) of all layers."""
        if not self.static:
            return request.numbers("erank", every_layer=True)
        if request.calibration is None or request.layers != tuple(range(request.num_layers)):
            raise ValueError("erank(static=true) needs calibrated ranks and all layers at once; its scope is 'prompt'")
        return request.calibration["erank"].double().cpu().expand(len(request.total), -1)
