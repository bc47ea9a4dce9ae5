"""A layer that holds latents: read absorbed and expanded, against every head's keys and values in float64.

What such a layer keeps is compared with an ordinary layer of one kv head that is given the absorbed queries and the
joined keys, which knows nothing of latents.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.every_plan import every_plan
from tests.support.latents import RandomProjections
from tests.support.segments_of import Padded, states, uneven
from torch import Tensor

from kvtailor.attend.contract import AttentionRequest
from kvtailor.attend.reference import Reference
from kvtailor.attend.segments import Segments
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.vector import Vector
from kvtailor.engine.engine import Engine
from kvtailor.engine.reading import read_latents
from kvtailor.errors import PlanError
from kvtailor.plan import Plan
from kvtailor.store.recent_window import Tail
from kvtailor.types import Layout, PlainSegment, Segment

# b, H, d', e, dv, r: odd numbers, one head, a rank below and above the sizes of keys.
SIZES = [(3, 5, 7, 3, 9, 13), (1, 1, 4, 2, 4, 3), (2, 6, 16, 8, 12, 32)]


def parts_of(size: tuple[int, ...], new: int, mix: str) -> list[Segment]:
    """Stored parts of latents and rotated keys, the new tokens last, in a buffer whose free slots are NaN."""
    b, _, _, rope, _, rank = size
    parts: list[Segment] = []
    column = 0
    for i, what in enumerate(mix.split()):
        span = 41
        latents, rotated = states((b, span, rank), 3 + i), states((b, span, rope), 30 + i)
        layout = Layout(rows=b, heads=1, size=span, start=column)
        if what == "ragged":
            layout, owner, at = uneven(b, 1, 16, most=span, columns=span, seed=i)
            assert layout.positions is not None
            layout = dataclasses.replace(layout, positions=layout.positions + column)
            latents, rotated = latents[owner, at], rotated[owner, at]
        plain = PlainSegment(layout=layout, keys=latents, values=rotated)
        codec = {"kivi": Kivi(bits=4, group=8, recent=0), "vector": Vector()}.get(what)
        parts.append(plain if codec is None else codec.encode(layout, latents, rotated))
        column += span
    tail = Tail(b, 1)
    tail.append(states((b, 1, new, rank), 77)[:, :, :new], states((b, 1, new, rope), 78), column)
    poison(tail)
    return [*parts, tail.as_segment()]


def poison(tail: Tail) -> None:
    for name, buffer in tail.tensors().items():
        if name != "positions":
            buffer[:, tail.length :] = float("nan")


def by_definition(
    projections: RandomProjections, query: Tensor, parts: list[Segment], visible: Padded, scaling: float
) -> tuple[Tensor, list[Tensor]]:
    """Output (b, H, t, dv) and each part's mass (m, s), from loops over rows and heads in float64."""
    b, heads, new, _ = query.shape
    output = torch.zeros(b, heads, new, projections.value, dtype=torch.float64)
    mass = [torch.zeros(part.layout.lanes, part.layout.size, dtype=torch.float64) for part in parts]
    real = torch.ones(b, new) if visible.real is None else visible.real[:, -new:]
    for row in range(b):
        latents, rotated, columns, places = [], [], [], []
        for number, part in enumerate(parts):
            filled = part.layout.filled(torch.device("cpu"))
            own = part.layout.columns(torch.device("cpu")).expand(part.layout.lanes, -1)
            stored = part.decode()
            for lane in (part.layout.owners(torch.device("cpu")) == row).nonzero()[:, 0].tolist():
                for slot in range(part.layout.size):
                    if filled is None or filled[lane, slot]:
                        latents.append(stored[0][lane, slot].double())
                        rotated.append(stored[1][lane, slot].double())
                        columns.append(int(own[lane, slot]))
                        places.append((number, lane, slot))
        c, k = torch.stack(latents), torch.stack(rotated)
        sees = visible.at(torch.tensor([row]), torch.tensor([columns]))[0]
        for head in range(heads):
            keys = torch.cat([c @ projections.of_keys[head].double().t(), k], -1)
            values = c @ projections.of_values[head].double().t()
            logits = (query[row, head].double() @ keys.t() * scaling).masked_fill(~sees, -torch.inf)
            weights = logits.softmax(-1).nan_to_num(0.0)
            output[row, head] = weights @ values
            for (number, lane, slot), given in zip(places, (weights * real[row, :, None]).sum(0), strict=True):
                mass[number][lane, slot] += given
    return output, mass


