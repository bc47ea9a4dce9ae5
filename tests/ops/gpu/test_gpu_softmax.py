"""Capped logits and sinks in the kernels of GPUs, against attention in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, error, needs_loops, needs_triton
from tests.ops.gpu.test_gpu_decode import ENCODINGS, bar, random
from torch import Tensor

from kvtailor.ops.attention.definition import reference
from kvtailor.ops.attention.folded import merge
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.types import Softmax

pytestmark = [needs_triton, needs_loops]
CAP = 0.8


def exactly(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(n, g, t, dv) and (n, g, t) in float64, the cap before weights and masks."""
    logits = torch.einsum("ngtd,nsd->ngts", query.double(), keys.double()) * 0.3
    logits = CAP * (logits / CAP).tanh()
    if log_weight is not None:
        logits = logits + log_weight.double()[:, None, None]
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], -torch.inf)
    return torch.einsum("ngts,nsd->ngtd", logits.softmax(-1).nan_to_num(0.0), values.double()), logits.logsumexp(-1)


def on_device(side: Coded) -> Coded:
    return type(side)(**{**side.numbers(), **{name: each.to(DEVICE) for name, each in side.tensors().items()}})


@pytest.mark.parametrize("encoding", ["whole", "floats", "symmetric4", "token4", "grouped8", "channel4", "uneven2"])
@pytest.mark.parametrize("new", [1, 3])
def test_capped_logits_of_every_kind_of_side(encoding: str, new: int) -> None:
    from kvtailor.ops.attention.triton.attend import attend_coded

    keys, values = (ENCODINGS[encoding](random(3, 63, 32, seed=seed)) for seed in (1, 2))
    query = random(3, 3, new, 32, seed=3)
    visible = torch.rand((3, new, 63), generator=torch.Generator().manual_seed(4)) < 0.7
    log_weight = random(3, 63, seed=5).abs()
    for sees, weight in itertools.product((None, visible), (None, log_weight)):
        wanted, lse = exactly(query, keys.decode().float(), values.decode().float(), sees, weight)
        found, found_lse = attend_coded(
            AttentionInputs(
                query.to(DEVICE),
                on_device(keys),
                on_device(values),
                scaling=0.3,
                softcap=CAP,
                visible=None if sees is None else sees.to(DEVICE),
                log_weight=None if weight is None else weight.to(DEVICE),
            ),
            splits=2,
        )
        allowed = bar(encoding)
        assert error(found, wanted) < allowed
        assert (found_lse.cpu() - lse).abs().max() < 3 * max(allowed, 1e-5)


def test_several_parts_and_chosen_pages_are_capped_too() -> None:
    from kvtailor.ops.attention.triton.attend import LanesRead, attend_pages, attend_parts

    query = random(2, 3, 1, 32, seed=3)
    sides = [(random(2, slots, 32, seed=slots), random(2, slots, 32, seed=slots + 1)) for slots in (17, 40)]
    wanted, _ = exactly(query, *(torch.cat([pair[i] for pair in sides], 1) for i in range(2)), None, None)
    there = [[Whole(states=each.to(DEVICE)) for each in pair] for pair in sides]
    parts = [LanesRead(inputs=AttentionInputs(query.to(DEVICE), *pair, scaling=0.3, softcap=CAP)) for pair in there]
    assert error(attend_parts(parts)[0], wanted) < 1e-5
    keys, values = sides[1]
    pages = torch.tensor([[0, 3, -1], [1, 4, 2]], dtype=torch.int32)
    seen = torch.zeros((2, 1, 40), dtype=torch.bool)
    for lane, page in ((0, 0), (0, 3), (1, 1), (1, 4), (1, 2)):
        seen[lane, :, page * 8 : page * 8 + 8] = True
    wanted, _ = exactly(query, keys, values, seen, None)
    there = Whole(states=keys.to(DEVICE)), Whole(states=values.to(DEVICE))
    found, _ = attend_pages(AttentionInputs(query.to(DEVICE), *there, scaling=0.3, softcap=CAP), pages.to(DEVICE), 8)
    assert error(found, wanted) < 1e-5


def test_mass_of_few_queries_with_a_cap_and_a_sink() -> None:
    from kvtailor.ops.attention.triton.mass import attend_and_keep

    query, keys, values = random(2, 3, 2, 24, seed=1), random(2, 33, 24, seed=2), random(2, 33, 24, seed=3)
    counts, sinks = torch.rand((2, 2), generator=torch.Generator().manual_seed(4)), random(2, 3, 1, seed=5) * 2
    there = Whole(states=keys.to(DEVICE)), Whole(states=values.to(DEVICE))
    out, lse, kept = attend_and_keep(AttentionInputs(query.to(DEVICE), *there, scaling=0.3, softcap=CAP))
    out, lse = merge([(out, lse)], sinks.to(DEVICE))
    logits = torch.einsum("ngtd,nsd->ngts", query.double(), keys.double()) * 0.3
    logits = torch.cat([CAP * (logits / CAP).tanh(), sinks.double()[..., None].expand(2, 3, 2, 1)], -1)
    shares = logits.softmax(-1)[..., :-1]
    assert error(out, torch.einsum("ngts,nsd->ngtd", shares, values.double())) < 1e-5
    wanted = torch.einsum("ngts,nt->ns", shares, counts.double())
    assert error(kept.mass(lse, counts.to(DEVICE)), wanted) < 1e-5


@pytest.mark.parametrize("new", [63, 40])
def test_a_prompt_and_its_mass_beside_sinks(new: int) -> None:
    from kvtailor.ops.attention.triton.mass import attend_with_mass, column_mass

    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    query, keys, values = (random(2, h, 63, 24, seed=h).to(dtype) for h in (6, 2, 3))
    values, query = values[:, :2], query[:, :, -new:]
    weight, sinks = torch.rand((2, new), generator=torch.Generator().manual_seed(4)), random(6, seed=5) * 2
    mask = torch.ones((63, 63), dtype=torch.bool).tril()[None, None, -new:]
    wanted, _, shares = reference(query.double(), keys.double(), values.double(), mask, 0.3, None, Softmax(sinks=sinks))
    most = 1e-5 if dtype == torch.float32 else 2e-3
    there = [x.to(DEVICE) for x in (query, keys, values)]
    out, mass = attend_with_mass(*there, 0.3, weight.to(DEVICE), sinks.to(DEVICE))
    assert error(out, wanted) < most
    assert error(mass, torch.einsum("bhgtn,bt->bhn", shares, weight.double())) < most
    _, lse, shares = reference(query.double(), keys.double(), values.double(), mask, 0.3, None, Softmax(softcap=CAP))
    found = column_mass(*there[:2], lse.float().to(DEVICE), 0.3, softcap=CAP, weight=weight.to(DEVICE))
    assert error(found, torch.einsum("bhgtn,bt->bhn", shares, weight.double())) < most
