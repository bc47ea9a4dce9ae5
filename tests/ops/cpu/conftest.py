"""Thread counts for kernels that share their work, and memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtailor.ops.attention.cpu import attention


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads in torch while the test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN."""
    empty = torch.empty
    monkeypatch.setattr(attention.torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
