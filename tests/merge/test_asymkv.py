"""AsymKV's merging: exact for equal keys, the values' sum, and keys weighed by what the output depends on."""

from __future__ import annotations

import cmath
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row
from torch import Tensor

from kvtailor.errors import PlanError
from kvtailor.merge.asymkv import AsymKV
from kvtailor.ops.attention.definition import reference
from kvtailor.plan import Plan
from kvtailor.types import Held

RAW = AsymKV(window=6, turned=False)


def row(tokens: int = 40, seed: int = 1) -> Row:
    return make_row(tokens, heads=3, group=2, size=8, generator=torch.Generator().manual_seed(seed))


def attended(query: Tensor, held: Held) -> Tensor:
    return reference(query.double(), held.keys, held.values, None, held.scaling, held.log_weight)[0]


def cut(merger: AsymKV, held: Held, keep: Tensor, into: Tensor | None = None) -> Held:
    """What is held afterwards; as many tokens in each head."""
    merged = merger.merge(held, keep, keep if into is None else into)
    shape = (*keep.shape[:2], -1)
    return replace(
        held,
        keys=merged.keys,
        values=merged.values,
        log_weight=merged.log_weight,
        positions=held.positions[keep].view(shape),
        valid=held.valid[keep].view(shape),
    )


def test_equal_keys_merge_without_loss_and_again() -> None:
    """Runs of 1 to 5 equal keys become one token each, then runs of those that were equal again."""
    generator = torch.Generator().manual_seed(3)
    runs = torch.repeat_interleave(torch.arange(12), torch.tensor([5, 1, 3, 4, 2, 5, 1, 1, 4, 3, 2, 2]))
    distinct = torch.randn(3, 6, 8, generator=generator)
    made = row(int(runs.shape[0]))
    held = held_of([replace(made, keys=distinct[:, runs // 2])], RAW.needs)
    query = torch.randn(1, 6, 7, 8, generator=generator) * 3
    expected = attended(query, held)
    first = torch.cat([torch.ones(1, dtype=torch.bool), runs[1:] != runs[:-1]]).expand(1, 3, -1)
    once = cut(RAW, held, first)
    assert once.keys.shape[2] == 12
    assert once.log_weight.exp()[0, 0].tolist() == pytest.approx([5, 1, 3, 4, 2, 5, 1, 1, 4, 3, 2, 2])
    assert (attended(query, once) - expected).abs().max() < 1e-5
    twice = cut(RAW, once, torch.arange(12).expand(1, 3, 12) % 2 == 0)
    assert twice.log_weight.exp()[0, 0].tolist() == pytest.approx([6, 7, 7, 2, 7, 4])
    assert (attended(query, twice) - expected).abs().max() < 1e-5
    dropped = replace(once, log_weight=None)
    assert (attended(query, dropped) - expected).abs().max() > 1e-2, "the weights make the difference"


def test_no_value_is_lost_and_no_token() -> None:
    held = held_of([row()], RAW.needs)
    keep = torch.rand(1, 3, 40, generator=torch.Generator().manual_seed(5)) < 0.4
    keep[..., -1] = True
    merged = RAW.merge(held, keep, keep)
    counts = merged.log_weight.double().exp() * (torch.arange(merged.keys.shape[2]) < keep.sum(-1)[..., None])
    assert counts.sum(-1).tolist() == [pytest.approx([40.0] * 3)]
    summed = (counts[..., None] * merged.values).sum(2)
    assert torch.allclose(summed, held.values.double().sum(2), atol=1e-4)
    # More than 5 tokens in one: nothing is clipped.
    assert counts.max() > 5


def test_the_only_kept_token_stands_for_all() -> None:
    held = held_of([row(40), row(7)], RAW.needs)
    merged = RAW.merge(held, held.positions == held.seen - 1, held.positions == held.seen - 1)
    assert merged.log_weight.exp()[..., 0].tolist() == [pytest.approx([40.0] * 3), pytest.approx([7.0] * 3)]


def test_a_row_that_has_but_padding_so_far_is_left_alone() -> None:
    """As the first chunk of a padded batch gives it."""
    whole, alone = held_of([row(40), row(0)], RAW.needs), held_of([row(40)], RAW.needs)
    merged = RAW.merge(whole, whole.positions % 3 == 0, whole.positions % 3 == 0)
    expected = RAW.merge(alone, alone.positions % 3 == 0, alone.positions % 3 == 0)
    assert torch.equal(merged.keys[0], expected.keys[0]) and torch.equal(merged.values[0], expected.values[0])
    assert not merged.log_weight[1].any()


def test_joins_the_kept_token_before_it_and_before_the_first_the_first() -> None:
    held = held_of([row(6)], RAW.needs)
    held = replace(held, values=torch.tensor([1.0, 2, 4, 8, 16, 32]).view(1, 1, 6, 1).expand(1, 3, 6, 1))
    keep = torch.tensor([False, True, False, False, True, False]).expand(1, 3, 6)
    merged = RAW.merge(held, keep, keep)
    assert merged.values[0, 0, :, 0].tolist() == pytest.approx([(1 + 2 + 4 + 8) / 4, (16 + 32) / 2])
    assert merged.log_weight[0, 0].exp().tolist() == pytest.approx([4, 2])
    closed = RAW.merge(held, keep, keep & (held.positions > 1))
    assert closed.values[0, 0, :, 0].tolist() == pytest.approx([2, 24]), "beside a closed token the others are dropped"


@pytest.mark.parametrize("sharp", [1, 9], ids=["even", "sharp"])
@pytest.mark.parametrize("turned", [False, True], ids=["as stored", "turned"])
def test_keys_are_weighed_by_the_squared_derivative_of_the_output(turned: bool, sharp: int) -> None:
    """Against automatic differentiation and a rotation by complex numbers, one channel at a time.

    Sharp: single tokens get nearly all of the attention, and are nearly the output.
    """
    merger = AsymKV(window=6, turned=turned)
    held = held_of([row(40)], merger.needs)
    held = replace(held, queries=held.queries * sharp)
    starts = [*range(0, 17, 4), 17, *range(20, 41, 4)]
    keep = torch.zeros(1, 3, 40, dtype=torch.bool)
    keep[..., starts[:-1]] = True
    merged = merger.merge(held, keep, keep)
    for head in range(3):
        fisher = derivative(held, head).square().sum((0, 1, 2))
        keys = held.keys[0, head].double()
        for number, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
            moved = torch.stack([turn(keys[i], first - i) if turned else keys[i] for i in range(first, end)])
            weights = fisher[first:end]
            expected = (weights * moved).sum(0) / weights.sum(0)
            # The square of a share's rounding error, by the exponent's size, over the square of the rest.
            close = {"rtol": 1e-4, "atol": 1e-5} if sharp == 1 else {"rtol": 1e-3, "atol": 1e-4}
            assert torch.allclose(merged.keys[0, head, number].double(), expected, **close)


def derivative(held: Held, head: int) -> Tensor:
    """(g, w, dv, n, d) the derivative of the window's outputs by the keys of one head."""
    queries = held.queries[0, 2 * head : 2 * head + 2].double()
    values = held.values[0, head].double()
    unseen = held.positions[0, head] > held.query_columns[:, None]

    def output(keys: Tensor) -> Tensor:
        logits = (queries @ keys.T * held.scaling).masked_fill(unseen, -torch.inf)
        return logits.softmax(-1) @ values

    return torch.autograd.functional.jacobian(output, held.keys[0, head].double())


def turn(key: Tensor, by: int) -> Tensor:
    """Channels 0 and 2, and 1 and 3, are planes that turn by 1 and 0.1 a position; see `held_of`."""
    found = key.clone()
    for plane, frequency in enumerate((1.0, 0.1)):
        one = complex(key[plane], key[plane + 2]) * cmath.exp(1j * frequency * by)
        found[plane], found[plane + 2] = one.real, one.imag
    return found


def test_nobody_looks_at_them() -> None:
    """Without any query of a row all tokens weigh the same, and none is NaN."""
    held = held_of([row()], RAW.needs)
    held = replace(held, query_columns=held.query_columns - 1000)
    keep = torch.arange(40).expand(1, 3, 40) % 4 == 0
    merged = RAW.merge(held, keep, keep)
    assert torch.allclose(merged.keys, held.keys.unflatten(2, (10, 4)).mean(3), atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "codec"), [("rolling", ""), ("rocket(tokens=64)", ""), ("quest(tokens=64)", " + indexed")]
)
def test_attentions_that_count_tokens_as_one_are_refused(attention: str, codec: str) -> None:
    name = attention.partition("(")[0]
    with pytest.raises(PlanError, match=f"asymkv lets a token stand for several, which {name} would count as one"):
        Plan.parse(f"pairs + asymkv{codec} + {attention} @ tokens=128")


def test_a_codec_that_stores_two_layers_together_is_refused() -> None:
    with pytest.raises(PlanError, match="minicache stores two layers' tokens together, and asymkv merges other tokens"):
        Plan.parse("position + asymkv + minicache @ tokens=128")


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="^asymkv: window must be at least 1"):
        AsymKV(window=0)
    held = held_of([row()], RAW.needs)
    with pytest.raises(ValueError, match="asymkv needs the last 32 queries and the rotation"):
        AsymKV().merge(held, held.valid, held.valid)
