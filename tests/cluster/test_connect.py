"""What a cluster is asked for, in words, and what is said without Ray."""

from __future__ import annotations

import os
import sys

import pytest

from kvtailor.cluster import Resources, connect
from kvtailor.errors import KvtailorError


def test_resources_in_words() -> None:
    assert str(Resources()) == "1 CPU"
    assert str(Resources(cpus=0.5, gpus=2, memory=10, exclusive=True)) == (
        "0.5 CPUs, 2 GPUs, 10 bytes of memory, with nothing else beside it"
    )
    assert [Resources(cpus=cpus).threads for cpus in (0.5, 1, 4)] == [1, 1, 4]


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvtailorError, match=r"asked for Ray, .*: run `pip install 'kvtailor\[ray\]'`"):
        connect()


def test_what_ray_raises_as_it_begins_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy machine: a bare Exception, since the raylet did not begin in time."""
    ray = pytest.importorskip("ray")

    def init(**given: object) -> None:
        raise Exception("The current node timed out during startup.\nMore lines.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KvtailorError, match="'local', which cannot be reached: The current node timed out during st"):
        connect("local")


def test_ray_tells_nobody_of_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvtailorError):
        connect()
    assert os.environ.pop("RAY_USAGE_STATS_ENABLED") == "0"
