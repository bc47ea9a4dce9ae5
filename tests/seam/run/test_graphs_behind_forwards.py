"""What may change between two tokens of a cache with `graphs=True`: it is seen, and the token is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from tests.support.seam.tape import Tape
from tests.support.seam.user_loop import Loop, loops
from tests.support.seam.zoo import build, error, prompts

CLOSE = 1e-5


pytestmark = pytest.mark.usefixtures("tapes", "without_gradients")


def of_model(change: Callable[[nn.Module], Any]) -> Callable[[Loop], Tensor]:
    def made(loop: Loop) -> Tensor:
        change(loop.model)
        return loop.step()

    return made


def _weights_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.01


def _a_parameter_anew(model: nn.Module) -> None:
    part = model.model.layers[1].mlp.up_proj
    part.weight = nn.Parameter(part.weight * 1.1)


def _a_part_anew(model: nn.Module) -> None:
    part = copy.deepcopy(model.model.layers[1].mlp)
    part.up_proj.weight.mul_(1.1)
    model.model.layers[1].mlp = part


def _a_forward_anew(model: nn.Module) -> None:
    part = model.model.layers[1].mlp
    own = part.forward
    part.forward = lambda hidden: own(hidden) * 1.1


def _a_hook(model: nn.Module) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output * 1.1)


def _in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.01)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(of_model(_in_place), None, id="weights changed in place"),
        pytest.param(of_model(_weights_anew), None, id="weights moved"),
        pytest.param(of_model(_a_parameter_anew), None, id="a parameter replaced"),
        pytest.param(of_model(_a_part_anew), None, id="a part replaced"),
        pytest.param(of_model(_a_forward_anew), None, id="a part's forward replaced"),
        pytest.param(of_model(_a_hook), "the model has hooks, which would not run", id="a hook"),
        pytest.param(of_model(nn.Module.train), "the model was in training mode", id="training"),
        pytest.param(lambda loop: loop.step(position_ids=...), "there were no position_ids", id="no positions"),
        pytest.param(
            lambda loop: loop.step(output_hidden_states=True), "output_hidden_states was given", id="hidden states"
        ),
        pytest.param(lambda loop: loop.step(labels=loop.following[:, :1]), "labels was given", id="labels"),
        pytest.param(lambda loop: loop.step(logits_to_keep=True), "logits_to_keep was given", id="a flag for a number"),
        pytest.param(
            lambda loop: loop.feed(loop.following[:, 7:10]),
            "a prompt, a turn or a draft of several tokens",
            id="several tokens",
        ),
    ],
)
def test_what_changes_between_two_tokens_is_seen(change: Callable[[Loop], Tensor], reason: str | None) -> None:
    """It gives what a plain forward gives, and later tokens are right and replayed again where they can be."""
    plain, loop = loops("snapkv(window=6) + adakv @ tokens=16")
    before = loop.cache.replays
    assert error(change(loop), change(plain)) < CLOSE
    after = loop.cache.replays
    if reason is None:
        assert after.plain == before.plain
    else:
        assert after.reasons[reason] == before.reasons.get(reason, 0) + 1
    for _ in range(6):
        assert error(loop.step(), plain.step()) < CLOSE
    # Hooks stay, those too with which transformers collects hidden states, and so does a mode. Behind an output that
    # held more than logits the next one is looked at first.
    stays = (
        "the model has hooks, which would not run",
        "the model was in training mode",
        "output_hidden_states was given",
    )
    expected = 0 if reason in stays else 5 if reason == "labels was given" else 6
    assert loop.cache.replays.replayed - after.replayed == expected
    assert torch.equal(loop.cache.held(), plain.cache.held())


def test_modes_of_torch_are_seen() -> None:
    plain, loop = loops()
    with torch.enable_grad():
        assert error(loop.step().detach(), plain.step().detach()) < CLOSE
    assert loop.cache.replays.reasons["gradients were not switched off"] == 1
    refused = []
    for each in (plain, loop):
        # A cache of float32 takes no keys of another dtype, replayed or not.
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CacheMisuse) as told:
            each.step()
        refused.append(str(told.value))
    assert refused[0] == refused[1]
    for _ in range(4):
        assert error(loop.step(), plain.step()) < CLOSE
    # Inside and outside of inference mode are two recordings, and what was made inside is read outside.
    recorded = loop.cache.replays.recordings
    with torch.inference_mode():
        for _ in range(4):
            assert error(loop.step(), plain.step()) < CLOSE
    held = loop.cache.held()
    assert torch.equal(held, plain.cache.held())
    for _ in range(4):
        assert error(loop.step(), plain.step()) < CLOSE
    assert loop.cache.replays.recordings == recorded + 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_prompt_of_another_mode(mode: Any) -> None:
    model = build("llama")
    ids, mask = prompts((20, 13))
    texts = []
    for graphs in (False, True):
        cache = kvtailor.cache_for(model, "full", graphs=graphs)
        with mode():
            kvtailor.prefill(model, ids[:, :-2], mask[:, :-2], cache=cache)
        texts.append(model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=9, do_sample=False))
    assert torch.equal(*texts) and cache.replays.replayed == 8


@pytest.mark.parametrize("mask", ["shows padding", "hides a token", "too long", "too short", "none", "other rows"])
def test_another_mask_is_refused_or_obeyed_as_ever(mask: str) -> None:
    told = []
    for loop in loops():
        given = torch.cat([loop.mask, loop.mask.new_ones((2, 1))], 1)
        if mask == "shows padding":
            given = torch.ones_like(given)
        elif mask == "hides a token":
            given[0, 5] = 0
        elif mask == "too long":
            given = torch.cat([given, given[:, :1]], 1)
        elif mask == "too short":
            given = given[:, :-1]
        elif mask == "other rows":
            given = given[:1]
        try:
            told.append(loop.step(attention_mask=None if mask == "none" else given))
        except CacheMisuse as refused:
            told.append(str(refused))
    plain, replayed = told
    assert isinstance(plain, Tensor) == (mask == "hides a token")
    assert error(replayed, plain) < CLOSE if isinstance(plain, Tensor) else replayed == plain


def test_a_mask_that_hides_more_from_now_on_begins_anew() -> None:
    plain, loop = loops(steps=4)
    for each in (plain, loop):
        each.mask[0, 6] = 0
    for _ in range(6):
        assert error(loop.step(), plain.step()) < CLOSE
    reason = "attention_mask or rows were not those of the token before"
    assert loop.cache.replays.reasons[reason] == 1 and loop.cache.replays.replayed == 9


def test_a_mask_of_four_dimensions_is_plain() -> None:
    plain, loop = (
        Loop(each.model, kvtailor.cache_for(each.model, "full", graphs=bool(graphs)), (12, 12))
        for graphs, each in enumerate(loops("full", steps=4))
    )
    told = []
    for each in (plain, loop):
        for _ in range(4):
            each.step()
        hidden = torch.ones((2, 1, 1, 17), dtype=torch.bool)
        hidden[0, 0, 0, :7] = False
        told.append(each.step(attention_mask=hidden))
    assert error(*told) < CLOSE
    assert loop.cache.replays.reasons["attention_mask was not (b, columns)"] == 1


def test_positions_of_the_callers_own_are_taken() -> None:
    """A token that stands elsewhere than behind the one before."""
    plain, loop = loops()
    for place in (40, 41, 3):
        positions = torch.full((2, 1), place)
        assert error(loop.step(position_ids=positions), plain.step(position_ids=positions)) < CLOSE
        # One row for all of the batch.
        assert error(loop.step(position_ids=positions[:1]), plain.step(position_ids=positions[:1])) < CLOSE
    assert loop.cache.replays.replayed == 11


def test_a_cache_that_is_looked_at_after_each_token_is_right(tapes: list[Tape]) -> None:
    """Each look lands; recording for one token at a time would only cost, so every other token is plain."""
    plain, loop = loops(steps=0)
    for _ in range(8):
        assert error(loop.step(), plain.step()) < CLOSE
        assert torch.equal(loop.cache.held(), plain.cache.held())
    assert not tapes and loop.cache.replays.replayed == 4
    assert loop.cache.replays.reasons["the cache was looked at before 3 steps had come"] == 4


def test_the_model_below_its_head_finds_a_cache_that_has_landed() -> None:
    plain, loop = loops()
    ids = loop.following[:, 7:9]
    mask = torch.cat([loop.mask, loop.mask.new_ones((2, 2))], 1)
    told = [
        each.model.model(ids, attention_mask=mask, **hand_cache(each.cache)).last_hidden_state for each in (plain, loop)
    ]
    assert error(*told) < CLOSE
    assert torch.equal(loop.cache.held(), plain.cache.held()) and loop.cache.seen == 19


def test_a_cache_by_position_is_found() -> None:
    plain, loop = loops()
    told = []
    for each in (plain, loop):
        positions = torch.full((2, 1), 17)
        mask = torch.cat([each.mask, each.mask.new_ones((2, 1))], 1)
        told.append(each.model(each.following[:, 5:6], mask, positions, each.cache).logits[:, -1])
    assert error(*told) < CLOSE
    assert loop.cache.replays.reasons["arguments came by position"] == 1


def test_tokens_that_were_replayed_can_be_taken_back() -> None:
    plain, loop = loops("full")
    for each in (plain, loop):
        each.cache.crop(-3)
        each.mask = each.mask[:, :-3]
    for _ in range(5):
        assert error(loop.step(), plain.step()) < CLOSE


def test_rows_may_be_chosen_between_tokens() -> None:
    plain, loop = loops("snapkv(window=6) + adakv @ tokens=16")
    for each in (plain, loop):
        each.cache.batch_select_indices(torch.tensor([1]))
        each.mask, each.following = each.mask[1:], each.following[1:]
    for _ in range(5):
        assert error(loop.step(), plain.step()) < CLOSE
    assert loop.cache.replays.replayed == 10


@pytest.mark.parametrize("lengths", [(12, 12), (12, 9)])
def test_the_host_waits_no_more_than_for_a_plain_token(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number that Python reads of a tensor is a wait on a GPU; `docs/synchronisations.md` has one for a token."""
    waits: list[int] = []
    for graphs in (False, True):
        model = build("llama")
        loop = Loop(model, kvtailor.cache_for(model, "full", graphs=graphs), lengths)
        for _ in range(4):
            loop.step()
        count: list[None] = []

        def counting(own: Callable[..., Any], count: list[None] = count) -> Callable[..., Any]:
            return lambda *args, **more: count.append(None) or own(*args, **more)

        with monkeypatch.context() as counted:
            for name in ("__bool__", "item", "tolist", "__int__", "__float__", "__index__", "nonzero", "cpu"):
                counted.setattr(Tensor, name, counting(getattr(Tensor, name)))
            loop.step()
        waits.append(len(count))
    assert waits[1] <= 1 and waits[1] <= waits[0]
