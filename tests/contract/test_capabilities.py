"""What each method serves, in one table: a method that is not in it serves every model that is known.

That the table is right is shown elsewhere, method by method: `test_head_shares.py` (heads on several processes),
`test_softmax.py` and `test_softmax_attention.py` (caps and sinks), `tests/engine/test_reading.py` (latents).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch

from kvtailor.calibration.lukv import _Listening
from kvtailor.method import Serves
from kvtailor.plan import registry
from kvtailor.plan.arguments import samples_of
from kvtailor.score.by_keys.knorm import KNorm
from kvtailor.score.snapkv import SnapKV
from kvtailor.types import Softmax

# What is refused, by the field of `Serves`.
REFUSED = {
    "score": {
        "atskv": {"latents"},
        "capkv": {"latents", "softcap", "sinks"},
        "compactor": {"latents", "softcap", "sinks"},
        "cur": {"latents"},
        "expected": {"latents", "softcap"},
        "fastkvzip": {"latents"},
        "keydiff": {"latents"},
        "knorm": {"latents"},
        "kvgrad": {"latents", "softcap", "sinks"},
        "kvzap": {"latents"},
        "kvzip_plus": {"latents"},
        "lagkv": {"latents"},
        "leverage": {"latents"},
        "noncausal": {"latents", "softcap", "sinks"},
        "pairs": {"latents"},
        "qfilters": {"latents"},
        "rkv": {"latents", "sinks"},
        "rms": {"latents"},
        "triattention": {"latents"},
    },
    "allocate": {"duo": {"latents"}, "lukv": {"latents"}},
    "select": {},
    "merge": {each: {"latents"} for each in ("asymkv", "blend", "cam", "d2o", "matching")},
    "encode": {
        each: {"latents"}
        for each in (
            *("channels", "indexed", "kvplugin", "kvtc", "lowrank", "minicache", "orthogonal", "static_fp8"),
            "unrotated",
        )
    },
    "store": {},
    "attend": {each: {"latents"} for each in ("quest", "rocket", "rolling")},
}
NOTHING_KNOWN = {"split_heads", "latents"}


def refused(serves: Serves) -> set[str]:
    assert None not in vars(serves).values()
    return {each.name for each in fields(serves) if getattr(serves, each.name) is not True}


@pytest.mark.parametrize("stage", registry.stages())
def test_who_serves_what(stage: str) -> None:
    found = {name: samples_of(registry.load(stage, name)) for name in registry.methods(stage)}
    for name, samples in found.items():
        for each in samples:
            assert refused(each.capabilities) == REFUSED[stage].get(name, set()), name
    assert REFUSED[stage].keys() <= found.keys()


def test_every_twist_of_a_softmax_is_something_that_methods_serve() -> None:
    every = Softmax(softcap=1.0, sinks=torch.zeros(2))
    assert all(getattr(every, each.name) is not None for each in fields(Softmax)), "the test misses a new field"
    assert list(every.twists) == [each.name for each in fields(Softmax)]
    assert every.twists.keys() <= {each.name for each in fields(Serves)}
    assert not Softmax().twists and list(Softmax(sinks=torch.zeros(2)).twists) == ["sinks"]


def test_of_another_package_nothing_is_known_but_what_follows_from_its_needs() -> None:
    class Blind(KNorm):
        """Sees no attention."""

    class Seeing(SnapKV):
        """Inherits, and may compute otherwise."""

    assert refused(Blind().capabilities) == NOTHING_KNOWN
    assert refused(Seeing().capabilities) == NOTHING_KNOWN | {"softcap", "sinks"}
    assert Blind().capabilities.latents == "it does not declare that it is right on them"
    # Nor of a class of ours that stands elsewhere than its stage.
    assert refused(_Listening(of=SnapKV()).capabilities) == NOTHING_KNOWN | {"softcap", "sinks"}


def test_what_a_class_declares_goes_before_the_rest_and_says_no_more() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Declaring(SnapKV):
        serves: ClassVar[Serves] = Serves(softcap=True, latents=True)

    class Heir(Declaring):
        """Has said nothing itself."""

    assert refused(Declaring().capabilities) == {"split_heads", "sinks"}
    assert refused(Heir().capabilities) == NOTHING_KNOWN | {"softcap", "sinks"}
