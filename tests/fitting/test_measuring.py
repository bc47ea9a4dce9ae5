"""Plans on pieces: what the numbers are, and what is not believed."""

from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from tests.support.fitting.small import pieces, subject

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.overlap import Calibrated
from kvtailor.bench.forks import one_thread, why_no_forks
from kvtailor.bench.measure import kept_prompts
from kvtailor.bench.measure.kept_prompts import KeptPrompts
from kvtailor.fitting.damage import Damage
from kvtailor.fitting.measuring import CalibratedHere, Measurer
from kvtailor.fitting.pieces import TEXT
from kvtailor.hf.run.later_layers import record
from kvtailor.plan import Plan

PLAN = Plan.parse("snapkv(window=8) @ tokens=30")


def by_hand(made, plan, piece):
    """KL(full || plan) over the targets behind the first, token by token."""
    rows = []
    for each in (Plan(), plan):
        cache = made.new_cache(Contestant.of(str(each)))
        made.forward(piece.context[None], cache)
        logits = [made.forward(target[None, None], cache)[0][0, -1] for target in piece.targets[:-1]]
        rows.append(torch.stack(logits).double().log_softmax(-1))
    return float((rows[0].exp() * (rows[0] - rows[1])).sum(-1).mean())


def test_the_loss_is_kl_behind_the_first_target(tmp_path):
    made, each = subject(), pieces(2, 1)
    found = Measurer(made, tmp_path).measure([PLAN], each)[0]
    expected = [by_hand(made, PLAN, piece) for piece in each]
    assert found.kl[TEXT] == pytest.approx(expected[:2], rel=1e-3)
    assert found.kl["needle"] == pytest.approx(expected[2:], rel=1e-3)
    assert found.loss == pytest.approx(fmean(expected[:2]) + expected[2], rel=1e-3)
    assert min(expected) > 0.01


def test_the_numbers_of_pieces_have_the_loss_as_their_mean(tmp_path):
    found = Measurer(subject(), tmp_path).measure([PLAN], pieces(5, 3))[0]
    assert len(found.each()) == 8 and fmean(found.each()) == pytest.approx(found.loss)


def test_a_plan_that_is_measured_twice_is_run_once(tmp_path):
    told = []
    measurer = Measurer(subject(), tmp_path, advance=told.append)
    each = pieces(2)
    first, same, other = measurer.measure([PLAN, PLAN, Plan.parse("kivi(bits=2, recent=32)")], each)
    assert first is same and len(told) == 4
    measurer.measure([PLAN], each)
    assert len(told) == 4


@pytest.mark.skipif(why_no_forks(torch.device("cpu")) is not None, reason="processes are forked under Linux alone")
def test_plans_side_by_side_give_what_they_give_one_after_the_other(tmp_path):
    plans = [PLAN, *LAYER_BY_LAYER]
    with one_thread(2):
        alone = Measurer(subject(), tmp_path / "alone").measure(plans, pieces(3), may_do_nothing=True)
    several = Measurer(subject(), tmp_path / "several", workers=3).measure(plans, pieces(3), may_do_nothing=True)
    assert several == alone and not any(each.error for each in alone)


def test_pieces_in_two_calls_give_what_they_give_in_one(tmp_path):
    made, first, rest = subject(), pieces(2, 1), pieces(5, 3)[3:]
    measurer = Measurer(made, tmp_path)
    whole = measurer.measure([PLAN], [*first, *rest])[0]
    parts = [measurer.measure([PLAN], each)[0] for each in (first, rest)]
    joined = parts[0].with_more(parts[1])
    assert {group: sorted(each) for group, each in joined.kl.items()} == {
        group: sorted(each) for group, each in whole.kl.items()
    }
    assert joined.loss == pytest.approx(whole.loss) and joined.bytes_held == whole.bytes_held
    assert {name: len(each) for name, each in joined.hits.items()} == {"needle": len(whole.hits["needle"])}
    wrong = replace(parts[1], error="it failed")
    assert parts[0].with_more(wrong).error == "it failed"


