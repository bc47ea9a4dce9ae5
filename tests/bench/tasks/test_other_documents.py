"""Another state takes other documents, windows and examples, and the records say which."""

import random

import pytest
from tests.support.bench.dummy import FULL, CountingModel, RecallModel, subject
from tests.support.bench.frauds import TEXT, task
from tests.support.bench.longset_rows import lines_to, longbench_row

from kvtailor.bench.build import make_task
from kvtailor.bench.data.synthetic.documents import SPLITS
from kvtailor.bench.data.texts import STATES, generated_text
from kvtailor.bench.runner import run
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.longcontext import LongContext
from kvtailor.bench.tasks.settings import STATES_APART
from kvtailor.cli.asked import OPTIONS, settings_of
from kvtailor.errors import KvtailorError

DUMMY = subject(CountingModel())
ASKED = dict.fromkeys(OPTIONS) | {
    "context": 64,
    "continuation": 16,
    "needles": (300,),
    "depths": (0.5,),
    "documents": 3,
    "kind": ("needle",),
    "contexts": (64,),
    "batches": (1,),
    "new_tokens": (8,),
    "rounds": 2,
    "gamma": 4,
}


def asked_for(kind, which, state):
    return settings_of([(kind, which)], {**ASKED, "state": state}, ["generated"], DUMMY)


def measured(made):
    return run(DUMMY, [FULL], [made], bandwidth=False)[0]


def windows(made):
    return {bytes(window.context.tolist()) + bytes(window.targets.tolist()) for window in made.cut(DUMMY)}


def test_another_state_takes_other_windows_of_the_same_text():
    given = {"windows": 12}
    before, one, two = (task(state=state, **given) for state in (0, 1, 2))
    assert len(windows(one)) == len(windows(before)) == 12
    assert windows(task(**given)) == windows(before)
    assert not windows(before) & windows(one) and not windows(one) & windows(two)
    assert windows(one) == windows(task(state=1, **given))
    assert all(window.decode() in TEXT for window in windows(one))
    records = [measured(each) for each in (before, one, two)]
    assert [each.state for each in records] == [None, 1, 2]
    assert len({each.text_hash for each in records}) == len({each.key for each in records}) == 3


def test_a_text_that_holds_one_window_is_no_error():
    for state in range(5):
        [window] = task(text=TEXT[:260], state=state).cut(DUMMY)
        assert bytes(window.context.tolist()).decode() in TEXT[:260]


def test_fidelity_takes_the_windows_of_perplexity():
    asked = {"text": TEXT, "source": "t", "context": 200, "continuation": 40, "windows": 4}
    first, other = (measured(Fidelity(**asked, state=state)) for state in (0, 3))
    assert (first.state, other.state) == (None, 3) and first.text_hash != other.text_hash
    assert measured(task(windows=4, state=3)).text_hash == other.text_hash


def test_generated_texts_of_two_states_have_no_document_in_common():
    pieces = [set(generated_text(60_000, state).split("\n\n")) for state in (0, 1, STATES - 1)]
    assert generated_text(2_000) == generated_text(2_000, 0)
    for i, one in enumerate(pieces):
        for other in pieces[i + 1 :]:
            assert not {line for line in one & other if len(line) > 300}
    with pytest.raises(KvtailorError, match="state 50: give 0 to 49"):
        generated_text(100, STATES)


@pytest.mark.parametrize("kind", ["perplexity", "fidelity", "needle", "speculation", "longbench"])
def test_the_option_reaches_every_task_that_it_is_about(kind):
    which = "qasper" if kind == "longbench" else None
    [(_, first)] = asked_for(kind, which, 0)
    [(_, last)] = asked_for(kind, which, STATES - 1)
    assert first["state"] == 0 and last["state"] > 0
    assert last["state"] + STATES_APART <= 500_000 < SPLITS["evaluation"].stop


def test_needles_of_two_states_share_no_document():
    hashes, states = set(), []
    for state in (0, 1):
        [(kind, settings)] = asked_for("needle", None, state)
        [found] = run(subject(RecallModel()), [FULL], [make_task(kind, settings, DUMMY, data=None)], bandwidth=False)
        hashes.add(found.text_hash)
        states.append(found.state)
    assert len(hashes) == 2 and states == [0, STATES_APART]


def test_some_examples_of_a_set_are_others_and_all_of_them_are_all(tmp_path):
    draw = random.Random(0)
    rows = [longbench_row(f"{draw.random()} {i}", ["Anna"], _id=str(i)) for i in range(30)]
    lines_to(tmp_path / "qasper.jsonl", rows)

    def names(**asked):
        found = LongContext(benchmark="longbench", subset="qasper", data=tmp_path, **asked)._found[0]
        return [each.name for each in found]

    assert names(examples=4) == list("0123")
    assert len(names(examples=4, state=1)) == 4 and names(examples=4, state=1) != names(examples=4, state=2)
    assert set(names(examples=4, state=1)) - set("0123")
    asked = {"benchmark": "longbench", "subset": "qasper", "data": tmp_path}
    model = subject(RecallModel())
    [some] = run(model, [FULL], [LongContext(**asked, examples=4, state=1)], bandwidth=False)
    [whole] = run(model, [FULL], [LongContext(**asked, state=1)], bandwidth=False)
    assert some.state == 1 and not any("chose nothing" in note for note in some.notes)
    assert whole.state is None and "All examples were taken, so that state 1 chose nothing." in whole.notes
    with pytest.raises(ValueError, match="state is -1"):
        LongContext(**asked, state=-1)
    with pytest.raises(ValueError, match="state is -1"):
        task(state=-1)
