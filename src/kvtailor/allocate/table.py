"""Table: budgets by weights that are written down, for each layer or for each layer and kv head.

*Idea*: whatever decides how much a layer or a head should have, a profile, a search or a guess, ends in numbers. With
these the numbers are the method.

*Paper*: none.

*Source*: our own. Tables of heads are what DuoAttention (arXiv 2410.10819) and other searches over heads give.

*Departs*: integers are proportional shares of the budget, never the numbers themselves: `weights=[300, 100]` and
`weights=[3, 1]` are one method. The share includes what a scorer always keeps. What a bound cuts off goes to the others
by their weights. A weight of 0 leaves what must stay.

*Cost*: none.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from typing import ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.files import FileContent, read_file
from kvtailor.ops.lanes.apportion import even_shares, split_shares

__all__ = ["Table"]

Weights = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Table(Allocator):
    """Shares by weight. Exactly one of the two is given; a file is read when the table is made.

    Attributes:
        file: JSON (a list, or a list of lists), TOML (`weights = [...]`) or safetensors (a tensor `weights`).
        weights: one number for each layer, shared equally by its heads, or one list for each layer with one number for
            each kv head.
    """

    file: str | None = None
    weights: Weights | None = None
    examples: ClassVar[tuple[str, ...]] = (
        "table(weights=[3.0, 0.0, 1.0])",
        "table(weights=[[3.0, 1.0], [0.5, 2.0], [0.0, 1.0]])",
    )
    _table: Weights = field(init=False, repr=False)
    _hash: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if (self.file is None) == (self.weights is None):
            found = "neither" if self.file is None else "both"
            raise ValueError(f"table: give either file or weights, found {found}; for example weights=[3, 2, 1]")
        if self.file is None:
            table = _checked(self.weights, "weights")
        else:
            content = read_file(self.file, "table: file")
            table = _checked(_read(content), f"the weights in {content.name}")
            object.__setattr__(self, "_hash", content.hash)
        object.__setattr__(self, "_table", table)

    @property
    def even_heads(self) -> bool:
        return not isinstance(self._table[0], tuple)

    @property
    def content_hash(self) -> str | None:
        return self._hash

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """A table of other layers or kv heads than the model's."""
        first = self._table[0]
        if len(self._table) != layers:
            return (
                f"table: its weights are for {len(self._table)} layers, but {layers} are compressed: give one for each"
            )
        if isinstance(first, tuple) and len(first) != heads:
            return f"table: its weights are for {len(first)} kv heads, but each layer has {heads}: give one for each"
        return None

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: the table is of another number of layers or heads.
        """
        rows, _, heads = request.capacity.shape
        sentence = self.misfit(layers=request.num_layers, heads=heads, size=0)
        if sentence is not None:
            raise ValueError(sentence)
        weights = torch.tensor(self._table, dtype=torch.float64).expand(rows, *[-1] * (1 + (not self.even_heads)))
        shares = even_shares if self.even_heads else split_shares
        return shares(weights, request.total, request.floor, request.capacity, request.layers, request.row_tokens)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: shares are a few numbers for each layer."""
        return 0


def _read(content: FileContent) -> object:
    """Return the content of a file in its own format."""
    kind = content.name.rpartition(".")[2].lower()
    try:
        if kind == "json":
            return json.loads(content.data)
        if kind == "toml":
            return tomllib.loads(content.data.decode())["weights"]
        if kind == "safetensors":
            return safetensors.torch.load(content.data)["weights"].tolist()
    except KeyError as error:
        raise ValueError(f"table: {content.name} has no 'weights': write weights = [...]") from error
    # Python's own readers let through its error for brackets that are thousands deep.
    except (ValueError, SafetensorError, RecursionError) as error:
        raise ValueError(f"table: {content.name} is not {kind}: {error}") from error
    raise ValueError(f"table: {content.name} is no file of a known kind: give .json, .toml or .safetensors")


def _checked(found: object, place: str) -> Weights:
    """The weights, if they are some."""
    rows = found if isinstance(found, list | tuple) else []
    flat = [each for row in rows for each in (row if isinstance(row, list | tuple) else [row])]
    widths = {len(row) if isinstance(row, list | tuple) else None for row in rows}
    if (
        len(widths) != 1
        or not flat
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in flat)
    ):
        raise ValueError(
            f"table: {place} must be one number for each layer, or for each layer a list with one number for each kv "
            f"head, found {found!r}"
        )
    if not all(math.isfinite(each) and each >= 0 for each in flat) or not any(flat):
        raise ValueError(f"table: {place} must be finite, not negative and not all 0, found {found!r}")
    if widths == {None}:
        return tuple(map(float, flat))
    return tuple(tuple(map(float, row)) for row in rows)
