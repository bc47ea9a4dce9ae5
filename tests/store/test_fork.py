"""A process that is forked while its segments are on the disk: child and parent go on, each with its own files."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.store.segment_file import SegmentFile

SECONDS = 60


def in_child(work: Callable[[], None]) -> int:
    """What `os.waitpid` says of a child that did some work: 0, or how it ended; it is killed where it hangs."""
    process = os.fork()
    if process == 0:
        ended = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            # Other threads of torch's own do not survive a fork.
            torch.set_num_threads(1)
            work()
            ended = 0
        finally:
            os._exit(ended)
    return os.waitpid(process, 0)[1]


@torch.no_grad()
def step(model, cache, count: int) -> torch.Tensor:
    """Logits of `count` further tokens, always the same ones."""
    ids = prompts((40,), state=5)[0][:, :count]
    return torch.cat([model(ids[:, i : i + 1], **hand_cache(cache)).logits for i in range(count)])


@pytest.mark.parametrize(
    "plan", ["full + disk(folder='{}', block=8)", "kivi(bits=4, group=8, recent=8) + disk(folder='{}')"]
)
def test_child_and_parent_both_go_on(plan: str, tmp_path: Path) -> None:
    """Both write files of the same numbers while they decode."""
    model = build("llama")
    cache = kvtailor.cache_for(model, plan.format(tmp_path))
    with torch.no_grad():
        model(prompts((60,))[0], **hand_cache(cache))
    step(model, cache, 3)
    expected = step(model, copy.deepcopy(cache), 20)
    ready, written = os.pipe()

    def work() -> None:
        same = torch.equal(step(model, cache, 20), expected)
        os.write(written, b"1" if same else b"0")
        assert same and len(list(tmp_path.iterdir())) == 2

    assert in_child(work) == 0
    assert os.read(ready, 1) == b"1"
    assert torch.equal(step(model, cache, 20), expected)
    kvtailor.cache_for(model, plan.format(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1, "what the child left goes when the next cache is made"


def test_a_fork_while_a_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child lacks the thread that would bring it."""
    model, parent, real = build("llama"), os.getpid(), SegmentFile.read
    cache = kvtailor.cache_for(model, f"full + disk(folder='{tmp_path}', block=8)")
    with torch.no_grad():
        model(prompts((60,))[0], **hand_cache(cache))
    expected = step(model, copy.deepcopy(cache), 2)
    reading, go_on = threading.Event(), threading.Event()

    def read(file: SegmentFile, *arguments):
        if os.getpid() == parent:
            reading.set()
            go_on.wait(SECONDS)
        return real(file, *arguments)

    monkeypatch.setattr(SegmentFile, "read", read)
    cache.engine.offload.prefetch(0)
    assert reading.wait(SECONDS)

    def work() -> None:
        assert cache.ledger().total > 0
        assert torch.equal(step(model, cache, 2), expected)

    try:
        assert in_child(work) == 0
    finally:
        go_on.set()
    assert torch.equal(step(model, cache, 2), expected)


def test_what_a_dead_process_left_goes_when_the_next_cache_is_made(tmp_path: Path) -> None:
    """Before it writes anything; files of a user and of a process that lives stay."""
    model = build("llama")
    plan = f"full + disk(folder='{tmp_path}', block=8)"
    mine = kvtailor.cache_for(model, plan)
    with torch.no_grad():
        model(prompts((60,))[0], **hand_cache(mine))
    (living,) = tmp_path.iterdir()
    kept = sorted(living.iterdir())

    def work() -> None:
        cache = kvtailor.cache_for(model, plan)
        with torch.no_grad():
            model(prompts((60,))[0], **hand_cache(cache))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == signal.SIGKILL
    (left,) = [path for path in tmp_path.iterdir() if path != living]
    assert len(list(left.glob("*.segment"))) > 2
    named = [left / "my.segment", tmp_path / "e.partial", left / "00000001.segment.bak"]
    for path in named:
        path.write_text("of a user")
    kvtailor.cache_for(model, plan)
    assert sorted(left.iterdir()) == sorted([named[0], named[2]]) and named[1].exists()
    assert sorted(living.iterdir()) == kept
