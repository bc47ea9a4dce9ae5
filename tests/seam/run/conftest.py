"""Steps of a model that are replayed from tapes, on every device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtailor.hf.graphs import replay
from kvtailor.ops.dispatch import using
from tests.support.seam.tape import Tape, recorder


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """A tape records on every device; one form of attention, so that plain and replayed steps round alike."""
    record, found = recorder(monkeypatch)
    monkeypatch.setattr(replay, "recorder_of", lambda device: record)
    with using("reference"):
        yield found


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """As `generate()` calls a model."""
    with torch.no_grad():
        yield
