"""Column sums of a prompt's attention against the whole matrix in float64."""

from __future__ import annotations

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, error, needs_loops, needs_triton

from kvtailor.ops.attention.definition import reference
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole

pytestmark = [needs_triton, needs_loops]


@pytest.mark.parametrize(
    ("new", "slots", "dtype", "padded"),
    [(63, 63, torch.float32, True), (7, 70, torch.float16, False), (40, 130, torch.float16, True)],
)
def test_sums_of_columns(new: int, slots: int, dtype: torch.dtype, padded: bool) -> None:
    from kvtailor.ops.attention.triton.mass import column_mass

    generator = torch.Generator().manual_seed(slots)
    query, keys = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 3, new, 40), (2, 1, slots, 40)))
    weight = torch.rand((2, new), generator=generator)
    start = torch.tensor([0, slots // 2], dtype=torch.int32)
    sees = torch.arange(slots) <= torch.arange(new)[:, None] + slots - new
    sees = sees[None] & (torch.arange(slots) >= (start if padded else start * 0)[:, None])[:, None]
    logits = torch.einsum("bqtd,bhnd->bqtn", query.double(), keys.double()) * 0.2
    logits = logits.masked_fill(~sees[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    shares = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    wanted = torch.einsum("bqtn,bt->bn", shares, weight.double())[:, None]
    found = column_mass(
        query.to(DEVICE),
        keys.to(DEVICE),
        lse.float().to(DEVICE),
        0.2,
        weight=weight.to(DEVICE),
        start=start.to(DEVICE) if padded else None,
    )
    assert error(found, wanted) < 1e-5
    assert float(found.sum()) == pytest.approx(float(wanted.sum()), rel=1e-5)


@pytest.mark.parametrize("new", [63, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_prompt_or_its_next_piece_and_the_mass(dtype: torch.dtype, new: int) -> None:
    from kvtailor.ops.attention.triton.mass import attend_with_mass, unsuited

    if DEVICE == "cuda" and dtype == torch.float32:
        pytest.skip("torch's kernel takes 16 bits there")
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn((2, h, 63, 24), generator=generator).to(dtype) for h in (6, 2, 2))
    query, weight = query[:, :, -new:], torch.rand((2, new), generator=generator)
    mask = torch.ones((63, 63), dtype=torch.bool).tril()[None, None, -new:]
    wanted, _, shares = reference(query.double(), keys.double(), values.double(), mask, 0.3)
    there = [x.to(DEVICE) for x in (query, keys, values)]
    assert unsuited(*there) is None
    out, mass = attend_with_mass(*there, 0.3, weight.to(DEVICE))
    most = 1e-6 if dtype == torch.float32 else 2e-3
    assert out.dtype == dtype and error(out, wanted) < most
    assert mass.dtype == torch.float32
    assert error(mass, torch.einsum("bhgtn,bt->bhn", shares, weight.double())) < max(most, 1e-5)


@pytest.mark.parametrize("new", [1, 2])
def test_mass_of_few_queries_over_lanes_that_share_an_owner(new: int) -> None:
    """Two parts under one softmax; a lane that is cut short, weights, and queries that see different slots."""
    from kvtailor.ops.attention.triton.mass import attend_and_keep

    generator = torch.Generator().manual_seed(new)
    query = torch.randn((2, 3, new, 24), generator=generator)
    owner, lengths = [[0, 1, 1], [0, 1]], [[9, 30, 12], [17, 17]]
    keys, values, visible, weights, logits = [], [], [], [], []
    for slots, owners, filled in zip((30, 17), owner, lengths, strict=True):
        keys.append(torch.randn((len(owners), slots, 24), generator=generator))
        values.append(torch.randn((len(owners), slots, 24), generator=generator))
        visible.append(torch.rand((len(owners), new, slots), generator=generator) < 0.7)
        weights.append(torch.rand((len(owners), slots), generator=generator) * 3)
        sees = visible[-1] & (torch.arange(slots) < torch.tensor(filled)[:, None])[:, None]
        each = torch.einsum("mgtd,msd->mgts", query[owners].double(), keys[-1].double()) * 0.3
        logits.append((each + weights[-1][:, None, None]).masked_fill(~sees[:, None], -torch.inf))
    counts = torch.rand((2, new), generator=generator)
    found, lses = [], []
    for part in range(2):
        out, lse, kept = attend_and_keep(
            AttentionInputs(
                query.to(DEVICE),
                Whole(states=keys[part].to(DEVICE)),
                Whole(states=values[part].to(DEVICE)),
                scaling=0.3,
                owner=torch.tensor(owner[part], device=DEVICE),
                lengths=torch.tensor(lengths[part], dtype=torch.int32, device=DEVICE),
                visible=visible[part].to(DEVICE),
                log_weight=weights[part].to(DEVICE),
            )
        )
        found.append(kept)
        lses.append(lse)
    together = torch.stack(lses).logsumexp(0)
    total = [0.0, 0.0]
    for part, kept in enumerate(found):
        mass = kept.mass(together, counts.to(DEVICE))
        for lane, its in enumerate(owner[part]):
            top = [logits[p][i] for p in range(2) for i in range(len(owner[p])) if owner[p][i] == its]
            share = (logits[part][lane] - torch.cat(top, -1).logsumexp(-1, keepdim=True)).exp()
            wanted = torch.einsum("gts,t->s", share, counts[its].double())
            assert error(mass[lane], wanted) < 1e-5
            assert not mass[lane, lengths[part][lane] :].any()
            total[its] += float(mass[lane].sum())
    assert total == pytest.approx((3 * counts.sum(1)).tolist(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_gives_the_log_sum_exp_on_a_gpu_as_it_is_read(dtype: torch.dtype) -> None:
    """What torch itself says of the operation's outputs on a GPU, where there is none."""
    query, keys = (torch.empty((2, h, 63, 24), dtype=dtype, device="meta") for h in (6, 2))
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = attend(query, keys, keys, is_causal=True, scale=0.3)
    assert out.shape == query.shape and out.dtype == dtype
    assert lse.shape == (2, 6, 63) and lse.dtype == torch.float32


def test_says_which_prompts_it_cannot_take() -> None:
    from kvtailor.ops.attention.triton.mass import unsuited

    query, keys = torch.zeros((1, 4, 9, 24), device=DEVICE).half(), torch.zeros((1, 2, 9, 24), device=DEVICE).half()
    assert unsuited(query, keys, keys) is None
    assert "one dtype, found torch.float16 and torch.float32" in str(unsuited(query, keys.float(), keys))
    assert unsuited(query[:, :, 1:], keys, keys) is None
    assert "found 24 and 16" in str(unsuited(query, keys, keys[..., :16]))
    assert "found 20 and 20" in str(unsuited(query[..., :20], keys[..., :20], keys[..., :20]))
    apart = torch.zeros((1, 2, 24, 9), device=DEVICE).half().transpose(2, 3)
    assert "side by side" in str(unsuited(query, apart, keys))
    meta = [each.to("meta") for each in (query, keys, keys)]
    assert "found meta" in str(unsuited(*meta))


def test_refuses_two_dtypes() -> None:
    from kvtailor.ops.attention.triton.mass import column_mass

    query, keys = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="need one dtype"):
        column_mass(query, keys, torch.zeros(1, 1, 4), 1.0)
