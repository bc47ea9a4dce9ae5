"""Numbers of real models in README and docs/measured.md are those of the records in docs/records."""

from __future__ import annotations

import csv
import gzip
import re
import runpy
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.docs.test_site import REPOSITORY

from kvtailor.bench.report import summarise
from kvtailor.bench.schema import latest, read_records
from kvtailor.cli import main
from kvtailor.plan import Plan

SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "write_real_models.py"))
VERDICTS = runpy.run_path(str(REPOSITORY / "docs" / "write_verdicts.py"))
PUBLISH = runpy.run_path(str(REPOSITORY / "docs" / "publish_records.py"))["publish"]
RECORDS = REPOSITORY / "docs" / "records"
FOLDERS = sorted(each.parent.name for each in RECORDS.glob("*/records.jsonl.gz"))


@pytest.mark.parametrize("page", SCRIPT["PAGES"], ids=lambda page: page.name)
def test_the_pages_are_what_the_records_say(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- real models: " in text
    assert SCRIPT["written"](text, SCRIPT["read"](), SCRIPT["read_rankings"]()) == text


def test_another_number_in_a_record_is_another_page():
    models = SCRIPT["read"]()
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    name, plan = next(iter(models)), next(iter(SCRIPT["START"].values()))
    row = models[name][plan]
    loss = row.numbers["perplexity.nll_over_full"]
    more = {loss.name: loss._replace(value=loss.value + 0.002, high=loss.high + 0.002)}
    models[name][plan] = replace(row, numbers={**row.numbers, **more})
    assert SCRIPT["written"](page, models, {}) != page


def test_readme_judges_its_plans_as_the_report_of_the_same_records_does():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    rows = {
        plan: next(line for line in text.splitlines() if f"| `{plan}` |" in line) for plan in SCRIPT["START"].values()
    }
    for name, folder in SCRIPT["MODELS"].items():
        said = summarise(read_records(RECORDS / folder)).advice.sentence
        for plan, row in rows.items():
            word = row.split("|")[-2].strip()
            assert word in ("safe", "not shown") or word.startswith("harmful: ")
            if said.startswith("Use none of these plans yet"):
                assert word != "safe" and "nothing to notice" not in row, f"{plan} on {name}"
    assert "harmful: novels on SmolLM2-135M; Python on " in rows["snapkv(kernel=21) + adakv @ keep=0.25"]
    assert rows["k3v3"].endswith("| harmful: later questions on SmolLM2-135M |")


def test_a_number_of_another_text_is_of_its_own_records():
    there = SCRIPT["read_texts"]()
    for name, texts in there.items():
        records = latest(read_records(RECORDS / f"{SCRIPT['MODELS'][name]}-texts"))
        for text, losses in texts.items():
            full = next(each for each in records if each.plan == "full" and each.text == text)
            assert len(full.values["nll"]) == 12 and len(losses) > 10
            for plan, loss in losses.items():
                [ours] = [each for each in records if each.label == plan and each.text == text]
                told = sum(ours.values["nll"]) / 12 - sum(full.values["nll"]) / 12
                assert loss.value == pytest.approx(told, abs=1e-9) and loss.low < loss.value < loss.high
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in readme.splitlines() if "| `k3v3` |" in line]
    python = there["SmolLM2-135M"]["kvtailor-engine.py.txt"]["k3v3"]
    assert f", {python.high:.3f}; " in row and python.low > 0.02


def test_of_two_plans_of_one_name_at_a_budget_the_table_has_the_one_with_most_bytes():
    """One meant for a sixteenth that holds a little more stands at an eighth, beside the one cut to that."""
    [name, ranking] = list(SCRIPT["read_rankings"]().items())[1]
    both = [each for each in ranking.at(0.125) if each.label == "snapkv, kernel 21 + adakv"]
    assert len(both) == 2 and both[0].share > 0.12 > 0.07 > both[1].share, "other records: take another plan"
    page = SCRIPT["written"]("<!-- real models: field -->\n<!-- /real models -->", {}, {name: ranking})
    row = next(line for line in page.splitlines() if line.startswith("| snapkv, kernel 21 + adakv |"))
    assert f"{both[0].scores['novels, ΔNLL'].difference.value:+.3f}" in row


@pytest.mark.parametrize(("folder", "model"), [(each, name) for name, each in SCRIPT["MODELS"].items()])
def test_a_check_agrees_with_the_bench_as_the_page_says(folder, model):
    agrees = runpy.run_path(str(REPOSITORY / "benchmarks" / "check_agrees.py"))
    check, bench = (latest(read_records(RECORDS / name)) for name in (f"{folder}-check", folder))
    found = agrees["pairs_of"](check, [each for each in bench if each.text == "books_eval"], 0.01)
    assert not [mine.plan for mine, theirs in found if agrees["contradicts"](mine, theirs)]
    page = (REPOSITORY / "docs" / "how-to" / "safe-on-my-model.md").read_text(encoding="utf-8")
    assert f"| {model}-Instruct | {len(found)} | {sum(a.word == b.word for a, b in found)} | 0 |" in page


