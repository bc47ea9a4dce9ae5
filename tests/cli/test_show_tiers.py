"""`show` predicts a step of a plan whose layers live elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli import main


def shown(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(main, ["show", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])


def test_a_step_is_the_longer_of_link_and_computing() -> None:
    asked = ["--model", "demo", "--tokens", "1000", "--link", "1M", "--step-ms", "8"]
    away = shown("kivi(bits=4) + disk", *asked)
    sizes, token = away["sizes"], away["closed_form"]["bytes_per_token"]
    found = away["forecast"]
    # The tail of 128 tokens stays on the device, in full precision.
    assert found["bytes_resident"] == pytest.approx(128 * away["closed_form"]["full_bytes_per_token"], rel=1e-6)
    assert found["bytes_moved"] == pytest.approx(872 * token, rel=1e-6)
    assert found["step_seconds"] == pytest.approx(found["link_seconds"]) == pytest.approx(872 * token / 1e6)
    layers = sizes["compressed_layers"]
    some = shown("kivi(bits=4) + disk(resident_layers=1)", *asked)["forecast"]
    assert some["bytes_moved"] == pytest.approx(872 * token * (layers - 1) / layers, rel=1e-6)
    here = shown("kivi(bits=4) + device", *asked)["forecast"]
    assert here["step_seconds"] == here["best_step_seconds"] == pytest.approx(0.008) and here["bytes_moved"] == 0
    assert shown("full")["forecast"] is None


def test_what_packing_saves_is_not_guessed() -> None:
    asked = ["--model", "demo", "--tokens", "1000", "--link", "1M", "--step-ms", "8"]
    plain, packed = (shown(f"kivi(bits=4) + disk{pack}", *asked)["forecast"] for pack in ("", "(pack=deflate)"))
    assert packed["bytes_moved"] == plain["bytes_moved"] == plain["bytes_on_link"] and packed["bytes_on_link"] is None
    unknown = ("link_seconds", "step_seconds", "best_resident", "best_step_seconds")
    assert all(packed[name] is None and plain[name] is not None for name in unknown)
    said = CliRunner().invoke(main, ["show", "kivi(bits=4) + disk(pack=deflate)", *asked]).output
    assert "packs its files, and how small they get depends on what the tokens are" in said
    assert "no time is predicted" in said and "the link alone takes" not in said
    model, _ = kvtailor.load_model("demo", dtype=torch.bfloat16)[:2]
    ids = torch.full((1, 1000), 77)
    for pack in ("", "(pack=deflate)"):
        size = shown(f"kivi(bits=4) + disk{pack}", *asked)["size"]
        assert (
            size["low"]
            <= kvtailor.prefill(model, ids, plan=f"kivi(bits=4) + disk{pack}").ledger().total
            <= size["high"]
        )
    here = shown("kivi(bits=4) + disk(on_device_layers=99, pack=deflate)", *asked)["forecast"]
    assert here["bytes_on_link"] == 0 and here["step_seconds"] == pytest.approx(0.008)


@pytest.mark.parametrize("words", [["--tokens", "5"], ["--tokens", "5", "--model", "demo", "--link", "much"]])
def test_what_is_missing_is_said(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["show", "full", *words])
    assert done.exit_code == 2 and ("give --model" in done.output or "not a whole number of bytes" in done.output)
