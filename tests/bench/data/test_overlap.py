import random

import pytest

from kvtailor.bench.checks import Fraud, check_calibration, check_sources
from kvtailor.bench.data.overlap import Calibrated, Sketch, read_back, shared, text_hash, written
from kvtailor.errors import KvtailorError


def words(count, state=0):
    draw = random.Random(state)
    return " ".join(f"w{draw.randrange(5000)}" for _ in range(count))


def made_from(text):
    return Calibrated.on(text, name="ranks.safetensors", model="m", text_name="corpus:train")


def test_shares_meet_a_count_by_hand():
    one, other = words(100), words(100, 1)
    # 100 words have 88 runs of 13; of the 40 words that were copied, 28 runs are whole.
    mixed = " ".join([*other.split(), *one.split()[:40]])
    found = shared(Sketch.of([one]), Sketch.of([mixed]))
    assert (found.count, found.of_first, found.of_second) == (28, 28 / 88, 28 / 128)
    assert shared(Sketch.of([one]), Sketch.of([other])).count == 0
    assert shared(Sketch.of(["..."]), Sketch.of([one])).of_first is None
    assert shared(Sketch.of(["Two words."]), Sketch.of(["TWO, words"])).of_first == 1.0
    pieces = Sketch.of([one[: len(one) // 2], one[len(one) // 2 :]])
    assert shared(pieces, Sketch.of([one])).of_first > 0.9 and len(pieces.hashes) < 88


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_a_bounded_sketch_is_right_within_its_stated_error(monkeypatch, share):
    monkeypatch.setattr(Sketch, "LARGEST", 2000)
    first, second = words(30_000), words(10_000, 1)
    copied = int(30_000 * share)
    mixed = " ".join([*second.split(), *first.split()[:copied]])
    one, other = Sketch.of([first]), Sketch.of([mixed])
    assert len(one.hashes) == len(other.hashes) == 2000 and not one.complete
    true = max(0, copied - 12) / (30_000 - 12)
    # Sampled: what lies below the lower of the two highest hashes.
    sampled = sum(h <= min(one.hashes[-1], other.hashes[-1]) for h in one.hashes)
    assert abs(shared(one, other).of_first - true) <= 4 * (true * (1 - true) / sampled) ** 0.5


def test_a_short_text_in_a_long_one_is_found_whole(monkeypatch):
    monkeypatch.setattr(Sketch, "LARGEST", 2000)
    long = words(30_000)
    short = " ".join(long.split()[500:1500])
    found = shared(Sketch.of([short]), Sketch.of([long]))
    assert found.of_first == 1.0 and 30 < found.count < 120


def test_provenance_survives_the_head_of_a_file():
    made = (made_from(words(500)), made_from(words(20, 1)))
    entries = written(made)
    assert all(isinstance(each, str) for each in entries.values())
    assert read_back({"format": "pt", **entries}) == made and made[0].text_hash == text_hash(words(500))
    assert read_back(written(())) == ()
    damaged = entries["calibrated_on"].replace('"sketch": "', '"sketch": "AAAA', 1)
    for broken in ({}, *({"calibrated_on": each} for each in ("{", "[{}]", "[[]]", damaged))):
        with pytest.raises(KvtailorError, match="calibrate again"):
            read_back(broken)


def test_a_sketch_of_what_was_used_is_bounded_as_asked():
    text = words(3000)
    made = Calibrated.on(text, name="n", model="m", text_name="t", used=[text[: len(text) // 2]], largest=100)
    assert len(made.sketch.hashes) == 100 and not made.sketch.complete and made.text_hash == text_hash(text)
    assert made.sketch.hashes == Sketch.of([text[: len(text) // 2]]).hashes[:100]


def test_a_percent_of_overlap_is_too_much_whichever_side_it_is_of():
    evaluated, source = [words(2000, 5), words(2000, 6)], "t"
    some = evaluated[0].split()
    check_calibration([made_from(words(3000, 7))], evaluated, source)
    check_calibration([made_from(words(3000, 7) + " " + " ".join(some[:30]))], evaluated, source)
    for text in (evaluated[0], words(3000, 7) + " " + " ".join(some[:80]), " ".join(some[10:40])):
        with pytest.raises(Fraud, match="calibration on the evaluated text: ranks.safetensors was made from corpus"):
            check_calibration([made_from(text)], evaluated, source)
    with pytest.raises(Fraud, match="calibration on the evaluated text"):
        check_calibration([made_from("short")], evaluated, source, whole="short")
    check_calibration([], evaluated, source)
    with pytest.raises(Fraud, match=r"shares 100.0% of the runs of 13 words of t and has 0.8% of its own there"):
        check_calibration([made_from(words(6000, 8) + " " + " ".join(some[:60]))], [" ".join(some[:60])], source)


def test_sources_that_are_one_text_for_the_most_part_are_one():
    one, other = words(3000), words(3000, 1)
    check_sources({"a": one, "b": other, "c": one[: len(one) // 3] + other[: len(other) // 3]})
    for text in (one, one * 5, one[: len(one) // 4], "new words before it " + one):
        with pytest.raises(Fraud, match="one text under two names: a and b"):
            check_sources({"a": one, "b": text})
