"""Kvtc: bits that no others beat, codes as a plain loop makes them, and what a basis that was measured is worth."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.calibrated import tiny, write_file
from tests.support.seam.zoo import build
from tests.support.segments_of import encoded
from torch import Tensor

import kvtailor
from kvtailor.calibration.passages import cut
from kvtailor.encode.contract import CodecContext
from kvtailor.encode.subspace.kvtc import Kvtc
from kvtailor.ops.codes.components import ComponentCodes, best_bits, part_distortions, principal_parts
from kvtailor.ops.codes.quant import packed_size
from kvtailor.types import Layout


def correlated(heads: int, tokens: int, size: int, seed: int) -> Tensor:
    """(h, n, c) of which few directions across heads have most of the variance, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(heads * size, heads * size, generator=torch.Generator().manual_seed(99))
    spread = torch.logspace(1, -2, heads * size)
    wide = (torch.randn(tokens, heads * size, generator=generator) * spread) @ torch.linalg.qr(mixing).Q.mT + 3
    return wide.unflatten(1, (heads, size)).transpose(0, 1).contiguous()


def measured(heads: int, size: int, group: int) -> dict[str, Tensor]:
    """A calibration of one layer, stacked."""
    states = correlated(heads, 2000, size, 5)
    wide = states.double().transpose(0, 1).flatten(1)
    parts = principal_parts(wide.mT @ wide, states.double().sum(1), wide.shape[0])
    each = {**parts, **part_distortions(states, parts, group)}
    return {f"{side}_{name}": part[None] for side in ("keys", "unrotated", "values") for name, part in each.items()}


def on_layer(codec: Kvtc, heads: int, size: int, *, evicts: bool = False) -> Kvtc:
    calibration = measured(heads, size, codec.group)
    return codec.for_layer(CodecContext(layer=0, layers=1, heads=heads, calibration=calibration, evicts=evicts))


@pytest.mark.parametrize(("size", "tokens"), [(24, 64), (19, 16), (7, 2)])
def test_no_other_bits_lose_less(size: int, tokens: int) -> None:
    """All 9^3 choices for three groups, under budgets from too small for anything to more than enough."""
    generator = torch.Generator().manual_seed(size)
    groups = -(-size // 8)
    for budget in (0.1, 0.7, 1.5, 2.3, 3.9, 6.0, 8.0):
        # Neither convex nor falling: what is measured need not be.
        errors = torch.rand(groups, 9, generator=generator).double()
        counts = [min(8, size - 8 * i) for i in range(groups)]

        def cost(bits: tuple[int, ...]) -> int:
            return sum(tokens * packed_size(n, b) + 4 * n for n, b in zip(counts, bits, strict=True) if b)  # noqa: B023

        def loss(bits: tuple[int, ...]) -> float:
            return sum(float(errors[i, b]) for i, b in enumerate(bits))  # noqa: B023

        allowed = [b for b in itertools.product(range(9), repeat=groups) if cost(b) <= budget * size * tokens / 8]
        found = best_bits(errors, size, tokens=tokens, budget=budget)
        assert found in allowed and loss(found) == pytest.approx(min(map(loss, allowed)), rel=1e-12)


@pytest.mark.parametrize("evicts", [False, True], ids=["together", "alone"])
def test_codes_are_those_of_a_plain_loop(evicts: bool) -> None:
    """3 heads of 11 channels, 63 tokens in runs of 16, two rows: project, round in steps of each run, turn back."""
    heads, size, group, tokens = 3, 11, 16, 63
    codec = on_layer(Kvtc(bits=3.0, group=group, block_size=64, recent=0), heads, size, evicts=evicts)
    keys, values = (torch.cat([correlated(heads, tokens, size, seed + row) for row in (0, 1)]) for seed in (1, 3))
    found = encoded(codec, Layout(rows=2, heads=heads, size=tokens, start=0), keys, values).decode()
    calibration = measured(heads, size, group)
    mean = calibration["keys_mean"][0].float()
    kind, joined = ("alone", 1) if evicts else ("together", heads)
    bits = best_bits(calibration[f"keys_{kind}_distortion"][0], joined * size, tokens=group, budget=3.0)
    assert 0 in bits and len(set(bits)) > (1 if evicts else 2), "the case is to have dropped groups, and several widths"
    for states, decoded in zip((keys, values), found, strict=True):
        for row, first in itertools.product(range(2), range(0, heads, joined)):
            lanes = [row * heads + first + i for i in range(joined)]
            wide = torch.cat([states[lane] for lane in lanes], 1).double()
            centre = mean[first : first + joined].flatten().double()
            directions = calibration[f"keys_{kind}_directions"][0].double().view(-1, joined * size, joined * size)
            directions = directions[0 if joined > 1 else first]
            back = centre.repeat(tokens, 1)
            for component in range(joined * size):
                width = bits[component // 8]
                along = (wide - centre) @ directions[:, component]
                for run in range(0, tokens, group) if width else ():
                    part = along[run : run + group]
                    step = (part.max() - part.min()) / (2**width - 1)
                    rounded = ((part - part.min()) / step).round() * step + part.min()
                    back[run : run + group] += rounded[:, None] * directions[:, component]
            expected = torch.stack(back.split(size, 1))
            assert torch.allclose(decoded[lanes].double(), expected, atol=2e-3), (decoded[lanes] - expected).abs().max()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 2), (torch.float32, 4)], ids=str)
