"""Lanes for kept sets: pages of heads that keep different numbers of tokens."""

from __future__ import annotations

import pytest
import torch

from kvtailor.ops.lanes.ragged import cut_lanes


@pytest.mark.parametrize("multiple", [1, 3, 32])
def test_pages_end_with_a_codecs_group_and_hold_each_kept_token_once(multiple: int) -> None:
    state = torch.Generator().manual_seed(multiple)
    keep = torch.rand((2, 3, 130), generator=state) < torch.rand((2, 3, 1), generator=state)
    cut = cut_lanes(keep, multiple)
    assert cut is not None and cut.owner is not None and cut.lengths is not None
    assert cut.index.shape[1] % multiple == 0
    for owner, kept in enumerate(keep.flatten(0, 1)):
        lanes = [i for i in range(len(cut.owner)) if int(cut.owner[i]) == owner]
        found = [int(token) for i in lanes for token in cut.index[i, : int(cut.lengths[i])]]
        assert found == kept.nonzero().flatten().tolist()
