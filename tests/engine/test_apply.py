"""What stays of a layer after an eviction, against loops over rows, heads and tokens; nothing changes early."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.segments_of import Padded, states
from torch import Tensor

from kvtailor.engine.apply import LayerContents, apply_contents, compute_contents
from kvtailor.engine.saving import state_of
from kvtailor.engine.state import LayerState
from kvtailor.engine.view import view_held
from kvtailor.plan import Plan
from kvtailor.types import Held, Needs, PlainSegment

ROWS, HEADS, SIZE = 3, 2, 8
PLANS = ["full", "plain(block_size=16)", "kivi(bits=8, group=4, recent=4)", "vector(bits=8)", "fp8"]


def layer(tokens: int = 63, seed: int = 1) -> LayerState:
    state = LayerState(0)
    keys, values = states((2, ROWS, HEADS, tokens, SIZE), seed)
    state.append(keys, values, exactly=True)
    return state


def shown(state: LayerState, first: tuple[int, ...] = (0, 5, 11)) -> tuple[Held, list[Tensor]]:
    seen = state.stored.seen
    real = torch.arange(seen)[None] >= torch.tensor(first)[:, None]
    visible = Padded(new_tokens=seen, first_column=0, real=real)
    return view_held(state, visible, Needs(), 1)


def drawn(held: Held, seed: int, recent: int, *, even: bool) -> Tensor:
    """(b, h, n) bool: some valid tokens, and always the recent window; as many in each row and head where `even`."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(held.valid.shape, generator=generator).masked_fill(~held.valid, -1.0)
    scores = scores.masked_fill(held.recent(recent), 2.0)
    keep = torch.zeros_like(held.valid)
    for row in range(ROWS):
        for head in range(HEADS):
            count = 20 if even else 9 + int(torch.randint(0, 25, (1,), generator=generator))
            keep[row, head, scores[row, head].topk(count).indices] = True
    return keep & held.valid


def tokens_of(state: LayerState) -> dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]]:
    """For each row and head (column, key, value) of what is held, in the order of the lanes."""
    found: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {
        (row, head): [] for row in range(ROWS) for head in range(HEADS)
    }
    for part in state.parts():
        keys, values = part.decode()
        owners, columns = part.layout.owners(torch.device("cpu")), part.layout.columns(torch.device("cpu"))
        columns, filled = columns.expand(keys.shape[:2]), part.layout.filled(torch.device("cpu"))
        for lane, owner in enumerate(owners.tolist()):
            for slot in range(part.layout.size):
                if filled is None or bool(filled[lane, slot]):
                    found[divmod(owner, HEADS)].append((int(columns[lane, slot]), keys[lane, slot], values[lane, slot]))
    return found


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("recent", [0, 1, 7])
@pytest.mark.parametrize("plan", PLANS)
def test_what_stays_is_what_was_kept(plan: str, recent: int, even: bool) -> None:
    """Twice, so that codes move and a ragged cache is cut again."""
    parsed, state = Plan.parse(plan), layer()
    for turn in range(2):
        held, slots = shown(state)
        keep = drawn(held, turn + 5, recent, even=even)
        most = int(keep.sum(-1).max())
        kept = compute_contents(state, parsed, (held, slots), keep, most=most, recent=recent)
        apply_contents(state, parsed, kept, first=held.first)
        for (row, head), tokens in tokens_of(state).items():
            wanted = keep[row, head].nonzero()[:, 0]
            assert sorted(column for column, _, _ in tokens) == held.positions[row, head, wanted].tolist()
            for column, key, value in tokens:
                at = int((held.positions[row, head] == column).nonzero()[0])
                for mine, was in ((key, held.keys), (value, held.values)):
                    error = (mine - was[row, head, at]).abs().max() / was.abs().max()
                    assert error < (1e-6 if parsed.encode.exact else 0.05), (plan, row, head, column)
        state.append(*states((2, ROWS, HEADS, 3, SIZE), 40 + turn), exactly=False)


def test_the_recent_window_stays_a_tail_only_where_all_heads_keep_it() -> None:
    state, plan = layer(), Plan.parse("vector(bits=8)")
    held, slots = shown(state)
    keep = drawn(held, 3, 6, even=True)
    whole = compute_contents(state, plan, (held, slots), keep, most=30, recent=6)
    assert whole.recent == 6
    dropped = keep.clone()
    dropped[2, 1, -2] = False
    assert compute_contents(state, plan, (held, slots), dropped, most=30, recent=6).recent == 0


def test_working_it_out_changes_nothing() -> None:
    """The result is frozen, and until it is applied the layer is what it was."""
    state, plan = layer(), Plan.parse("kivi(bits=8, group=4, recent=4) + d2o + snapkv(window=4) @ tokens=20")
    held, slots = shown(state)
    before = copy.deepcopy(state_of(state))
    keep = drawn(held, 3, 4, even=False)
    kept = compute_contents(state, plan, (held, slots), keep, most=int(keep.sum(-1).max()), recent=4)
    after = state_of(state)
    assert before[0] == after[0] and all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    with pytest.raises(AttributeError):
        kept.recent = 3  # type: ignore[misc]


def test_mass_follows_its_tokens() -> None:
    """Mass is the column of each token, so that a token that came with another's would show."""
    for plan in (Plan(), Plan.parse("vector(bits=8)")):
        state = layer()
        state.observed.evidence = state.observed.evidence.__class__(mass=(torch.arange(63.0).expand(6, 63).clone(),))
        seen = Padded(new_tokens=63, first_column=0)
        held, slots = view_held(state, seen, Needs(mass=True), 1)
        keep = drawn(held, 8, 5, even=False)
        kept = compute_contents(state, plan, (held, slots), keep, most=40, recent=5)
        apply_contents(state, plan, kept, first=held.first)
        for part, mass in zip(state.parts(), state.observed.evidence.mass, strict=True):
            filled = part.layout.filled(torch.device("cpu"))
            columns = part.layout.columns(torch.device("cpu")).expand(mass.shape).float()
            assert torch.equal(mass if filled is None else mass[filled], columns if filled is None else columns[filled])


def test_a_whole_tail_is_one_replacement() -> None:
    state = layer()
    held, slots = shown(state, (0, 0, 0))
    kept = compute_contents(state, Plan(), (held, slots), drawn(held, 2, 4, even=True), most=20, recent=4)
    assert isinstance(kept, LayerContents) and isinstance(kept.tail, PlainSegment) and kept.segments == ()
