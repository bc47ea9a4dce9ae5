"""The device that stands for a GPU: it refuses what CUDA refuses, and counts what makes the host wait for CUDA."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvtailor.ledger import storage_bytes
from tests.support.other_device import syncs
from tests.support.other_device.backend import move_model, register
from tests.support.other_device.syncs import count_syncs
from tests.support.seam.zoo import build, prompts

ONE, OTHER = "gpu:0", "gpu:1"


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    register()


def made(device: str = ONE) -> Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


MIXED: dict[str, Callable[[], object]] = {
    "an operand": lambda: made() + torch.ones(3),
    "a factory without device": lambda: made()[0] + torch.arange(3),
    "another index": lambda: made() + made(OTHER),
    "a matrix product": lambda: made() @ torch.ones(3, 2),
    "a tensor of a list": lambda: torch.cat([made(), torch.ones(2, 3)]),
    "a number in a list": lambda: torch.stack([made().sum(), torch.tensor(1.0)]),
    "an index of gather": lambda: made().gather(1, torch.zeros(2, 1, dtype=torch.long)),
    "an index of index_select": lambda: made().index_select(0, torch.tensor([0])),
    "an index of another device": lambda: made()[torch.zeros(1, dtype=torch.long, device=OTHER)],
    "an index on the device of a tensor of the CPU": lambda: torch.ones(4)[
        torch.zeros(1, dtype=torch.long, device=ONE)
    ],
    "a mask": lambda: made().masked_fill(torch.ones(2, 3, dtype=torch.bool), 0.0),
    "a condition": lambda: torch.where(torch.ones(3, dtype=torch.bool), made(), made()),
    "what is written": lambda: torch.ones(2, 3).add_(made()),
    "a number that is written": lambda: torch.tensor(1.0).add_(made().sum()),
    "out": lambda: torch.add(made(), made(), out=torch.empty(2, 3)),
    "values to write": lambda: made().index_put_((torch.tensor([0]),), torch.ones(1, 3)),
    "scattered values": lambda: made().scatter_(1, torch.zeros(2, 1, dtype=torch.long, device=ONE), torch.ones(2, 1)),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(made(), torch.ones(2, 3), made()),
    "an embedding": lambda: torch.nn.functional.embedding(torch.tensor([1]), made()),
    "equal": lambda: torch.equal(made(), torch.ones(2, 3)),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED.keys())
def test_two_devices_never_meet(mix: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"at least two devices, .*gpu:\d.* was given .*\("):
        mix()


def test_the_refusal_has_devices_and_shapes() -> None:
    with pytest.raises(RuntimeError, match=r"cpu and gpu:1: aten.mul.Tensor was given gpu:1 \(2, 3\), cpu \(3,\)"):
        made(OTHER) * torch.ones(3)


def test_numbers_of_the_cpu_are_operands_and_its_indices_index() -> None:
    number, x = torch.tensor(2.0), made()
    assert torch.equal((x + number).cpu(), torch.arange(6.0).view(2, 3) + 2)
    assert torch.where(x > 1, x, number).device == x.device
    assert x.masked_fill(x > 1, number).device == x.device
    with count_syncs() as found:
        assert x[torch.tensor([1, 0])][:, 0].tolist() == [3.0, 0.0]
        x[torch.tensor([1])] = 7.0
    assert found.by_kind == {syncs.FROM_HOST: 2, syncs.TO_HOST: 1}


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'gpu:0' device type for generator but found 'cpu'"):
        torch.randn(3, device=ONE, generator=torch.Generator())
    torch.manual_seed(3)
    found = torch.rand(4, device=ONE)
    torch.manual_seed(3)
    assert torch.equal(found.cpu(), torch.rand(4))


FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "full": lambda device: torch.full((2,), 3, device=device),
    "arange": lambda device: torch.arange(2, 9, 3, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "tensor": lambda device: torch.tensor([[1, 2]], device=device),
    "as_tensor": lambda device: torch.as_tensor([1.0], device=device),
    "scalar": lambda device: torch.tensor(3, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(3), device=device),
    "new_ones": lambda device: torch.empty(0).new_ones(3, device=device),
    "a default": lambda device: _under(device),
}


def _under(device: str) -> Tensor:
    with torch.device(device):
        return torch.ones(3)


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())
@pytest.mark.parametrize("device", [ONE, OTHER])
def test_factories(make: Callable[[str], Tensor], device: str) -> None:
    found = make(device)
    assert str(found.device) == device
    assert torch.equal(found.cpu(), make("cpu"))
    assert str(torch.zeros_like(found, device="cpu").device) == "cpu"
    assert torch.zeros_like(found).device == found.device == found.new_empty(2).device


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "resize_": lambda x: x.resize_(1, 4),
    "resize_ to more": lambda x: x.resize_(40, 4).zero_(),
    "as_strided_": lambda x: x.as_strided_((2,), (1,), 2),
    "out= of another shape": lambda x: torch.arange(4.0, device=x.device, out=x.resize_(0)),
    "out= of an empty one": lambda x: torch.cat([x.clone(), x.clone()], out=x.resize_(0)),
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(x.flip(0).clone()),
    "a slice": lambda x: x[:, 1:].fill_(9.0),
    "an item": lambda x: x.__setitem__((0, slice(1, None)), 5.0),
    "a mask": lambda x: x.__setitem__(x > 2, 5.0),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 2, x.clone()),
    "out= of a sort": lambda x: torch.sort(x, out=(x.clone(), torch.empty(0, dtype=torch.long, device=x.device)))[0],
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE.keys())
@pytest.mark.parametrize("inference", [False, True])
def test_what_changes_in_place(change: Callable[[Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference):
        ours, expected = made(), made("cpu")
        view = ours[0]
        change(ours), change(expected)
        assert ours.shape == expected.shape and ours.stride() == expected.stride()
        assert ours.storage_offset() == expected.storage_offset()
        assert torch.equal(ours.cpu(), expected)
        ours.fill_(3.0)
        assert view.shape == (3,)


def test_views_share_what_is_written_and_are_charged_once() -> None:
    base = torch.zeros(4, 5, device=ONE)
    view = base[1:3].t()
    view[0] = 7.0
    assert base[:, 0].tolist() == [0.0, 7.0, 7.0, 0.0]
    base.add_(1)
    assert view[0].tolist() == [8.0, 8.0]
    assert storage_bytes([base, view]) == 80 and storage_bytes([view]) == 80
    assert storage_bytes([base, base.clone()]) == 160
    with torch.inference_mode():
        assert storage_bytes([torch.zeros(3, device=ONE), torch.zeros(3, device=OTHER)]) == 24


def test_views_in_inference_mode_of_what_was_made_outside() -> None:
    base = made()
    with torch.inference_mode():
        view = base[1]
        view.add_(1)
        first, second = base.t().split([1, 2])
    assert base[1].tolist() == [4.0, 5.0, 6.0] and first.tolist() == [[0.0, 4.0]] and second.shape == (2, 2)
    assert not view.is_inference()


def test_copies_of_a_tensor_keep_its_device(tmp_path) -> None:
    weight = torch.nn.Parameter(made(OTHER))
    weight.note = "kept"
    again, shared = copy.deepcopy((weight, weight.data[0]))
    assert isinstance(again, torch.nn.Parameter) and again.requires_grad and str(again.device) == OTHER
    assert again.note == "kept"
    with torch.no_grad():
        again.zero_()
    assert shared.tolist() == [0.0] * 3 and weight.tolist() == made().tolist()
    save_file({"x": weight.detach().cpu()}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], made("cpu"))
    assert made().numpy(force=True).tolist() == made("cpu").tolist()
    with pytest.raises(TypeError, match="can't convert gpu:0 device type tensor to numpy"):
        made().numpy()


WAITS: dict[str, tuple[Callable[[Tensor], object], dict[str, int]]] = {
    "item": (lambda x: x.sum().item(), {syncs.ITEM: 1}),
    "bool": (lambda x: bool((x > 0).any()), {syncs.ITEM: 1}),
    "if": (lambda x: 1 if x.sum() > 0 else 0, {syncs.ITEM: 1}),
    "int and float": (lambda x: int(x.sum()) + float(x[0, 0]), {syncs.ITEM: 2}),
    "a range": (lambda x: range(int(x.long().sum())), {syncs.ITEM: 1}),
    "a slice": (lambda x: x[: x.long()[0, 1]], {syncs.ITEM: 1}),
    "equal": (lambda x: torch.equal(x, x), {syncs.EQUAL: 1}),
    "allclose": (lambda x: torch.allclose(x, x), {syncs.ITEM: 1}),
    "nonzero": (lambda x: x.nonzero(), {syncs.SIZE: 1}),
    "unique": (lambda x: x.unique(), {syncs.SIZE: 1}),
    "a mask as an index": (lambda x: x[x > 1], {syncs.SIZE: 1}),
    "masked_select": (lambda x: x.masked_select(x > 1), {syncs.SIZE: 1}),
    "what is written through a mask": (lambda x: x.__setitem__(x > 9, x[0, :0]), {syncs.SIZE: 1}),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.new_ones(3).long(), 1), {syncs.SIZE: 1}),
    "to the host": (lambda x: x.to("cpu"), {syncs.TO_HOST: 1}),
    "tolist": (lambda x: x.tolist(), {syncs.TO_HOST: 1}),
    "numpy": (lambda x: x.numpy(force=True), {syncs.TO_HOST: 1}),
    "copy_ into the host's": (lambda x: torch.empty(2, 3).copy_(x), {syncs.TO_HOST: 1}),
    "from the host": (lambda x: torch.ones(2).to(x.device), {syncs.FROM_HOST: 1}),
    "copy_ of the host's": (lambda x: x.copy_(torch.ones(2, 3)), {syncs.FROM_HOST: 1}),
    "one number": (lambda x: x.__setitem__((0, 1), 2.0), {syncs.FROM_HOST: 1}),
    "torch.tensor": (lambda x: torch.tensor([1, 2], device=x.device), {syncs.FROM_HOST: 1}),
    "between devices": (lambda x: x.to(OTHER), {syncs.BETWEEN: 1}),
    "eigenvalues": (lambda x: torch.linalg.eigh(x @ x.T), {syncs.CHECK: 1}),
}
NEVER: dict[str, Callable[[Tensor], object]] = {
    "a copy that is not waited for": lambda x: x.copy_(torch.ones(2, 3), non_blocking=True),
    "one to another device": lambda x: torch.ones(2).to(x.device, non_blocking=True),
    "a number through a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "a number into a slice": lambda x: x.__setitem__(0, 2.0),
    "repeat_interleave by a number": lambda x: x.repeat_interleave(3, 1),
    "repeat_interleave of a known size": lambda x: x.repeat_interleave(x.new_ones(3).long(), 1, output_size=3),
    "shapes": lambda x: (len(x), x.shape, x.numel(), list(x)),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(),
    "factories": lambda x: (torch.arange(3, device=x.device), x.new_zeros(3), torch.full((2,), 1.0, device=x.device)),
    "the same device": lambda x: x.to(x.device),
    "another dtype": lambda x: x.half().float(),
    "the CPU alone": lambda x: (torch.ones(3).sum().item(), torch.ones(3).nonzero().tolist()),
}


@pytest.mark.parametrize(("wait", "expected"), WAITS.values(), ids=WAITS.keys())
@pytest.mark.parametrize("inference", [False, True])
def test_every_wait_is_counted_once(
    wait: Callable[[Tensor], object], expected: dict[str, int], inference: bool
) -> None:
    with torch.inference_mode(inference):
        x = made()
        with count_syncs() as found:
            wait(x)
    assert found.by_kind == expected, found.table()
    assert found.total == sum(count for kind, count in expected.items() if kind != syncs.BETWEEN)
    assert all(place.startswith("(other_device/test_device.py:") for place in found.by_place)


@pytest.mark.parametrize("work", NEVER.values(), ids=NEVER.keys())
def test_what_waits_for_nothing(work: Callable[[Tensor], object]) -> None:
    x = made()
    with count_syncs() as found:
        work(x)
    assert found.total == 0, found.table()


def test_a_wrong_piece_of_code_is_caught_in_its_line() -> None:
    """A tensor without device, and a number read in a loop, inside kvtailor's own code."""
    import kvtailor.ops.lanes.topk as topk

    source = "def positions(scores, torch):\n    return scores + torch.arange(scores.shape[-1])\n\n\n" + (
        "def total(scores):\n    return sum(scores[i].item() for i in range(len(scores)))\n"
    )
    scope: dict[str, Callable[..., object]] = {}
    exec(compile(source, topk.__file__, "exec"), scope)
    scores = torch.ones(5, device=ONE)
    with pytest.raises(RuntimeError, match=r"aten.add.Tensor was given gpu:0 \(5,\), cpu \(5,\)"):
        scope["positions"](scores, torch)
    with count_syncs() as found:
        scope["total"](scores)
    assert found.found == {(syncs.ITEM, "ops/lanes/topk.py:6 <genexpr>"): 5} and found.ours() == 5


