"""`kvtailor export`: a setting, what it lacks, and losses that records have."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.fitting.made_fits import made_fit

from kvtailor import load_model
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.schema import read_records
from kvtailor.cli import main
from kvtailor.plan import Plan

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "smollm2-135m"


def run(*words):
    result = CliRunner().invoke(main, ["export", *words])
    return result.exit_code, result.output


def test_layers_without_codes_become_the_list_that_vllm_skips():
    code, text = run("vllm", "by_layer(of=[plain, kivi(bits=8, recent=32)], layers=[0, 1, 1, 0])")
    assert code == 0 and "int8_per_token_head --kv-cache-dtype-skip-layers 0 3" in text
    assert "give --records" in text


@pytest.mark.parametrize("plan, near", [("fp8", "fp8"), ("mxfp4", "nvfp4"), ("snapkv @ tokens=1536", "fp8")])
def test_losses_are_those_of_the_records(plan, near):
    code, text = run("vllm", plan, "--records", str(RECORDS), "--json")
    assert code == 0 and f"kvtailor's {near}, a neighbour of the setting, which vLLM itself" in " ".join(text.split())
    found = json.loads(text.splitlines()[-1])
    scored = [each for each in read_records(RECORDS) if each.task == "perplexity"]
    assert found["losses"]["neighbour"] == near
    for what, line in (("plan", found["plan"]), ("setting", near)):
        loss = found["losses"][what]
        pairs = [
            (ours.values, full.values)
            for ours in scored
            for full in scored
            if ours.plan == line and full.is_full and (ours.text_hash, ours.point) == (full.text_hash, full.point)
        ]
        if not pairs:
            assert loss is None
            continue
        ours, full = pairs[0]
        assert loss["value"] == pytest.approx(
            mean_difference(ours["nll"], full["nll"], documents=ours["document"]).value
        )
    assert found["losses"]["setting"] is not None


def test_the_number_of_layers_is_asked_for_or_taken_from_the_records():
    code, text = run("vllm", "asymkv1")
    assert code == 2 and "(--model NAME or --layers N" in " ".join(text.split())
    for more in (("--records", str(RECORDS)), ("--layers", "30")):
        code, text = run("vllm", "turboquant4", *more, "--json")
        found = json.loads(text.splitlines()[-1])
        assert code == 0 and all(Plan.parse(near).encode.table_layers == 30 for near in found["neighbours"])
        assert run("vllm", "asymkv1", *more)[0] == 0


def test_modelopt_s_file_is_written_only_on_the_word_that_nobody_reads_it(tmp_path):
    model, _ = load_model("demo")
    model.save_pretrained(tmp_path / "demo")
    words = ["modelopt", "fp8", "--model", str(tmp_path / "demo"), "--out", str(tmp_path / "made.json")]
    code, text = run(*words)
    assert code == 2 and "give --unread" in " ".join(text.split()) and not (tmp_path / "made.json").exists()
    code, text = run(*words, "--unread", "--json")
    assert code == 0 and "No released engine reads it, and it has no scales." in " ".join(text.split())
    made = json.loads((tmp_path / "made.json").read_text())
    assert json.loads(text.splitlines()[-1])["file"] == made
    layers = made["quantization"]["kv_cache_quantized_layers"]
    assert [*layers] == [f"model.layers.{layer}.self_attn" for layer in range(model.config.num_hidden_layers)]
    code, text = run(*words, "--unread")
    assert code == 2 and "there already" in text
    code, text = run(*words[:4], "--unread")
    assert code == 0 and '"kv_cache_schema_version": 1' in text
    code, text = run("modelopt", "fp8", "--unread")
    assert code == 2 and "give --model" in text


@pytest.mark.parametrize(
    "words",
    [
        ("vllm", "fp8", "--unread"),
        ("compressed-tensors", "fp8", "--layers", "3"),
        ("compressed-tensors", "fp8", "--unread"),
        ("modelopt", "fp8", "--unread", "--layers", "3"),
        ("modelopt", "fp8", "--unread", "--records", str(RECORDS)),
    ],
)
def test_options_that_say_nothing_there_are_refused(words):
    code, text = run(*words)
    assert code == 2 and "says nothing about" in text


def test_what_was_not_measured_is_null():
    code, text = run("vllm", "kivi(bits=7)", "--records", str(RECORDS), "--json")
    assert code == 0 and json.loads(text.splitlines()[-1])["losses"]["plan"] is None


def test_a_plan_that_evicts_is_told_eight_bits():
    code, text = run("vllm", "snapkv @ tokens=100")
    assert code == 0 and "--kv-cache-dtype fp8" in text and "snapkv @ tokens=100 is missing" in text
    assert "dropped by kvtailor's cache inside transformers" in " ".join(text.split())


def test_a_plan_that_changes_nothing_is_told_the_uncompressed_cache():
    code, text = run("llama.cpp", "full")
    assert code == 0 and "serve with its uncompressed cache" in text


def test_an_unknown_engine_names_its_neighbour():
    code, text = run("vlm", "kivi4")
    assert code == 2 and "vllm" in text
    code, text = run("modelop", "kivi4")
    assert code == 2 and "modelopt" in text, "those that get a file are engines too"


def test_a_setting_without_a_neighbour_of_ours_is_told_as_not_measured():
    code, text = run("transformers", "kivi4", "--records", str(RECORDS))
    assert code == 0 and "loss of the setting: not known" in text


def test_a_fit_s_folder_has_its_layers_losses(tmp_path):
    made = made_fit(8)
    made.save(tmp_path)
    code, text = run("vllm", str(tmp_path), "--json")
    found = json.loads(text.splitlines()[-1])
    assert (
        code == 0
        and found["plan"] == str(Plan.parse(made.plan))
        and tuple(found["skipped"]) == made.export("vllm").skipped
    )
    assert "Layers were compared by what each lost alone" in " ".join(text.split())
    code, text = run("vllm", str(tmp_path / "fitted.toml"))
    assert code == 0 and "what each layer loses was not measured" in " ".join(text.split())


def test_a_model_numbers_its_layers():
    code, text = run("vllm", "by_layer(of=[plain, fp8], layers=[0, 1, 1, 1, 1, 1])", "--model", "demo", "--json")
    assert code == 0 and json.loads(text.splitlines()[-1])["skipped"] == [0] and "Layers are counted" not in text
    code, text = run("vllm", "kivi4", "--model", "demo", "--layers", "6")
    assert code == 2 and "give one" in text


def test_a_number_of_layers_that_no_model_has_is_refused_at_once():
    code, text = run("vllm", "kivi4", "--layers", "999999")
    assert code == 2 and "for 999,999 layers: at most 100,000" in " ".join(text.split())