def test_a_budget_is_kept_and_counted_to_the_byte(dtype: torch.dtype, scale: int) -> None:
    heads, size = 2, 32
    codec = on_layer(Kvtc(bits=3.0, key_bits=1.6, group=64), heads, size)
    states = correlated(heads, 128, size, 8).to(dtype)
    segment = encoded(codec, Layout(rows=1, heads=heads, size=128, start=0), states, states)
    inner = segment.inner  # type: ignore[attr-defined]
    for side, budget in ((inner.keys, 1.6), (inner.values, 3.0)):
        assert isinstance(side, ComponentCodes) and 0 < side.size < heads * size
        stored = sum(tensor.numel() * tensor.element_size() for tensor in side.tensors().values())
        codes = sum(packed_size(8, int(digit)) for digit in side.bits) * 128
        assert stored == codes + 2 * 2 * side.size * scale == side.closed_form_bytes(1, 128)
        # Steps and minima count 16 bits in the budget, whatever they take; no group could have had a bit more.
        assert (
            codes + 2 * 2 * side.size * 2 <= budget * heads * size * 128 / 8 < codes + 2 * 2 * side.size * 2 + 128 * 2
        )
    assert segment.closed_form_bytes() == codec.bytes_per_token(size, size, scale) * heads * 128


def test_measured_components_lose_less_than_random_ones_and_together_less_than_alone() -> None:
    heads, size = 2, 32
    states = correlated(heads, 512, size, 21)
    layout = Layout(rows=1, heads=heads, size=512, start=0)
    random = Kvtc(bits=2.0, basis="random").for_layer(CodecContext(layer=0, layers=1, heads=heads))
    errors = [
        float((encoded(codec, layout, states, states).decode()[0] - states).square().mean())
        for codec in (on_layer(Kvtc(bits=2.0), heads, size), on_layer(Kvtc(bits=2.0, heads=1), heads, size), random)
    ]
    assert 4 * errors[0] < 2 * errors[1] < errors[2]


def test_a_calibration_has_the_components_of_the_states_and_their_errors(tmp_path) -> None:
    """Against hooks on the projections, whose outputs are keys before the rotary embedding, and values."""
    subject, text = (
        tiny("llama"),
        "A quick brown fox jumps over the lazy dog, and then over another one; they sleep. " * 12,
    )
    states: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    attention = subject.model.model.layers[1].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, __, out, into=into: into.append(out[0].double()))
        for name, into in states.items()
    ]
    with torch.no_grad():
        for passage in cut(subject, {"a": text}, tokens=240, context=60):
            subject.model(passage.ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    made = kvtailor.calibrate(subject, "kvtc", {"a": text}, out=tmp_path / "m.safetensors", tokens=240, context=60)
    assert made.texts == ("a",) and made.facts["group"] == 64 and made.facts["rotary"]
    for name, side in (("k_proj", "unrotated"), ("v_proj", "values")):
        passages = states[name]
        wide = torch.cat(passages)
        variance, directions = (
            made.tensors[f"{side}_together_{part}"][1].double() for part in ("variance", "directions")
        )
        mean = made.tensors[f"{side}_mean"][1].double().flatten()
        assert torch.allclose(mean, wide.mean(0), atol=1e-4)
        assert torch.allclose(variance, torch.linalg.eigvalsh(torch.cov(wide.mT, correction=0)).flip(0), atol=1e-4)
        along = (wide - mean) @ directions
        assert torch.allclose(along.square().mean(0), variance, rtol=2e-2, atol=1e-4)
        errors = made.tensors[f"{side}_together_distortion"][1].double()
        assert torch.allclose(errors[:, 0], along.square().mean(0).view(-1, 8).sum(1), rtol=1e-3)
        squared = torch.zeros(len(errors), dtype=torch.float64)
        for passage in passages:
            part = (passage - mean) @ directions
            low, step = part.amin(0), (part.amax(0) - part.amin(0)) / 3
            rounded = ((part - low) / step).round() * step + low
            squared += (rounded - part).square().sum(0).view(-1, 8).sum(1)
        assert torch.allclose(errors[:, 2], squared / 240, rtol=1e-3)
        assert (errors[:, 1:-1] > errors[:, 2:]).all()


def test_a_file_says_the_bytes_beforehand_to_the_byte(tmp_path) -> None:
    heads, size, path = 4, 16, tmp_path / "k.safetensors"
    model = build("llama")
    tensors = Kvtc.example_calibration(
        layers=3, heads=2, group=2, size=size, generator=torch.Generator().manual_seed(1)
    )
    codec = Kvtc(file=write_file(path, "kvtc", tensors, model), bits=2.5)
    each = [
        codec.for_layer(CodecContext(layer=layer, layers=3, heads=2, calibration=tensors)).bytes_per_token(
            size, size, 2
        )
        for layer in range(3)
    ]
    assert codec.mean_bytes_per_token(3, size, size, 2, heads=2) == pytest.approx(sum(each) / 3, rel=1e-12)
    # For other heads the file says nothing, and the most that is allowed is told.
    assert codec.mean_bytes_per_token(3, size, size, 2, heads=heads) == 2.5 * 2 * size / 8 > max(each)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bits": 0.0}, "bits must be above 0 and at most 8, found 0.0"),
        ({"key_bits": 9.0}, "key_bits must be above 0 and at most 8"),
        ({"heads": 2}, "heads must be 0 .* or 1"),
        ({"group": 48}, "block_size must be a multiple of its group"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Kvtc(**arguments)


def test_a_budget_for_nothing_and_a_missing_calibration_are_named() -> None:
    states = correlated(2, 64, 16, 1)
    layout = Layout(rows=1, heads=2, size=64, start=0)
    with pytest.raises(ValueError, match="0.01 bits for each of 32 channels of keys are fewer than one group"):
        encoded(on_layer(Kvtc(bits=0.01), 2, 16), layout, states, states)
    with pytest.raises(ValueError, match="no calibration was given"):
        encoded(Kvtc(), layout, states, states)
