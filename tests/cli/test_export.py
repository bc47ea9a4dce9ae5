"""`kvtailor export`: a setting, what it lacks, and losses that records have."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.schema import read_records
from kvtailor.cli import main

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "smollm2-135m"


def run(*words):
    result = CliRunner().invoke(main, ["export", *words])
    return result.exit_code, result.output


def test_layers_without_codes_become_the_list_that_vllm_skips():
    code, text = run("vllm", "by_layer(of=[plain, kivi(bits=8, recent=32)], layers=[0, 1, 1, 0])")
    assert code == 0 and "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 3" in text
    assert "give --records" in text


def test_losses_are_those_of_the_records():
    code, text = run("vllm", "kivi4", "--records", str(RECORDS), "--json")
    assert code == 0
    found = json.loads(text.splitlines()[-1])["losses"]
    scored = {each.label: each for each in read_records(RECORDS) if each.task == "perplexity"}
    for name, label in (("the plan", "kivi4"), ("kvtailor's fp8, the setting's neighbour", "fp8")):
        ours, full = scored[label].values, scored["full"].values
        assert found[name]["value"] == pytest.approx(
            mean_difference(ours["nll"], full["nll"], documents=ours["document"]).value
        )
    assert found["the plan"]["value"] != found["kvtailor's fp8, the setting's neighbour"]["value"]


def test_what_was_not_measured_is_null():
    code, text = run("vllm", "kivi(bits=7)", "--records", str(RECORDS), "--json")
    assert code == 0 and json.loads(text.splitlines()[-1])["losses"]["the plan"] is None


def test_a_plan_that_evicts_is_told_the_uncompressed_cache():
    code, text = run("llama.cpp", "snapkv @ tokens=100")
    assert code == 0 and "serve with its uncompressed cache" in text and "snapkv at 100 is missing" in text


def test_an_unknown_engine_names_its_neighbour():
    code, text = run("vlm", "kivi4")
    assert code == 2 and "vllm" in text


def test_a_setting_without_a_neighbour_of_ours_is_told_as_not_measured():
    code, text = run("llama.cpp", "kivi4", "--records", str(RECORDS))
    assert code == 0 and "loss of the setting: not measured in" in text
