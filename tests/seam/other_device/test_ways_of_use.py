"""Ways in which people use a cache, on a device that is not the CPU: the same as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kvtailor
from kvtailor.bench.subject import Subject
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.dispatch import using
from kvtailor.ops.what_runs import explained
from tests.seam.test_modes import PLANS
from tests.support.bench.dummy import DummyTokenizer
from tests.support.crossed import crossed
from tests.support.other_device.backend import move_model, register
from tests.support.other_device.decoding import decoded
from tests.support.seam.zoo import build, error, prompts

PLAN = "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=2"
Use = Callable[[nn.Module, str], Any]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    register()


def of_both(use: Use, family: str = "llama", **options: Any) -> list[Any]:
    """What a use gives on the CPU and on the device, copied to the CPU."""
    found = []
    for device in ("cpu", "gpu:1"):
        torch.manual_seed(5)
        with using("reference" if device == "cpu" else "auto"):
            made = use(move_model(build(family, **options), device), device)
        if isinstance(made, Tensor):
            assert str(made.device) == device
            made = made.detach().cpu()
        found.append(made)
    return found


def generated(plan: str, **options: Any) -> Use:
    def use(model: Any, device: str) -> Tensor:
        ids, mask = (each.to(device) for each in prompts((48, 31, 40)))
        cache = kvtailor.cache_for(model, plan)
        return model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=8, **options)

    return use


MODES = ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2})


@pytest.mark.parametrize(("options", "plan"), [(MODES[0], PLANS[7]), (MODES[1], PLANS[5])])
def test_generate_of_transformers(options: dict[str, Any], plan: str) -> None:
    assert torch.equal(*of_both(generated(plan, **options)))


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("options", MODES, ids=str)
def test_generate_of_transformers_with_every_plan(options: dict[str, Any], plan: str) -> None:
    assert torch.equal(*of_both(generated(plan, **options)))


def rows_moved(model: Any, device: str) -> Tensor:
    """Beams: rows reordered, repeated and chosen; then a copy goes on."""
    ids, mask = (each.to(device) for each in prompts((48, 31, 40)))
    cache = kvtailor.prefill(model, ids, mask, plan=PLAN)
    order, chosen = torch.tensor([2, 0, 2, 1], device=device), torch.tensor([0, 3, 5], device=device)
    cache.reorder_cache(order)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(chosen)
    mask = mask[order].repeat_interleave(2, 0)[chosen]
    mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    again, token = copy.deepcopy(cache), torch.tensor([[7], [8], [9]], device=device)
    cache.reset()
    return model(token, attention_mask=mask, **hand_cache(again)).logits


def taken_back(model: Any, device: str) -> Tensor:
    ids = prompts((60,))[0].to(device)
    cache = kvtailor.cache_for(model, PLAN)
    model(ids, **hand_cache(cache))
    cache.activate_past_recording()
    model(ids[:, :4], **hand_cache(cache))
    cache.crop(-2)
    return model(ids[:, :2], **hand_cache(cache)).logits


def speculated(**options: Any) -> Use:
    def use(model: Any, device: str) -> Tensor:
        ids = prompts((60,))[0].to(device)
        draft = {"draft": move_model(build("llama", state=1), device)} if "draft_plan" not in options else {}
        torch.manual_seed(5)  # making a model draws numbers too
        return kvtailor.generate(model, ids, plan=PLAN, max_new_tokens=8, **draft, **options).sequences

    return use


def scored(model: Any, device: str) -> Tensor:
    ids = prompts((60,))[0].to(device)
    with kvtailor.session(model, PLAN) as session:
        return session.score(ids[:, :50], ids[:, 50:])


def asked(model: Any, device: str) -> tuple[str, ...]:
    questions = ["what is it?", "and why?"]
    answers = kvtailor.ask(model, DummyTokenizer(), "a long context " * 20, questions, plan=PLAN, max_new_tokens=5)
    return tuple(answers.texts)


def in_inference_mode(model: Any, device: str) -> Tensor:
    with torch.inference_mode():
        return generated(PLAN, do_sample=False)(model, device).clone()


USES: dict[str, Use] = {
    "rows moved": rows_moved,
    "recorded and taken back": taken_back,
    "speculation": speculated(),
    "speculation that samples": speculated(do_sample=True),
    "a draft of the model's own": speculated(draft_plan="streaming @ tokens=16"),
    "session": scored,
    "questions": asked,
    "inference mode": in_inference_mode,
}


DEFAULT = ("rows moved", "recorded and taken back", "speculation", "session")


@pytest.mark.parametrize(
    "use",
    [pytest.param(use, id=name, marks=() if name in DEFAULT else pytest.mark.long) for name, use in USES.items()],
)
def test_the_same_on_both(use: Use) -> None:
    expected, found = of_both(use)
    assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected


@pytest.mark.parametrize(
    ("dtype", "plan"), crossed([torch.bfloat16, torch.float16], [PLAN, PLANS[6], "full", *PLANS[7:9]])
)
def test_sixteen_bits(dtype: torch.dtype, plan: str) -> None:
    """Forms that only a device other than the CPU has: not bit for bit, since the CPU has its own for such numbers."""
    with using("reference"):
        expected = decoded(build("llama", dtype=dtype), plan, (70, 41, 60), steps=1)
    found = decoded(move_model(build("llama", dtype=dtype), "gpu:1"), plan, (70, 41, 60), steps=1)
    assert found.logits.dtype == dtype and error(found.logits.float(), expected.logits.float()) < 5e-2
    assert found.ledger.total == found.ledger.closed_form == expected.ledger.total


@pytest.mark.parametrize(
    "kind", ["qfilters", *(pytest.param(each, marks=pytest.mark.long) for each in ("erank", "duo"))]
)
def test_calibrations(kind: str, tmp_path: Path) -> None:
    """Those that do not train: where autograd ran before the device was there, it has no thread for it."""
    text = {"t": "some words of a text, and others that follow them in a row " * 120}

    def use(model: Any, device: str) -> dict[str, Tensor]:
        path = tmp_path / f"{kind} {device[:3]}.safetensors"
        subject = Subject(name="tiny", model=model, tokenizer=DummyTokenizer())
        kvtailor.calibrate(subject, kind, text, out=str(path), tokens=256, context=128)
        return load_file(path)

    expected, found = of_both(use)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_what_runs_is_said_and_graphs_are_refused() -> None:
    """The C++ kernels read memory of the CPU; graphs are CUDA's."""
    choices = explained(torch.device("gpu:0"), torch.float32)
    assert choices[0].implementation == "torch, decoded parts" and choices[0].why == "there are no kernels for gpu"
    model = move_model(build("llama"), "gpu:1")
    with pytest.raises(UnsupportedModel, match="the model is on gpu:1, and graphs are CUDA's"):
        kvtailor.generate(model, prompts((40,))[0].to("gpu:1"), plan="full", graphs=True, max_new_tokens=4)
