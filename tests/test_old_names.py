"""Old names: arguments keep working, and what another package implements under an old name is refused, not ignored."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from kvtailor.attend.segments import Segments
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.minicache import MiniCache
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.plan import Plan
from kvtailor.score.contract import Scorer


def test_the_old_argument_is_read_everywhere() -> None:
    for plan in (
        Plan.parse("kivi(bits=4, residual=64)"),
        Plan.from_toml('[encode]\nmethod = "kivi"\nbits = 4\nresidual = 64'),
        Plan(encode=Kivi(bits=4, residual=64)),
        Plan(encode=dataclasses.replace(Kivi(bits=4), residual=64)),
    ):
        assert plan.encode.recent == plan.encode.residual == 64
        assert plan == Plan.parse("kivi(bits=4, recent=64)") and "recent=64" in str(plan)
    inside = Plan.parse("lowrank(rank=0.5, of=kivi(bits=4, group=16, residual=16), residual=16, basis=random)")
    assert isinstance(inside.encode, LowRank) and inside.encode.of.recent == 16


def test_two_names_for_one_argument_are_refused() -> None:
    with pytest.raises(TypeError, match="residual is the old name of recent, and both were given"):
        Kivi(residual=32, recent=32)


def test_a_scorer_that_has_recents_is_refused_when_it_is_made() -> None:
    class Mixed:
        @property
        def recents(self) -> int:
            return 9

    for bases, body in (((Scorer,), {"recents": property(lambda self: 4)}), ((Mixed, Scorer), {}),
                        ((Scorer,), {"__annotations__": {"recents": int}, "recents": 8})):  # fmt: skip
        with pytest.raises(TypeError, match="Theirs has recents, which is now called recent"):
            type("Theirs", bases, body)


def test_codecs_and_attentions_of_old_names_are_refused_when_they_are_made() -> None:
    with pytest.raises(TypeError, match="has encode_together, which is now called encode_group"):
        type("Theirs", (MiniCache,), {"encode_together": lambda self, *more: None})
    with pytest.raises(TypeError, match="has layers_together, which is now called layer_groups"):
        type("Theirs", (MiniCache,), {"layers_together": lambda self, layers: ()})
    with pytest.raises(TypeError, match="has repeats, which is now called graph_safe"):
        type("Theirs", (Segments,), {"repeats": False})
    with pytest.raises(TypeError, match="declares residual, which is now called recent"):

        @dataclass(frozen=True, kw_only=True)
        class Theirs(Kivi):
            residual: int = 64


def test_an_attention_of_a_mixin_is_held_to_its_signature_too() -> None:
    class Mixed:
        def attend(self, query, parts, visible, scaling):
            return torch.zeros(0)

    with pytest.raises(TypeError, match="cannot be called with one request"):
        type("Theirs", (Mixed, Segments), {})
