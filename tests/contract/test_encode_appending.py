"""What is encoded stays as it was encoded, bit for bit, however long the cache decodes on."""

from __future__ import annotations

import pytest
import torch
from tests.support.crossed import crossed
from tests.support.discover import methods_of, samples_of
from tests.support.segments_of import group_of, states

import kvtailor.encode
from kvtailor.encode.by_age import AgedSegment
from kvtailor.encode.contract import Codec
from kvtailor.engine.apply import encode_tail
from kvtailor.engine.state import LayerState
from kvtailor.plan import Plan
from kvtailor.types import Rotation, Segment

SAMPLES: list[Codec] = [each for kind in methods_of(kvtailor.encode, Codec) for each in samples_of(kind)]
PROMPT, DECODED = 77, 500


@pytest.mark.parametrize(
    ("codec", "dtype"),
    crossed(SAMPLES, [torch.float32, torch.float16]),
    ids=lambda each: str(each if isinstance(each, torch.dtype) else Plan(encode=each)),
)
def test_no_segment_changes_over_hundreds_of_decoded_tokens(codec: Codec, dtype: torch.dtype) -> None:
    plan, group = Plan(encode=codec), tuple(LayerState(layer, 3) for layer in group_of(codec))
    for state in group:
        state.model.rotation = Rotation(frequencies=torch.tensor([1.0, 0.1, 0.01]))
        state.layer_group = group
    keys, values = (states((2, 3, PROMPT + DECODED, 16), seed, dtype) for seed in (1, 2))
    first_seen: list[tuple[Segment, dict[str, tuple[int, torch.Tensor]]]] = []
    heaviest_tail = 0
    for end in [PROMPT, *range(PROMPT + 1, PROMPT + DECODED + 1)]:
        for state in group:
            state.append(keys[:, :, state.stored.seen : end], values[:, :, state.stored.seen : end], exactly=False)
            encode_tail(state, plan, PROMPT if end == PROMPT else 1, None)
        assert len(state.stored.segments) >= len(first_seen)
        for segment in state.stored.segments[len(first_seen) :]:
            storages = {name: (t.untyped_storage().data_ptr(), t.clone()) for name, t in segment.tensors().items()}
            first_seen.append((segment, storages))
        assert state.stored.tail is not None
        heaviest_tail = max(heaviest_tail, state.stored.tail.length)
    for segment, (then, storages) in zip(state.stored.segments, first_seen, strict=True):
        # A codec by age makes another segment of the same tokens, and changes none.
        renewed = isinstance(segment, AgedSegment) and isinstance(then, AgedSegment) and segment.level > then.level
        assert segment is then or renewed
        assert torch.equal(segment.layout.columns(keys.device), then.layout.columns(keys.device))
        for name, tensor in then.tensors().items():
            place, before = storages[name]
            assert tensor.untyped_storage().data_ptr() == place and torch.equal(tensor, before)
    assert int(state.counts().sum()) == 6 * (PROMPT + DECODED)
    if codec.block:
        assert len(first_seen) > 1 and heaviest_tail < codec.tail + codec.block + 1
    order = torch.cat([part.layout.columns(torch.device("cpu")) for part in state.parts()], 1)
    assert torch.equal(order[0], torch.arange(PROMPT + DECODED))
