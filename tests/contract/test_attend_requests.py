"""Attentions take requests as values: what was written for the old signatures is refused when its class is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support.attention_cases import SIZES, case, request_of

from kvtailor.attend.contract import Attended, Attention, AttentionContext, AttentionRequest
from kvtailor.attend.segments import Segments
from kvtailor.errors import KvtailorError
from kvtailor.plan import registry


def test_an_old_signature_is_refused_with_the_new_one() -> None:
    with pytest.raises(TypeError, match=r"Old\.attend\(self, query, parts, visible, scaling.*request: AttentionReq"):

        class Old(Attention):
            def attend(self, query, parts, visible, scaling, *, facts=None) -> Attended:  # type: ignore[override]
                raise AssertionError

    with pytest.raises(TypeError, match=r"Listed\.index.*write index\(self, request: IndexRequest\)"):

        class Listed(Segments):
            def index(self, parts, visible, facts) -> dict[str, Any]:  # type: ignore[override]
                raise AssertionError

    with pytest.raises(TypeError, match=r"Priced\.flops.*write flops\(self, request: FlopsRequest\)"):

        class Priced(Segments):
            def flops(self, encoded, *, group, size, held=None, facts=None) -> int:  # type: ignore[override]
                raise AssertionError


def test_a_method_that_takes_one_request_is_made() -> None:
    class Fine(Segments):
        def attend(self, request: AttentionRequest) -> Attended:
            return super().attend(dataclasses.replace(request, scaling=2 * request.scaling))

    made = case(SIZES[1], "tail", 3)
    twice = request_of(made.query, made.parts, made.visible, 0.04)
    once = dataclasses.replace(twice, scaling=0.08)
    assert torch.equal(Fine().attend(twice).output, Segments().attend(once).output)


def test_a_package_with_an_old_signature_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old_attention.py").write_text(
        "from kvtailor.attend.contract import Attention\n\n\nclass Old(Attention):\n"
        "    def attend(self, query, parts, visible, scaling, **more):\n        raise AssertionError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    known = dict(registry.methods("attend"))
    info = dataclasses.replace(known["segments"], name="old", module="old_attention", class_name="Old", by="a package")
    monkeypatch.setattr(registry, "methods", lambda stage: {**known, "old": info})
    with pytest.raises(KvtailorError, match="'old' of a package cannot be imported: Old.attend.*write attend"):
        registry.load("attend", "old")


def test_a_request_has_a_context_of_its_own() -> None:
    made = case(SIZES[1], "tail", 1)
    request = request_of(made.query, made.parts, made.visible, 0.04)
    assert request.context == AttentionContext() and not request.want_mass and request.real_queries is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.scaling = 1.0  # type: ignore[misc]


def test_an_attention_of_a_mixin_is_held_to_its_signature_too() -> None:
    class Mixed:
        def attend(self, query, parts, visible, scaling):
            return torch.zeros(0)

    with pytest.raises(TypeError, match="cannot be called with one request"):
        type("Theirs", (Mixed, Segments), {})
