"""Settings of a suite follow the model's shapes; what does not fit is left out and named before the first cell."""

import json
from functools import cache

import pytest
from click.testing import CliRunner
from tests.support.seam.zoo import build

from kvtailor.bench.runner import run
from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.fitted import written
from kvtailor.bench.suite.run import prepare
from kvtailor.bench.suite.shapes import fit_settings, settings_of_lines
from kvtailor.bench.suite.suite import DEFAULT, SuiteError, read_suite, suites
from kvtailor.cli import bench
from kvtailor.errors import KvtailorError

HEAD = """
title = "Small"
[settings.default]
rank = 96
ranks = [120, 64]
contexts = [512, 2048]
tier = "host"
keep = 0.5
[shapes]
rank = { of = "head_size", from = 128 }
ranks = { of = "head_size", from = 128 }
contexts = { most = "positions", less = 64 }
tier = { cpu = "disk" }
"""
TABLES = """
[tasks.ppl]
run = "perplexity"
for = { context = "{contexts}" }
text = "generated"
context = "{context}"
continuation = 32
windows = 2
[[tables]]
name = "loss"
title = "Loss"
labels = ["Method"]
columns = [{ label = "NLL", task = "ppl", value = "metrics.nll" }]
rows = [
    { Method = "full", plan = "full" },
    { Method = "snap", plan = "snapkv(window=8) @ keep={keep}" },
    { Method = "atskv", plan = "atskv @ keep={keep}" },
]
"""


DRAFTED = """
title = "Drafted"
[settings.default]
draft = "nobody/nowhere"
[tasks.spec]
run = "speculation"
text = "generated"
context = 64
tokens = 4
rounds = 1
draft = "{draft}"
[[tables]]
name = "speed"
title = "Speed"
labels = ["Method"]
columns = [{ label = "x", task = "spec", value = "metrics.speed_up" }]
rows = [{ Method = "full", plan = "full" }]
"""


@cache
def model():
    tokenizer = Subject.load("demo").tokenizer
    built = build("llama")
    built.config.max_position_embeddings = 640
    built.resize_token_embeddings(len(tokenizer))
    return Subject(name="mine", model=built, tokenizer=tokenizer)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(HEAD + TABLES)
    return path


