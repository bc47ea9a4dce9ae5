import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.support.bench.dummy import FULL, DummyCache, RecallModel, UniformModel, contestant, subject
from tests.support.bench.longset_rows import ChatTokenizer, lines_to, longbench_row, scrolls_row

from kvtailor.bench.checks import Fraud
from kvtailor.bench.data.longsets import long_set, read_examples
from kvtailor.bench.data.longsets.prompts import longbench_ids
from kvtailor.bench.data.overlap import Calibrated
from kvtailor.bench.loop import Given, records_of
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.longcontext import LongContext, generate
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache
from recipes import demo

ASKED = 'like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
TOLD = ("Paragraph 7. So it ends here, my dear.", "Paragraph 12 and 3, said the owl.", "Paragraph 5. No more of it.")
RIGHT = ("Paragraph 7", "Paragraph 3", "Paragraph 4")


@pytest.fixture
def paragraphs(tmp_path):
    """Three examples whose context says after the prompt's own last words what comes next, with filler behind."""
    rows = [
        longbench_row(f"Text {'xyz'[i]}. {ASKED}{told} " + "lorem ipsum " * 20, [right], _id=f"n{i}")
        for i, (told, right) in enumerate(zip(TOLD, RIGHT, strict=True))
    ]
    lines_to(tmp_path / "longbench" / "passage_retrieval_en.jsonl", rows)
    return tmp_path


def bench(data, *labels, caches=None, model=None, tokenizer=None, subset="passage_retrieval_en", **settings):
    task = LongContext(**{"benchmark": "longbench", "subset": subset, "data": data} | settings)
    given = subject(model or RecallModel(), **(caches or {}))
    if tokenizer is not None:
        object.__setattr__(given, "tokenizer", tokenizer)
    return run(given, [FULL, *map(contestant, labels)], [task], bandwidth=False)


def by_hand(given, label, row, right):
    """The share of right numbers in 32 greedy tokens."""
    cache, ids, text = given.make_cache(given.model, label), None, b""
    prompt = long_set("longbench", "passage_retrieval_en").prompt.format(**row)
    ids = torch.tensor(list(prompt.encode()))
    while len(text) < 32:
        ids = given.model(input_ids=ids[None], **hand_cache(cache), use_cache=True).logits[0, -1:].argmax(-1)
        text += bytes(ids.tolist())
    numbers = "".join(c if c.isdigit() else " " for c in text.decode(errors="replace")).split()
    return 100 * sum(number == right for number in numbers) / max(1, len(numbers))


def test_a_model_that_recalls_scores_as_reckoned_by_hand(paragraphs):
    caches = {"short": DummyCache(keep=700), "shorter": DummyCache(keep=40)}
    records = bench(paragraphs, "short", "shorter", caches=caches)
    [full, short, shorter] = records
    # Numbers in the 32 characters that follow: 7; 12 and 3; 5 where 4 is right.
    assert full.values["score"] == (100.0, 50.0, 0.0) and full.metrics["score"] == pytest.approx(50)
    rows = [json.loads(line) for line in next((paragraphs / "longbench").iterdir()).read_text().splitlines()]
    for record in records:
        right = [answer.split()[1] for answer in RIGHT]
        given = subject(RecallModel(), **caches)
        assert record.values["score"] == tuple(
            by_hand(given, record.label, row, number) for row, number in zip(rows, right, strict=True)
        )
        assert record.point == {
            "benchmark": "longbench",
            "subset": "passage_retrieval_en",
            "max_tokens": None,
            "metric": "retrieval",
            "generation": 32,
            "chat_template": False,
        }
        assert record.samples == 3 and record.error is None and record.text == "longbench/passage_retrieval_en"
    assert shorter.metrics["score"] < full.metrics["score"]
    # The heaviest cache of the three, weighed after the prompt.
    prompt = long_set("longbench", "passage_retrieval_en").prompt
    assert full.tokens_seen == full.tokens_held == max(len(prompt.format(**row).encode()) for row in rows)
    assert shorter.tokens_held == 40 and short.text_hash == full.text_hash


