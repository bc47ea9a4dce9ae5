"""docs/coming-from-llama-cpp.md: its figures are those of the records, and its plans are plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.recorded_losses import recorded_loss
from kvtailor.bench.schema import read_records
from kvtailor.ops.codes.ggml import FORMATS
from kvtailor.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from-llama-cpp.md").read_text(encoding="utf-8")
RECORD = json.loads((DOCS / "peers" / "llama-cpp-types.json").read_text(encoding="utf-8"))
FOLDERS = [
    read_records(DOCS / "records" / name) for name in ("smollm2-135m", "smollm2-135m-ggml", "smollm2-135m-on-write")
]
RECORDS = FOLDERS[0]
ROWS = re.findall(r"^\| (llama.cpp )?`([^`]+)` \| (\d+) % \| (\S+) \| (\S+) to (\S+) \|$", PAGE, re.MULTILINE)
PAIRS = re.findall(r"^\| `-ctk (\S+) -ctv (\S+)` \| `([^`]+)` \| ([\d.]+) \|$", PAGE, re.MULTILINE)


def told(loss: Estimate | None) -> tuple[str, ...]:
    assert loss is not None
    return tuple(f"{each:+.4f}" for each in (loss.value, loss.low, loss.high))


@pytest.mark.parametrize(("theirs", "name", "share", "value", "low", "high"), ROWS)
def test_a_row_is_of_the_records(theirs: str, name: str, share: str, value: str, low: str, high: str) -> None:
    if theirs:
        same = next(each for each in RECORDS if each.text_hash == RECORD["texts"] and each.is_full)
        loss = mean_difference(RECORD["nll"][name], RECORD["nll"]["f16"], documents=same.values["document"])
        bytes_held = RECORD["allocated_bytes"][name] / RECORD["allocated_bytes"]["f16"]
    else:
        plan = str(Plan.parse(name))
        folder = next(each for each in FOLDERS if any(record.plan == plan for record in each))
        loss = recorded_loss(Plan.parse(name), folder)
        one = next(each for each in folder if each.plan == plan and each.task == "perplexity")
        bytes_held = one.bytes_held / one.bytes_full
    assert (value, low, high) == told(loss) and share == f"{100 * bytes_held:.0f}"


def test_what_rounds_on_write_forecasts_what_llama_cpp_lost() -> None:
    losses = {(bool(theirs), name): [float(each) for each in loss] for theirs, name, _, *loss in ROWS}
    for kind in ("q8_0", "q4_0"):
        (ran, least, most) = losses[True, kind]
        (forecast, low, high) = losses[False, f"on_write(of=hadamard(of=ggml(type={kind})))"]
        assert least < forecast < most and low < ran < high
    assert losses[False, "hadamard(of=ggml(type=q4_0))"][2] < losses[True, "q4_0"][1]


@pytest.mark.parametrize(
    ("folder", "codec", "losses"),
    [
        ("ggml", "hadamard(of=ggml(type={}))", ("-0.001", "+0.088", "+0.208")),
        ("on-write", "on_write(of=hadamard(of=ggml(type={})))", ("+0.002", "+0.263", "+0.723")),
    ],
)
def test_what_the_codes_lose_on_qwen_is_of_its_records(folder: str, codec: str, losses: tuple[str, ...]) -> None:
    records = read_records(DOCS / "records" / f"qwen2.5-coder-0.5b-{folder}")
    full = next(each for each in records if each.is_full)
    types = json.loads((DOCS / "peers" / "llama-cpp-types-qwen.json").read_text(encoding="utf-8"))
    assert full.text_hash == types["texts"]
    for name, told in zip(("q8_0", "q5_1", "q4_0"), losses, strict=True):
        lost = next(each for each in records if each.plan == str(Plan.parse(codec.format(name))))
        assert f"{mean_difference(lost.values['nll'], full.values['nll']).value:+.3f}" == told
        assert f"`{name}` {told}" in PAGE


def test_what_the_rotation_loses_on_qwen_is_of_its_records() -> None:
    records = read_records(DOCS / "records" / "qwen2.5-coder-0.5b-ggml")
    full = next(each for each in records if each.is_full)
    unturned = next(each for each in records if each.plan == str(Plan.parse("ggml(type=q4_0)")))
    assert f"{mean_difference(unturned.values['nll'], full.values['nll']).value:+.3f}" == "+0.022"


def test_the_page_has_these_rows() -> None:
    assert len(ROWS) == 13 and len(PAIRS) == 8


@pytest.mark.parametrize(("keys", "values", "text", "bits"), PAIRS)
def test_a_pair_of_types_is_a_plan_of_as_many_bits(keys: str, values: str, text: str, bits: str) -> None:
    each = [16.0 if name == "f16" else FORMATS[name].bytes_of(64) / 64 * 8 for name in (keys, values)]
    assert sum(each) / 2 == float(bits)
    plan = Plan.parse(text)
    assert plan.encode.bytes_per_token(64, 64, 2) == 64 * sum(each) / 8
    if text != "full":
        setting = plan.export("llama.cpp")
        assert setting.setting == f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}"
        assert text in setting.neighbours
