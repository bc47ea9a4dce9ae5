"""Blend: values by similarity of keys and by length, against plain loops; keys never change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.merge.blend import Blend
from kvtailor.types import Held, Needs


def by_hand(held: Held, keep: torch.Tensor, row: int, head: int, threshold: float) -> list[list[float]]:
    """The values of the kept tokens, in time order."""
    keys, values = held.keys[row, head].tolist(), held.values[row, head].tolist()
    kept = [i for i in range(len(keys)) if keep[row, head, i]]
    gone = [i for i in range(len(keys)) if held.valid[row, head, i] and not keep[row, head, i]]
    total, count = {i: list(values[i]) for i in kept}, dict.fromkeys(kept, 1.0)

    def cosine(i: int, j: int) -> float:
        dot = sum(a * b for a, b in zip(keys[i], keys[j], strict=True))
        return dot / math.hypot(*keys[i]) / math.hypot(*keys[j])

    for i in gone:
        best = max(kept, key=lambda j: cosine(i, j))
        if cosine(i, best) < threshold:
            continue
        length, other = math.hypot(*values[i]), math.hypot(*values[best])
        weight = max(0.0, cosine(i, best)) * length / (length + other + 1e-6)
        total[best] = [a + weight * b for a, b in zip(total[best], values[i], strict=True)]
        count[best] += weight
    return [[x / count[i] for x in total[i]] for i in kept]


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_equals_a_plain_loop(threshold: float) -> None:
    generator = torch.Generator().manual_seed(3)
    held = held_of([make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 5)], Needs())
    keep = (torch.rand(held.valid.shape, generator=generator) < 0.3) & held.valid
    keep[..., -1] = True
    merged = Blend(threshold=threshold).merge(held, keep, keep)
    changed = 0
    for row in range(3):
        for head in range(3):
            mine = keep[row, head]
            expected = torch.tensor(by_hand(held, keep, row, head, threshold))
            torch.testing.assert_close(merged.values[row, head, : int(mine.sum())], expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(merged.keys[row, head, : int(mine.sum())], held.keys[row, head][mine])
            changed += int((expected != held.values[row, head][mine]).any(-1).sum())
    assert changed > 20


def test_a_fraction_takes_the_most_similar_alone() -> None:
    """Cosines 1, 0.7071 and 0 to the one kept key: of half of them the two most similar are taken in, of 1 all."""
    keys = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]])
    values = torch.tensor([[[3.0], [3.0], [6.0], [9.0]]])
    row = make_row(4, heads=1, group=1, size=2, generator=torch.Generator())
    held = held_of([replace(row, keys=keys, values=values)], Needs())
    keep = torch.tensor([[[True, False, False, False]]])
    half = math.sqrt(0.5) * 6 / 9
    found = [Blend(fraction=share).merge(held, keep, keep).values.item() for share in (0.5, 1.0, 0.2)]
    both = (3 + 0.5 * 3 + half * 6) / (1 + 0.5 + half)
    assert found == pytest.approx([both, both, (3 + 0.5 * 3) / 1.5], rel=1e-5)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    held = held_of([make_row(90, heads=2, group=1, size=6, generator=generator)], Needs())
    keep = torch.rand(held.valid.shape, generator=generator) < 0.3
    whole = Blend().merge(held, keep, keep)
    monkeypatch.setattr("kvtailor.merge.blend._BLOCK", 100)
    torch.testing.assert_close(Blend().merge(held, keep, keep).values, whole.values)


def test_refuses_what_makes_no_sense() -> None:
    for arguments in ({"threshold": -0.1}, {"threshold": 1.1}, {"fraction": 0.0}, {"fraction": 1.1}):
        with pytest.raises(ValueError, match="^blend: "):
            Blend(**arguments)
