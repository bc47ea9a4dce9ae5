"""What an attention is told of its layer, when it is asked for an index, and what becomes of what it carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvtailor
from kvtailor.attend.contract import Attended, Attention, AttentionContext, AttentionRequest, IndexRequest
from kvtailor.attend.segments import Segments
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.position import Position
from kvtailor.types import Rotation
from tests.support.seam.zoo import build, prompts

CALLS: list[tuple[str, AttentionContext, int, int]] = []


@dataclass(frozen=True, kw_only=True)
class Diary(Attention):
    """Counts its own calls in its carry, and writes down what it is asked with."""

    gives_mass: ClassVar[bool] = True

    def attend(self, request: AttentionRequest) -> Attended:
        CALLS.append(("attend", request.context, request.query.shape[2], held(request.parts)))
        read = Segments().attend(request)
        carry = counted(request.context, "attended", request.query.shape[0])
        return Attended(output=read.output, mass=read.mass, carry=carry)

    def index(self, request: IndexRequest) -> Mapping[str, torch.Tensor]:
        CALLS.append(("index", request.context, request.visible.new_tokens, held(request.parts)))
        return counted(request.context, "indexed", request.parts[0].layout.rows)


@dataclass(frozen=True, kw_only=True)
class Turning(Diary):
    """The same, and it needs the rotation."""

    needs_rotation: ClassVar[bool] = True


def held(parts) -> int:
    return sum(int(part.layout.counts()[0, 0]) for part in parts)


def counted(context: AttentionContext, name: str, rows: int) -> dict[str, torch.Tensor]:
    carry = dict(context.carry)
    carry[name] = carry.get(name, torch.zeros(rows, dtype=torch.int64)) + 1
    return carry


@pytest.fixture(autouse=True)
def _empty() -> None:
    CALLS.clear()


@torch.no_grad()
def test_layers_count_those_that_are_compressed_and_carry_what_they_left() -> None:
    """Gemma's layers 1 and 3 see all tokens; 0 and 2 have a window of their own."""
    model = build("gemma3")
    ids, _ = prompts((20,))
    cache = kvtailor.cache_for(model, Plan(attend=Diary()))
    model(ids, **hand_cache(cache))
    for _ in range(3):
        model(ids[:, :1], **hand_cache(cache))
    asked = [(what, context.layer, new) for what, context, new, _ in CALLS]
    first = [("attend", 0, 20), ("index", 0, 20), ("attend", 1, 20), ("index", 1, 20)]
    assert asked == first + [("attend", 0, 1), ("attend", 1, 1)] * 3
    assert all(context.layers == 2 and context.rotation is None for _, context, _, _ in CALLS)
    for state in cache.engine.states:
        assert {name: tensor.tolist() for name, tensor in state.observed.carry.items()} == {
            "attended": [4],
            "indexed": [1],
        }
    assert cache.ledger().by_stage["attend"] == 2 * 2 * 8
    cache.reset()
    assert all(not state.observed.carry for state in cache.engine.states)


@torch.no_grad()
def test_the_rotation_is_told_to_who_needs_it() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, Plan(attend=Turning()))
    model(prompts((5,))[0], **hand_cache(cache))
    assert len(CALLS) == 6 and all(isinstance(context.rotation, Rotation) for _, context, _, _ in CALLS)


@pytest.mark.parametrize("scope", ["layer", "prompt"])
@torch.no_grad()
def test_an_index_is_asked_for_when_what_is_held_has_changed(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompt's eviction, not before it; then at each eviction while decoding, every third token."""
    monkeypatch.setattr(Position, "scope", scope)
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(model, Plan(attend=Diary(), score=Position(), tokens=12, slack=2))
    model(ids, **hand_cache(cache))
    assert [count for what, _, _, count in CALLS if what == "index"] == [12, 12, 12]
    for step in range(1, 8):
        CALLS.clear()
        model(ids[:, :1], **hand_cache(cache))
        assert [count for what, _, _, count in CALLS if what == "index"] == ([12] * 3 if step % 3 == 0 else [])


@torch.no_grad()
def test_a_carry_follows_rows_and_rejected_tokens_leave_none() -> None:
    model = build("llama")
    ids, _ = prompts((20, 20))
    cache = kvtailor.cache_for(model, Plan(attend=Diary()))
    cache.activate_past_recording()
    model(ids, **hand_cache(cache))
    cache.crop(0)
    before = {name: tensor.clone() for name, tensor in cache.engine.states[0].observed.carry.items()}
    model(ids[:, :4], **hand_cache(cache))
    waiting = cache.ledger()
    assert waiting.total == waiting.closed_form
    cache.crop(-4)
    assert {name: tensor.tolist() for name, tensor in cache.engine.states[0].observed.carry.items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }
    model(ids[:, :4], **hand_cache(cache))
    cache.crop(-1)
    # Of the two calls of this forward the one with the rejected token counts for nothing.
    assert cache.engine.states[0].observed.carry["attended"].tolist() == [2, 2]
    cache.reorder_cache(torch.tensor([1, 1]))
    assert all(tensor.shape == (2,) for tensor in cache.engine.states[0].observed.carry.values())
