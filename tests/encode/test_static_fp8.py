"""8-bit floats with calibrated scales: their grid, what lies above it, and whose scale a head has."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.contract import CodecContext
from kvtailor.encode.static_fp8 import StaticFp8
from kvtailor.types import HeadShare, Layout

KEYS = torch.tensor([[0.02, 0.5, 0.125], [0.01, 0.04, 0.03]])
VALUES = torch.tensor([[0.5, 0.25, 0.02], [0.02, 0.01, 0.06]])


class LastOfThree(HeadShare):
    """The third of three processes that share a model's heads."""

    rank = 2
    ranks = 3


def on_layer(layer: int, heads: int = 3, share: HeadShare | None = None, **options: object) -> StaticFp8:
    calibration = {"key_scale": KEYS, "value_scale": VALUES}
    more = {} if share is None else {"share": share}
    context = CodecContext(layer=layer, layers=2, heads=heads, calibration=calibration, **more)
    return StaticFp8(**options).for_layer(context)


def nearest(x: torch.Tensor, scale: float) -> torch.Tensor:
    """By the definition: of all numbers of e4m3 times the scale the nearest, the largest for what lies above."""
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()].sort().values * scale
    return grid[(x.double().flatten()[:, None] - grid).abs().argmin(1)].view(x.shape)


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("layer", [0, 1])
def test_each_number_is_the_nearest_of_its_head_s_or_layer_s_grid(layer: int, per: str) -> None:
    given = [states((6, 40, 16), seed) * 6 for seed in (1, 2)]
    found = on_layer(layer, per=per).encode(Layout(rows=2, heads=3, size=40, start=0), *given).decode()
    for scales, x, y in zip((KEYS[layer], VALUES[layer]), given, found, strict=True):
        for lane in range(6):
            scale = float(scales.max() if per == "tensor" else scales[lane % 3])
            expected = nearest(x[lane], scale)
            # Halfway between two numbers both are nearest.
            off = (y[lane].double() - x[lane].double()).abs() - (expected - x[lane].double()).abs()
            assert off.max() <= 1e-6 * scale * 448
            assert y[lane].abs().max() <= 448 * scale * (1 + 1e-6)


def test_a_process_that_holds_some_heads_takes_their_scales_and_the_layer_s_largest() -> None:
    x = states((1, 8, 16), 3)
    layout = Layout(rows=1, heads=1, size=8, start=0)
    for per in ("head", "tensor"):
        own = on_layer(1, heads=1, share=LastOfThree(), per=per).encode(layout, x, x)
        scale = 0.03 if per == "head" else 0.04
        assert torch.allclose(own.keys.scale, torch.tensor(scale)), per


def test_one_scale_needs_no_calibration_and_is_that_of_every_layer() -> None:
    x = states((3, 8, 16), 4)
    segment = StaticFp8(scale=1.0).encode(Layout(rows=1, heads=3, size=8, start=0), x, x)
    assert torch.equal(segment.decode()[0], x.to(torch.float8_e4m3fn).float())
    assert not StaticFp8(scale=1.0).wants_calibration and StaticFp8().wants_calibration


def test_a_scale_that_is_nothing_in_the_cache_s_dtype_is_the_least_one() -> None:
    x = states((1, 4, 8), 5, torch.float16) * 1e-4
    decoded = StaticFp8(scale=1e-30).encode(Layout(rows=1, heads=1, size=4, start=0), x, x).decode()[0]
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "above 0, found 0.0"),
        ({"scale": float("inf")}, "above 0, found inf"),
        ({"per": "row"}, "tensor or head, found 'row'"),
        ({"recent": -1}, "recent must be"),
    ],
)
def test_bad_arguments_say_what_to_write(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticFp8(**options)


def test_without_a_calibration_nothing_is_encoded() -> None:
    x = states((1, 4, 8), 6)
    for codec in (StaticFp8(), StaticFp8().for_layer(CodecContext(layer=0, layers=2))):
        with pytest.raises(ValueError, match="no calibration was given"):
            codec.encode(Layout(rows=1, heads=1, size=4, start=0), x, x)