def test_every_verdict_has_its_lines_of_real_models():
    page = VERDICTS["PAGE"].read_text(encoding="utf-8")
    for name in VERDICTS["names_in"](page):
        [lines] = re.findall(
            rf"<!-- real models: of {re.escape(name)} -->\n(.*?)<!-- /real models -->", page, re.DOTALL
        )
        told = [f"- {model}: " in lines for model in SCRIPT["MODELS"]]
        assert all(told) or lines == "Not measured on a real model.\n", name
    orders = _orders(page, both=True)
    assert all(model.startswith("Qwen") for model, *_ in orders), "the page says which"
    last, first = "higgs, 4 bits", "kvquant, 2 bits"
    assert {tuple(order) for _, *order in orders} == {
        (0.5, "expected", "pyramidkv"),
        *(("codes", one, last) for one in ("vector, 4 bits", "nvfp4", "kivi, 2 bits", "turboquant, 2 bits", first)),
        *(("codes", first, other) for other in ("vector, 4 bits", "turboquant, 3 bits")),
    }
    assert "finds more needles than `streaming`" in " ".join(page.split()) and len(_orders(page, both=False)) > 5


def _orders(page, *, both):
    """Pairs of plans whose order a real model shows, and the embedded model shows or has by its means the other way."""
    embedded = SCRIPT["_embedded"](page)
    there = SCRIPT["_order" if both else "_means"]
    found = []
    for name, rows in SCRIPT["read"]().items():
        real = SCRIPT["_by_label"](SCRIPT["read_rankings"]()[name], rows)
        for group in (0.5, 0.25, 0.125, "codes"):
            at = {each: SCRIPT["_at"](real[each], group) for each in real}
            was = {each: SCRIPT["_at"](embedded.get(each, ()), group) for each in real}
            labels = [each for each in real if at[each] and was[each]]
            found += [
                (name, group, one, other)
                for one in labels
                for other in labels
                if SCRIPT["_order"](at[one].loss, at[other].loss) < 0 < there(was[one].loss, was[other].loss)
            ]
    return found


def test_numbers_of_real_models_in_sentences_by_hand_stand_in_the_lines_below_them():
    page = VERDICTS["PAGE"].read_text(encoding="utf-8")
    seen = 0
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        by_hand, _, below = section.partition("<!-- measured: ")
        lines = " ".join(below.partition("<!-- real models: of ")[2].split())
        for sentence in re.split(r"(?<=\.) ", " ".join(by_hand.split())):
            if any(each in sentence for each in ("SmolLM2", "Qwen", "real models")):
                for number in re.findall(r"[+-]0\.\d{3}", sentence):
                    seen += 1
                    assert f"novels {number} (" in lines, f"{section.splitlines()[0]}: {sentence}"
                for right, asked in re.findall(r"(\d+) of (6|12)\b", sentence):
                    told = f"{right} of {asked} needles ("
                    assert told in lines or "floor 0.2" in sentence, f"{section.splitlines()[0]}: {sentence}"
    assert seen


def test_a_name_in_the_records_is_the_plan_that_the_suite_has_under_it():
    for ranking in SCRIPT["read_rankings"]().values():
        for place in ranking.places:
            today = SCRIPT["suite_rows"]().get(place.label)
            assert today in (None, SCRIPT["_methods_of"](place.plan.partition(" @ ")[0])), place.label


def test_a_preset_is_told_what_it_lost_at_whatever_budget():
    told = SCRIPT["of_plan"](Plan.parse("kvzip @ keep=0.3"))
    for name, rows in SCRIPT["read"]().items():
        row = next(row for text, row in rows.items() if text.startswith("kvzip_pooled @"))
        cut = [each for each in SCRIPT["read_rankings"]()[name].places if each.label == "kvzip" and each.scores]
        pairs = [(each.share, each.scores["novels, ΔNLL"].difference) for each in cut] or [(row.ratio, row.loss)]
        [line] = [each for each in told if each.startswith(f"{name}: ")]
        for share, loss in pairs:
            assert f"{100 * share:.1f} % of the bytes, novels {loss.value:+.3f} (" in line
    assert SCRIPT["of_plan"](Plan.parse("kvzip + uniform @ keep=0.3")) != told
    assert SCRIPT["of_plan"](Plan.parse("snapkv(window=7) @ keep=0.3")) == ()


