"""A model on a full cache whose tokens are folded by hand: what merging plans are measured against.

Nothing of kvtailor's caches, attentions or mergers is used: keys and values come from the model's own prompt, each row
and kv head is a Python list of tokens, and a method is a function over such lists in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from tests.support.seam.zoo import MaskedReference
from torch import Tensor

__all__ = ["FoldedReference", "Lane", "Token"]


@dataclass
class Token:
    """One held token of one row and kv head; `weight` is how many it stands for in the softmax."""

    column: int
    key: Tensor
    value: Tensor
    weight: float = 1.0


@dataclass
class Lane:
    """What a method is given: all tokens that were held, which of them are kept, and the newest queries (g, w, d)."""

    tokens: list[Token]
    kept: set[int]
    queries: Tensor
    query_columns: list[int]
    scaling: float

    @property
    def gone(self) -> list[Token]:
        return [token for token in self.tokens if token.column not in self.kept]

    @property
    def stays(self) -> list[Token]:
        return [token for token in self.tokens if token.column in self.kept]

    def attention(self) -> Tensor:
        """(g, w, n) probabilities of the newest queries over all tokens, multiplicities counted."""
        keys = torch.stack([token.key for token in self.tokens])
        weights = torch.tensor([token.weight for token in self.tokens], dtype=torch.float64)
        logits = self.queries @ keys.T * self.scaling + weights.log()
        for w, column in enumerate(self.query_columns):
            for n, token in enumerate(self.tokens):
                if token.column > column:
                    logits[:, w, n] = -torch.inf
        return logits.softmax(-1)


class FoldedReference(MaskedReference):
    """The model on a full cache; before each decoded token `fold` is asked where a lane holds fewer than before.

    Args:
        family, layers: of the model.
        fold: from what was held to what is held, columns ascending.
        window: newest queries that it is shown.
    """

    NAME = "folded-reference"

    def __init__(self, family: str, fold: Callable[[Lane], list[Token]], window: int, **model):
        super().__init__(family, **model)
        self.fold, self.window = fold, window
        self.lanes: dict[int, dict[tuple[int, int], list[Token]]] = {}
        self.queries: dict[int, Tensor] = {}
        self.folded = 0

    def _attention(self, module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        layer, seen = module.layer_idx, key.shape[2]
        before = self.queries.get(layer, query[:, :, :0])
        self.queries[layer] = torch.cat([before, query.double()], 2)[:, :, -self.window :]
        lanes = self.lanes.setdefault(layer, {})
        new = seen - query.shape[2]
        for row in range(key.shape[0]):
            for head in range(key.shape[1]):
                there = mask.expand(key.shape[0], -1, -1, -1)[row, 0, -1]
                lanes.setdefault((row, head), []).extend(
                    Token(column, key[row, head, column].double(), value[row, head, column].double())
                    for column in range(new, seen)
                    if there[column]
                )
        if query.shape[2] > 1:
            return super()._attention(module, query, key, value, mask, scaling, dropout, **kwargs)
        group = query.shape[1] // key.shape[1]
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
        for (row, head), tokens in lanes.items():
            keys, values = (torch.stack([getattr(token, name) for token in tokens]) for name in ("key", "value"))
            weights = torch.tensor([token.weight for token in tokens], dtype=torch.float64)
            mine = slice(head * group, (head + 1) * group)
            counts = weights * (query[row, mine, 0].double() @ keys.T * self.scaling).exp()
            out[row, mine, 0] = ((counts @ values) / counts.sum(-1, keepdim=True)).to(query.dtype)
        return out.transpose(1, 2).contiguous(), None

    def hold(self, held: Mapping[int, Tensor]) -> None:
        """Folds what is not among `held` (b, h, seen) of its layer any more."""
        for layer, columns in held.items():
            queries = self.queries[layer]
            seen = columns.shape[-1]
            for (row, head), tokens in self.lanes[layer].items():
                kept = set(columns[row, head].nonzero()[:, 0].tolist())
                if kept >= {token.column for token in tokens}:
                    continue
                group = queries.shape[1] // columns.shape[1]
                there = {token.column for token in tokens}
                newest = [seen - queries.shape[2] + w for w in range(queries.shape[2])]
                real = [w for w, column in enumerate(newest) if column in there]
                lane = Lane(
                    tokens=tokens,
                    kept=kept,
                    queries=queries[row, head * group : (head + 1) * group][:, real],
                    query_columns=[newest[w] for w in real],
                    scaling=queries.shape[-1] ** -0.5,
                )
                self.lanes[layer][row, head] = self.fold(lane)
                self.folded += 1
