"""How long the rest of a fit takes, from steps that were timed."""

from kvtailor.fitting.progress import TimeLeft


def test_before_the_first_step_it_is_the_timed_one_times_all():
    left = TimeLeft({"a": 20.0, "b": 80.0}, 0.5)
    assert left.left == 50.0
    assert TimeLeft({"a": 20.0}, None).left is None


def test_the_pace_is_that_of_steps_so_far_and_stages_left_out_do_not_count():
    left = TimeLeft({"a": 100.0, "b": 80.0, "c": 40.0}, 0.5)
    left.begin("a", 100)
    for _ in range(65):
        left.step(2.0)
    # 35 of this stage are left; a stage may end before its steps are done.
    assert left.pace == 2.0 and left.left == 2.0 * (35 + 80 + 40)
    left.end()
    assert left.left == 2.0 * 120
    left.begin("c", 10)
    assert left.left == 2.0 * 40, "b was left out"
    left.step(8.0)
    assert left.left == 2.0 * 36, "a step of this stage is worth four units"


def test_a_short_stage_of_dear_steps_says_nothing_of_a_long_one():
    """Seen on SmolLM2: fifteen first plans at five times the pace made 54 minutes into four hours and a half."""
    left = TimeLeft({"first": 15.0, "layers": 1350.0}, 1.0)
    left.begin("first", 15)
    for _ in range(12):
        left.step(6.0)
    assert left.left == 6.0 * 3 + 1350
    left.end()
    assert left.left == 1350
    left.begin("layers", 1350)
    for _ in range(100):
        left.step(0.8)
    assert abs(left.left - 0.8 * 1250) < 1e-6


def test_steps_that_were_known_before_tell_no_pace():
    left = TimeLeft({"a": 100.0}, 1.0)
    left.begin("a", 100)
    for _ in range(40):
        left.step(0.001)
    assert left.pace == 1.0 and left.left == 60.0
    for _ in range(20):
        left.step(3.0)
    assert left.pace == 3.0 and left.left == 120.0


def test_steps_that_prefill_are_no_pace_of_those_that_find_their_prompts():
    left = TimeLeft({"a": 200.0}, 1.0)
    left.begin("a", 200)
    for seconds in [9.0] * 20 + [1.0] * 60:
        left.step(seconds)
    assert left.pace == 1.0 and left.left == 120.0


def test_a_stage_that_nobody_announced_has_a_time_from_its_first_step_on():
    """Seen on SmolLM2: the times of a token ran for minutes with "about 1 s left of all"."""
    left = TimeLeft({"a": 10.0}, 1.0)
    left.begin("other", 3)
    assert left.left is None
    left.step(100.0)
    assert left.left == 2 * 100.0 + 10.0
    left.end()
    assert left.left == 10.0, "its steps are none of the others'"


def test_the_last_stage_has_none_behind_it():
    left = TimeLeft({"a": 1.0}, None)
    left.begin("a", 1)
    left.step(2.0)
    assert left.left == 0.0
    left.end()
    assert left.left == 0.0


def test_what_is_given_up_early_takes_no_time_and_is_expected_again():
    """Seen on SmolLM2: a search of trials that were given up after a third of their pieces had 61 minutes left of 7."""
    left = TimeLeft({"search": 240.0}, 1.0)
    left.begin("search", 480)
    for _ in range(20):
        for _ in range(4):
            left.step(1.0)
        left.skip(8)
    # 240 steps are left, of which a third is measured: 0.5 units each, 2/3 of a second a unit.
    assert abs(left.left - 120 * 2 / 3) <= 10 and left.stages["search"] == 120


def test_a_few_plans_of_another_kind_are_no_pace_of_what_follows():
    """Seen on SmolLM2: presets that take gradients, at 25 s a step, made 12 minutes into two hours."""
    left = TimeLeft({"layers": 800.0, "search": 300.0, "proof": 200.0}, 1.0)
    left.begin("layers", 1000)
    for _ in range(1000):
        left.step(0.8)
    left.end()
    left.begin("search", 300)
    for place in range(80):
        left.step(25.0 if place % 10 == 9 else 1.0)
    # 220 steps, each tenth at five times the others, and the proof at the pace of both long stages: 1,072 s of 880.
    assert abs(left.left - (220 * 1.4 + 200 * 1072 / 880)) < 1