def test_only_the_first_examples_are_taken_and_a_note_tells_of_fewer(paragraphs):
    [record] = bench(paragraphs, examples=2)
    assert record.values["score"] == (100.0, 50.0)
    [record] = bench(paragraphs, examples=9)
    assert record.samples == 3 and "There are 3 examples, not 9." in record.notes
    assert any(str(paragraphs) in note for note in record.notes)


def test_every_unit_is_told_and_known_records_are_given_back(paragraphs):
    task = LongContext(benchmark="longbench", subset="passage_retrieval_en", data=paragraphs)
    given, told = subject(RecallModel()), []
    [record] = run(given, [FULL], [task], bandwidth=False, advance=told.append)
    assert len(told) == task.units(1) == 3
    again = Given(
        subject=subject(None),
        contestants=[FULL],
        blank=lambda _: record,
        advance=told.append,
        known=lambda blank: record if blank.text_hash == record.text_hash else None,
    )
    assert list(records_of(task, again)) == [record] and len(told) == 6


def test_a_plan_that_fails_is_a_record_and_the_others_go_on(paragraphs):
    class Broken(DummyCache):
        def ledger(self):
            raise KvtailorError("this plan is broken")

    given = subject(RecallModel())
    make = given.make_cache
    object.__setattr__(given, "make_cache", lambda model, plan: Broken() if plan == "bad" else make(model, "full"))
    task = LongContext(benchmark="longbench", subset="passage_retrieval_en", data=paragraphs)
    records = run(given, [FULL, contestant("bad"), contestant("good")], [task], bandwidth=False)
    assert [record.error for record in records] == [None, "this plan is broken", None]
    assert records[1].metrics == {} and records[2].metrics["score"] == pytest.approx(50)


def test_logits_that_are_no_numbers_are_an_error(paragraphs):
    class Nan(UniformModel):
        def logits(self, cache, ids):
            return super().logits(cache, ids) * float("nan")

    [record] = bench(paragraphs, model=Nan())
    assert "no numbers" in record.error and record.values == {}


def test_the_same_example_twice_is_a_fraud(paragraphs):
    file = paragraphs / "longbench" / "passage_retrieval_en.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[0]]))
    with pytest.raises(Fraud, match="repeated data: sample 3 of longbench/passage_retrieval_en"):
        bench(paragraphs)


def test_a_plan_that_was_calibrated_on_the_examples_is_refused(paragraphs):
    [document] = [path.read_text() for path in paragraphs.rglob("*.jsonl")]
    task = LongContext(benchmark="longbench", subset="passage_retrieval_en", data=paragraphs)
    for text, refused in ((document, True), ("Something else, of many other words altogether. " * 30, False)):
        made = Calibrated.on(text, name="filters", model="dummy", text_name="the test split")
        tuned = replace(contestant("short"), calibration=(made,))
        given = subject(RecallModel(), short=DummyCache(keep=700))
        full, found = run(given, [FULL, tuned], [task], bandwidth=False)
        assert full.error is None and ("calibration on the evaluated text: f" in str(found.error)) == refused


