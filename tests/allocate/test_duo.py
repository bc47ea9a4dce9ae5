"""Duo: heads fill up by their gates, against loops and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.budget_requests import asked
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.duo import Duo
from kvtailor.hf.versions import hand_cache

Gates = tuple[tuple[float, ...], ...]


def naive(gates: Gates, total: int, held: int, streaming: int, floor: int) -> list[list[int]]:
    """One token at a time, all heads holding the same: to the poorest head below `streaming`, else by gate."""
    heads = [(layer, head) for layer, row in enumerate(gates) for head in range(len(row))]
    given = dict.fromkeys(heads, min(floor, held))
    for _ in range(total - sum(given.values())):
        poor = [at for at in heads if given[at] < min(streaming, held)]
        open_heads = [at for at in heads if given[at] < held]
        if not open_heads:
            break
        if poor:
            at = min(poor, key=lambda at: given[at])
        else:
            highest = max(gates[layer][head] for layer, head in open_heads)
            at = min((at for at in open_heads if gates[at[0]][at[1]] == highest), key=lambda at: given[at])
        given[at] += 1
    return [[given[layer, head] for head in range(len(row))] for layer, row in enumerate(gates)]


@pytest.mark.parametrize("coarse", [True, False], ids=["ties", "distinct"])
@pytest.mark.parametrize(("streaming", "floor"), [(0, 0), (6, 2), (6, 9), (50, 0)])
def test_equals_one_token_at_a_time(streaming: int, floor: int, coarse: bool) -> None:
    for state in range(5):
        drawn = torch.randn(4, 3, generator=torch.Generator().manual_seed(state))
        gates = tuple(map(tuple, (drawn.round() if coarse else drawn).tolist()))
        for total in (0, 50, 107, 200, 331, 999):
            request = asked(total, [40] * 4, heads=3, floor=floor)
            found = Duo(gates=gates, streaming=streaming).allocate(request)[0].tolist()
            assert found == naive(gates, total, 40, streaming, floor)


def test_by_hand() -> None:
    duo = Duo(gates=((0.9, 0.1), (0.2, 0.5)), streaming=10)
    # 40 for streaming; then 60 fill up the gate of 0.9, and 30 go to that of 0.5.
    assert duo.allocate(asked(130, [70, 70], heads=2))[0].tolist() == [[70, 10], [10, 40]]
    assert duo.allocate(asked(22, [70, 70], heads=2))[0].tolist() == [[6, 6], [5, 5]], "not even streaming fits"
    # What heads of one gate get they share.
    alike = Duo(gates=((1.0, 0.0), (1.0, 0.0)), streaming=10)
    assert alike.allocate(asked(90, [70, 70], heads=2))[0].tolist() == [[35, 10], [35, 10]]


def test_a_share_of_the_heads_holds_everything_at_the_budget_that_the_docstring_says() -> None:
    """3 of 6 heads, 200 tokens of 20 that stream: keep = 1/2 + 1/2 * 20/200 = 0.55."""
    gates = ((0.9, 0.1), (0.8, 0.3), (0.2, 0.7))
    total = math.floor(6 * 200 * 0.55)
    found = Duo(gates=gates, streaming=20).allocate(asked(total, [200] * 3, heads=2))[0].tolist()
    assert found == [[200, 20], [200, 20], [20, 200]]


def test_a_layer_alone_gets_what_it_gets_among_all() -> None:
    """Others were cut before, which it cannot see; so all count as having what the row has seen, now and later."""
    duo = Duo(gates=((0.9, 0.1), (0.2, 0.5), (0.5, 0.4)), streaming=10)
    held = duo.allocate(asked(190, [70] * 3, heads=2))
    assert held[0].tolist() == [[70, 10], [10, 45], [45, 10]]
    later = []
    for layer in range(3):
        request = BudgetRequest(
            total=torch.tensor([190]),
            capacity=held[:, layer : layer + 1] + 4,
            floor=torch.zeros_like(held[:, :1]),
            layers=(layer,),
            num_layers=3,
            row_tokens=torch.tensor([74]),
        )
        later += duo.allocate(request)[0].tolist()
    assert later == [[74, 10], [10, 43], [43, 10]]


@torch.no_grad()
def test_with_positions_streaming_heads_hold_sinks_and_recents() -> None:
    model = build("llama")
    ids, mask = prompts((60,))
    plan = "position(sinks=4) + duo(gates=[[0.9, 0.1], [0.3, 0.2], [0.1, 1.0]], streaming=12) @ tokens=28"
    cache = kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache))
    # 168 in all, 72 for streaming: 48 fill up each of the two highest gates.
    assert cache.held()[0].tolist() == [[60, 12], [12, 12], [12, 60]]
    held = held_columns(cache)
    assert held[1][0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, *range(52, 60)]


def test_gates_of_another_model_are_refused() -> None:
    duo = Duo(gates=((1.0, 0.0),))
    assert duo.misfit(layers=1, heads=2, size=8) is None
    with pytest.raises(ValueError, match="duo: its gates are for 1 layers with 2 kv heads, but 2 with 2 are"):
        duo.allocate(asked(9, [9, 9], heads=2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gates": ()}, "gates must be a list"),
        ({"gates": ((1.0,), (1.0, 2.0))}, "gates must be a list"),
        ({"gates": ((1.0, math.nan),)}, "gates must be finite"),
        ({"gates": ((1.0,),), "streaming": -1}, "streaming"),
    ],
)
def test_refuses_wrong_settings(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^duo: {said}"):
        Duo(**wrong)  # type: ignore[arg-type]


def test_calibrated_gates_fill_heads_as_written_ones() -> None:
    gates = ((0.9, 0.1), (0.2, 0.5), (0.5, 0.4))
    request = replace(asked(130, [40] * 3, heads=2), calibration={"gates": torch.tensor(gates, dtype=torch.float64)})
    expected = Duo(gates=gates, streaming=10).allocate(asked(130, [40] * 3, heads=2))
    assert torch.equal(Duo(streaming=10).allocate(request), expected)
    assert Duo().wants_calibration and not Duo(gates=gates).wants_calibration
    with pytest.raises(ValueError, match="gates and a file of gates"):
        Duo(gates=gates, file="gates.safetensors")
    with pytest.raises(ValueError, match="none were given; see `kvtailor calibrate duo`"):
        Duo().allocate(asked(130, [40] * 3, heads=2))
