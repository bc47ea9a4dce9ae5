import pytest
from tests.bench.dummy import FULL, DummyCache, RecallModel, UniformModel, contestant, subject

from kvtailor.bench.runner import run
from kvtailor.bench.tasks.needle import Needle
from kvtailor.errors import KvtailorError


def bench(model, *labels, caches=None, **settings):
    task = Needle(**{"lengths": (600,), "depths": (0.1, 0.9), "documents": 3} | settings)
    return run(subject(model, **(caches or {})), [FULL, *map(contestant, labels)], [task], bandwidth=False)


def test_a_model_that_recalls_is_always_right_and_one_that_guesses_never():
    for record in bench(RecallModel()):
        assert record.metrics["accuracy"] == 1.0
        assert record.metrics["answer_nll"] < 1e-3
        assert record.tokens_seen == record.tokens_held <= 600
    for record in bench(UniformModel()):
        assert record.metrics["accuracy"] == 0.0
        assert record.metrics["answer_nll"] == pytest.approx(5.545, abs=1e-3)


def test_a_cache_that_forgot_the_fact_is_wrong_where_the_fact_is_far():
    records = bench(RecallModel(), "short", caches={"short": DummyCache(keep=340)})
    by_depth = {(r.label, r.point["depth"]): r.metrics["accuracy"] for r in records}
    assert by_depth["full", 0.1] == by_depth["full", 0.9] == 1.0
    assert by_depth["short", 0.1] < 1.0
    assert by_depth["short", 0.9] == 1.0


def test_a_question_outside_comes_after_the_cut():
    for outside in (False, True):
        [record] = bench(RecallModel(), depths=(0.5,), question_outside=outside)
        assert record.point["question_outside"] is outside
        assert record.metrics["accuracy"] == 1.0
        # What is weighed is the compressed context: with the question inside it is longer.
        assert record.tokens_seen < 560 if outside else record.tokens_seen > 560


def test_every_plan_gets_the_same_documents():
    records = bench(RecallModel(), "short", caches={"short": DummyCache(keep=340)})
    assert records[0].text_hash == records[1].text_hash
    assert records[0].values["state"] == records[1].values["state"]
    assert len({r.text_hash for r in records}) == 2


def test_documents_longer_than_the_model_are_refused():
    model = RecallModel()
    model.config = type(model.config)(max_position_embeddings=512, vocab_size=256)
    with pytest.raises(KvtailorError, match="600 tokens.*512 positions"):
        bench(model)
    with pytest.raises(KvtailorError, match="length 40"):
        bench(RecallModel(), lengths=(40,))
    with pytest.raises(ValueError, match="at least"):
        Needle(lengths=())
