"""`full` is the model's own cache, on models whose layers are not all alike: tokens, logits, batches, turns, chunks."""

from __future__ import annotations

import copy

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.layers.states import StateLayer
from kvtailor.hf.progress import STATES_ARE_ASKED_FOR
from kvtailor.hf.versions import hand_cache, read_cache
from tests.seam.methods.test_identity import generated
from tests.support.seam.layer_kinds import FEW, HYBRIDS, MIXED
from tests.support.seam.zoo import VOCABULARY, build, error, prompts

KINDS = [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in (*HYBRIDS, *MIXED)]
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beam": {"num_beams": 3},
    "several_sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 16},
}
# Single precision, in sums of another order: a context in pieces, rows of another batch. Zamba2's layers, which are the
# same module twice, let it grow (with the model's own eager attention as well).
ROUNDED = {"zamba": 5e-4, "zamba2": 1e-3}
# A batch with padding is read otherwise by MiniMax's own cache once it is decoded: its first layer keeps no keys, and
# that cache says that it has seen nothing. The others: see `Geometry.restarts`.
WRONG_WITH_PADDING, RESTARTS = ("minimax",), ("jamba", "zamba")


def bound(family: str) -> float:
    return ROUNDED.get(family, 5e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", KINDS)
def test_full_equals_the_models_own_cache(family: str, mode: str) -> None:
    own, ours = build(family), build(family)
    if mode == "chunked" and family in (*RESTARTS, *WRONG_WITH_PADDING):
        pytest.skip("its own cache cannot, either")
    if mode == "beam" and family == "minimax":
        pytest.skip("its own cache does not reorder the states of its linear layers")
    ids, mask = prompts((40,) if family in WRONG_WITH_PADDING else (40, 27, 33))
    expected = generated(own, None, ids, mask, **MODES[mode])
    cache = kvtailor.cache_for(ours, "full")
    found = generated(ours, cache, ids, mask, **MODES[mode])
    assert torch.equal(found.sequences, expected.sequences)
    for now, then in zip(found.logits, expected.logits, strict=True):
        assert error(now, then) < (5e-5 if family in ROUNDED else 1e-5)
    assert cache.seen == ids.shape[1] + 11


@pytest.mark.parametrize("family", KINDS)
def test_rows_of_a_padded_batch_are_rows_alone(family: str) -> None:
    model, lengths = build(family), (40, 27, 33)
    ids, mask = prompts(lengths)
    plan = "snapkv(window=4) @ tokens=16"
    together = generated(model, kvtailor.cache_for(model, plan), ids, mask)
    for row, length in enumerate(lengths):
        one = ids[row : row + 1, -length:]
        alone = generated(model, kvtailor.cache_for(model, plan), one, torch.ones_like(one))
        assert torch.equal(together.sequences[row, ids.shape[1] :], alone.sequences[0, length:])
        for now, then in zip(together.logits, alone.logits, strict=True):
            assert error(now[row], then[0]) < bound(family)


@pytest.mark.parametrize("family", KINDS)
def test_turn_two_is_the_models_own_and_one_shot(family: str) -> None:
    own, ours = build(family), build(family)
    ids, mask = prompts((30, 30) if family in WRONG_WITH_PADDING else (30, 22))
    cache = kvtailor.cache_for(ours, "full")
    first = generated(ours, cache, ids, mask)
    more = torch.cat([first.sequences, prompts((9, 9), state=5)[0]], 1)
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], 1)
    if family in RESTARTS:
        with pytest.raises(CacheMisuse, match="begins its recurrent state anew"):
            generated(ours, cache, more, mask)
        return
    found = generated(ours, cache, more, mask)
    expected = generated(own, None, more, mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert max(error(a, b) for a, b in zip(found.logits, expected.logits, strict=True)) < bound(family)


@pytest.mark.parametrize("family", KINDS)
def test_a_context_in_chunks_is_the_context_at_once(family: str) -> None:
    model = build(family)
    ids, mask = prompts((41, 30))
    whole = kvtailor.prefill(model, ids, mask, plan="full")
    if family in RESTARTS:
        with pytest.raises(CacheMisuse, match="begins its recurrent state anew with each piece"):
            kvtailor.prefill(model, ids, mask, plan="full", chunk=7)
        return
    pieces = kvtailor.prefill(model, ids, mask, plan="full", chunk=7)
    token = torch.tensor([[5], [9]])
    after = torch.cat([mask, mask.new_ones(2, 1)], 1)
    positions = after.sum(-1, keepdim=True) - 1
    with torch.no_grad():
        found, expected = (
            model(token, attention_mask=after, position_ids=positions, **hand_cache(cache)).logits
            for cache in (pieces, whole)
        )
    assert error(found, expected) < bound(family)


@pytest.mark.parametrize("family", KINDS)
def test_a_copy_a_reset_and_other_rows(family: str) -> None:
    model = build(family)
    ids, mask = prompts((30, 22))
    cache = kvtailor.cache_for(model, "snapkv(window=4) @ tokens=16, slack=4")
    first = generated(model, cache, ids, mask)
    more = torch.cat([first.sequences, prompts((9, 9), state=5)[0]], 1)
    if family in RESTARTS:
        more = first.sequences
    after = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], 1)
    copied = copy.deepcopy(cache)
    there = generated(model, copied, more, after)
    assert torch.equal(generated(model, cache, more, after).sequences, there.sequences)
    cache.reset()
    lone = prompts((25,), state=3)
    fresh = generated(model, kvtailor.cache_for(model, cache.plan), *lone)
    assert torch.equal(generated(model, cache, *lone).sequences, fresh.sequences)
    assert cache.held().shape[0] == 1