LAYER_BY_LAYER = [
    Plan.parse("by_layer(of=[plain, kivi(bits=2, recent=32)], layers=[0, 0, 1])"),
    Plan.parse("by_layer(of=[plain, kivi(bits=2, recent=32)], layers=[1, 0, 0])"),
    Plan.parse("snapkv(window=8) + table(weights=[1.0, 0.25, 1.0]) @ keep=0.75"),
]


def test_layers_below_the_change_are_not_computed_again_and_nothing_differs(tmp_path):
    made, each = subject(), pieces(2, 1)
    shared = replace(made, kept=KeptPrompts(lasting=True))
    found = Measurer(shared, tmp_path / "shared").measure(LAYER_BY_LAYER, each, may_do_nothing=True)
    plain = Measurer(replace(made, kept=KeptPrompts(off="asked")), tmp_path / "own")
    assert [one.kl for one in found] == [one.kl for one in plain.measure(LAYER_BY_LAYER, each, may_do_nothing=True)]
    assert min(one.loss for one in found) > 0
    # Of three pieces those under the first and the last plan, whose first layers are whole.
    assert shared.kept.begun_later == 6 and shared.kept.later


def test_layers_that_do_not_give_the_same_again_are_computed(tmp_path, monkeypatch):
    """What a layer gave is held against a whole forward the first time; here it is another's."""

    @contextmanager
    def wrong(layers):
        with record(layers) as answers:
            yield answers
        answers[:] = [each + 1 for each in answers]

    monkeypatch.setattr(kept_prompts, "record", wrong)
    made, each = subject(), pieces(2, 1)
    shared = replace(made, kept=KeptPrompts(lasting=True))
    found = Measurer(shared, tmp_path / "shared").measure(LAYER_BY_LAYER, each, may_do_nothing=True)
    own = Measurer(replace(made, kept=KeptPrompts(off="asked")), tmp_path / "own")
    assert [one.kl for one in found] == [one.kl for one in own.measure(LAYER_BY_LAYER, each, may_do_nothing=True)]
    assert shared.kept.begun_later == 1 and not shared.kept.later


def test_a_cache_that_is_not_read_is_not_believed(tmp_path):
    """The best plan of a search would be one whose cache nothing reads."""
    made = subject()
    with torch.no_grad():
        for layer in made.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    measurer = Measurer(made, tmp_path)
    found = measurer.measure([PLAN], pieces(3))[0]
    assert found.error is not None and "untouched cache" in found.error
    allowed = Measurer(made, tmp_path).measure([PLAN], pieces(3), may_do_nothing=True)[0]
    assert allowed.error is None and allowed.loss == 0.0


def test_a_plan_that_the_model_cannot_have_is_an_error_and_not_an_end(tmp_path):
    made = subject(layers=1)
    bad, good = Measurer(made, tmp_path).measure(
        [Plan.parse("table(weights=[1.0, 2.0]) + snapkv @ tokens=30"), PLAN], pieces(2)
    )
    assert "layers" in bad.error and good.error is None


def test_a_plan_that_was_calibrated_on_the_texts_is_left_out(tmp_path, monkeypatch):
    made = subject()
    story = " ".join(f"word{n}" for n in range(300))
    files = {
        "kivi": (Calibrated.on(story, name="artefact.safetensors", model="tiny", text_name="notes.txt"),),
        "snapkv": (Calibrated.on("something else " * 40, name="other.safetensors", model="tiny", text_name="a.txt"),),
    }
    monkeypatch.setattr(
        type(made),
        "provenance",
        lambda self, contestant: next((of for name, of in files.items() if name in str(contestant.text)), ()),
    )
    measurer = Measurer(made, tmp_path, calibrated=CalibratedHere([story]))
    of_it, other = measurer.measure([Plan.parse("kivi(bits=2, recent=32)"), PLAN], pieces(2))
    assert "artefact.safetensors was made from notes.txt" in of_it.error and other.error is None


def test_groups_are_samples_of_their_own():
    task = Damage(pieces=tuple(pieces(2, 3)))
    assert {name: len(each) for name, each in task.groups().items()} == {TEXT: 2, "needle": 3} and task.points() == 2
