"""Rooms are used again, and never while anybody looks."""

from __future__ import annotations

import gc

import pytest
import torch

from kvtailor.store.offload.buffers import Rooms


def test_a_room_comes_back_when_the_last_tensor_over_it_is_gone() -> None:
    rooms = Rooms()
    run = rooms.take(4096)
    place, view = run.data_ptr(), run[100:200].view(torch.int16)
    view.fill_(7)
    del run
    other = rooms.take(4096)
    assert other.data_ptr() != place and rooms.idle_bytes == 0
    other.fill_(255)
    assert bool((view == 7).all())
    del view
    gc.collect()
    assert rooms.idle_bytes == 4096
    assert rooms.take(4096).data_ptr() == place


@pytest.mark.parametrize("expected, left", [([64, 64], 128), ([64], 64), ([32], 0), ([], 0), ([64, 32, 64, 64], 128)])
def test_what_the_next_reading_does_not_take_is_given_back(expected: list[int], left: int) -> None:
    rooms = Rooms()
    held = [rooms.take(64), rooms.take(64), rooms.take(128)]
    assert rooms.idle_bytes == 0
    held.clear()
    gc.collect()
    assert rooms.idle_bytes == 256
    rooms.expect(expected)
    assert rooms.idle_bytes == left


def test_nothing_is_kept_when_the_rooms_are_gone() -> None:
    rooms = Rooms()
    run = rooms.take(64)
    del rooms
    run.fill_(3)
    del run
    gc.collect()