def test_settings_follow_the_models_shapes(small):
    fitted, told = fit_settings(read_suite(small), model())
    size = model().model.config.head_dim
    found = fitted.settings_of("mine")
    assert found["rank"] == round(96 * size / 128) and found["ranks"] == [round(120 * size / 128), size // 2]
    assert (found["contexts"], found["tier"], found["keep"]) == ([512, 576], "disk", 0.5)
    assert "contexts=[512, 576] in place of [512, 2048], from the model's shapes" in told and len(told) == 4
    assert fitted.settings_of("another")["contexts"] == [512, 2048]


def test_a_model_with_settings_of_its_own_keeps_them(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(HEAD + "[settings.mine]\ncontexts = [600]\n" + TABLES)
    fitted, told = fit_settings(read_suite(path), model())
    assert fitted.settings_of("mine")["contexts"] == [600] and fitted.settings_of("mine")["rank"] == 96 and not told


def test_what_a_user_sets_goes_before_all_and_stands_beside_the_records(small, tmp_path):
    asked = settings_of_lines(["contexts=[128, 256]", "keep = 0.25", "tier=ram"])
    assert asked == {"contexts": [128, 256], "keep": 0.25, "tier": "ram"}
    fitted, told = fit_settings(read_suite(small), model(), asked)
    assert "keep=0.25 in place of 0.5, as asked" in told
    kept = tmp_path / "out.toml"
    kept.write_text(written(fitted, small.read_text(), kept))
    again = read_suite(kept)
    assert again.settings_of("mine") == fitted.settings_of("mine")
    assert again.tables_for("mine") == fitted.tables_for("mine") != read_suite(small).tables_for("mine")
    # Another model's stay, and a run without them takes them back.
    other, _ = fit_settings(again, Subject(name="other", model=model().model), {"keep": 0.75})
    kept.write_text(written(other, kept.read_text(), kept))
    assert read_suite(kept).settings_of("other")["keep"] == 0.75
    assert read_suite(kept).settings_of("mine")["keep"] == 0.25
    with pytest.raises(SuiteError, match="no setting 'context', it has .*; did you mean 'contexts'"):
        fit_settings(read_suite(small), model(), {"context": 3})
    with pytest.raises(SuiteError, match="give a list, such as contexts="):
        fit_settings(read_suite(small), model(), {"contexts": 96})
    with pytest.raises(SuiteError, match="give one value, such as keep=0.5"):
        fit_settings(read_suite(small), model(), {"keep": [0.5]})
    with pytest.raises(KvtailorError, match="write NAME=VALUE"):
        settings_of_lines(["contexts"])


def test_names_in_a_list_need_no_quotes():
    """The sentence that asks for a list shows one without: kinds=[needle, passkey]."""
    assert settings_of_lines(
        ["kinds=[needle,passkey]", 'sets=[ "2wikimqa", qasper ]', "sizes=[4, 1024]", "none=[]"]
    ) == {
        "kinds": ["needle", "passkey"],
        "sets": ["2wikimqa", "qasper"],
        "sizes": [4, 1024],
        "none": [],
    }


def test_rules_that_name_nothing_are_faults(tmp_path):
    path = tmp_path / "small.toml"
    rules = '[shapes]\nkeep = { of = "head_sise", from = 4 }\nkeeps = { most = "layers" }\nrank = { off = "x" }\n'
    rules += 'ranks = 3\ncontexts = { of = "layers", from = 0 }\n'
    rules += 'tier = { most = "positions", less = "all", times = "half" }\n'
    path.write_text(HEAD.partition("[shapes]")[0] + rules + TABLES)
    with pytest.raises(SuiteError) as caught:
        read_suite(path)
    said = str(caught.value)
    assert "did you mean 'head_size'" in said and "did you mean 'keep'" in said and "unknown key 'off'" in said
    assert "ranks is 3: write a rule" in said and "less is 'all'" in said and "times is 'half'" in said
    assert "contexts: write from =" in said


def test_where_no_token_is_left_the_default_stays_and_does_not_fit(small):
    small.write_text(small.read_text().replace("less = 64", "less = 640"))
    fitted, _ = fit_settings(read_suite(small), model())
    assert fitted.settings_of("mine")["contexts"] == [512, 2048]


def test_what_does_not_fit_is_named_before_the_first_cell_and_the_rest_is_measured(small):
    prepared = prepare(read_suite(small), model())
    long, calibrated = sorted(prepared.unavailable, key=lambda each: "atskv" in each)
    assert "2080 tokens, but mine has 640 positions" in long and "--set NAME=VALUE" in long
    assert calibrated.startswith("atskv @ keep=0.5: atskv: no file is named")
    tried = []
    subject = Subject(name="mine", model=model().model, tokenizer=model().tokenizer)
    object.__setattr__(subject, "new_cache", lambda each: tried.append(each.label) or Subject.new_cache(subject, each))
    done = run(subject, prepared.contestants, prepared.jobs, bandwidth=False)
    assert not any("atskv" in label for label in tried)
    by = {(record.label.split(" ")[0], record.point.get("context")): record.error for record in done}
    assert by["full", 512] is None and by["snapkv(window=8)", 512] is None
    unfit = [record.error for record in done if record.label.startswith("atskv")]
    assert len(unfit) == 2 and any("no file is named" in error for error in unfit)
    assert sum(record.error is not None and "640 positions" in record.error for record in done) >= 2


def test_a_suite_of_which_nothing_fits_is_refused(small):
    with pytest.raises(SuiteError, match="but mine has 640 positions"):
        prepare(fit_settings(read_suite(small), model(), {"contexts": [700]})[0], model())


@pytest.mark.parametrize("name", sorted(suites()))
@pytest.mark.parametrize("positions", [2048, 8192, 32768])
def test_every_suite_fits_models_that_it_does_not_know(name, positions, monkeypatch):
    monkeypatch.setattr("kvtailor.bench.suite.run._made", lambda asked, subject, data: (None, "not made here"))
    bare = Subject(name="unknown", model=build("llama"))
    bare.model.config.max_position_embeddings = positions
    fitted, _ = fit_settings(read_suite(name), bare)
    monkeypatch.setattr("kvtailor.bench.suite.run._fitting", lambda contestant, subject: contestant)
    left_out = [each for each in prepare(fitted, bare).unavailable if "positions" in each]
    assert not left_out


def test_set_is_an_option_of_the_command(small, tmp_path):
    words = ["--suite", str(small), "--set", "contexts=[96]", "--set", "keep=0.75", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(bench.command, [*words, "--dtype", "float32", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["suite"] == "small" and DEFAULT
    assert read_suite(tmp_path / "out" / "suites" / "small.toml").settings_of("demo")["keep"] == 0.75
    refused = CliRunner().invoke(bench.command, ["--set", "keep=0.75"])
    assert refused.exit_code and "--set without --suite" in refused.output


@pytest.mark.parametrize(("draft", "said"), [("nobody/nowhere", "nobody/nowhere"), ("small", "has 99 tokens")])
def test_a_draft_model_that_cannot_draft_is_named_before_the_first_cell(draft, said, tmp_path, monkeypatch):
    path = tmp_path / "drafted.toml"
    path.write_text(DRAFTED, encoding="utf-8")
    small = build("llama").config
    small.vocab_size = 99

    def config_of(name):
        if name == "small":
            return small
        raise KvtailorError(f"asked for model {name!r}, which is not on this disk")

    monkeypatch.setattr("kvtailor.bench.suite.run.config_of", config_of)
    suite, _ = fit_settings(read_suite(str(path)), model(), {"draft": draft})
    prepared = prepare(suite, model())
    [why] = prepared.unavailable
    assert said in why and "--set draft=NAME" in why
    # No step of it runs, and its record says why.
    steps: list[str] = []
    [record] = prepared.run(advance=steps.append, bandwidth=False)
    assert said in str(record.error) and not steps


def test_reasons_are_said_once():
    sets = [f"longcontext(subset={name}): asked for the set '{name}' of longbench, not there" for name in "abc"]
    plans = [f"kvplugin(rank={rank}): lowrank: no file is named" for rank in (8, 16)]
    assert bench._by_reason([*sets, *plans, "x: alone"]) == [
        f"{sets[0]} (and 2 more, for the same reason)",
        f"{plans[0]} (and 1 more, for the same reason)",
        "x: alone",
    ]
