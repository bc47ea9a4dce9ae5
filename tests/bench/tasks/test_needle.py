import pytest
import torch
from tests.support.bench.dummy import FULL, DummyCache, RecallModel, UniformModel, contestant, subject

from kvtailor.bench.data.synthetic.documents import make_document
from kvtailor.bench.runner import run
from kvtailor.bench.tasks.needle import Needle
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache


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


def test_parts_are_recalled_in_any_order_where_the_answer_is_not_exact():
    """By hand: each plan's own greedy continuation, and how many of the numbers stand in it."""
    keeps = {"all": None, "some": 300}
    caches = {name: DummyCache(keep=keep) for name, keep in keeps.items() if keep}
    records = bench(RecallModel(), "some", caches=caches, kind="multi_query", lengths=(700,), documents=6)
    given = subject(RecallModel(), **caches)
    for record in records:
        shares = []
        for state in map(int, record.values["state"]):
            document = make_document("multi_query", state=state, length=700, depth=record.point["depth"])
            cache = given.make_cache(given.model, record.label)
            ids, text = torch.tensor(list(document.prompt.encode())), ""
            while len(text) < len(document.answer) + 4:
                out = given.model(input_ids=ids[None], **hand_cache(cache), use_cache=True)
                ids = out.logits[0, -1:].argmax(-1)
                text += chr(int(ids))
            shares.append(sum(part in text for part in document.parts) / 4)
        assert record.values["recall"] == pytest.approx(shares)
        assert record.metrics["recall"] == pytest.approx(sum(shares) / len(shares))
    assert any(0 < share < 1 for record in records for share in record.values["recall"])


def test_answers_of_one_part_have_no_recall():
    for record in bench(RecallModel(), "short", caches={"short": DummyCache(keep=340)}):
        assert "recall" not in record.values and record.metrics["recall"] is None


@pytest.mark.parametrize("kind", ["common_words", "frequent_words", "multi_query", "first_names"])
def test_every_kind_of_document_can_be_asked(kind):
    for record in bench(UniformModel(), kind=kind, lengths=(900,), documents=1):
        assert record.error is None and record.point["kind"] == kind and record.metrics["accuracy"] == 0.0


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
