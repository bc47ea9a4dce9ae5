"""Steps that the cache does not know of yet: every use lands them, and none is lost to an error or another thread."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs.replayed_cache import ReplayedCache
from tests.support.seam.user_loop import Loop, loops
from tests.support.seam.zoo import build, error

CLOSE = 1e-5
# What a logit may differ by where one number of one key or value has the code beside it.
ONE_CODE = 1e-2


pytestmark = pytest.mark.usefixtures("tapes", "without_gradients")


# What of the public names is the plan's, the model's or a count, and not about tokens that have come.
OF_THE_PLAN = {
    "geometry",
    "is_compileable",
    "layer_class_to_replicate",
    "lease",
    "offloading",
    "own_geometry",
    "plan",
    "replays",
    "share",
    "calibrations",
    "forward_lease",
    "open_steps",
}
COUNTED = {"seen", "get_seq_length", "get_query_offset"}
# Of transformers' own caches; ours has nothing to move, to allocate or to index.
NOT_OURS = {"prefetch", "offload", "early_initialization", "update_indexer"}
AFTER = {"reset": 0, "crop": 16, "update": 18}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "batch_repeat_interleave": (2,),
    "batch_select_indices": (torch.tensor([0, 1]),),
    "check_ids": (torch.full((2, 30), 3),),
    "crop": (-1,),
    "get_conv_state": (0,),
    "get_mask_sizes": (1, 0),
    "get_recurrent_state": (0,),
    "has_previous_state": (0,),
    "is_recording_past": (0,),
    "reorder_cache": (torch.tensor([1, 0]),),
    "take_ids": (torch.full((2, 3), 3), None, 0),
    "update": (torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), 0),
    "update_conv_state": (torch.zeros(2, 4, 3), 0),
    "update_recurrent_state": (torch.zeros(2, 4, 3), 0),
}
PUBLIC = sorted(
    {name for kind in (Cache, KvCache, ReplayedCache) for name in dir(kind) if not name.startswith("_")}
    | {name for name in vars(kvtailor.cache_for(build("llama"), "full")) if not name.startswith("_")}
)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_lands_or_counts(name: str, tmp_path) -> None:
    """A name that is new here has to be put into one of the lists above, or to land."""
    _, loop = loops()
    cache = loop.cache
    behind = int(cache._layers[0].get_seq_length())
    assert behind == 12 and cache.seen == 17
    found = getattr(cache, name)
    if name in NOT_OURS:
        assert inspect.ismethod(found)
        return
    if callable(found) and name not in OF_THE_PLAN:
        arguments = (tmp_path / "cache",) if name == "save" else ARGUMENTS.get(name, ())
        try:
            found = found(*arguments)
        except (CacheMisuse, ValueError, AttributeError):
            assert name in {
                "check_ids",
                "crop",
                "get_conv_state",
                "get_recurrent_state",
                "has_previous_state",
                "update_conv_state",
                "update_recurrent_state",
            }
    if name in OF_THE_PLAN:
        assert cache.open_steps.done == 5
        return
    if name in COUNTED:
        assert found == 17 and cache.open_steps.done == 5
        return
    assert cache.open_steps.now is None
    assert int(cache._layers[0].get_seq_length()) == AFTER.get(name, 17)


@pytest.mark.parametrize(
    "use",
    [repr, copy.copy, copy.deepcopy, len, lambda cache: cache._repr_html_()],
    ids=["repr", "copy", "deepcopy", "len", "html"],
)
def test_so_does_every_function_of_python(use: Callable[[Any], Any]) -> None:
    plain, loop = loops()
    made = use(loop.cache)
    if isinstance(made, KvCache):
        # A shallow copy shares what is open, and whichever is used first lands it.
        assert made.seen == 17 and torch.equal(made.held(), plain.cache.held())
    assert torch.equal(loop.cache.held(), plain.cache.held())
    assert error(loop.step(), plain.step()) < CLOSE


def test_whether_there_is_a_cache_lands_nothing() -> None:
    """Phi-3 asks it at every token, so that its answers were never replayed."""
    _, loop = loops()
    assert loop.cache and len(loop.cache) == len(loop.cache._layers) and loop.cache.open_steps.done == 5


def test_what_was_held_before_by_hand_takes_no_forward() -> None:
    """A layer that a user took out of the cache before refuses what would get lost."""
    plain, loop = loops(steps=0)
    layer = loop.cache.layers[0]
    for _ in range(4):
        loop.step()
    states = torch.zeros(2, 2, 1, 16)
    with pytest.raises(CacheMisuse, match="being read by replayed steps that have not landed"):
        layer.update(states, states)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("moment", ["first step", "recording", "replay"])
def test_a_step_that_is_broken_off_was_none(
    moment: str, kind: type[BaseException], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote lies in slots that count as free; the token may come again, and all that was before is right."""
    plain, loop = loops(family=family, steps={"first step": 0, "recording": 1, "replay": 3}[moment])
    calls, own = [], torch.nn.functional.linear

    def linear(*args: Any, **more: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 9:
            raise kind("broken off")
        return own(*args, **more)

    token = loop.at
    with monkeypatch.context() as broken, pytest.raises((kind, UnsupportedModel)):
        if moment == "replay":
            done = loop.cache.open_steps.now._replayed.__self__.done
            middle = len(done) // 2
            was = done[middle]

            def breaks() -> None:
                done[middle] = was
                raise kind("broken off")

            done[middle] = breaks
        else:
            broken.setattr(torch.nn.functional, "linear", linear)
        loop.step()
    loop.at, seen = token, plain.cache.seen
    assert loop.cache.seen == seen
    loop.mask = loop.mask[:, :seen]
    apart = [error(loop.step(), plain.step()) for _ in range(20)]
    # Behind them a block is encoded, where a number may lie half way between two codes.
    assert max(apart[:16]) < CLOSE and max(apart) < ONE_CODE
    assert torch.equal(loop.cache.held(), plain.cache.held())
    assert loop.cache.replays.replayed >= 20


def test_a_landing_that_is_broken_off_leaves_a_cache_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop = loops()
    calls, own = [], type(loop.cache._guard.engine).replayed

    def replayed(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        own(*args)

    monkeypatch.setattr(type(loop.cache._guard.engine), "replayed", replayed)
    with pytest.raises(KeyboardInterrupt):
        loop.cache.held()
    for _ in range(2):
        with pytest.raises(CacheMisuse, match="taking the tokens of replayed steps.* before its end"):
            loop.step()
    with pytest.raises(CacheMisuse, match="before its end"):
        loop.cache.save("nowhere")
    monkeypatch.undo()
    loop.cache.reset()
    assert loop.cache.seen == 0 and loop.cache.open_steps.done == 0


def test_two_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop = loops()
    inside, go_on, told = threading.Event(), threading.Event(), []
    own = type(loop.cache.open_steps.now).step

    def step(*args: Any) -> Tensor:
        inside.set()
        assert go_on.wait(20)
        return own(*args)

    monkeypatch.setattr(type(loop.cache.open_steps.now), "step", step)

    def first() -> None:
        with torch.no_grad():
            told.append(loop.step())

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(CacheMisuse, match="two threads use this cache at once"):
        loop.cache.held()
    go_on.set()
    thread.join()
    monkeypatch.undo()
    assert len(told) == 1
    for use in (loop.step, loop.cache.held, loop.cache.ledger):
        with pytest.raises(CacheMisuse, match="two threads use this cache at once"):
            use()
    loop.cache.reset()
    Loop(loop.model, loop.cache)