def test_every_plan_to_start_from_was_measured_on_every_model():
    for name, rows in SCRIPT["read"]().items():
        for plan in SCRIPT["START"].values():
            assert rows[plan].loss is not None and rows[plan].loss.high is not None, f"{plan} on {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_anyone_makes_the_tables_again(folder, tmp_path):
    assert sum(each.stat().st_size for each in (RECORDS / folder).rglob("*") if each.is_file()) < 2**20
    shutil.copytree(RECORDS / folder, tmp_path / folder)
    done = CliRunner().invoke(main, ["report", str(tmp_path / folder)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / folder / "report.html").is_file()


def test_one_leaderboard_has_both_models(tmp_path):
    fields = [str(RECORDS / f"{folder}-field") for folder in SCRIPT["MODELS"].values()]
    done = CliRunner().invoke(main, ["report", *fields, "--to", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "leaderboard-field.csv").open(encoding="utf-8", newline="")))
    rankings = SCRIPT["read_rankings"]().values()
    assert len({row["model"] for row in rows}) == len(fields) == 2
    for ranking in rankings:
        places = [ranking.full, *ranking.places]
        found = [(row["plan"], row["novels, ΔNLL"]) for row in rows if row["model"] == ranking.last.model]
        told = [place.scores.get("novels, ΔNLL") for place in places]
        losses = ["" if score is None else str(score.difference.value) for score in told]
        assert found == list(zip([place.plan for place in places], losses, strict=True))
    # What is level on one model and leads on the other is one line.
    page = (tmp_path / "leaderboard-field.html").read_text(encoding="utf-8")
    assert re.search(
        r"<code>h2o</code></td>(?:(?!</tr>).)*; level</small>(?:(?!</tr>).)*; leads</small>", page, re.DOTALL
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sentence_names_the_verb_whose_options_it_has(folder):
    """Records of `check` have no `--documents`, which `bench` has."""
    run = summarise(latest(read_records(RECORDS / folder)))
    for text in (run.advice.sentence, run.advice.next or "", run.headline, *run.footnotes):
        said = re.findall(r"--[a-z-]+", text)
        # To the end of the sentence; a dot within a word, as in a model's name, ends none.
        for verb, words in re.findall(r"kvtailor (\w+)((?: (?:[^.;()]|\.\b)*?)? --(?:[^.;()]|\.\b)*)", text):
            known = {option for each in main.get_command(None, verb).params for option in each.opts}
            for option in re.findall(r"--[a-z-]+", words):
                assert option in known, text
                said.remove(option)
        assert not said, text


def test_what_is_published_is_what_was_measured(tmp_path):
    """The name of the model aside; and the same records give the same bytes."""
    folder = RECORDS / FOLDERS[0]
    [where, again] = [PUBLISH(folder, name, "hub/name", tmp_path) for name in ("one", "two")]
    records = read_records(folder)
    assert read_records(where) == [replace(record, model="hub/name") for record in records]
    packed = (where / "records.jsonl.gz").read_bytes()
    assert packed == (again / "records.jsonl.gz").read_bytes() and gzip.decompress(packed)
    (tmp_path / "mixed").mkdir()
    lines = [record.to_line() for record in (records[0], replace(records[0], model="another"))]
    (tmp_path / "mixed" / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="records of one model, found 2"):
        PUBLISH(tmp_path / "mixed", "three", "hub/name", tmp_path)


@pytest.mark.parametrize(
    ("measured", "published"),
    [
        ("atskv(file=my.safetensors) @ keep=0.25", "atskv @ keep=0.25"),
        ("atskv(file=my.safetensors, window=32) + adakv @ keep=0.25", "atskv(window=32) + adakv @ keep=0.25"),
        ("atskv(window=32, file=/a/my.safetensors) @ keep=0.25", "atskv(window=32) @ keep=0.25"),
    ],
)
def test_files_and_folders_of_a_machine_are_not_published(tmp_path, measured, published):
    """A plan that named a file is read without it, and a draft that is the model has its name on the hub."""
    (tmp_path / "suites").mkdir()
    record = read_records(RECORDS / FOLDERS[0])[0]
    asked = "speculation(draft=/models/mine, gamma=8)"
    own = replace(record, model="/models/mine", point={"draft": "/models/mine", "gamma": 8}, asked=asked)
    own = replace(own, plan=measured, label=measured, notes=("pg19 was read from /a/books_eval.",))
    (tmp_path / "records.jsonl").write_text(own.to_line() + "\n", encoding="utf-8")
    (tmp_path / "suites" / "it.toml").write_text(f'draft = "/models/mine"\nplan = "{measured}"\n', encoding="utf-8")
    where = PUBLISH(tmp_path, "one", "hub/name", tmp_path / "into")
    [found] = read_records(where)
    assert (found.plan, found.label, found.plan_hash) == (published, published, Plan.parse(published).hash)
    assert found.notes == ("pg19 was read from books_eval.",)
    assert found.point == {"draft": "hub/name", "gamma": 8} and found.asked == "speculation(draft=hub/name, gamma=8)"
    suite = (where / "suites" / "it.toml").read_text(encoding="utf-8")
    assert 'draft = "hub/name"' in suite and f'plan = "{published}"' in suite and "safetensors" not in suite
