"""Saved caches with images: what comes next stands where it would have stood, in another process as well."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtailor
from tests.seam.vision.test_identity import apart, generated, own_cache
from tests.support.seam.vision import MROPE, ROWS, build, prompt, turn_two
from tests.support.seam.zoo import ROUNDING, error

FAMILIES = (*MROPE, "gemma3", "paligemma", "smolvlm")
PLANS = ("full", "snapkv(window=8) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24")


def saved(family: str, plan: str, path: Path) -> tuple[Any, Any]:
    """A cache that has seen a batch with images and answered, saved; and the next turn, of text alone."""
    model, first = build(family), prompt(family, ROWS)
    cache = kvtailor.cache_for(model, plan)
    answer = generated(model, cache, first.inputs()).sequences[:, first.ids.shape[1] :]
    cache.save(path)
    return model, turn_two(first, ROWS, answer, (7,))


def next_turn(model: Any, cache: Any, whole: Any) -> Any:
    """As a user types it who has no images: token ids and their mask."""
    return generated(model, cache, {"input_ids": whole.ids, "attention_mask": whole.mask})


CHILD = """
import json, sys, torch, kvtailor
from tests.support.seam.vision import build
from tests.seam.vision.test_saving import next_turn
found = {}
for name, family in json.loads(sys.argv[1]):
    whole = torch.load(name + ".pt", weights_only=False)
    model = build(family)
    torch.save(next_turn(model, kvtailor.load_cache(model, name), whole).logits, name + ".logits")
"""


@pytest.mark.parametrize("families", [("qwen2_5_vl",), pytest.param(FAMILIES, marks=pytest.mark.long)], ids=len)
def test_in_another_process(families: tuple[str, ...], tmp_path: Path) -> None:
    expected, asked = {}, []
    for family in families:
        for number, plan in enumerate(PLANS):
            path = tmp_path / f"{family}{number}"
            model, whole = saved(family, plan, path)
            torch.save(whole, f"{path}.pt")
            cache = kvtailor.load_cache(model, path)
            # Another conversation has moved the model's state meanwhile.
            generated(model, None, prompt(family, [(3, (2, 5), 7)], state=4).inputs())
            expected[str(path)] = next_turn(model, cache, whole).logits
            asked.append((str(path), family))
            if plan == "full":
                own = build(family)
                once = generated(own, own_cache(own), whole.inputs()).logits
                assert max(error(a, b) for a, b in zip(expected[str(path)], once, strict=True)) < ROUNDING, family
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(asked)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, logits in expected.items():
        there = torch.load(f"{name}.logits")
        assert max(error(a, b) for a, b in zip(there, logits, strict=True)) < ROUNDING, name


def test_a_file_without_the_shift_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier release wrote it: the text behind an image would be read at wrong positions."""
    from kvtailor.hf import saving

    write = saving.write_cache_file

    def without(path: Path, tensors: dict[str, Any], about: dict[str, str]) -> None:
        kept = {name: tensor for name, tensor in tensors.items() if name != "rope_deltas"}
        write(path, kept, {name: text for name, text in about.items() if name != "rope_deltas"})

    monkeypatch.setattr(saving, "write_cache_file", without)
    model, whole = saved("qwen2_5_vl", "full", tmp_path / "old")
    with pytest.warns(UserWarning, match="before kvtailor saved by how much images shift"):
        cache = kvtailor.load_cache(model, tmp_path / "old")
    own = build("qwen2_5_vl")
    once = generated(own, None, whole.inputs()).logits
    # The positions matter: this is what the warning is for.
    assert error(next_turn(model, cache, whole).logits[0], once[0]) > 0.1
    # With token types and grids a model that knows no shift computes the positions anew.
    other = build("qwen2_5_vl")
    with pytest.warns(UserWarning, match="before kvtailor saved"):
        cache = kvtailor.load_cache(other, tmp_path / "old")
    grids = {"image_grid_thw": whole.pixels()["image_grid_thw"]}
    found = generated(other, cache, {**whole.text(), **grids})
    assert apart(found, generated(own, None, whole.inputs())) < ROUNDING


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_other_models_do_not_warn(family: str, tmp_path: Path) -> None:
    model, _ = saved(family, "full", tmp_path / "new")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvtailor.load_cache(model, tmp_path / "new")
