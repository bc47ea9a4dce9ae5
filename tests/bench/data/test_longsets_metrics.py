"""Our metrics against the official scripts' values; how they were made is in `official_pairs.py`."""

import importlib.util
import json
from pathlib import Path

import pytest
from tests.support.bench.official_pairs import CLASSES, COUNT, pairs

from kvtailor.bench.data.longsets import METRICS, overall, score_example
from kvtailor.errors import KvtailorError, UnknownName

OFFICIAL = json.loads((Path(__file__).parents[2] / "data" / "official_scores.json").read_text(encoding="utf-8"))
NEEDS = {"qa_f1_zh": "jieba", "rouge_l_zh": "jieba", "rouge_geometric_mean": "rouge_score"}
CASES = [(kind, metric) for kind, scores in OFFICIAL["scores"].items() for metric in scores if "rouge" not in metric]
CASES += [("english", "rouge_l"), ("english", "rouge_geometric_mean"), ("chinese", "rouge_l_zh")]
ROUGES = ("rouge1", "rouge2", "rougeL")


def need(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


def official(kind, metric):
    return OFFICIAL["scores"][kind][metric]


def test_the_pairs_are_those_that_the_official_scripts_saw():
    assert pairs() == OFFICIAL["pairs"] and list(CLASSES) == OFFICIAL["classes"]
    assert all(len(found) == COUNT == 100 for found in OFFICIAL["pairs"].values())


def test_every_metric_is_compared():
    assert {metric for _, metric in CASES} == set(METRICS)


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_equals_the_official_script(kind, metric):
    need(NEEDS.get(metric, "json"))
    compared = 0
    for index, (prediction, reference) in enumerate(OFFICIAL["pairs"][kind]):
        if metric == "f1" and not (prediction + reference).isascii() and not importlib.util.find_spec("unidecode"):
            continue
        found = score_example(metric, prediction, [reference], CLASSES)
        if metric == "rouge_geometric_mean":
            right = {name: 100 * official(kind, name)[index] for name in ROUGES}
            right["score"] = (right["rouge1"] * right["rouge2"] * right["rougeL"]) ** (1 / 3)
        else:
            right = {"score": 100 * official(kind, metric)[index]}
        assert found == pytest.approx(right, abs=1e-9, rel=0), (prediction, reference)
        compared += 1
    assert compared == COUNT or (metric == "f1" and compared >= 30)


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_the_pairs_are_varied(kind, metric):
    values = official(kind, "rouge2" if metric == "rouge_geometric_mean" else metric)
    assert (
        min(values) == 0.0
        and max(values) > 0.999
        and (metric == "accuracy" or sum(0 < value < 1 for value in values) >= 5)
    )


def test_the_best_right_answer_counts_and_rouge_is_averaged_before_its_geometric_mean():
    assert score_example("qa_f1", "The red fox.", ["a blue fox", "red FOX"]) == {"score": 100.0}
    need("rouge_score")
    found = [
        score_example("rouge_geometric_mean", "one two three", ["one two three", "none"]),
        score_example("rouge_geometric_mean", "four", ["five four"]),
    ]
    assert found[0]["score"] == pytest.approx(100) and found[1]["score"] == 0.0
    # By hand: 2/3 for four against five four in ROUGE-1 and ROUGE-L, no bigram.
    assert found[1]["rouge1"] == found[1]["rougeL"] == pytest.approx(200 / 3)
    whole = overall("rouge_geometric_mean", found)
    assert whole["rouge1"] == pytest.approx((100 + 200 / 3) / 2) and whole["rouge2"] == pytest.approx(50)
    assert whole["score"] == pytest.approx((whole["rouge1"] * 50 * whole["rougeL"]) ** (1 / 3))
    assert overall("qa_f1", [{"score": 10.0}, {"score": 20.0}]) == {"score": 15.0}


def test_a_long_text_without_a_full_stop_is_scored():
    """Where the package that LongBench uses recurses too deep, and the official script gives 0."""
    words = " ".join(f"word{i}" for i in range(1500))
    assert score_example("rouge_l", words, [words])["score"] == pytest.approx(100, abs=1e-5)


@pytest.mark.parametrize(
    ("metric", "reference"),
    [("retrieval", "30"), ("retrieval_zh", "Paragraph 3"), ("accuracy", "E"), ("exponential_similarity", "60")]
    + [("concordance_index", answer) for answer in ("", "1", "2, 3", "1, 1, 2")],
)
def test_a_right_answer_that_is_none_is_an_error(metric, reference):
    with pytest.raises(KvtailorError, match="right answer"):
        score_example(metric, "1, 2", [reference])


def test_what_cannot_be_scored_is_an_error(monkeypatch):
    with pytest.raises(UnknownName, match="did you mean.*'rouge_l'"):
        score_example("rougel", "x", ["x"])
    with pytest.raises(KvtailorError, match="without a right answer"):
        score_example("qa_f1", "x", [])
    monkeypatch.setitem(__import__("sys").modules, "unidecode", None)
    with pytest.raises(KvtailorError, match="pip install Unidecode"):
        score_example("f1", "café", ["cafe"])