@pytest.mark.parametrize("most", [2, 101, 500])
def test_the_middle_of_a_longbench_prompt_is_cut(paragraphs, most):
    example = read_examples("longbench", "passage_retrieval_en", paragraphs)[0][0]
    chosen = long_set("longbench", "passage_retrieval_en")
    whole = chosen.prompt.format(**example.fields).encode()
    ids = longbench_ids(subject(RecallModel()), chosen, example, most)
    assert bytes(ids.tolist()) == whole[: most // 2] + whole[-(most // 2) :]
    assert bytes(longbench_ids(subject(RecallModel()), chosen, example, len(whole)).tolist()) == whole
    [record] = bench(paragraphs, max_tokens=most, examples=1)
    assert record.tokens_seen == most // 2 * 2 and record.point["max_tokens"] == most
    assert f"1 of 1 prompts were longer than {most} tokens and cut." in record.notes


def of_size(positions):
    model = RecallModel()
    model.config = SimpleNamespace(max_position_embeddings=positions, vocab_size=256)
    return model


def test_prompts_and_answers_fit_into_the_model(paragraphs):
    [record] = bench(paragraphs, model=of_size(400))
    assert record.point["max_tokens"] == 400 - 32 and record.tokens_seen == 368
    with pytest.raises(KvtailorError, match="up to 369 tokens.*400 positions.*allow 368"):
        bench(paragraphs, model=of_size(400), max_tokens=369)
    with pytest.raises(KvtailorError, match="up to 32 tokens, but dummy has 33 positions"):
        bench(paragraphs, model=of_size(33))
    # A letter of three bytes that is cut becomes a replacement letter of three bytes at each end.
    row = longbench_row("界" * 300, ["Paragraph 1"])
    lines_to(paragraphs / "longbench" / "passage_retrieval_en.jsonl", [row])
    for positions in range(890, 896):
        [record] = bench(paragraphs, model=of_size(positions))
        assert positions - 32 - 8 <= record.tokens_seen <= positions - 32


def few_shot(tmp_path, subset, context, asked, answers, classes=None):
    row = longbench_row(context, answers, input=asked, all_classes=classes)
    lines_to(tmp_path / f"{subset}.jsonl", [row])
    return tmp_path


def test_only_the_first_line_counts_and_samsum_ends_with_it(tmp_path, monkeypatch):
    pytest.importorskip("rouge_score")
    made = []
    generating = generate
    monkeypatch.setattr(
        "kvtailor.bench.tasks.longcontext.generate",
        lambda *given, **more: made.append(generating(*given, **more)[0]) or (made[-1], {}),
    )
    context, asked = "Dialogue: Hm?\nSummary, briefly:Anna sings\nDialogue: No", "Dialogue: Hm?\nSummary, briefly:"
    [record] = bench(few_shot(tmp_path, "samsum", context, asked, ["Anna sings"]), subset="samsum")
    assert bytes(made[-1]) == b"Anna sings\n" and record.values["score"][0] == pytest.approx(100, abs=1e-5)
    context, asked = "Question: Who?\nType:Human\nQuestion: Location", "Question: Who?\nType:"
    data = few_shot(tmp_path, "trec", context, asked, ["Human"], ["Human", "Location"])
    [record] = bench(data, subset="trec")
    assert len(made[-1]) == 64 and b"Location" in bytes(made[-1]) and record.values["score"] == (100.0,)


def test_an_answer_ends_with_an_end_token_but_not_before_its_least_length():
    ids = torch.tensor(list(b"say: A.B.A.B.A. say: "))
    given = subject(RecallModel())
    assert bytes(generate(given, FULL, ids, most=8)[0]) == b"A.B.A.B."
    assert bytes(generate(given, FULL, ids, most=8, ends={ord("B")})[0]) == b"A.B"
    assert bytes(generate(given, FULL, ids, most=8, ends={ord("A")})[0]) == b"A"
    assert bytes(generate(given, FULL, ids, most=8, ends={ord("A")}, least=1)[0])[:1] != b"A"


@pytest.mark.parametrize("told", [ord("."), [ord("."), 3]])
def test_the_models_own_end_tokens_are_known(paragraphs, told):
    model = RecallModel()
    model.generation_config = SimpleNamespace(eos_token_id=told)
    # "Paragraph 12 and 3, said the owl." has its stop after the number; the first two end before or at it.
    [record] = bench(paragraphs, model=model, examples=1)
    assert record.values["score"] == (100.0,)
    made, _ = generate(subject(model), FULL, torch.tensor(list(b"k: one. two. k: ")), most=9, ends={ord(".")})
    assert bytes(made) == b"one."


def test_chat_models_get_their_template_but_not_for_few_shot_sets(paragraphs, tmp_path):
    [record] = bench(paragraphs, tokenizer=ChatTokenizer(), model=of_size(400))
    assert record.point["chat_template"] is True
    assert record.point["max_tokens"] == 400 - 32 - len("<u></u>") and record.tokens_seen in (367, 368)
    given = subject(RecallModel())
    object.__setattr__(given, "tokenizer", ChatTokenizer())
    chosen, example = (
        long_set("longbench", "lcc"),
        read_examples("longbench", "passage_retrieval_en", paragraphs)[0][0],
    )
    assert not bytes(longbench_ids(given, chosen, example, None).tolist()).startswith(b"<u>")
    chosen = long_set("longbench", "qasper")
    inside = chosen.prompt.format(**example.fields)
    assert bytes(longbench_ids(given, chosen, example, None).tolist()).decode() == f"<u>{inside}</u>"


def test_zeroscrolls_scores_by_its_metrics_and_joins_right_answers(tmp_path):
    pytest.importorskip("rouge_score")
    said = "\n\nAnswer:\nred fox runs far away" + "y" * 600
    rows = [scrolls_row(name, f"{name}{said}", "What?", answer) for name, answer in (("a", "red fox"), ("b", "a hen"))]
    rows.append(rows[0] | {"output": "red fox runs far away " + "y" * 600})
    lines_to(tmp_path / "qmsum" / "validation.jsonl", rows)
    [record] = bench(tmp_path, benchmark="zeroscrolls", subset="qmsum")
    assert record.samples == 2 and record.point["generation"] == 512
    assert record.values["rouge1"][1] == 0.0 and record.values["score"][1] == 0.0
    # By hand: 512 tokens say "red fox runs far awayyyy...", of which the longer right answer has 4 of 6 words.
    assert record.values["rouge1"][0] == pytest.approx(100 * 2 * 4 / (5 + 6))
    one, two = record.metrics["rouge1"], record.metrics["rouge2"]
    assert record.metrics["score"] == pytest.approx((one * two * record.metrics["rougeL"]) ** (1 / 3))


@pytest.mark.long
def test_the_embedded_model_is_measured_on_real_data():
    data = demo.data_folder()
    if not (data / "longbench").is_dir():
        pytest.skip(f"no {data}/longbench: set KVTAILOR_DATA to a folder that has it")
    task = LongContext(benchmark="longbench", subset="multifieldqa_zh", data=data, examples=2, max_tokens=300)
    pytest.importorskip("jieba")
    loaded = Subject.load("demo")
    full, small = run(loaded, contestants_of(["snapkv @ keep=0.25"]), [task], bandwidth=False)
    assert full.error is small.error is None and full.samples == small.samples == 2
    assert full.text_hash == small.text_hash and full.tokens_seen == small.tokens_seen
    assert small.tokens_held < 0.3 * full.tokens_held and small.bytes_held < full.bytes_held
    assert all(0.0 <= score <= 100.0 for record in (full, small) for score in record.values["score"])


def test_how_long_answers_are_and_whether_they_run_in_circles_stands_beside_the_score(paragraphs, monkeypatch):
    from kvtailor.bench.tasks import longcontext as module

    answers = iter([[5, 6, 7], [1, 2, 3, 4, 1, 2, 3, 4], [9]])
    monkeypatch.setattr(module, "generate", lambda *args, **how: (next(answers), {"bytes_held": 1}))
    [record] = bench(paragraphs)
    # The second has five runs of four tokens, one of which stood there before.
    assert record.values["answer_tokens"] == (3.0, 8.0, 1.0) and record.metrics["answer_tokens"] == 4.0
    assert record.values["repetition"] == pytest.approx((0.0, 0.2, 0.0))
