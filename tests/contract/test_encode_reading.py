"""What the stage `encode` promises to attention, tested on every codec in its folder."""

from __future__ import annotations

import torch
from tests.contract.test_encode import every_codec, every_dtype, ragged, uniform
from tests.support.segments_of import encoded

from kvtailor.encode.contract import Codec


@every_codec
@every_dtype
def test_attention_reads_what_is_decoded(codec: Codec, dtype: torch.dtype) -> None:
    """Values as they are stored say the same once they are lifted; token by token, as sums of one."""
    for layout, keys, values in (uniform((3, 5, 63, 24, 20), dtype), ragged(codec, dtype)):
        segment = encoded(codec, layout, keys, values)
        read, decoded = segment.view(), segment.decode()
        assert torch.equal(read.keys, decoded[0]) and (read.log_weight is not None) == codec.weighs_tokens
        if read.shared is None:
            each = read.values
        else:
            assert read.shared.flatten().sort().values.tolist() == list(range(keys.shape[0]))
            each = torch.empty((*keys.shape[:2], read.values.shape[-1]), dtype=dtype)
            each[read.shared] = read.values[:, None].expand(-1, read.shared.shape[1], -1, -1)
        if read.lift is not None:
            heads = layout.owners(torch.device("cpu")) % layout.heads
            each = each.float() @ read.lift.matrix[heads]
            each = each if read.lift.offset is None else each + read.lift.offset[heads][:, None]
        error = (each.float() - decoded[1].float()).norm() / decoded[1].float().norm()
        assert each.shape == decoded[1].shape and error <= torch.finfo(dtype).eps
