"""Rolling reads what attention reads of the keys that kvpress turned to their slots: `tests/data/kvpress_kept.md`."""

from __future__ import annotations

import torch
from tests.support.attention_cases import request_of
from tests.support.kvpress_cases import cases, states_of
from tests.support.segments_of import Padded

from kvtailor.attend.contract import AttentionContext
from kvtailor.attend.rolling import Rolling
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Layout, PlainSegment, Rotation


def test_the_newest_query_sees_the_keys_of_kvpress() -> None:
    case = cases()["rolling s4 two-rows"]
    kept = torch.nonzero(case.kept[20][0, 0, -1])[:, 0]
    states, rotation = states_of(case.geometry, 0), Rotation(frequencies=case.geometry.frequencies)
    keys, values = (each[0, -1:, kept] for each in (states.keys, states.values))
    query, newest = states.queries[:1, -2:, -1:], int(kept[-1])
    assert newest == states.keys.shape[2] - 1 and case.returned_keys is not None
    layout = Layout(rows=1, heads=1, size=20, positions=kept[None].to(torch.int32))
    visible = Padded(new_tokens=1, first_column=newest)
    parts = [PlainSegment(layout=layout, keys=keys, values=values)]
    found = (
        Rolling()
        .attend(request_of(query, parts, visible, case.geometry.scaling, context=AttentionContext(rotation=rotation)))
        .output
    )
    at_its_slot = turn(query[0], torch.tensor([19 - newest]), rotation)
    expected = (at_its_slot @ case.returned_keys.T * case.geometry.scaling).softmax(-1) @ values[0]
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    still = (query[0] @ keys[0].T * case.geometry.scaling).softmax(-1) @ values[0]
    assert (found[0] - still).abs().max() > 1e-2, "nothing had to be turned, so this test has shown nothing"
