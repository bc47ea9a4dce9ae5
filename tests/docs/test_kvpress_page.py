"""The page for users of kvpress: every plan in its tables runs, and names every press once."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.plan import Plan, registry

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-kvpress.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([^`]*)`[^|]*\| `([a-z][^`]*)` \|$", re.MULTILINE)
WEIGHTS = "(3.0, 2.0, 1.0, 1.0, 1.0, 1.0)"
PLANS = {press: plan.replace("WEIGHTS", WEIGHTS) for press, plan in ROW.findall(TEXT) if "kvtailor." not in plan}
# The classes of kvpress 0.5.5, as they were read and run for tests/data/kvpress_kept.md and the survey behind it.
NAMES = """
AdaKVPress BlockPress CAMPress CURPress CapPress ChunkKVPress ChunkPress CompactorPress ComposedPress
CriticalAdaKVPress CriticalKVPress DMSPress DecodingPress DuoAttentionPress EntropyGatedChunkKVPress
ExpectedAttentionPress ExpectedAttentionStatsPress FastKVzipPress FinchPress KVComposePress KVgradPress KVzapPress
KVzipPress KeyDiffPress KeyRerotationPress KnormPress LUKVPress LagKVPress LeverageScorePress NonCausalAttnPress
ObservedAttentionPress PerLayerCompressionPress PrefillDecodingPress PyramidKVPress QFilterPress RandomPress
RestoreKVPress SimLayerKVPress SnapKVPress StreamingLLMPress TOVAPress ThinKPress
"""
PRESSES = NAMES.split()


@pytest.fixture(scope="module")
def demo() -> tuple[object, object]:
    return kvtailor.load_model("demo")


def test_every_press_is_on_the_page() -> None:
    assert [press for press in PRESSES if press not in TEXT] == []
    assert len(PLANS) > 20


@pytest.mark.parametrize("press", PLANS)
def test_a_plan_of_the_tables_runs(press: str, demo: tuple[object, object]) -> None:
    model, tokenizer = demo
    ids = tokenizer("The old mill stood in the village. " * 90, return_tensors="pt").input_ids  # type: ignore[operator]
    with kvtailor.session(model, PLANS[press], tokenizer) as session:
        session.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
        assert session.last is not None
        ledger = session.last.ledger()
    assert ledger.total < ledger.full


def test_the_names_of_the_last_section_exist() -> None:
    known = {name for stage in registry.stages() for name in registry.methods(stage)}
    rest = TEXT[TEXT.index("## What kvtailor does not have") :]
    rows = [line.split("|")[2] for line in rest.splitlines() if line.startswith("| ") and "---" not in line]
    named = {re.split(r"[(@ ]", word)[0] for row in rows[1:] for word in re.findall(r"`([a-z][^`]*)`", row)}
    assert named - known - {"kvtailor", "fit"} == set()
    assert "kvzip" in named
    for word in re.findall(r"`(critical\([^`]*\))`", rest):
        if "..." not in word:
            Plan.parse(f"{word} @ keep=0.5")


def test_the_measured_table_is_that_of_the_record() -> None:
    """Until somebody has measured, the page says so; from then on it has the numbers of the record and no others."""
    script = runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "beside_kvpress.py"))
    shown = TEXT.split(script["BEGIN"])[1].split(script["END"])[0].strip()
    if not script["RECORD"].exists():
        assert shown == "Not measured yet."
        return
    assert shown == script["table"](json.loads(script["RECORD"].read_text(encoding="utf-8")))


def test_every_pair_of_the_script_is_a_plan() -> None:
    script = runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "beside_kvpress.py"))
    for pair in script["PAIRS"]:
        assert Plan.parse(f"{pair.plan} @ keep=0.25, slack=never").evicts
        assert set(re.findall(r"[A-Za-z]+Press", pair.press)) <= set(PRESSES)
