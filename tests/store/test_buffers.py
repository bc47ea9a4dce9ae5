"""Buffers are used again, and never while a tensor refers to them."""

from __future__ import annotations

import gc

import pytest
import torch

from kvtailor.store.disk import Buffers


def test_a_buffer_comes_back_when_the_last_tensor_over_it_is_gone() -> None:
    buffers = Buffers()
    run = buffers.take(4096)
    place, view = run.data_ptr(), run[100:200].view(torch.int16)
    view.fill_(7)
    del run
    other = buffers.take(4096)
    assert other.data_ptr() != place and buffers.idle_bytes == 0
    other.fill_(255)
    assert bool((view == 7).all())
    del view
    gc.collect()
    assert buffers.idle_bytes == 4096
    assert buffers.take(4096).data_ptr() == place


@pytest.mark.parametrize("expected, left", [([64, 64], 128), ([64], 64), ([32], 0), ([], 0), ([64, 32, 64, 64], 128)])
def test_what_the_next_reading_does_not_take_is_given_back(expected: list[int], left: int) -> None:
    buffers = Buffers()
    held = [buffers.take(64), buffers.take(64), buffers.take(128)]
    assert buffers.idle_bytes == 0
    held.clear()
    gc.collect()
    assert buffers.idle_bytes == 256
    buffers.expect(expected)
    assert buffers.idle_bytes == left


def test_nothing_is_kept_when_the_buffers_are_gone() -> None:
    buffers = Buffers()
    run = buffers.take(64)
    del buffers
    run.fill_(3)
    del run
    gc.collect()