@pytest.mark.parametrize("expands", [False, True], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("new", [1, 5, 70])
@pytest.mark.parametrize("mix", ["", "dense", "dense ragged", "kivi vector ragged"])
@pytest.mark.parametrize("size", SIZES)
def test_both_forms_are_the_definition(size: tuple[int, ...], mix: str, new: int, expands: bool) -> None:
    b, heads, nope, rope, value, rank = size
    projections = RandomProjections(heads, nope, rope, value, rank, expands=expands)
    parts = parts_of(size, new, mix)
    seen = 41 * len(mix.split()) + new
    query, scaling = states((b, heads, new, nope + rope), 5), 1.7 * (nope + rope) ** -0.5
    for padded in (False, True):
        real = torch.ones(b, seen, dtype=torch.bool)
        real[0, :3] = False
        visible = Padded(new_tokens=new, first_column=seen - new, real=real if padded else None)
        request = AttentionRequest(
            query=query,
            parts=parts,
            visible=visible,
            scaling=scaling,
            want_mass=True,
            real_queries=real[:, -new:] if padded else None,
        )
        due, mass = by_definition(projections, query, parts, visible, scaling)
        for method in (Segments(), Reference()):
            found = read_latents(method, request, projections)
            assert found.output.shape == due.shape
            assert (found.output - due).abs().max() < 1e-5 * due.abs().max().clamp(min=1)
            assert found.mass is not None
            for here, there in zip(found.mass, mass, strict=True):
                assert (here - there).abs().max() < 1e-4
            plain = read_latents(method, dataclasses.replace(request, want_mass=False), projections)
            assert (plain.output - due).abs().max() < 1e-5 * due.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_as_expanded_keys_would_be(dtype: torch.dtype) -> None:
    size = SIZES[2]
    b, heads, nope, rope, value, rank = size
    parts: list[Segment] = [
        PlainSegment(layout=part.layout, keys=part.decode()[0].to(dtype), values=part.decode()[1].to(dtype))
        for part in parts_of(size, 1, "dense")
    ]
    query, visible = states((b, heads, 1, nope + rope), 5).to(dtype), Padded(new_tokens=1, first_column=41)
    request = AttentionRequest(query=query, parts=parts, visible=visible, scaling=0.2)
    due, _ = by_definition(RandomProjections(*size[1:]), query, parts, visible, 0.2)
    errors = []
    for expands in (False, True):
        found = read_latents(Segments(), request, RandomProjections(*size[1:], expands=expands)).output
        assert found.dtype == dtype
        errors.append(float((found.double() - due).norm() / due.norm()))
    assert max(errors) < 8 * torch.finfo(dtype).eps
    assert errors[0] < 3 * errors[1]


def accepted() -> dict[str, str]:
    """Plans of every method and preset that says it is right on latents, on one kv head."""
    found = {}
    for name, text in every_plan().items():
        plan = Plan.parse(text)
        fits = not plan.latent_misfits() and not plan.misfits(layers=3, heads=1, size=32)
        if fits and plan.needs.reconstruction is None and "static" not in text and "host" not in text:
            found[name] = text
    return found


EXACT = {name: text for name, text in accepted().items() if Plan.parse(text).encode.exact}
LOSSY = sorted(set(accepted()) - set(EXACT))


class Fed:
    """Three layers of an engine that are given the same forwards, as latents or as one kv head of joined keys."""

    def __init__(self, text: str, *, latents: bool, expands: bool = False):
        self.engine = Engine(Plan.parse(text), 3)
        self.latents = latents
        self.projections = [RandomProjections(4, 12, 8, 10, 32, seed=layer, expands=expands) for layer in range(3)]
        if latents:
            for state, own in zip(self.engine.states, self.projections, strict=True):
                state.model.latents = own
        for state, own in zip(self.engine.states, self.projections, strict=True):
            output = states((4, 10, 24), 900)
            # What latents go through: W_o behind what makes values of them.
            state.model.output = lambda own=own, output=output: own.of_values.transpose(1, 2) @ output

    def forward(self, first: int, new: int, real: Tensor | None, seed: int) -> Tensor:
        visible = Padded(new_tokens=new, first_column=first, real=None if real is None else real[:, : first + new])
        found = []
        for layer, (state, own) in enumerate(zip(self.engine.states, self.projections, strict=True)):
            # Sharp enough that tokens differ in what they receive.
            query, latents = states((2, 4, new, 20), seed + layer) * 2, states((2, 1, new, 32), seed + 10 + layer)
            rotated = states((2, 1, new, 8), seed + 20 + layer)
            keys, values = (latents, rotated) if self.latents else (torch.cat([latents, rotated], -1), latents)
            asked = query if self.latents else own.absorbed(query)
            self.engine.append(state, keys, values)
            attended = self.engine.attend(state, asked, visible, 20**-0.5)
            self.engine.act(state, asked, visible, attended)
            found.append(attended.output if self.latents else own.lifted(attended.output))
        return torch.stack(found)

    def all_of_it(self) -> list[Tensor]:
        real = torch.ones(2, 60 + 12 + 30, dtype=torch.bool)
        real[0, :7] = False
        outputs = [self.forward(0, 60, real, 100), self.forward(60, 12, real, 200)]
        outputs += [self.forward(72 + step, 1, real, 300 + 40 * step) for step in range(30)]
        return outputs

    def columns(self) -> list[list[list[int]]]:
        """For each layer and row the columns that are held."""
        cpu, found = torch.device("cpu"), []
        for state in self.engine.states:
            rows: list[list[int]] = [[] for _ in range(state.rows)]
            for part in state.parts():
                filled = part.layout.filled(cpu)
                for lane, owner in enumerate(part.layout.owners(cpu).tolist()):
                    own = part.layout.columns(cpu).expand(part.layout.lanes, -1)[lane]
                    rows[owner] += own[slice(None) if filled is None else filled[lane]].tolist()
            found.append([sorted(row) for row in rows])
        return found


@pytest.mark.parametrize(
    "expands", [pytest.param(False, id="absorbed"), pytest.param(True, id="expanded", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", EXACT)
def test_every_exact_plan_keeps_what_it_keeps_of_one_kv_head(name: str, expands: bool) -> None:
    latents, plain = Fed(EXACT[name], latents=True, expands=expands), Fed(EXACT[name], latents=False)
    for here, there in zip(latents.all_of_it(), plain.all_of_it(), strict=True):
        assert (here - there).abs().max() < 1e-4 * there.abs().max()
    assert latents.columns() == plain.columns()
    if latents.engine.plan.evicts:
        assert min(len(row) for layer in latents.columns() for row in layer) < 95, "the plan evicted nothing"
    held = sum(each.numel() for state in latents.engine.states for each in state.parts()[-1].tensors().values())
    assert held < sum(each.numel() for state in plain.engine.states for each in state.parts()[-1].tensors().values())


@pytest.mark.parametrize("name", LOSSY)
def test_every_codec_is_read_as_what_it_decodes(name: str) -> None:
    """After the prompt was encoded, the attention of a new token is that of the decoded latents and rotated keys."""
    fed = Fed(accepted()[name], latents=True)
    fed.forward(0, 200, None, 100)
    plain = Fed("full", latents=True)
    plain.forward(0, 200, None, 100)
    found, exact = fed.forward(200, 1, None, 300), plain.forward(200, 1, None, 300)
    lossy = 0
    for layer, (state, own) in enumerate(zip(fed.engine.states, fed.projections, strict=True)):
        query, visible = states((2, 4, 1, 20), 300 + layer) * 2, Padded(new_tokens=1, first_column=200)
        due, _ = by_definition(own, query, state.parts(), visible, 20**-0.5)
        # The new token may have been encoded behind its own attention, which none of these codecs does at once.
        assert (found[layer] - due).abs().max() < 1e-4 * due.abs().max()
        stored = [each for each in state.parts() if not isinstance(each, PlainSegment)]
        lossy += len(stored)
        for segment, true in zip(stored, plain.engine.states[layer].parts(), strict=False):
            for side, whole in zip(segment.decode(), (true.decode()[0], true.decode()[1]), strict=True):
                off = (side - whole[:, : side.shape[1]]).norm() / whole.norm()
                assert off < 0.7, "a codec gives back something else than it was given"
    assert lossy, "nothing was encoded"
    assert float((found - exact).norm() / exact.norm()) < 1.0


def test_a_merger_that_tears_keys_and_values_apart_is_refused() -> None:
    for text in ("snapkv + cam @ tokens=16", "h2o + d2o @ tokens=16"):
        assert any("latents" in sentence for sentence in Plan.parse(text).latent_misfits())


def test_what_a_class_inherits_does_not_count() -> None:
    from kvtailor.score.snapkv import SnapKV

    class Mine(SnapKV):
        """A score of someone else's."""

    (sentence,) = Plan(score=Mine(), tokens=10).latent_misfits()
    assert "does not declare" in sentence
    with pytest.raises(PlanError):
        raise PlanError("mine", [sentence])