@pytest.mark.parametrize("family", KINDS)
def test_the_ledger_counts_what_the_models_own_cache_holds(family: str) -> None:
    own, ours = build(family), build(family)
    ids, mask = prompts((40, 33))
    expected = read_cache(generated(own, None, ids, mask))
    cache = kvtailor.cache_for(ours, "full")
    generated(ours, cache, ids, mask)
    ledger = cache.ledger()
    held = {"keys": 0, "states": 0}
    for layer in getattr(expected, "layers", ()):
        for side in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            held["keys"] += 0 if side is None else side.numel() * side.element_size()
        for side in ("conv_states", "recurrent_states"):
            states = getattr(layer, side, {}).values()
            held["states"] += sum(t.numel() * t.element_size() for t in states if t is not None)
    held["states"] += sum(t.numel() * t.element_size() for t in getattr(expected, "linear_cache", ()) if len(t))
    assert ledger.by_stage.get("state", 0) == held["states"]
    assert ledger.full == held["keys"] + held["states"]
    assert ledger.closed_form == ledger.total
    known = cache.geometry.state_bytes(4)
    assert known is not None and 2 * known == held["states"]


@pytest.mark.parametrize("family", KINDS)
def test_a_budget_in_bytes_covers_states_and_windows(family: str) -> None:
    model = build(family)
    ids, mask = prompts((200,))
    full = kvtailor.prefill(model, ids, mask, plan="full")
    others = full.geometry.other_bytes(4)
    budget = others + (full.ledger().full - others) // 3
    cache = kvtailor.prefill(model, ids, mask, plan=f"snapkv(window=4) @ bytes={budget}")
    ledger = cache.ledger()
    assert budget * 0.85 < ledger.total - ledger.by_stage.get("observe", 0) <= budget
    assert ledger.held is not None and ledger.held < 200


@pytest.mark.parametrize("family", [name for name in HYBRIDS if name != "lfm2"][:2] + ["gemma4_shared"])
def test_tokens_that_cannot_be_taken_back_are_refused_before_any_work(family: str) -> None:
    model = build(family)
    ids, mask = prompts((20,))
    with pytest.raises(UnsupportedModel, match="a draft may be rejected, and layers of this"):
        kvtailor.generate(model, ids, draft_plan="streaming @ tokens=16", max_new_tokens=4)
    cache = kvtailor.cache_for(model, "full")
    with pytest.raises(CacheMisuse, match="asked to record forwards"):
        cache.activate_past_recording()
    generated(model, cache, ids, mask)


def test_a_recurrent_state_is_not_cropped() -> None:
    model = build("qwen3_next")
    cache = kvtailor.cache_for(model, "full")
    with torch.no_grad():
        model(prompts((20,))[0], **hand_cache(cache))
        with pytest.raises(CacheMisuse, match="layer 0 keeps a recurrent state"):
            cache.crop(-1)
        assert model(torch.tensor([[5]]), **hand_cache(cache)).logits.isfinite().all()


