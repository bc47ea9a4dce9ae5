"""The fast forms against attention by its definition, on fresh random data with NaN where nothing may be read."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.attention import lanes, prompt
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.attention.folded import folded, merge, suits
from kvtailor.ops.attention.lanes import Lanes, joint
from kvtailor.ops.attention.prompt import causal, masked, query_blocks, with_mass
from kvtailor.types import Softmax

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
every_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=lambda x: str(x))


def prompt_of(t: int, n: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query (2, 6, t, 20), keys and values of 3 heads over n slots cut from a poisoned buffer, and the causal mask."""
    query = states((2, 6, t, 20), seed, dtype)
    buffer = torch.full((2, 2, 3, n + 7, 20), float("nan"), dtype=dtype)
    buffer[:, :, :, :n] = states((2, 2, 3, n, 20), seed + 1, dtype)
    mask = torch.ones(t, n, dtype=torch.bool).tril(n - t)[None, None]
    return query, buffer[0][:, :, :n], buffer[1][:, :, :n], mask


def test_the_reference_is_the_definition() -> None:
    query, keys, values, mask = prompt_of(3, 5, torch.float64, 2)
    out, lse, weights = reference(query, keys, values, mask, 0.3)
    for row, head, t in ((0, 0, 0), (1, 4, 2), (0, 5, 1)):
        logits = [
            0.3 * sum(float(a * b) for a, b in zip(query[row, head, t], keys[row, head // 2, n], strict=True))
            for n in range(3 + t)
        ]
        total = sum(torch.tensor(logits).double().exp().tolist())
        shares = [float(torch.tensor(x).double().exp()) / total for x in logits]
        expected = sum(share * values[row, head // 2, n] for n, share in enumerate(shares))
        assert torch.allclose(out[row, head, t], expected)
        assert abs(float(lse[row, head, t]) - float(torch.tensor(total).log())) < 1e-6
        assert torch.allclose(weights[row, head // 2, head % 2, t, : 3 + t], torch.tensor(shares).double(), atol=1e-6)
        assert bool((weights[row, head // 2, head % 2, t, 3 + t :] == 0).all())


def test_the_reference_gives_zeros_where_nothing_is_seen() -> None:
    query, keys, values, _ = prompt_of(3, 5, torch.float32)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    out, lse, weights = reference(query, keys, values, mask[None, None], 0.3)
    assert bool((out[:, :, 1] == 0).all() and (lse[:, :, 1] == -torch.inf).all() and (weights[..., 1, :] == 0).all())


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0])


@every_dtype
@pytest.mark.parametrize(("t", "n"), [(1, 1), (2, 2), (63, 63), (17, 80), (63, 64), (300, 301)])
@pytest.mark.parametrize(
    "softmax", [Softmax(), Softmax(sinks=SINKS), Softmax(softcap=2.0, sinks=SINKS)], ids=["plain", "sinks", "capped"]
)
def test_causal(t: int, n: int, softmax: Softmax, dtype: torch.dtype, tolerance: float) -> None:
    """A prompt, and a chunk behind what is held, whose older slots weigh more than its own."""
    query, keys, values, mask = prompt_of(t, n, dtype, 3)
    keys[:, :, : n - t] *= 2
    out = causal(query, keys, values, 0.1, softmax)
    expected = reference(query, keys, values, mask, 0.1, softmax=softmax)[0]
    assert out.dtype == dtype
    assert torch.allclose(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_chunk_makes_no_mask() -> None:
    """Whose elements are as many as a chunk's queries times all that is held."""
    query, keys, values, _ = prompt_of(64, 4096, torch.float32, 7)
    with Watch(of=torch.bool) as watch:
        causal(query, keys, values, 0.04)
    assert watch.largest < 64 * 64


@every_dtype
@pytest.mark.parametrize(("t", "n"), [(1, 1), (63, 63), (17, 80), (300, 301)])
def test_masked(t: int, n: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_BLOCK", 16 * 2 * n)
    query, keys, values, mask = prompt_of(t, n, dtype, 4)
    mask = mask[0].expand(2, t, n).clone()
    mask[1, :, : n // 2] = False
    mask[1, 0] = False
    out = masked(query, keys, values, 0.04, lambda first, end: mask[:, first:end])
    expected = reference(query, keys, values, mask[:, None], 0.04)[0]
    assert torch.allclose(out.float(), expected, atol=tolerance, rtol=tolerance)
    assert bool((out[1, :, 0] == 0).all())


@every_dtype
@pytest.mark.parametrize(("t", "n"), [(1, 1), (63, 63), (17, 80), (200, 201)])
@pytest.mark.parametrize(
    ("form", "custom"), [("auto", False), ("reference", False), ("auto", True)], ids=["causal", "plain", "custom"]
)
def test_with_mass(
    t: int, n: int, form: str, custom: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt, "_BLOCK", 16 * 2 * n)
    query, keys, values, mask = prompt_of(t, n, dtype, 5)
    mask = mask.expand(2, 3, t, n).clone()
    if custom:
        mask[1, :, :, : n // 2] = False
        mask[1, 2, 0] = False
        mask[0, 1] &= torch.rand(t, n, generator=torch.Generator().manual_seed(6)) < 0.7
    weight = torch.ones(2, t)
    weight[1, : t // 3] = 0
    sees = (lambda row, first, end: mask[row, :, first:end]) if custom else None
    with dispatch.using(form):
        out, mass = with_mass(query, keys, values, 0.04, weight, sees)
    expected, _, weights = reference(query, keys, values, mask, 0.04)
    assert torch.allclose(out.float(), expected, atol=tolerance, rtol=tolerance)
    summed = torch.einsum("bhgtn,bt->bhn", weights, weight)
    # Logits and sums are float32 in every dtype, so the mass is as exact as in float32.
    assert mass.dtype == torch.float32 and torch.allclose(mass, summed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("custom", [False, True], ids=["causal", "custom"])
def test_long_prompts_hold_no_square_matrix(custom: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that any form makes grows with t, not with its square."""
    largest: dict[int, int] = {}
    monkeypatch.setattr(prompt, "_BLOCK", 1 << 14)
    for t in (256, 512):
        query, keys, values, _ = prompt_of(t, t, torch.float32, 7)

        def sees(first: int, end: int, t: int = t) -> Tensor:
            return torch.ones(t, t, dtype=torch.bool).tril()[None, first:end]

        rule = (lambda row, first, end: sees(first, end)) if custom else None
        with Watch() as watch:
            with_mass(query, keys, values, 0.04, torch.ones(2, t), rule)
        largest[t] = watch.largest
    assert largest[512] <= 2 * largest[256]


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation gave, of floats or of the type `of`."""

    def __init__(self, of: torch.dtype | None = None) -> None:
        super().__init__()
        self.of, self.largest = of, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and (tensor.dtype == self.of if self.of else tensor.is_floating_point()):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@every_dtype
@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (2, 3), (3, 17)], ids=str)
@pytest.mark.parametrize("owned", [False, True], ids=["even", "owned"])
def test_joint(
    rows: tuple[int, int], owned: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes of an owner, several parts and pieces of the widening scratch meet without a seam."""
    monkeypatch.setattr(lanes, "_SCRATCH", 20 * 11)
    group, t = rows
    query = states((6, group, t, 20), 8, dtype)
    parts, keys, values, seen = [], [], [], []
    for i, slots in enumerate((40, 9)):
        owner = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 5]) if owned and i == 0 else None
        count = 6 if owner is None else owner.shape[0]
        k, v = states((count, slots, 20), 9 + i, dtype), states((count, slots, 20), 19 + i, dtype)
        visible = torch.rand((count, t, slots), generator=torch.Generator().manual_seed(i)) < 0.8
        visible[0] = False
        parts.append(Lanes(keys=k, values=v, owner=owner, visible=visible))
        of = torch.arange(6) if owner is None else owner
        keys.append([k[of == n].flatten(0, 1) for n in range(6)])
        values.append([v[of == n].flatten(0, 1) for n in range(6)])
        seen.append([visible[of == n].transpose(0, 1).flatten(1) for n in range(6)])
    weight = torch.rand((6, t), generator=torch.Generator().manual_seed(5))
    out, lse, mass = joint(query, parts, 0.04, weight=weight)
    assert mass is not None
    assert out.dtype == lse.dtype == torch.float32
    for n in range(6):
        mask = torch.cat([seen[i][n] for i in (0, 1)], 1)[None, None]
        k, v = (torch.cat([x[i][n] for i in (0, 1)])[None, None] for x in (keys, values))
        expected, sums, weights = reference(query[n][None], k, v, mask, 0.04)
        assert torch.allclose(out[n], expected[0], atol=tolerance, rtol=tolerance)
        assert torch.allclose(lse[n], sums[0], atol=1e-4)
        of = parts[0].owner if parts[0].owner is not None else torch.arange(6)
        found = torch.cat([mass[0][of == n].flatten(), mass[1][n]])
        assert torch.allclose(found, torch.einsum("gts,t->s", weights[0, 0], weight[n]), atol=1e-5)


@pytest.mark.parametrize("owned", [False, True], ids=["even", "owned"])
def test_folded_is_joint(owned: bool) -> None:
    query = states((6, 4, 1, 20), 1, torch.bfloat16)
    owner = torch.tensor([0, 1, 1, 2, 3, 4, 5])
    visible = torch.rand((6, 1, 40), generator=torch.Generator().manual_seed(3)) < 0.5
    visible[2] = False
    parts = [
        Lanes(
            keys=states((6, 40, 20), 2, torch.bfloat16), values=states((6, 40, 20), 3, torch.bfloat16), visible=visible
        )
    ]
    parts.append(Lanes(keys=states((6, 9, 20), 4, torch.bfloat16), values=states((6, 9, 20), 5, torch.bfloat16)))
    if owned:
        pages = states((7, 8, 20), 6, torch.bfloat16)
        parts.append(Lanes(keys=pages, values=pages, owner=owner))
    assert suits(query, parts[0])
    out, lse = folded(query, parts, 0.04)
    expected, sums, _ = joint(query, parts, 0.04)
    assert torch.allclose(out.float(), expected, atol=2e-2, rtol=2e-2) and torch.allclose(lse, sums, atol=1e-2)
    alone, empty = folded(query, parts[:1], 0.04)
    assert bool((alone[2] == 0).all() and (empty[2] == -torch.inf).all())


def test_merge_of_halves_is_the_whole() -> None:
    query, keys, values, mask = prompt_of(5, 12, torch.float32, 9)
    mask = mask.clone()
    mask[..., 2, :] = False
    mask[..., 3, :6] = False
    whole = reference(query, keys, values, mask, 0.04)
    halves = [
        reference(query, keys[:, :, s], values[:, :, s], mask[..., s], 0.04)[:2] for s in (slice(0, 6), slice(6, 12))
    ]
    out, lse = merge(halves)
    assert torch.allclose(out, whole[0], atol=1e-6) and torch.equal(lse == -torch.inf, whole[1] == -torch.inf)
    assert torch.allclose(lse.nan_to_num(neginf=0), whole[1].nan_to_num(neginf=0), atol=1e-6)


def test_query_blocks_cover_every_query_once() -> None:
    for count, width in ((1, 1), (63, 100), (8192, 4096), (5, 1 << 30)):
        covered = [t for first, end in query_blocks(count, width, most=256) for t in range(first, end)]
        assert covered == list(range(count))
        assert all(
            (end - first) * width <= prompt._BLOCK or end - first == 1
            for first, end in query_blocks(count, width, most=256)
        )


@pytest.mark.parametrize("sizes", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_prompt_of_keys_and_values_of_unequal_sizes_is_read_by_the_fused_kernel(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Whose scratch does not grow with the square of the prompt, as that of torch's other form does."""
    d, dv = sizes
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, h, 80, c, generator=generator).to(dtype) for h, c in ((6, d), (3, d), (3, dv))
    )
    with torch.profiler.profile() as seen:
        found = causal(query, keys, values, 0.3)
    names = {event.key for event in seen.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    mask = torch.ones(80, 80, dtype=torch.bool).tril()
    due = reference(query.double(), keys.double(), values.double(), mask, 0.3)[0]
    assert found.shape == (2, 6, 80, dv) and found.dtype == dtype
    assert (found.double() - due).abs().max() < 16 * torch.finfo(dtype).eps
