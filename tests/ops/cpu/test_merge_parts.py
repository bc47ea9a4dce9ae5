"""One softmax over parts that were read apart is what attention over all of their slots gives."""

import pytest
import torch

from kvtailor.ops import dispatch
from kvtailor.ops.attention import folded
from kvtailor.ops.attention.cpu.attention import merge
from kvtailor.ops.cpu.library import built, library, load

VARIANTS = [each for each in map(load, built().values()) if each is not None]
pytestmark = pytest.mark.skipif(library() is None, reason="no C++ kernels were built")


def parts(slots, owners=3, group=2, tokens=3, size=5):
    """Logits (n, g, t, s) and values (n, s, dv) of each part, in float64."""
    generator = torch.Generator().manual_seed(sum(slots))
    return [
        (
            5 * torch.randn(owners, group, tokens, count, generator=generator, dtype=torch.float64),
            torch.randn(owners, count, size, generator=generator, dtype=torch.float64),
        )
        for count in slots
    ]


def read(logits, values):
    """Out (n, g, t, dv) and lse (n, g, t) of one part, float32; zeros and -inf where every slot is hidden."""
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ values[:, None]).float(), lse.float()


@pytest.mark.parametrize("used", VARIANTS, ids=lambda each: each.variant)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("slots", [(7,), (1, 63), (5, 1, 40, 2)])
def test_against_one_softmax_over_all_slots(used, sinks, slots):
    made = parts(slots)
    # A query that sees nothing of the first part, and one that sees nothing at all.
    for i, (logits, _) in enumerate(made):
        if i == 0:
            logits[0, 1] = -torch.inf
        logits[2, 0, 1] = -torch.inf
    sink = torch.linspace(-2, 2, 6).view(3, 2, 1) if sinks else None
    all_logits, all_values = torch.cat([each for each, _ in made], -1), torch.cat([each for _, each in made], 1)
    if sinks:
        all_logits = torch.cat([all_logits, sink.double()[..., None].expand(-1, -1, 3, 1)], -1)
        all_values = torch.cat([all_values, torch.zeros(3, 1, 5, dtype=torch.float64)], 1)
    out, lse = read(all_logits, all_values)
    found, found_lse = merge([read(*each) for each in made], sink, used)
    torch.testing.assert_close(found, out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found_lse, lse, atol=2e-6, rtol=2e-6)
    assert (found[2, 0, 1] == 0).all() and (found_lse[2, 0, 1] == -torch.inf).all() != sinks


@pytest.mark.parametrize("used", VARIANTS, ids=lambda each: each.variant)
def test_what_is_no_number_stays_one(used):
    found = [read(*each) for each in parts((4, 9))]
    found[1][1][1, 0, 2] = torch.nan
    out, lse = merge(found, None, used)
    assert lse.isnan().nonzero().tolist() == [[1, 0, 2]] and out[1, 0, 2].isnan().all()
    assert out.isnan().sum() == 5


def test_what_cannot_be_merged_in_it_goes_to_torch(monkeypatch):
    found = [read(*each) for each in parts((4, 9))]
    expected = folded.merge([(out.clone(), lse) for out, lse in found])
    called = []
    monkeypatch.setattr(folded, "merge", lambda *args: called.append(args) or expected)
    assert dispatch.merged(found)[0] is not expected[0] and not called
    dispatch.merged([(out.bfloat16(), lse) for out, lse in found])
    with dispatch.using("reference"):
        dispatch.merged(found)
    # Many tokens of each head.
    dispatch.merged([read(*each) for each in parts((4, 9), tokens=17)])
    assert len(called) == 3


def test_strided_parts_and_sinks():
    found = [read(*each) for each in parts((4, 9))]
    strided = [(out.transpose(1, 2).contiguous().transpose(1, 2), lse) for out, lse in found]
    assert not strided[0][0].is_contiguous()
    sinks = torch.randn(6).double().view(3, 2, 1)
    for mine, other in zip(dispatch.merged(strided, sinks), dispatch.merged(found, sinks), strict=True):
        assert torch.equal(mine, other)
