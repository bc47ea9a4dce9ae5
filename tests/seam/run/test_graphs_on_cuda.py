"""Real CUDA graphs, where there is a GPU: the same tokens as without. `tests/seam/run/test_replay.py` has the tape."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.hf.graphs.replay import recorder_of
from kvtailor.ops.dispatch import using
from tests.ops.gpu.exact_attention import DEVICE
from tests.support.seam.zoo import build, prompts

PLANS = (
    "full",
    "snapkv(window=6) + adakv @ tokens=16",
    "vector(bits=4, recent=4)",
    "kivi(bits=4, group=16, recent=16)",
)


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device is here")
@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_replayed_tokens_are_those_of_launched_steps(plan: str, form: str) -> None:
    model = build("llama").cuda()
    ids, mask = (each.cuda() for each in prompts((48, 31)))
    with using(form):
        told = [
            kvtailor.generate(model, ids, attention_mask=mask, plan=plan, max_new_tokens=40, graphs=graphs).sequences
            for graphs in (False, True)
        ]
    assert torch.equal(*told)


def test_there_is_a_recorder_of_gpus_alone() -> None:
    assert recorder_of(torch.device("cpu")) is None
    assert recorder_of(torch.device("cuda")) is not None
