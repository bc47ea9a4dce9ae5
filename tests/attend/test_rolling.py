"""Rolling against keys that were never rotated: a slow form of its own, and models whose rotation is taken out."""

from __future__ import annotations

import itertools
import sys
import warnings

import pytest
import torch
from tests.support.attention_cases import MIXES, SIZES, Case, case, close, request_of
from tests.support.crossed import crossed
from tests.support.seam.zoo import MaskedReference, build, error, held_columns, prompts
from tests.support.segments_of import Padded, states
from torch import Tensor

import kvtailor
from kvtailor.attend.contract import AttentionContext
from kvtailor.attend.rolling import Rolling
from kvtailor.attend.segments import Segments
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.versions import hand_cache
from kvtailor.types import Layout, PlainSegment, Rotation

CPU = torch.device("cpu")
ROTATIONS = {
    "whole": Rotation(frequencies=10.0 ** -torch.linspace(0, 3, 6)),
    "pairs": Rotation(frequencies=10.0 ** -torch.linspace(0, 3, 6), interleaved=True),
    "partial": Rotation(frequencies=torch.tensor([1.0, 0.03])),
}


def spun(states: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """(n, d) float64 turned plane by plane."""
    out = states.clone()
    half = rotation.frequencies.shape[0]
    for plane, frequency in enumerate(rotation.frequencies.double().tolist()):
        one, two = (2 * plane, 2 * plane + 1) if rotation.interleaved else (plane, plane + half)
        cos, sin = (positions.double() * frequency).cos(), (positions.double() * frequency).sin()
        out[:, one] = states[:, one] * cos - states[:, two] * sin
        out[:, two] = states[:, two] * cos + states[:, one] * sin
    return out


def slow(made: Case, rotation: Rotation, scaling: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Turns every key and query back by its column, numbers the held real tokens anew, and turns all by number."""
    b, h, g, _, dv = made.sizes
    out = torch.zeros((b, h * g, made.new, dv), dtype=torch.float64)
    lse = torch.full((b, h * g, made.new), -torch.inf, dtype=torch.float64)
    decoded = [part.decode() for part in made.parts]
    mass = [torch.zeros(keys.shape[:2], dtype=torch.float64) for keys, _ in decoded]
    real = torch.ones((b, made.seen), dtype=torch.bool) if made.visible.real is None else made.visible.real
    for row in range(b):
        for head in range(h):
            found = []
            for index, part in enumerate(made.parts):
                lengths = [part.layout.size] * part.layout.lanes
                lengths = lengths if part.layout.lengths is None else part.layout.lengths.tolist()
                for lane in range(part.layout.lanes):
                    if int(part.layout.owners(CPU)[lane]) == row * h + head:
                        columns = part.layout.columns(CPU).expand(part.layout.lanes, -1)[lane].tolist()
                        found += [(c, index, lane, i) for i, c in enumerate(columns[: lengths[lane]]) if real[row, c]]
            if not found:
                continue
            assert found == sorted(found, key=lambda one: one[0])
            columns, numbers = torch.tensor([one[0] for one in found]), torch.arange(len(found))
            keys = torch.stack([decoded[i][0][lane, slot] for _, i, lane, slot in found]).double()
            values = torch.stack([decoded[i][1][lane, slot] for _, i, lane, slot in found]).double()
            keys = spun(spun(keys, -columns, rotation), numbers, rotation)
            for new in range(made.new):
                column = made.seen - made.new + new
                if not real[row, column]:
                    continue
                number = columns.tolist().index(column)
                sees = columns <= column
                for member in range(head * g, head * g + g):
                    query = made.query[row, member, new : new + 1].double()
                    query = spun(spun(query, torch.tensor([-column]), rotation), torch.tensor([number]), rotation)
                    logits = (query @ keys.T * scaling)[0].masked_fill(~sees, -torch.inf)
                    weights = logits.softmax(-1)
                    out[row, member, new], lse[row, member, new] = weights @ values, logits.logsumexp(-1)
                    for weight, (_, index, lane, slot) in zip(weights, found, strict=True):
                        mass[index][lane, slot] += weight
    return out, lse, mass


@pytest.mark.parametrize(
    ("rotation", "mix", "new", "padded"),
    [
        pytest.param(*one.values[0], *one.values[1], marks=one.marks)
        for one in crossed(list(itertools.product(ROTATIONS, MIXES)), list(itertools.product([1, 5], [False, True])))
    ],
)
def test_equals_keys_that_are_numbered_anew(rotation: str, mix: str, new: int, padded: bool) -> None:
    made = case(SIZES[2], mix, new, padded=padded, seed=3)
    if made.visible.real is not None:
        # A blind query, as of padding, has no number; the contract's test asks it for zeros.
        real = torch.arange(made.seen)[None] >= torch.tensor([0, 40])[:, None].clamp(max=made.seen - new)
        made.visible = type(made.visible)(new_tokens=new, first_column=made.seen - new, real=real)
    context = AttentionContext(rotation=ROTATIONS[rotation])
    got = Rolling().attend(request_of(made.query, made.parts, made.visible, 0.04, want_mass=True, context=context))
    out, lse, mass = slow(made, ROTATIONS[rotation], 0.04)
    assert close(got.output, out, 1e-4) and got.lse is not None and close(got.lse, lse, 1e-4)
    assert got.mass is not None
    for part, found, expected in zip(made.parts, got.mass, mass, strict=True):
        filled = part.layout.filled(CPU)
        filled = torch.ones_like(found, dtype=torch.bool) if filled is None else filled
        assert close(found[filled], expected[filled], 1e-4)


def test_pages_without_a_gap_stand_between_pages_with_one() -> None:
    """Each head's first page is far back, its second is the newest but for the tail: only the first ones are turned."""
    positions = torch.tensor([[0, 1, 2, 3], [60, 61, 62, 63], [5, 6, 8, 9], [60, 61, 62, 63]], dtype=torch.int32)
    layout = Layout(rows=1, heads=2, size=4, positions=positions, owner=torch.tensor([0, 0, 1, 1]))
    ragged = PlainSegment(layout=layout, keys=states((4, 4, 20), 1), values=states((4, 4, 12), 2))
    tail = Layout(rows=1, heads=2, size=5, start=64)
    newest = PlainSegment(layout=tail, keys=states((2, 5, 20), 3), values=states((2, 5, 12), 4))
    visible = Padded(new_tokens=2, first_column=67)
    query = states((1, 6, 2, 20), 5)
    made = Case(parts=[ragged, newest], new=2, seen=69, query=query, visible=visible, sizes=(1, 2, 3, 20, 12))
    context = AttentionContext(rotation=ROTATIONS["whole"])
    got = Rolling().attend(request_of(query, made.parts, visible, 0.04, want_mass=True, context=context))
    out, _, mass = slow(made, ROTATIONS["whole"], 0.04)
    assert close(got.output, out, 1e-4) and got.mass is not None
    assert all(close(found, expected, 1e-4) for found, expected in zip(got.mass, mass, strict=True))


def test_gaps_change_what_is_read_and_no_gaps_do_not() -> None:
    context = AttentionContext(rotation=ROTATIONS["whole"])
    gapped, whole = case(SIZES[2], "moved tail", 1), case(SIZES[2], "tail", 1)
    for made, same in ((gapped, False), (whole, True)):
        still = Segments().attend(request_of(made.query, made.parts, made.visible, 0.04)).output
        rolled = Rolling().attend(request_of(made.query, made.parts, made.visible, 0.04, context=context)).output
        assert torch.equal(still, rolled) if same else not torch.allclose(still, rolled, atol=1e-2)


def test_without_a_rotation_nothing_can_be_turned() -> None:
    made = case(SIZES[2], "moved tail", 1)
    with pytest.raises(CacheMisuse, match="rotary embedding"):
        Rolling().attend(request_of(made.query, made.parts, made.visible, 0.04))


class Unrotated(MaskedReference):
    """A full cache of keys that were never rotated: each layer rotates what a head holds by its number there.

    The model's rotary embedding gives "no turn"; the model's own function turns in the attention instead.
    """

    NAME = "unrotated-reference"

    def __init__(self, family: str):
        super().__init__(family)
        base = getattr(self.model, "model", None) or self.model.base_model
        self.rotary = base.rotary_emb
        self.real = torch.ones(1, 1, dtype=torch.bool)
        angles = self.rotary.forward

        def still(*args, **kwargs) -> tuple[Tensor, Tensor]:
            cos, sin = angles(*args, **kwargs)
            return torch.ones_like(cos), torch.zeros_like(sin)

        self.angles, self.rotary.forward = angles, still

    def _attention(self, module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        kind = getattr(module, "layer_type", None)
        kinds = (kind,) if isinstance(getattr(self.rotary, "rope_type", None), dict) else ()
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        b, heads, new, _ = query.shape
        group, seen = heads // key.shape[1], self.real.shape[1]
        held = self.held.get(module.layer_idx)
        out = torch.zeros(b, heads, new, value.shape[-1])
        ages = self.real.long().cumsum(1) - 1
        # transformers' window layers hold the newest columns alone.
        base = seen - key.shape[2]
        for row in range(b):
            for head in range(heads):
                here = self.real[row].clone()
                if held is not None:
                    here[: held.shape[-1]] &= held[row, head // group]
                here[:base] = False
                columns = here.nonzero()[:, 0]
                windowed = kind == "sliding_attention"
                numbers = ages[row, columns] if windowed else torch.arange(len(columns))
                cos, sin = self.angles(value.float(), numbers[None], *kinds)
                keys = apply(*[key[row, head // group, columns - base][None, None]] * 2, cos, sin)[0][0, 0]
                at = torch.tensor(
                    [int((columns == seen - new + i).nonzero()) if here[seen - new + i] else 0 for i in range(new)]
                )
                queries = apply(*[query[row, head][None, None]] * 2, cos[:, at], sin[:, at])[0][0, 0]
                allowed = mask[row, 0][:, columns - base]
                logits = (queries.double() @ keys.double().T * scaling).masked_fill(~allowed, -1e30)
                out[row, head] = (logits.softmax(-1) @ value[row, head // group, columns - base].double()).float()
        return out.transpose(1, 2).contiguous(), None

    def __call__(self, ids: Tensor, mask: Tensor, held) -> Tensor:
        self.real = mask.bool()
        return super().__call__(ids, mask, held)


PLANS = (
    "position + rolling @ tokens=12, slack=0",
    "position + rolling @ tokens=14, slack=5",
    "snapkv(window=4) + adakv + rolling @ tokens=16, slack=3",
    "h2o(recent=4) + rolling @ tokens=14, slack=2",
)


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox", "gemma3"], PLANS))
def test_a_model_reads_what_it_holds_at_contiguous_positions(family: str, plan: str) -> None:
    check_rolling(family, plan)


@torch.no_grad()
def check_rolling(family: str, plan: str) -> None:
    """A padded batch: prompt, single tokens, a chunk of several, single tokens."""
    model, reference = build(family), Unrotated(family)
    ids, mask = prompts((40, 27, 33))
    cache = kvtailor.cache_for(model, plan)
    token, held = ids, {}
    for step in range(12):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token.shape[1] :]
        logits = model(token, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits
        real = mask[:, -token.shape[1] :, None]
        assert error(logits * real, reference(token, mask, held) * real) < 2e-5, f"at forward {step}"
        held = held_columns(cache)
        token = prompts((4,) * 3, state=20 + step)[0] if step == 5 else logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(token.shape)], 1)
    dropped = [int((~columns & mask.bool()[:, None, : columns.shape[-1]]).sum()) for columns in held.values()]
    assert min(dropped) > 0, "nothing was evicted, so this test has shown nothing"


@torch.no_grad()
def test_the_reference_notices_original_positions() -> None:
    """The yardstick can fail: the same tokens at their original positions give other logits."""
    model, reference = build("llama"), Unrotated("llama")
    ids, mask = prompts((40,))
    cache = kvtailor.cache_for(model, "position @ tokens=12, slack=0")
    token = model(ids, **hand_cache(cache)).logits[:, -1:].argmax(-1)
    reference(ids, mask, {})
    held = held_columns(cache)
    mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
    found = model(token, **hand_cache(cache)).logits
    assert error(found, reference(token, mask, held)) > 1e-2


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_model_without_rotation_is_refused_before_anything_is_done(family: str) -> None:
    model = build(family)
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        kvtailor.cache_for(model, "streamingllm @ tokens=32")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("plan", "warns"),
    [("streamingllm @ tokens=32", False), ("streaming @ tokens=32", True), ("streamingllm @ tokens=600", True)],
)
@pytest.mark.parametrize("pieces", [32, 640])
@torch.no_grad()
def test_only_what_is_held_counts_for_the_warning(plan: str, warns: bool, pieces: int) -> None:
    """The zoo's models are made for 512 positions; a prompt of 640 tokens at once is beyond them in any case."""
    warns = warns or pieces == 640
    model = build("llama")
    cache = kvtailor.cache_for(model, plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for piece in torch.randint(3, 131, (1, 640)).split(pieces, 1):
            model(piece, **hand_cache(cache))
    said = [str(each.message) for each in caught if "trained on" in str(each.message)]
    assert len(said) == warns and cache.seen == 640
