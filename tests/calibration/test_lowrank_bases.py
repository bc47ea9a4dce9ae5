"""The calibrator of low rank: moments are those of the states that the model makes, weights those of its gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.support.calibrated import tiny
from tests.support.seam.zoo import build

import kvtailor
from kvtailor.calibration.lowrank import squared_gradients
from kvtailor.calibration.passages import cut
from kvtailor.hf.model.modules import attention_modules
from kvtailor.ops.codes.subspace import StateMoments

TEXT = "A quick brown fox jumps over the lazy dog, and then over another one; the dogs sleep on. " * 12


def projected(subject, name: str, passages) -> list[torch.Tensor]:
    """What a projection of each layer gives, over all tokens (n, h * c), from hooks."""
    found: dict[int, list[torch.Tensor]] = {}
    modules = attention_modules(subject.model)
    hooks = [
        getattr(module, name).register_forward_hook(
            lambda _, __, out, layer=layer: found.setdefault(layer, []).append(out[0].double())
        )
        for layer, module in enumerate(modules)
    ]
    with torch.no_grad():
        for passage in passages:
            subject.model(passage.ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(found[layer]) for layer in sorted(found)]


def test_moments_are_those_of_the_projections(tmp_path) -> None:
    subject = tiny("llama")
    passages = cut(subject, {"a": TEXT}, tokens=240, context=60)
    wanted = {
        name: projected(subject, layer, passages) for name, layer in (("unrotated", "k_proj"), ("values", "v_proj"))
    }
    made = kvtailor.calibrate(subject, "lowrank", {"a": TEXT}, out=tmp_path / "m.safetensors", tokens=240, context=60)
    assert made.tensors["keys_mean"].shape == (3, 2, 16)
    assert made.tensors["keys_correlation"].shape == (3, 32 * 31 // 2)
    for name, layers in wanted.items():
        for layer, states in enumerate(layers):
            parts = {part: made.tensors[f"{name}_{part}"][layer] for part in ("mean", "deviation", "correlation")}
            exact = torch.cov(states.mT, correction=0)
            scale = exact.diagonal().sqrt()
            assert torch.allclose(parts["mean"].double().flatten(), states.mean(0), atol=2e-3, rtol=2e-3)
            assert ((StateMoments(**parts).covariance() - exact).abs() <= 6e-3 * scale[:, None] * scale).all()
    turned = made.tensors["keys_deviation"].double().square() + made.tensors["keys_mean"].double().square()
    back = made.tensors["unrotated_deviation"].double().square() + made.tensors["unrotated_mean"].double().square()
    assert torch.allclose(turned.sum(-1), back.sum(-1), rtol=1e-2), "a rotation keeps the energy of a head"
    assert made.facts["rotary"] and not torch.allclose(turned, back, rtol=1e-2)
    assert all(0.5 < share < 1 for share in made.facts["values_energy_of_half_by_layer"])


def test_weights_are_mean_squared_gradients() -> None:
    subject = tiny("llama")
    passages = cut(subject, {"a": TEXT}, tokens=80, context=40)
    modules = attention_modules(subject.model)
    before = [each.requires_grad for each in subject.model.parameters()]
    steps: list[str] = []
    with torch.inference_mode():
        found = squared_gradients(subject.model, modules, passages, steps.append)
    assert [each.requires_grad for each in subject.model.parameters()] == before and len(steps) == 2
    assert all(each.grad is None for each in subject.model.parameters())
    expected = {"keys": torch.zeros(3, dtype=torch.float64), "values": torch.zeros(3, dtype=torch.float64)}
    for passage in passages:
        ids = passage.ids[None]
        subject.model.zero_grad()
        logits = subject.model(ids, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        for layer, module in enumerate(modules):
            for side, projection in (("keys", module.k_proj), ("values", module.v_proj)):
                expected[side][layer] += projection.weight.grad.double().square().mean() / 2
    for side, squares in expected.items():
        assert torch.allclose(found[side], squares, rtol=1e-4) and bool((squares > 0).all())


def test_gradients_are_taken_over_16_passages_at_most(tmp_path) -> None:
    """They are spread over the texts, and as many steps come as were announced."""
    announced, steps = [], []

    def progress(units: int):
        announced.append(units)
        return nullcontext(steps.append)

    out = tmp_path / "m.safetensors"
    kvtailor.calibrate(tiny("llama"), "lowrank", {"a": TEXT}, out=out, tokens=20 * 12, context=12, progress=progress)
    assert announced == [36] and steps == ["states"] * 20 + ["gradients"] * 16


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_one_weight_for_all_three_has_no_weights_to_tell(family: str, tmp_path) -> None:
    subject = tiny(family)
    made = kvtailor.calibrate(subject, "lowrank", {"a": TEXT}, out=tmp_path / "m.safetensors", tokens=80, context=40)
    assert torch.equal(made.tensors["fisher_keys"], torch.ones(3)) and made.facts["rotary"] == (family != "gpt2")
    same = torch.equal(made.tensors["keys_correlation"], made.tensors["unrotated_correlation"])
    assert same == (family == "gpt2")
    cache = kvtailor.cache_for(build(family), f"lowrank(heads=0, file='{tmp_path / 'm.safetensors'}')")
    assert cache.calibrations[0].hash == made.hash