def test_models_move_whole_and_stay_tied() -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    ids, mask = prompts((20, 13))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    move_model(model, OTHER)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {str(each.device) for each in (*model.parameters(), *model.buffers())} == {OTHER} == {str(model.device)}
    with torch.no_grad():
        assert torch.equal(model(ids.to(OTHER), attention_mask=mask.to(OTHER)).logits.cpu(), expected)
        with pytest.raises(RuntimeError, match="at least two devices, cpu and gpu:1"):
            model(ids, attention_mask=mask)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 2}, {"do_sample": True, "top_k": 5}], ids=str)
def test_generate_of_transformers(options: dict) -> None:
    ids, mask = prompts((20, 13))
    found = []
    for device in ("cpu", ONE):
        model = move_model(build("gpt_neox"), device)
        torch.manual_seed(3)
        given = {"attention_mask": mask.to(device), "max_new_tokens": 5, **options}
        found.append(model.generate(ids.to(device), **given))
    assert str(found[1].device) == ONE and torch.equal(found[0], found[1].cpu())


@pytest.mark.long
def test_gradients() -> None:
    """In a process of its own: torch's autograd serves the devices that exist when it first runs in a process."""
    script = (
        "import torch\n"
        "from torch.nn.functional import scaled_dot_product_attention, softmax\n"
        "from tests.support.other_device.backend import register\n"
        "register()\n"
        "found = []\n"
        "for device in ('gpu:0', 'cpu'):\n"
        "    weight = torch.nn.Parameter(torch.arange(6.0, device=device).view(2, 3) / 7)\n"
        "    seen = scaled_dot_product_attention(weight[None], weight[None], weight[None])\n"
        "    (softmax(weight @ weight.T, -1).square().sum() + seen.square().sum()).backward()\n"
        "    found.append(weight.grad.cpu())\n"
        "assert found[1].abs().min() > 0 and torch.allclose(*found), found\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.long
def test_a_plan_that_takes_gradients() -> None:
    """In a process of its own, likewise: the same tokens stay as on the CPU."""
    script = (
        "import torch, kvtailor\n"
        "from tests.support.other_device.backend import move_model, register\n"
        "from tests.support.seam.zoo import build, held_columns, prompts\n"
        "register()\n"
        "found = []\n"
        "for device in ('gpu:0', 'cpu'):\n"
        "    ids, mask = (each.to(device) for each in prompts((70, 41)))\n"
        "    model = move_model(build('llama'), device)\n"
        "    cache = kvtailor.prefill(model, ids, mask, plan='kvgrad(chunk=17) + pooled @ tokens=20')\n"
        "    found.append(held_columns(cache))\n"
        "assert all(torch.equal(each.cpu(), found[1][layer]) for layer, each in found[0].items())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def test_two_threads_are_counted_and_counts_nest() -> None:
    x = made()
    with count_syncs() as outer:
        thread = threading.Thread(target=lambda: x.sum().item())
        thread.start()
        thread.join()
        with count_syncs() as inner:
            x.tolist()
    x.tolist()
    assert outer.by_kind == {syncs.ITEM: 1, syncs.TO_HOST: 1} and inner.by_kind == {syncs.TO_HOST: 1}