@pytest.mark.parametrize("plan", ["full", "snapkv(window=4) @ tokens=16, slack=4"])
def test_a_convolution_is_taken_back(plan: str) -> None:
    """LFM2's other layers keep the newest inputs alone, so drafts may be rejected: with the same tokens as without."""
    own, ours = build("lfm2"), build("lfm2")
    ids = prompts((12,))[0].repeat(1, 3)
    expected = kvtailor.generate(own, ids, plan=plan, max_new_tokens=16).sequences
    drafted = kvtailor.generate(
        ours, ids, plan=plan, draft_plan="position(sinks=1) @ tokens=2", gamma=3, min_gain=None, max_new_tokens=16
    )
    assert torch.equal(drafted.sequences, expected)
    level = drafted.statistics.levels[0]
    assert level.proposed > level.accepted > 0, "one draft is rejected and one is not"
    looked_up = generated(ours, kvtailor.cache_for(ours, plan), ids, torch.ones_like(ids), prompt_lookup_num_tokens=3)
    assert torch.equal(looked_up.sequences, expected[:, : looked_up.sequences.shape[1]])


@pytest.mark.parametrize("family", KINDS)
def test_a_forward_that_is_broken_off_is_noticed(family: str) -> None:
    """An error in any layer: the next forward is refused, or nothing of the broken one is in the cache."""
    model = build(family)
    if not STATES_ARE_ASKED_FOR and any(type(each) is StateLayer for each in kvtailor.cache_for(model, "full").layers):
        pytest.skip("models of this release of transformers write states without a call, so that nobody sees where")
    ids, _ = prompts((20,))
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) > 1)
    for broken in range(len(layers)):
        cache = kvtailor.cache_for(model, "full")
        with torch.no_grad():
            model(ids, **hand_cache(cache))
            handle = layers[broken].register_forward_hook(_fails)
            with pytest.raises(MemoryError):
                model(ids[:, :1], **hand_cache(cache))
            handle.remove()
            if broken == len(layers) - 1:
                continue
            with pytest.raises(CacheMisuse, match="before its end"):
                model(ids[:, :1], **hand_cache(cache))
            cache.reset()
            assert model(ids, **hand_cache(cache)).logits.isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", pytest.param("bamba", marks=pytest.mark.long)])
def test_padding_that_states_would_take_for_text_is_refused(family: str) -> None:
    """On the right, before a second turn, and one padding token alone; transformers' own cache is wrong there."""
    model = build(family)
    ids, mask = prompts((20, 12))
    right = mask.flip(-1)
    after = torch.cat([mask, torch.tensor([[1, 1, 1], [0, 1, 1]])], 1)
    more = torch.cat([ids, prompts((3, 2), state=4)[0]], 1)
    alone = torch.cat([mask, torch.tensor([[1], [0]])], 1)
    with torch.no_grad():
        with pytest.raises(CacheMisuse, match="keep states that would take it for text"):
            model(ids, attention_mask=right, **hand_cache(kvtailor.cache_for(model, "full")))
        for columns, whole in ((more, after), (more[:, :21], alone)):
            cache = kvtailor.prefill(model, ids, mask, plan="full")
            with pytest.raises(CacheMisuse, match="keep states that would take it for text"):
                model(columns[:, 20:], attention_mask=whole, **hand_cache(cache))
        with pytest.raises(CacheMisuse, match="keep states that would take it for text"):
            kvtailor.prefill(model, ids, mask, plan="full", chunk=1)


def test_states_of_other_rows_are_refused() -> None:
    model = build("qwen3_next")
    cache = kvtailor.cache_for(model, "full")
    with torch.no_grad():
        model(prompts((20, 18))[0], **hand_cache(cache))
        with pytest.raises(CacheMisuse, match=r"holds 2 rows, and layer 0 got states of 3"):
            model(torch.randint(3, VOCABULARY, (3, 2)), **hand_cache(cache))


def test_a_plan_in_bytes_is_refused_where_states_are_not_known() -> None:
    model = build("qwen3_next")
    shapes = kvtailor.cache_for(model, "full").geometry.shapes
    assert all(shape.state_elements is not None for shape in shapes if shape.states)
    model.config.model_type = "something_new"
    with pytest.raises(PlanError, match="how many bytes the states of this something_new take is not known"):
        kvtailor.cache_for(model, "snapkv @ bytes=1MiB")


def _fails(*_: object) -> None:
    raise MemoryError
