"""The parts of a layer's state: what each says of itself for a saved cache is all of it, and comes back."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kvtailor.engine.saving import restore, state_of
from kvtailor.engine.state import Clock, LayerState, ModelPart, Observed, Stored
from kvtailor.plan import Plan
from kvtailor.types.evidence import Evidence

# What a saved cache does not hold, and why that is right.
LEFT_OUT = {
    "Stored": {},
    "Observed": {
        "tokens_read": "of the last forward alone",
        "repeated": "gone when the context is compressed, before anything can be saved",
        "repeated_real": "likewise",
    },
    "Clock": {"due": "nothing is due between two forwards", "decoding": "each forward says it", "reindex": "likewise"},
    "ModelPart": {
        "output": "the model's",
        "softmax": "the model's",
        "rotation": "the model's",
        "offset": "the model's",
        "calibration": "a file",
        "encoding": "a file",
        "share": "the processes'",
        "latents": "the model's",
    },
}


PLAN = Plan.parse("streaming @ tokens=16, slack=8")


def filled() -> LayerState:
    """A layer of which every field of every part has a value of its own."""
    generator = torch.Generator().manual_seed(3)
    state = LayerState(0)
    state.append(*torch.randn(2, 2, 3, 9, 4, generator=generator), exactly=False)
    state.stored.segments.append(state.stored.tail.as_segment())
    state.stored.tail.clear()
    state.append(*torch.randn(2, 2, 3, 2, 4, generator=generator), exactly=False)
    state.observed = Observed(
        evidence=Evidence(queries=torch.rand(2, 6, 1, 4), columns=torch.tensor([10]), mass=(torch.rand(6, 9),)),
        carry={"bounds": torch.rand(2, 3)},
        tokens_read=torch.ones(2, 3, dtype=torch.int64),
        scored=torch.rand(2, 3, 5),
        scored_columns=torch.arange(5, dtype=torch.int32).expand(2, 3, 5).clone(),
        reconstruction=torch.rand(2, 3, 11),
    )
    state.clock = Clock(settled_seen=4, evict_at=8, growth=7, due=True, reindex=True, prompt=3)
    state.model = ModelPart(scaling=0.25)
    return state


def test_all_of_a_layer_comes_back() -> None:
    state = filled()
    fields, tensors = state_of(state)
    found = LayerState(0)
    restore(found, json.loads(json.dumps(fields)), tensors, PLAN, 3, torch.float32)
    assert found.stored.seen == state.stored.seen == 11 and found.model.scaling == 0.25
    for one, two in zip(found.parts(), state.parts(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.decode(), two.decode(), strict=True))
    assert found.observed.memories().keys() == state.observed.memories().keys()
    assert torch.equal(found.observed.evidence.mass[0], state.observed.evidence.mass[0])
    assert torch.equal(found.observed.carry["bounds"], state.observed.carry["bounds"])
    assert found.clock == dataclasses.replace(state.clock, due=False, decoding=False, reindex=False)


@pytest.mark.parametrize("kind", [Stored, Observed, Clock, ModelPart], ids=lambda kind: kind.__name__)
def test_no_field_of_a_part_is_forgotten(kind: type) -> None:
    """A field that is changed, and whose change a saved cache does not show, must be listed above with its reason."""
    name = {"Stored": "stored", "Observed": "observed", "Clock": "clock", "ModelPart": "model"}[kind.__name__]
    whole = said(filled())
    for each in dataclasses.fields(kind):
        state = filled()
        setattr(getattr(state, name), each.name, getattr(getattr(LayerState(0), name), each.name))
        shown = not same(said(state), whole)
        assert shown != (each.name in LEFT_OUT[kind.__name__]), f"{kind.__name__}.{each.name}"


def said(state: LayerState) -> tuple[dict, dict]:
    return state_of(state)


def same(one: tuple[dict, dict], two: tuple[dict, dict]) -> bool:
    return one[0] == two[0] and one[1].keys() == two[1].keys()


def test_files_keep_the_names_of_the_first_version() -> None:
    """Of them all but `prompt`, `held` and `tensors`, without which a file is read as well."""
    fields, _ = state_of(filled())
    assert fields.keys() == {
        "seen",
        "settled_seen",
        "walk_at",
        "tail_growth",
        "prompt",
        "scaling",
        "rows",
        "heads",
        "tail",
        "segments",
        "held",
        "tensors",
    }
    fields, tensors = state_of(filled())
    for name in ("prompt", "held", "tensors"):
        del fields[name]
    found = LayerState(0)
    restore(found, fields, tensors, PLAN, 3, torch.float32)
    assert found.clock.prompt == 0 and found.clock.growth == 7


@pytest.mark.parametrize(
    ("name", "value"), [("walk_at", -1), ("tail_growth", None), ("seen", 1.5), ("scaling", 0.0), ("settled_seen", True)]
)
def test_a_number_that_is_none_is_refused_by_name(name: str, value: object) -> None:
    fields, tensors = state_of(filled())
    with pytest.raises(ValueError, match=f"{name} of a layer is"):
        restore(LayerState(0), {**fields, name: value}, tensors, PLAN, 3, torch.float32)


def test_a_checkpoint_is_not_changed_by_what_comes_after() -> None:
    state = filled()
    before, fields = state.checkpoint(), said(state)
    state.append(*torch.randn(2, 2, 3, 1, 4), exactly=False)
    state.stored.segments.clear()
    state.observed.scored, state.clock.growth = None, 99
    state.restore(before)
    assert said(state)[0] == fields[0]
