"""One user at a time, whole forwards, padding that stays padding, and memory that is freed at once."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, build, error, prompts

OURS = str(Path(kvtailor.__file__).parent)
PLANS = (
    "snapkv(window=6) + adakv @ tokens=16",
    "h2o(recent=6) @ tokens=16, slack=1",
    "snapkv(window=6) + kivi(bits=4, group=8, recent=8) @ tokens=24",
    "streaming + minicache(start=0.0, block_size=4) @ tokens=16, slack=3",
    "full",
)


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raises at the `line`-th line of ours that this thread runs; the list counts those that were run."""
    run = [0]

    def local(frame, event, argument):
        if event == "line":
            run[0] += 1
            if run[0] == line:
                raise Interrupted
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename.startswith(OURS) else None

    sys.settrace(trace)
    try:
        yield run
    finally:
        sys.settrace(None)


def lines_of(act: Callable[[], object]) -> int:
    """How many lines of ours an action runs."""
    with interrupted_at(-1) as run:
        act()
    return run[0]


@torch.no_grad()
def assert_right_or_refused(plan: str, family: str, points: int | None) -> tuple[int, int]:
    """Interrupts a prompt, decoding, a crop ...; how often the cache was refused, and how often it was right."""
    model, ids = build(family), prompts((40,))[0]
    tokens = prompts((6,), state=3)[0]
    feed = lambda cache, column: model(tokens[:, column : column + 1], **hand_cache(cache)).logits  # noqa: E731
    empty = kvtailor.cache_for(model, plan)
    after_prompt = copy.deepcopy(empty)
    model(ids, **hand_cache(after_prompt))
    # What each token gives by the number of tokens seen before it.
    expected, cache = {}, copy.deepcopy(after_prompt)
    for column in range(6):
        expected[40 + column] = feed(cache, column)
    recorded = copy.deepcopy(after_prompt)
    recorded.activate_past_recording()
    few = tokens[:, :2] if "minicache" in plan else tokens[:, :4]

    def draft(cache):
        model(few, **hand_cache(cache))
        cache.crop(-1)

    starts = {
        "prompt": (empty, lambda cache: model(ids, **hand_cache(cache))),
        "token": (after_prompt, lambda cache: feed(cache, 0)),
        "tokens": (after_prompt, lambda cache: [feed(cache, column) for column in range(3)]),
        "draft": (recorded, draft),
        "rows": (after_prompt, lambda cache: cache.reorder_cache(torch.tensor([0]))),
        "reset": (after_prompt, lambda cache: (cache.reset(), model(ids, **hand_cache(cache)))),
    }
    refused = right = 0
    generator = torch.Generator().manual_seed(0)
    for name, (start, act) in starts.items():
        cache = copy.deepcopy(start)
        count = lines_of(lambda cache=cache, act=act: act(cache))
        chosen = range(1, count + 1)
        if points is not None:
            chosen = [1, count, *(torch.randperm(count, generator=generator)[:points] + 1).tolist()]
        for line in chosen:
            cache = copy.deepcopy(start)
            try:
                with interrupted_at(line):
                    act(cache)
            except Interrupted:
                pass
            else:
                # What is done once in a process made the first run longer.
                continue
            try:
                if cache.seen == 0:
                    model(ids, **hand_cache(cache))
                found, seen = feed(cache, cache.seen - 40), cache.seen - 1
            except CacheMisuse as refusal:
                assert "not to be trusted" in str(refusal) or "its end" in str(refusal), (name, line)
                refused += 1
                continue
            assert error(found, expected[seen]) < ROUNDING, f"{name}, line {line} of {count}, {seen} tokens seen"
            right += 1
    return refused, right


@pytest.mark.parametrize("plan", PLANS)
def test_an_interrupt_at_any_line_leaves_a_cache_right_or_refused(plan: str) -> None:
    refused, right = assert_right_or_refused(plan, "llama", points=10)
    assert refused > 10 and right > 0


@pytest.mark.long
@pytest.mark.parametrize(("family", "plan"), [("llama", plan) for plan in PLANS] + [("gemma3", plan) for plan in PLANS])
def test_an_interrupt_at_every_line(family: str, plan: str) -> None:
    refused, right = assert_right_or_refused(plan, family, points=400)
    assert refused > 300 and right > 10


