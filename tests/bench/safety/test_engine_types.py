"""What an engine's cache types cost a model: each by the plan that stands for it, through the check of any plan."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

import kvtailor
from kvtailor.bench.safety.engine_types import _plans_of
from kvtailor.bench.subject import Subject
from kvtailor.cli import main
from kvtailor.errors import UnknownName
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan
from kvtailor.plan.engines import ENGINES

NAMED = {each.name.lower(): each for each in ENGINES}
SHORT = {"context": 96, "margin": 0.05}


@pytest.fixture(scope="module")
def demo() -> Subject:
    return Subject.load("demo", dtype="float32")


def test_every_type_is_measured_or_named_with_a_reason(demo: Subject) -> None:
    layers = len(Geometry.of(demo.model.config).compressed)
    for name, least in (("vllm", 6), ("sglang", 2), ("tensorrt-llm", 2), ("llama.cpp", 10)):
        engine = NAMED[name]
        plans, others = _plans_of(engine, demo)
        options = {each.option for each in engine.types if each.checked}
        assert len(plans) >= least and {*plans} <= options and {*engine.others} <= {*others}
        for option in options - {*plans} - {*others}:
            assert "f16 --cache-type-v f16" in option
        assert all(Plan.parse(plan).encode.table_layers in (None, layers) for plan in plans.values())
    plans, _ = _plans_of(NAMED["llama.cpp"], demo)
    assert plans["--flash-attn on --cache-type-k q8_0 --cache-type-v q4_0"] == (
        "on_write(of=hadamard(of=ggml(key_type=q8_0, value_type=q4_0)))"
    )
    assert "iq4_nl" in NAMED["llama.cpp"].others


def test_numbers_are_those_of_the_check_of_the_same_plans(demo: Subject) -> None:
    found = kvtailor.check_engine(demo, "SGLang", **SHORT)
    plans, _ = _plans_of(NAMED["sglang"], demo)
    same = kvtailor.check_model(demo, plans=list(plans.values()), **SHORT)
    assert {each.option: each.verdict for each in found.types} == {
        option: same.verdict(plan) for option, plan in plans.items()
    }
    sizes = {each.option.split()[-1]: each.verdict.bytes for each in found.types}
    assert 0.26 < sizes["nvfp4"] < 0.31 and 0.5 <= sizes["fp8_e4m3"] < 0.53
    text = " ".join(str(found).split())
    assert "SGLang itself was not run" in text and "mxfp8" in text and "as static_fp8(scale=1.0)" in text
    for each in found.types:
        loss = each.verdict.loss
        assert f"{100 * each.verdict.bytes:.0f} % {loss.value:+.4f} ({loss.low:+.4f} to {loss.high:+.4f})" in text
        assert each.sentence.startswith(f"{each.option}: ") and each.sentence.endswith(f"(as {each.verdict.plan})")
    assert max(map(len, found.lines())) <= 80


def test_an_engine_that_is_not_known_or_has_no_plans_is_refused(demo: Subject) -> None:
    for name, near in (("vlm", "vllm"), ("transformers", "tensorrt-llm")):
        with pytest.raises(UnknownName, match=near):
            kvtailor.check_engine(demo, name)


def test_the_command_prints_the_same_and_takes_no_plan() -> None:
    words = ["check", "--engine", "sglang", "--model", "demo", "--tokens", "96", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert {each["option"].split()[-1] for each in found["types"]} == {"nvfp4", "fp8_e4m3"}
    assert re.search(r"%\s+[+-]0\.\d{4} \([+-]", result.output)
    wrong = CliRunner().invoke(main, [*words, "kivi4"])
    assert wrong.exit_code == 2 and "leave PLAN out" in wrong.output
    wrong = CliRunner().invoke(main, ["check", "--engine", "sglang"])
    assert wrong.exit_code == 2 and "without --model" in wrong.output
