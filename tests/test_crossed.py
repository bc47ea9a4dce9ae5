"""The few pairs of the default run meet every case."""

from __future__ import annotations

import pytest

from tests.support.crossed import crossed


@pytest.mark.parametrize(("n", "m", "each"), [(3, 16, 1), (16, 3, 1), (9, 7, 2), (5, 5, 1), (1, 4, 2), (4, 2, 3)])
def test_every_case_of_both_lists_is_met(n: int, m: int, each: int) -> None:
    pairs = crossed(range(n), range(m), each=each)
    assert [pair.values for pair in pairs] == [(i, j) for i in range(n) for j in range(m)]
    near = [pair.values for pair in pairs if not pair.marks]
    assert all(pair.marks == (pytest.mark.long,) for pair in pairs if pair.marks)
    assert len(near) == max(n, m) * min(each, n, m)
    for side, count, other in ((0, n, m), (1, m, n)):
        met = [sum(pair[side] == case for pair in near) for case in range(count)]
        assert min(met) >= min(each, other)


def test_what_is_not_possible_is_left_out_and_every_case_is_met() -> None:
    pairs = crossed(range(3), range(9), possible=lambda one, other: (one, other) != (1, 4))
    assert len(pairs) == 26 and (1, 4) not in [pair.values for pair in pairs]
    assert {pair.values[1] for pair in pairs if not pair.marks} == set(range(9))