@torch.no_grad()
def test_an_error_in_the_midst_of_a_forward_ends_the_cache_until_it_is_reset() -> None:
    model, ids = build("llama"), prompts((40,))[0]
    cache = kvtailor.cache_for(model, PLANS[0])
    model(ids, **hand_cache(cache))

    def fail(*_):
        raise RuntimeError("out of memory, say")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, :1], **hand_cache(cache))
    handle.remove()
    for use in (
        lambda: model(ids[:, :1], **hand_cache(cache)),
        lambda: cache.crop(0),
        lambda: cache.save("nowhere"),
        lambda: cache.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(CacheMisuse, match=r"at layer 1 of 3 before its end .*call cache.reset\(\)"):
            use()
    cache.reset()
    fresh = kvtailor.cache_for(model, PLANS[0])
    assert torch.equal(model(ids, **hand_cache(cache)).logits, model(ids, **hand_cache(fresh)).logits)


@torch.no_grad()
def test_a_mask_that_does_not_fit_changes_nothing() -> None:
    model, (ids, mask) = build("llama"), prompts((40, 31))
    cache = kvtailor.cache_for(model, PLANS[0])
    model(ids, attention_mask=mask, **hand_cache(cache))
    before = copy.deepcopy(cache)
    token, more = prompts((1, 1), state=7)[0], torch.cat([mask, mask.new_ones(2, 1)], 1)
    shown = more.clone()
    shown[1, :3] = 1
    for wrong, said in (
        (more[1:], "the attention_mask is for 1 rows, and this cache holds 2"),
        (torch.cat([more, more], 0), "the attention_mask is for 4 rows, and this cache holds 2"),
        (shown, "tokens that were padding"),
        (mask, "has 40 columns, but the cache has seen 40"),
        (torch.cat([more, more], 1), "has 82 columns, but the cache has seen 40"),
    ):
        with pytest.raises(CacheMisuse, match=said):
            model(token, attention_mask=wrong, **hand_cache(cache))
    for each in (cache, before):
        assert each.seen == 40
    found = model(token, attention_mask=more, **hand_cache(cache)).logits
    assert torch.equal(found, model(token, attention_mask=more, **hand_cache(before)).logits)


@torch.no_grad()
def test_a_crop_that_cannot_be_changes_nothing() -> None:
    model, ids = build("gemma3"), prompts((40,))[0]
    cache, same = kvtailor.cache_for(model, "full"), kvtailor.cache_for(model, "full")
    for each in (cache, same):
        model(ids, **hand_cache(each))
    with pytest.raises(CacheMisuse, match="layer 0 has a window of 16 tokens of the model's own and has seen 40"):
        cache.crop(-2)
    token = prompts((1,), state=7)[0]
    assert torch.equal(model(token, **hand_cache(cache)).logits, model(token, **hand_cache(same)).logits)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_on_one_cache_all_get_an_error(threads: int) -> None:
    model = build("llama", layers=8)
    ids = prompts((60,))[0]
    for plan in (PLANS[0], "full"):
        cache = kvtailor.cache_for(model, plan)
        outcomes, start = [], threading.Barrier(threads)

        def use(cache=cache, outcomes=outcomes, start=start):
            start.wait()
            try:
                with torch.no_grad():
                    for _ in range(200):
                        model(ids, **hand_cache(cache))
                outcomes.append("finished")
            except CacheMisuse as refusal:
                outcomes.append(str(refusal))

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            running = [threading.Thread(target=use) for _ in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        assert len(outcomes) == threads
        assert all("two threads use this cache at once" in outcome for outcome in outcomes), outcomes
        with pytest.raises(CacheMisuse, match="two threads"):
            model(ids, **hand_cache(cache))
        cache.reset()
        with torch.no_grad():
            model(ids, **hand_cache(cache))


@torch.no_grad()
def test_threads_may_take_turns() -> None:
    """A server hands a conversation from one thread to another."""
    model, ids = build("llama"), prompts((40,))[0]
    cache, alone = kvtailor.cache_for(model, PLANS[0]), kvtailor.cache_for(model, PLANS[0])
    found = []
    for column in range(3):
        piece = ids[:, column * 12 : column * 12 + 12]
        thread = threading.Thread(
            target=lambda piece=piece: found.append(torch.no_grad()(model)(piece, **hand_cache(cache)).logits)
        )
        thread.start()
        thread.join()
        assert torch.equal(found[-1], model(piece, **hand_cache(alone)).logits)


@pytest.mark.parametrize(
    ("family", "plan"),
    crossed(["llama", "gemma3"], [*PLANS, "kivi(bits=4, group=8) + disk(folder='{tmp}', resident_layers=0)"]),
)
def test_a_dropped_cache_is_freed_at_once(plan: str, family: str, tmp_path: Path) -> None:
    """Without the garbage collector, which may come long after memory is short."""
    model, (ids, mask) = build(family), prompts((40, 31))
    gc.collect()
    gc.disable()
    try:
        cache = kvtailor.cache_for(model, plan.replace("{tmp}", str(tmp_path)))
        model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=6, do_sample=False)
        twin = copy.deepcopy(cache)
        held = [
            weakref.ref(tensor)
            for each in (cache, twin)
            for state in each.engine.states
            for entry in state.entries(0)
            for tensor in entry.tensors.values()
        ]
        alive = [weakref.ref(cache), weakref.ref(twin), weakref.ref(cache.engine), *held]
        del cache, twin
        assert [each() for each in alive if each() is not None] == []
    finally:
        gc.enable()


def test_a_session_and_a_prefill_leave_nothing_behind() -> None:
    model, (ids, mask) = build("llama"), prompts((40, 31))
    gc.collect()
    gc.disable()
    try:
        with kvtailor.session(model, PLANS[0]) as s:
            s.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
            alive = [weakref.ref(s.last)]
            s.last = None
        out = kvtailor.generate(
            model, ids[:1], plan="snapkv(window=6) @ tokens=24", draft_plan="full", max_new_tokens=8
        )
        alive += [weakref.ref(out.cache), *(weakref.ref(each) for each in out.drafts)]
        del out
        assert [each() for each in alive if each() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("plan", ["full", "streaming @ tokens=100", "kivi(bits=4, group=8, recent=8)", PLANS[0]])
@torch.no_grad()
def test_held_and_ledger_count_no_padding(plan: str) -> None:
    model, (ids, mask) = build("llama"), prompts((40, 10))
    cache = kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache))
    alone = [kvtailor.cache_for(model, plan) for _ in range(2)]
    for row, length in enumerate((40, 10)):
        model(ids[row : row + 1, -length:], **hand_cache(alone[row]))
    held = cache.held()
    for row in range(2):
        assert torch.equal(held[row], alone[row].held()[0])
    assert cache.ledger().held == pytest.approx(float(held.double().mean()))
