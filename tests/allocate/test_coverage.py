"""Coverage: tokens for a share of the attention where it is known, and on whole matrices of padded rows."""

from __future__ import annotations

import pytest
import torch
from tests.support.budget_requests import asked, held_with, rows_of_attention
from tests.support.held_rows import held_of, make_row

from kvtailor.allocate.coverage import Coverage
from kvtailor.types import Needs


def tokens_for(mass: float, given: list[float]) -> int:
    taken, total = 0, 0.0
    for share in sorted(given, reverse=True):
        if total >= mass:
            break
        taken, total = taken + 1, total + share
    return taken


@pytest.mark.parametrize("mass", [0.5, 0.95])
@pytest.mark.parametrize("window", [1, 8, 32])
def test_equals_the_loops_for_every_padded_row(window: int, mass: float) -> None:
    generator = torch.Generator().manual_seed(window)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 1)]
    held = held_of(rows, Needs(window=window))
    of_layers = Coverage(window=window, mass=mass).measure(held)
    of_heads = Coverage(window=window, mass=mass, per_head=True).measure(held)
    for i, row in enumerate(rows):
        counts = [[tokens_for(mass, given) for given in head] for head in rows_of_attention(row, window)]
        means = [sum(each) / len(each) for each in counts]
        assert float(of_layers[i]) == pytest.approx(sum(means) / 6, rel=1e-6)
        assert of_heads[i].tolist() == pytest.approx([(means[2 * h] + means[2 * h + 1]) / 2 for h in range(3)])


def test_measures_what_is_known() -> None:
    uniform = [[1 / (i + 1) if j <= i else 0.0 for j in range(20)] for i in range(20)]
    itself = [[float(i == j) for j in range(20)] for i in range(20)]
    # 0.94 of 19 tokens are 17.86 and of 20 are 18.8, so 18 and 19.
    assert float(Coverage(mass=0.94).measure(held_with(uniform, heads=2, window=2))) == 18.5
    assert float(Coverage().measure(held_with(itself, window=2))) == 1.0
    # Half, a quarter, an eighth, an eighth: half is one token, nine tenths are four.
    last = [[0.0] * 4] * 3 + [[0.5, 0.25, 0.125, 0.125]]
    assert float(Coverage(mass=0.5).measure(held_with(last, window=1))) == 1.0
    assert float(Coverage(mass=0.9).measure(held_with(last, window=1))) == 4.0


def test_a_mass_that_rounding_never_reaches_asks_for_all_tokens_and_no_more() -> None:
    """In float32, 41 times 1/41 is 0.99999994."""
    for n in (7, 41, 47, 55):
        even = [[0.0] * n] * (n - 1) + [[1 / n] * n]
        assert float(Coverage(mass=1 - 1e-9).measure(held_with(even, window=1))) == n


def test_layers_share_in_proportion_and_what_one_cannot_hold_goes_on() -> None:
    found = Coverage().allocate(asked(600, [999] * 3, measured=[10.0, 30.0, 20.0]))
    assert found[0, :, 0].tolist() == [100, 300, 200]
    found = Coverage().allocate(asked(600, [999, 150, 999], measured=[10.0, 30.0, 20.0], floor=120))
    assert found[0, :, 0].tolist() == [150, 150, 300]
    with pytest.raises(ValueError, match="layers 0 to 2 at once"):
        Coverage().allocate(asked(9, [9, 9], layers=3, measured=[1.0, 2.0]))


def test_per_head_is_one_split_over_layers_and_heads() -> None:
    request = asked(120, [[99, 99], [99, 99]], measured=[[10.0, 30.0], [20.0, 60.0]])
    assert Coverage(per_head=True).allocate(request)[0].tolist() == [[10, 30], [20, 60]]
    # 15 must stay and one head holds 50: 55 are left for 30 : 20.
    short = asked(120, [[99, 99], [99, 50]], floor=15, measured=[[10.0, 30.0], [20.0, 60.0]])
    assert Coverage(per_head=True).allocate(short)[0].tolist() == [[15, 33], [22, 50]]


@pytest.mark.parametrize(("wrong", "said"), [({"window": 0}, "window"), ({"mass": 1.0}, "mass"), ({"mass": 0}, "mass")])
def test_refuses_wrong_settings(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=f"^coverage: {said} must"):
        Coverage(**wrong)  # type: ignore[arg-type]
