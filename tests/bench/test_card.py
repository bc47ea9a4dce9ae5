"""A plan card: its numbers are those of the records, it comes back as it was written, and `--plan` takes its folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.support.fitting.made_fits import made_fit

from kvtailor.bench.card import CARD_FILE, Card, make_card
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.recorded_losses import recorded_loss
from kvtailor.bench.schema import read_records
from kvtailor.cli import main
from kvtailor.errors import KvtailorError, PlanError
from kvtailor.ops.files import seal_json, unseal_json
from kvtailor.plan import Plan

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "smollm2-135m"
PLAN = Plan.parse("snapkv + adakv @ keep=0.25")


@pytest.fixture(scope="module")
def records():
    return read_records(RECORDS)


def test_numbers_are_those_of_the_records(records):
    made = make_card(PLAN, records)
    pairs = [
        (ours, full)
        for ours in records
        for full in records
        if ours.plan == str(PLAN) and full.is_full and (ours.task, ours.text_hash) == (full.task, full.text_hash)
    ]
    [(ours, full)] = [pair for pair in pairs if pair[0].task == "perplexity"]
    [loss] = made.losses
    expected = mean_difference(ours.values["nll"], full.values["nll"], documents=ours.values["document"])
    assert loss.loss == expected and loss.text_hash == ours.text_hash
    assert loss.bytes == ours.bytes_held / ours.bytes_full
    [answers] = made.answers
    needles = [pair for pair in pairs if pair[0].task == "needle"]
    assert answers.right == sum(sum(pair[0].values["hit"]) for pair in needles)
    assert answers.full == sum(sum(pair[1].values["hit"]) for pair in needles)
    assert answers.count == sum(len(pair[0].values["hit"]) for pair in needles) and not answers.outside
    assert made.layers == () and made.versions["commit"] == ours.machine["commit"]
    assert made.model == "HuggingFaceTB/SmolLM2-135M-Instruct" and made.plan_hash == PLAN.hash


def test_it_comes_back_as_it_was_written(records, tmp_path, monkeypatch):
    made = make_card(PLAN, records)
    made.save(tmp_path / "card")
    assert Card.load(tmp_path / "card") == made and Plan.load(tmp_path / "card") == PLAN
    assert Plan.named(f"{tmp_path}/card") == PLAN
    assert Contestant.named(str(tmp_path / "card")).plan == PLAN
    (tmp_path / "kivi4").mkdir()
    assert Plan.named("kivi4") == Plan.parse("kivi4")
    text = (tmp_path / "card" / "card.json").read_text()
    (tmp_path / "card" / "card.json").write_text(text.replace('"right": ', '"right": 1'))
    with pytest.raises(KvtailorError, match="run `kvtailor card` again"):
        Card.load(tmp_path / "card")
    with pytest.raises(KvtailorError, match=r"found none of plan.toml, fitted.toml"):
        Plan.load(tmp_path / "kivi4")
    monkeypatch.chdir(tmp_path / "card")
    # No words are no plan, and not that of the folder one stands in.
    for line in (str(tmp_path / "nothing"), "kivi(bits=99) + " + "x" * 5000, "~nobody/there", "", " "):
        with pytest.raises(PlanError):
            Plan.named(line)


def test_the_page_has_a_head_in_yaml_and_every_number(records):
    made = make_card(PLAN, records)
    _, head, body = made.readme().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "base_model": made.model,
        "library_name": "kvtailor",
        "tags": ["kv-cache", "kv-cache-compression", "kvtailor"],
    }
    loss = made.losses[0].loss
    assert f"| {loss.value:+.4f} | {loss.low:+.4f} to {loss.high:+.4f} | {loss.count} |" in body
    assert f"| {made.answers[0].right} | {made.answers[0].full} | {made.answers[0].count} |" in body
    assert made.losses[0].text_hash in body and "What each layer loses by itself was not measured." in body
    assert "vLLM 0.33.0" in body and "snapkv + adakv @ keep=0.25 is missing" in body


def test_layers_have_what_a_fit_measured_at_the_plan_s_widths(records):
    plan = Plan.parse("kivi(recent=32, key_bits=8, value_bits=4)")
    layers = made_fit(8).layers
    with pytest.raises(KvtailorError, match=r"given are for 30, the layers that were measured are for 6"):
        make_card(plan, records, layers)
    records = [replace(each, tokens_by_head=None) for each in records]
    made = make_card(plan, records, layers)
    assert [(each.keys, each.values) for each in made.layers] == [
        (keys[1], values[2]) for keys, values in zip(layers.keys, layers.values, strict=True)
    ]
    assert f"| 0 | 8 | {layers.keys[0][1]:.5f} | 4 | {layers.values[0][2]:.5f} |" in made.readme()
    none = make_card(plan, records, replace(layers, widths=(0, 7, 6, 5)))
    assert {(each.keys, each.values) for each in none.layers} == {(None, None)}


def test_a_plan_that_was_not_measured_and_several_models_are_refused(records):
    with pytest.raises(KvtailorError, match="those of .*fp8"):
        make_card(Plan.parse("kivi(bits=7)"), records)
    with pytest.raises(KvtailorError, match="changes nothing"):
        make_card(Plan.parse("full"), records)
    with pytest.raises(KvtailorError, match="one model"):
        make_card(PLAN, [*records, replace(records[0], model="another")])
    with pytest.raises(KvtailorError, match="do not have; they have no loss of 'full' to hold it against: run"):
        make_card(PLAN, [each for each in records if not each.is_full])


def test_a_plan_that_did_nothing_is_said_to(records):
    """A loss of 0.0000 with an interval of 0 to 0 looks like a plan that loses nothing."""
    full = {(each.task, each.text_hash): each for each in records if each.is_full}
    idle = [
        replace(each, values=full[each.task, each.text_hash].values) if each.plan == str(PLAN) else each
        for each in records
        if (each.task, each.text_hash) in full
    ]
    assert (
        "the plan did nothing: each loss is the uncompressed cache's to the last bit" in make_card(PLAN, idle).readme()
    )
    assert "did nothing" not in make_card(PLAN, records).readme()


def test_what_was_measured_and_is_not_shown_is_named(records, tmp_path):
    made = make_card(PLAN, records)
    assert made.unshown == () and "Measured as well" not in made.readme()
    asked = [replace(each, task="ask", values={}) for each in records if each.task == "needle"]
    more = make_card(PLAN, [*records, *asked])
    assert more.unshown == ("ask",) and replace(more, unshown=()) == made
    assert "Measured as well, and not on this page: ask." in " ".join(more.readme().split())
    assert Card.load(more.save(tmp_path / "card")) == more
    # A card of before has no such field.
    text, _ = unseal_json((tmp_path / "card" / CARD_FILE).read_text())
    old = {name: value for name, value in json.loads(text).items() if name != "unshown"}
    (tmp_path / "card" / CARD_FILE).write_text(seal_json(json.dumps(old)))
    assert Card.load(tmp_path / "card") == made


def test_the_command_writes_a_folder_that_other_commands_take(tmp_path):
    words = ["card", str(PLAN), "--records", str(RECORDS), "--out", str(tmp_path / "card")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and "What each layer loses was not measured" in " ".join(result.output.split())
    assert sorted(each.name for each in (tmp_path / "card").iterdir()) == ["README.md", "card.json", "plan.toml"]
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "card"), "--json"])
    assert shown.exit_code == 0 and json.loads(shown.output.splitlines()[-1])["plan"] == str(PLAN)
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit" / "records").symlink_to(RECORDS)
    of_fit = CliRunner().invoke(main, [*words[:3], str(tmp_path / "fit"), *words[4:]])
    assert of_fit.exit_code == 0, of_fit.output
    wrong = CliRunner().invoke(main, ["card", "kivi(bits=7)", *words[2:]])
    assert wrong.exit_code == 2 and "kvtailor bench" in wrong.output


def test_what_was_in_a_folder_is_not_written_over(records, tmp_path):
    made = make_card(PLAN, records)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(KvtailorError, match=r"which has README\.md and no card"):
        made.save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"] and (
        tmp_path / "README.md"
    ).read_text() == "mine"
    made.save(tmp_path / "card")
    made.save(tmp_path / "card")
    (tmp_path / "card" / "README.md").unlink()
    (tmp_path / "card" / "README.md").mkdir()
    with pytest.raises(KvtailorError, match=r"README\.md is a folder"):
        made.save(tmp_path / "card")


def test_the_number_of_layers_is_that_of_the_records(records):
    """A setting that leaves the first and last layers whole stands beside a plan that does."""
    plan = Plan.parse("turboquant4")
    vllm = next(each for each in make_card(plan, records).settings if each.engine == "vLLM")
    assert Plan.parse(vllm.neighbour).encode.table_layers == 30 and "how many layers" not in vllm.lacks
    bare = [replace(each, tokens_by_head=None) for each in records]
    vllm = next(each for each in make_card(plan, bare).settings if each.engine == "vLLM")
    assert vllm.neighbour is None and "how many layers" in vllm.lacks


@pytest.mark.parametrize("name", ["plan.toml", "card.json"])
def test_a_pipe_or_a_link_in_the_place_of_a_card_s_file_is_refused(records, tmp_path, name):
    card = tmp_path / "card"
    made = make_card(PLAN, records)
    made.save(card)
    (card / "fitted.toml").write_text(Plan.parse("kivi4").to_toml())
    kept = (card / name).read_bytes()
    (tmp_path / "elsewhere").write_bytes(kept)

    def refused(why):
        for read in (Plan.load, Card.load, lambda folder: Plan.named(f"{folder}/")):
            with pytest.raises(KvtailorError, match=why):
                read(card)

    (card / name).unlink()
    os.mkfifo(card / name)
    refused("is a pipe and no regular file")
    for target in (tmp_path / "elsewhere", tmp_path / "nothing", card / name):
        (card / name).unlink()
        (card / name).symlink_to(target)
        refused("is a link to")
    (card / name).unlink()
    (card / "renamed").write_bytes(kept)
    (card / name).symlink_to("renamed")
    assert Card.load(card) == made


def test_a_card_in_the_hub_s_cache_is_read(records, tmp_path):
    """There the files are links to `blobs`."""
    made, blobs = make_card(PLAN, records), tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for folder in ("", "cards/kivi4"):
        card = tmp_path / "models--a--b" / "snapshots" / "0123abc" / folder
        made.save(card)
        for each in [path for path in card.iterdir() if path.is_file()]:
            each.rename(blobs / each.name)
            each.symlink_to(blobs / each.name)
        assert Card.load(card) == made and Plan.load(card) == PLAN


def test_a_card_and_the_plan_beside_it_are_of_one_plan(records, tmp_path):
    made = make_card(PLAN, records)
    made.save(tmp_path)
    (tmp_path / "plan.toml").write_text(Plan.parse("kivi2").to_toml())
    with pytest.raises(KvtailorError, match="one was changed"):
        Plan.load(tmp_path)
    with pytest.raises(KvtailorError, match="cannot be read"):
        Card.load(tmp_path)
    made.save(tmp_path)
    replace(made, losses=()).save(tmp_path)
    with pytest.raises(KvtailorError, match="no loss"):
        Card.load(tmp_path)


def test_a_loss_is_of_one_model_one_cache_and_the_newest_record(records):
    mine = [each for each in records if each.task == "perplexity" and (each.is_full or each.plan == str(PLAN))]
    before = recorded_loss(PLAN, mine)
    assert before is not None
    others = {"model_hash": "0" * 64, "cache_dtype": "float16", "dtype": "float64"}
    for name, value in others.items():
        assert recorded_loss(PLAN, [replace(each, **{name: value}) if each.is_full else each for each in mine]) is None
    [ours] = [each for each in mine if not each.is_full]
    worse = replace(
        ours,
        started="2099-01-01T00:00:00.000+00:00",
        values={**ours.values, "nll": tuple(x + 1 for x in ours.values["nll"])},
    )
    for order in ([*mine, worse], [worse, *mine]):
        found = recorded_loss(PLAN, order)
        assert found is not None and found.value == pytest.approx(before.value + 1)


def test_names_from_outside_break_no_table_and_no_command(records):
    made = make_card(PLAN, records)
    [loss] = made.losses
    odd = replace(
        made,
        model="evil\nname | x`y",
        losses=(replace(loss, text="my | text\n# boom", dtype="float32\n# boom", text_hash="0`\n# boom"),),
        answers=tuple(replace(each, hashes=("`\n# boom",)) for each in made.answers),
        versions={**made.versions, "processor": "a`\n# boom"},
        model_hash="`\n# boom",
    )
    page = odd.readme()
    assert "\nname" not in page.split("---")[2] and "\n# boom" not in page and "| my / text # boom |" in page
    assert "SHA-256 `0' # boom`" in page and "Model hash `' # boom`" in page
    assert "kvtailor run --model 'evil name / x'\"'\"'y' --plan FOLDER" in page
    assert yaml.safe_load(page.split("---")[1])["base_model"] == odd.model
