"""Real CUDA graphs, where there is a GPU: the same tokens as without. `tests/seam/run/test_replay.py` has the tape."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.hf.graphs.replay import recorder_of
from kvtailor.hf.versions import hand_cache
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


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device is here")
@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_so_behind_plain_generate(plan: str, form: str) -> None:
    """Two turns, with padding; the forward is given back at the end."""
    model = build("llama").cuda()
    ids, mask = (each.cuda() for each in prompts((48, 31)))
    told: list[torch.Tensor] = []
    for graphs in (False, True):
        cache = kvtailor.cache_for(model, plan, graphs=graphs)
        with using(form):
            text = model.generate(ids, attention_mask=mask, **hand_cache(cache), do_sample=False, max_new_tokens=40)
            more = torch.cat([text, ids[:, :5].clamp(min=3)], 1)
            shown = torch.cat([mask, mask.new_ones((2, 45))], 1)
            told.append(
                model.generate(more, attention_mask=shown, **hand_cache(cache), do_sample=False, max_new_tokens=40)
            )
        if graphs:
            assert cache.replays is not None and cache.replays.replayed > 40 and cache.replays.recordings > 1
    assert torch.equal(*told)
    del cache
    assert "forward" not in vars(model)


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device is here")
def test_beams_and_sampling_behind_plain_generate() -> None:
    model = build("llama").cuda()
    ids, mask = (each.cuda() for each in prompts((48, 31)))
    for told in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}):
        texts = []
        for graphs in (False, True):
            torch.manual_seed(4)
            cache = kvtailor.cache_for(model, "full", graphs=graphs)
            texts.append(model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=20, **told))
        assert torch.equal(*texts)
    assert cache.replays is not None and cache.replays.replayed == 19


def test_there_is_a_recorder_of_gpus_alone() -> None:
    assert recorder_of(torch.device("cpu")) is None
    assert recorder_of(torch.device("cuda")) is not None
