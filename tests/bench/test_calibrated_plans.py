"""Plans that read calibration files: their provenance reaches the records, and their own text is refused."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.calibrated import filters_for, tiny, write_file

import kvtailor
from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.data.overlap import Calibrated, text_hash
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity


def words(count: int, state: int) -> str:
    draw = random.Random(state)
    return " ".join(f"w{draw.randrange(5000)}" for _ in range(count))


MINE, OTHER = words(600, 0), words(600, 1)


@pytest.fixture(scope="module")
def subject():
    return tiny()


def plan_on(text: str | None, subject, folder: Path) -> str:
    path = write_file(folder / "f.safetensors", "qfilters", filters_for(subject.model), subject.model, on=text)
    return f"qfilters(file='{path}') @ keep=0.5"


def perplexity(text: str) -> Perplexity:
    return Perplexity(text=text, source="a corpus", context=64, continuation=16, windows=3)


def test_the_text_of_a_plans_file_is_refused_and_another_is_not(subject, tmp_path: Path) -> None:
    contestants = contestants_of([plan_on(MINE, subject, tmp_path)])
    assert contestants[1].calibration == ()
    reason = "calibration on the evaluated text: f.safetensors was made from a text"
    for text in (MINE, MINE[300:2300]):
        full, mine = run(subject, contestants, [perplexity(text)], bandwidth=False)
        assert full.error is None and mine.error.startswith(reason) and mine.metrics == {}
    full, mine = run(subject, contestants, [perplexity(OTHER)], bandwidth=False)
    assert mine.error is None and mine.tokens_held < full.tokens_held
    assert mine.calibrated_on == (f"a text {text_hash(MINE)}",) and full.calibrated_on == ()


def test_a_record_says_what_the_file_says_of_its_worth(subject, tmp_path: Path) -> None:
    facts = json.dumps({"verdict": "beats nothing"})
    tensors = filters_for(subject.model)
    path = write_file(tmp_path / "f.safetensors", "qfilters", tensors, subject.model, on=MINE, facts=facts)
    plans = contestants_of([f"qfilters(file='{path}') @ keep=0.5", "snapkv(window=8) @ keep=0.5"])
    full, mine, other = run(subject, plans, [perplexity(OTHER)], bandwidth=False, out=tmp_path)
    assert [note for note in mine.notes if "beats" in note] == ["qfilters of m: beats nothing."]
    assert not any("beats" in note for note in (*full.notes, *other.notes))
    again = run(subject, plans, [perplexity(OTHER)], bandwidth=False, out=tmp_path)
    assert [each.notes for each in again] == [each.notes for each in (full, mine, other)]


def test_a_file_inside_another_method_counts_too(subject, tmp_path: Path) -> None:
    plan = f"critical(of={plan_on(MINE, subject, tmp_path).replace(' @', ') @')}"
    _, mine = run(subject, contestants_of([plan]), [perplexity(MINE)], bandwidth=False)
    assert mine.error.startswith("calibration on the evaluated text")


def test_needles_are_asked_too(subject, tmp_path: Path) -> None:
    task = Needle(lengths=(200,), depths=(0.5,), documents=1, kind="passkey")
    document = task._grid(subject)[200, 0.5][0]
    _, mine = run(subject, contestants_of([plan_on(document.prompt, subject, tmp_path)]), [task], bandwidth=False)
    assert re.search("which shares .* of generated passkey documents", mine.error)


def test_a_plan_without_its_file_is_an_error_of_its_own_record(subject, tmp_path: Path) -> None:
    other = tiny(state=1)
    plan = plan_on(MINE, other, tmp_path)
    full, mine = run(subject, contestants_of([plan]), [perplexity(OTHER)], bandwidth=False)
    assert full.error is None and "this llama has other weights" in mine.error
    assert subject.provenance(Contestant.of(plan)) == () and subject.provenance(OWN) == ()


def test_what_a_contestant_says_itself_stays(subject, tmp_path: Path) -> None:
    made = Calibrated.on(OTHER, name="x", model="m", text_name="other")
    mine = replace(Contestant.of(plan_on(MINE, subject, tmp_path)), calibration=(made,))
    assert [each.text_name for each in subject.provenance(mine)] == ["other", "a text"]


def test_the_whole_text_and_what_was_used_of_it_are_known(subject, tmp_path: Path) -> None:
    """Two passages of 450 bytes are measured; a piece of one is refused, and so is the whole text by its hash."""
    path = tmp_path / "f.safetensors"
    text = words(4000, 7)
    made = kvtailor.calibrate(subject, "qfilters", {"mine.txt": text}, out=path, tokens=900, context=450)
    (known,) = subject.provenance(Contestant.of(f"qfilters(file='{path}') @ keep=0.5"))
    assert known.text_hash == text_hash(text) and known.text_name == "mine.txt" and made.made["tokens"] == 900
    assert known.sketch.complete and 100 < len(known.sketch.hashes) < 250
    contestants = contestants_of([f"qfilters(file='{path}') @ keep=0.5"])
    for piece in (text, text[50:440]):
        _, mine = run(subject, contestants, [perplexity(piece)], bandwidth=False)
        assert mine.error.startswith("calibration on the evaluated text: f.safetensors was made from mine.txt")


def test_the_harness_model_asks_before_it_answers(subject, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'kvtailor[harness]'")
    from types import SimpleNamespace

    from kvtailor.bench.lm_eval.model import HarnessModel

    model = HarnessModel.__new__(HarnessModel)
    plan = Contestant.of(plan_on(MINE, subject, tmp_path))
    model.contestant = replace(plan, calibration=subject.provenance(plan))
    for ask in (model.loglikelihood, model.loglikelihood_rolling, model.generate_until):
        with pytest.raises(Fraud, match="of the harness's requests"):
            ask([SimpleNamespace(args=(MINE[:800], " yes"))])
