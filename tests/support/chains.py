"""Models that are tables: what comes next depends on the last two tokens. And a chi-square test."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse


class Table:
    """A `Reader` whose logits (v, v, v) are looked up by the last two tokens that it has read."""

    def __init__(self, logits: Tensor):
        self.logits, self.ids, self.settled, self.reads = logits, torch.zeros((1, 0), dtype=torch.int64), 0, 0

    @property
    def seen(self) -> int:
        return self.ids.shape[1]

    def read(self, tokens: Tensor, keep: int) -> Tensor:
        self.reads += 1
        self.ids = torch.cat([self.ids.expand(tokens.shape[0], -1), tokens], 1)
        last = self.ids[:, -keep:]
        before = self.ids[:, -keep - 1 : -1]
        return self.logits[before, last]

    def retract(self, length: int) -> None:
        if length < self.settled:
            raise CacheMisuse(f"asked to go back to {length}, and {self.settled} have settled")
        self.ids = self.ids[:, :length]

    def settle(self) -> None:
        self.settled = self.seen

    def tokens_until_action(self) -> int | None:
        return None

    def wait(self) -> None:
        return


def random_tables(vocabulary: int) -> list[Table]:
    """A target, one that is like it, and one that is less so."""
    generator = torch.Generator().manual_seed(1)
    logits, *noise = torch.randn((3, *(vocabulary,) * 3), generator=generator)
    return [Table(logits * 1.5 + strength * each) for strength, each in ((0, logits), (0.8, noise[0]), (2.5, noise[1]))]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """p-value of counts (s, v), each row of which was drawn from probabilities (s, v); rare cells are left out."""
    expected = probabilities.double() * counts.sum(1, keepdim=True)
    usual = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[usual].sum())
    freedom = int((usual.sum(1) - 1).clamp(min=0).sum())
    return survival(statistic, freedom)


def survival(statistic: float, freedom: int) -> float:
    """P(chi-square with so many degrees of freedom > statistic)."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def transitions(ids: Tensor, vocabulary: int) -> Tensor:
    """(v * v, v) how often each token followed each two."""
    flat = (ids[:-2] * vocabulary + ids[1:-1]) * vocabulary + ids[2:]
    return torch.bincount(flat, minlength=vocabulary**3).view(-1, vocabulary).double()


assert math.isclose(survival(3.841, 1), 0.05, rel_tol=1e-3)
