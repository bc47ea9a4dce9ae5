"""What every attention promises for a model that caps its logits or has learned sinks: the definition, in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.contract.test_softmax import ATTENTIONS, CAP, SCALING, same
from tests.support.attention_cases import MIXES, SIZES, STILL, case, close, naive, request_of
from tests.support.crossed import crossed
from tests.support.discover import sample_of
from torch import Tensor

from kvtailor.attend.contract import Attention
from kvtailor.ops.dispatch import using
from kvtailor.types import Softmax


@pytest.mark.parametrize("name", ["quest", "rocket"])
@pytest.mark.parametrize("seed", range(3))
def test_what_reads_a_part_chooses_it_by_the_models_own_logits(name: str, seed: int) -> None:
    """One query of one channel: capped keys under a plain softmax are read as the keys are under the cap."""
    from kvtailor.attend.quest import Quest
    from kvtailor.attend.rocket import Rocket
    from kvtailor.encode.indexed import Indexed
    from kvtailor.types import Layout, PlainSegment

    method = Quest(tokens=16, least=1, dense_layers=0) if name == "quest" else Rocket(tokens=24, expect=8)
    generator = torch.Generator().manual_seed(seed)
    b, h, g, n, d = 2, 3, 2, 64, 8
    layout = Layout(rows=b, heads=h, size=n, start=0)
    keys, values = (torch.randn((b * h, n + 1, d), generator=generator) * 4 for _ in range(2))
    query = torch.zeros(b, h * g, 1, d)
    query[..., 0], query[:, 1::2] = 1 / SCALING, 0.5 * torch.eye(d)[1][None, None, None] / SCALING
    made = case((b, h, g, d, d), "prompt", 1)
    visible = dataclasses.replace(made.visible, new_tokens=1, first_column=n)

    def read(keys: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        parts = [
            Indexed(page=4).encode(layout, keys[:, :n], values[:, :n]),
            PlainSegment(
                layout=Layout(rows=b, heads=h, size=1, start=n), keys=keys[:, n:].clone(), values=values[:, n:].clone()
            ),
        ]
        request = request_of(query, parts, visible, SCALING, context=STILL, softmax=softmax)
        got = method.attend(request)
        assert got.tokens_read is not None and int(got.tokens_read.max()) < n and got.lse is not None
        return got.output, got.lse

    # The second query head of a group asks for half of its channel.
    half = keys.clone()
    half[..., 0], half[..., 1] = CAP * (keys[..., 0] / CAP).tanh(), 2 * CAP * (keys[..., 1] / 2 / CAP).tanh()
    out, lse = read(keys, Softmax(softcap=CAP))
    plain, plain_lse = read(half, Softmax())
    assert same(out, plain) and same(lse, plain_lse)
    assert not same(out, read(keys, Softmax())[0])
    # Both query heads have the same sink, so that the same is read as without.
    sinks = torch.full((h * g,), 2.0)
    beside, beside_lse = read(keys, Softmax(softcap=CAP, sinks=sinks))
    share = (lse - sinks[None, :, None]).sigmoid()
    assert same(beside_lse, torch.logaddexp(lse, sinks[None, :, None].expand_as(lse)))
    if name == "quest":
        assert same(beside, out * share[..., None])


WHICH = ("softcap", "sinks", "both")


@pytest.mark.parametrize("kind", ATTENTIONS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("size", "what"), crossed(SIZES, list(itertools.product(MIXES, [1, 3, 130], WHICH, [False, True]))), ids=str
)
def test_attention_equals_the_definition(
    kind: type[Attention], size: tuple[int, int, int, int, int], what: tuple[str, int, str, bool]
) -> None:
    mix, new, which, padded = what
    assert sample_of(kind).capabilities.softcap and sample_of(kind).capabilities.sinks, "refused for such a model"
    made = case(size, mix, new, padded=padded, seed=5)
    softcap = None if which == "sinks" else 1.5
    generator = torch.Generator().manual_seed(2)
    sinks = None if which == "softcap" else torch.randn(size[1] * size[2], generator=generator) * 2 + 1
    out, lse, mass = naive(made, 0.04, softcap, sinks)
    request = request_of(
        made.query,
        made.parts,
        made.visible,
        0.04,
        context=STILL,
        softmax=Softmax(softcap=softcap, sinks=sinks),
        want_mass=kind.gives_mass,
        real_queries=made.real_queries,
    )
    for which_form in ("auto", "reference"):
        with using(which_form):
            got = sample_of(kind).attend(request)
        assert close(got.output, out), which_form
        if got.lse is not None:
            assert close(got.lse, lse), which_form
        for part, found, expected in zip(made.parts, got.mass or [], mass, strict=kind.gives_mass):
            filled = part.layout.filled(torch.device("cpu"))
            filled = torch.ones_like(found, dtype=torch.bool) if filled is None else filled
            assert close(found[filled], expected[filled]), which_form
    if made.seen == 1 and which == "softcap":
        # A token that sees itself alone.
        return
    plain, _, _ = naive(made, 0.04)
    assert (plain - out).abs().max() > 1e-3, "the plain softmax gives the same, so this test has shown nothing"
