"""The verbs ls, show and check: what they print, their JSON, and how they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvtailor.cli import main
from kvtailor.plan import Plan, registry
from kvtailor.plan.arguments import explanations


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def last_object(found: Result) -> dict[str, Any]:
    lines = found.stdout.rstrip("\n").split("\n")
    assert sum(line.startswith("{") for line in lines) == 1
    read = json.loads(lines[-1])
    assert isinstance(read, dict)
    return read


def test_ls_lists_every_method_and_preset() -> None:
    found = call("ls", "--json")
    assert found.exit_code == 0
    read = last_object(found)
    for stage in registry.stages():
        assert read["stages"][stage].keys() == registry.methods(stage).keys()
        for name in registry.methods(stage):
            assert f"  {name} " in found.stdout
    assert read["presets"].keys() == registry.presets().keys()


def test_ls_of_one_stage() -> None:
    found = call("ls", "allocate")
    assert "adakv" in found.stdout and "snapkv " not in found.stdout and "presets" not in found.stdout
    assert "uniform (default)" in found.stdout
    assert "streaming" in call("ls", "presets").stdout


def test_ls_of_a_method_explains_each_argument() -> None:
    found = call("ls", "snapkv", "--json")
    assert found.exit_code == 0 and "kernel=21" in found.stdout and "odd width of the pooling" in found.stdout
    told = {each["name"]: each["explained"] for each in last_object(found)["arguments"]}
    assert told["window"] == "newest queries that vote, and newest tokens that always stay."
    # What stands behind @ is no method's, and is asked for in the same breath.
    assert "keep=" in found.stdout and "fraction of each row's tokens" in found.stdout
    kivi = {each["name"]: each["explained"] for each in last_object(call("ls", "kivi", "--json"))["arguments"]}
    assert kivi["recent"].startswith("newest tokens in full precision") and kivi["recent"].endswith("a whole group.")
    assert "fraction of each row's tokens" in call("ls", "keep").stdout
    assert "stands for: kivi(bits=4)" in call("ls", "kivi4").stdout
    refused = call("ls", "kivy4")
    assert refused.exit_code == 2 and "did you mean 'kivi4'" in refused.stderr


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("snapkv @ keep=0.25", True),
        ("h2o + kivi(bits=4) @ keep=0.25", True),
        ("expected_attention @ keep=0.5", True),
        ("kvzip @ keep=0.25", False),
        ("streaming @ tokens=64", False),
        ("kivi4", False),
    ],
)
def test_show_says_which_plans_lose_questions_that_come_later(plan: str, told: bool) -> None:
    assert ("questions that come later try kvzip" in " ".join(call("show", plan).stdout.split())) == told


def test_every_argument_of_every_method_has_an_explanation() -> None:
    lacking = [
        f"{name}({each.name}=)"
        for stage in registry.stages()
        for name in registry.methods(stage)
        for kind in [registry.load(stage, name)]
        for each in fields(kind)  # type: ignore[arg-type]
        if each.init and not explanations(kind).get(each.name)
    ]
    assert lacking == []


def test_show_keeps_the_name_that_it_was_asked_by() -> None:
    found = call("show", "kivi4", "--json")
    assert found.stdout.splitlines()[:2] == ["kivi4", "kivi(bits=4)"] and last_object(found)["named"] == "kivi4"
    assert call("show", "snapkv + kivi4 @ keep=0.5").stdout.startswith("snapkv + kivi4 @ keep=0.5\n")
    assert call("show", "kivi(bits=4)").stdout.startswith("kivi(bits=4)\n")


def test_show_says_stages_sources_and_bytes() -> None:
    found = call(
        "show", "snapkv(window=16) + adakv @ tokens=64", "--head-size", "80", "--cache-dtype", "float32", "--json"
    )
    assert found.exit_code == 0
    assert "2404.14469" in found.stdout and "2407.11550" in found.stdout
    read = last_object(found)
    assert read["plan"] == "snapkv(window=16) + adakv @ tokens=64"
    assert read["stages"]["score"]["arguments"]["window"] == 16
    assert read["closed_form"]["full_bytes_per_token_and_kv_head"] == 2 * 80 * 4
    assert read["closed_form"]["bytes_per_token_and_kv_head"] == 2 * 80 * 4
    assert read["closed_form"]["bytes_per_token"] is None
    assert read["hash"] == Plan.parse(read["plan"]).hash
    assert Plan.from_toml(read["toml"]) == Plan.parse(read["plan"])


def test_show_says_what_methods_inside_are() -> None:
    found = call("show", "snapkv + shuffled(of=inverse(of=pyramid(beta=3)), state=1) @ tokens=64", "--json")
    assert "allocate  shuffled(of=inverse(of=pyramid(beta=3.0)), state=1)" in found.stdout
    assert "2406.02069" in found.stdout and "Inverse: another allocator's" in found.stdout
    stage = last_object(found)["stages"]["allocate"]
    assert stage["arguments"] == {"of": "inverse(of=pyramid(beta=3.0))", "state": 1}
    assert [each["method"] for each in stage["inner"]] == ["inverse", "pyramid"]


def test_show_with_a_model_counts_layers_and_heads() -> None:
    sizes = last_object(call("show", "full", "--model", "demo", "--json"))
    known = sizes["sizes"]
    each = sizes["closed_form"]["bytes_per_token_and_kv_head"]
    assert sizes["closed_form"]["bytes_per_token"] == each * known["kv_heads"] * known["compressed_layers"] > 0


def test_show_reads_words_and_toml_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(Plan.parse("snapkv @ keep=0.5").to_toml())
    as_file = call("show", str(file), "--json")
    as_words = call("show", "snapkv", "@", "keep=0.5", "--json")
    assert as_file.exit_code == 0 and as_file.stdout == as_words.stdout
    missing = call("show", str(tmp_path / "none.toml"))
    assert missing.exit_code == 2 and "cannot be read" in missing.stderr


def test_check_without_faults() -> None:
    found = call("check", "snapkv + adakv @ tokens=64", "--model", "demo", "--json")
    assert found.exit_code == 0
    read = last_object(found)
    assert read["faults"] == [] and read["compressed_layers"] == list(range(read["layers"]))


def test_check_says_what_runs_on_this_machine() -> None:
    (few, *_) = last_object(call("check", "kivi4", "--json"))["implementations"]
    assert few["operation"].startswith("attention of up to") and few["why"]
    (forced,) = last_object(call("--implementation", "reference", "check", "kivi4", "--json"))["implementations"]
    assert forced["why"] == "the reference is forced" and forced["implementation"] != few["implementation"]
    assert last_object(call("check", "kivi4", "--json"))["implementations"][0] == few


def test_check_says_all_faults() -> None:
    found = call("check", "snapk + adakv(floor=7) @ tokens=3, keep=1", "--json")
    assert found.exit_code == 2
    read = last_object(found)
    assert len(read["faults"]) == 3 and read["plan"] is None and read["hash"] is None
    assert found.stderr.count("fault: ") == 3 and "fault" not in "".join(found.stdout.splitlines()[:-1])


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration file, as save_pretrained does, and gives its folder."""

    def write(**fields: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return str(tmp_path)

    return write


def test_check_names_windowed_layers(config: Any) -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 9,
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = config(model_type="gemma3_text", layer_types=kinds, sliding_window=16, head_dim=8, **sizes)
    read = last_object(call("check", "streaming @ keep=0.5", "--model", folder, "--json"))
    assert read["compressed_layers"] == [1, 3] and read["faults"] == []
    assert read["notes"][0] == "2 of 4 layers are compressed; 2 keep the model's own window of 16 tokens"


def test_check_refuses_where_nothing_can_be_compressed(config: Any) -> None:
    folder = config(model_type="mistral", num_hidden_layers=2, sliding_window=16)
    found = call("check", "snapkv @ keep=0.5", "--model", folder)
    assert found.exit_code == 2 and "nothing to compress" in found.stderr
    assert call("check", "full", "--model", folder).exit_code == 0


def test_check_says_why_a_model_is_refused_beside_the_plans_faults(config: Any) -> None:
    read = last_object(call("check", "snapkv", "--model", config(model_type="t5"), "--json"))
    assert len(read["faults"]) == 2 and "encoder-decoder" in read["faults"][1]


def test_check_notes_a_budget_above_the_models_positions(config: Any) -> None:
    folder = config(model_type="llama", max_position_embeddings=64)
    read = last_object(call("check", "snapkv @ tokens=64", "--model", folder, "--json"))
    assert "nothing will be evicted" in read["notes"][1]
    assert len(last_object(call("check", "snapkv @ tokens=63", "--model", folder, "--json"))["notes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "scoer"], "there is no stage, method or preset named 'scoer'; did you mean 'score'"),
        (["show", "snapkv @ tokns=3"], "there is no setting named 'tokns'"),
        (["shw", "full"], "there is no verb named 'shw'; did you mean 'show'"),
        (["check", "full", "--model", "/no/such/folder"], "there is no folder /no/such/folder"),
    ],
)
def test_mistakes_end_with_a_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    found = call(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr and "Traceback" not in found.stderr
    assert not found.stdout


def test_every_file_with_a_command_is_a_verb_and_help_lists_it() -> None:
    found = call("--help")
    verbs = main.list_commands(None)  # type: ignore[arg-type]
    assert {"ls", "show", "check", "run", "bench"} <= set(verbs) and "plan_words" not in verbs
    for verb in verbs:
        assert f"  {verb} " in found.stdout
        assert call(verb, "--help").exit_code == 0


def test_the_version_and_the_help_load_neither_torch_models_nor_transformers() -> None:
    code = (
        "import sys; from kvtailor.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules, 'slow'"
    )
    for argument in ("--version", "--help"):
        found = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
    assert "kvtailor" in found.stdout


@pytest.mark.parametrize(
    ("plan", "each"),
    [
        # 4 bits with 4 scales of 2 bytes in 64, and 16 bits, of 64 and 64 elements.
        ("by_layer(of=[kivi(bits=4), plain], layers=[0, 1, 1, 0])", 128 * (0.5 + 4 / 32 + 2) / 2),
        ("bit_table(of=kivi, keys=[4, 2], values=[2, 2])", 64 * (0.5 + 3 * 0.25) / 2 + 128 * 4 / 32),
    ],
)
def test_show_takes_the_layers_that_a_table_is_for(plan: str, each: float) -> None:
    found = call("show", plan, "--head-size", "64", "--cache-dtype", "bfloat16", "--json")
    assert found.exit_code == 0
    assert last_object(found)["closed_form"]["bytes_per_token_and_kv_head"] == each
    refused = call("show", plan, "--model", "demo")
    assert refused.exit_code != 0 and "layers; the plan compresses" in refused.output + str(refused.exception)


def test_a_head_size_beside_a_model_is_refused():
    found = CliRunner().invoke(main, ["show", "kivi4", "--model", "demo", "--head-size", "128"])
    assert found.exit_code == 2 and "both say how wide a head is" in found.output
