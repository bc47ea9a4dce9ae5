"""Local files of the usual task sets become the rows that the harness's tasks expect."""

import json
from pathlib import Path

import pytest
from tests.support.bench.harness_fixtures import write

from kvtailor.bench.lm_eval.local_data import write_task
from kvtailor.errors import KvtailorError
from recipes import demo

SPLITS = {"training_split": "train", "validation_split": "validation", "test_split": "test"}
HIDDEN = SPLITS | {"test_split": None}
ARC = {"dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy"} | SPLITS
GSM8K = {"dataset_path": "openai/gsm8k", "dataset_name": "main", "fewshot_split": "train"} | SPLITS
MMLU = {"dataset_path": "cais/mmlu", "dataset_name": "virology", "test_split": "test", "fewshot_split": "dev"}
WINOGRANDE = {"dataset_path": "allenai/winogrande", "dataset_name": "winogrande_xl"} | HIDDEN
PIQA = {"dataset_path": "baber/piqa", "dataset_name": None} | HIDDEN
HELLASWAG = {"dataset_path": "Rowan/hellaswag", "dataset_name": None} | HIDDEN
BOOLQ = {"dataset_path": "aps/super_glue", "dataset_name": "boolq"} | HIDDEN
LAMBADA = {"dataset_path": "EleutherAI/lambada_openai", "dataset_name": "default", "test_split": "test"}
QUIZ = "Please choose the correct answer to the question: "
QUIZ += "Why: so?\n\nAnswer1: it Answer2: is so Answer3: a\n\nAnswer format: x"
BLANK = "Please choose the correct answer to fill in the blank to complete the given sentence: "
BLANK += "A _ b.\n\nOption1: u Option2: v w Answer format: option1/option2"
TRUTH = "Please answer the following question with true or false, question: is it?\n\nAnswer format: true/false"


def made(config, data, into, *, split="test", task="one", fewshot=None):
    into.mkdir(exist_ok=True)
    notes = write_task(task, Path("/harness/one.yaml"), config, data, into, fewshot)
    written = json.loads((into / f"{task}.yaml").read_text())
    file = written["dataset_kwargs"]["data_files"][split]
    return [json.loads(line) for line in Path(file).read_text().split("\n") if line], written, notes


@pytest.mark.parametrize(
    ("config", "file", "row", "expected", "note"),
    [
        (
            ARC,
            "arc_easy/ARC-Easy-Test.jsonl",
            {
                "id": "q",
                "question": {"stem": "Why?", "choices": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]},
                "answerKey": "2",
            },
            {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
            None,
        ),
        (
            ARC,
            "arc_easy/test.jsonl",
            {"instruction": QUIZ, "answer": "answer2"},
            {
                "question": "Why: so?",
                "choices": {"text": ["it", "is so", "a"], "label": ["1", "2", "3"]},
                "answerKey": "2",
            },
            None,
        ),
        (
            WINOGRANDE,
            "winogrande/dev.jsonl",
            {"qID": "x", "sentence": "A _ b.", "option1": "u", "option2": "v", "answer": "1"},
            {"sentence": "A _ b.", "option1": "u", "option2": "v", "answer": "1"},
            None,
        ),
        (
            WINOGRANDE,
            "winogrande/test.dev.jsonl",
            {"instruction": BLANK, "answer": "option2"},
            {"sentence": "A _ b.", "option1": "u", "option2": "v w", "answer": "2"},
            None,
        ),
        (
            PIQA,
            "piqa/valid.jsonl",
            {"goal": "g", "sol1": "x\u2028y", "sol2": "z", "label": "1"},
            {"goal": "g", "sol1": "x\u2028y", "sol2": "z", "label": 1},
            None,
        ),
        (
            HELLASWAG,
            "hellaswag/hellaswag_val.jsonl",
            {
                "ind": 3,
                "activity_label": "Run",
                "ctx_a": "A man.",
                "ctx_b": "he",
                "ctx": "A man. he",
                "endings": ["a", "b"],
                "label": 1,
            },
            {"activity_label": "Run", "ctx_a": "A man.", "ctx_b": "he", "endings": ["a", "b"], "label": "1"},
            None,
        ),
        (
            HELLASWAG,
            "hellaswag/val.dev.jsonl",
            {"ctx": "Run: A man: he", "endings": ["a", "b"], "label": 0},
            {"activity_label": "Run", "ctx_a": "A man: he", "ctx_b": "", "endings": ["a", "b"], "label": "0"},
            "not capitalised",
        ),
        (
            BOOLQ,
            "boolq/dev.jsonl",
            {"question": "is it", "title": "t", "answer": True, "passage": "It is."},
            {"passage": "It is.", "question": "is it", "label": 1},
            None,
        ),
        (
            BOOLQ,
            "boolq/test.dev.jsonl",
            {"instruction": TRUTH, "answer": "false"},
            {"passage": "", "question": "is it", "label": 0},
            "closed-book",
        ),
        (LAMBADA, "lambada/test.jsonl", {"text": "one two"}, {"text": "one two"}, None),
        (
            GSM8K,
            "gsm8k/test.dev.jsonl",
            {"question": "q", "answer": "#### 1"},
            {"question": "q", "answer": "#### 1"},
            None,
        ),
    ],
)
def test_rows_become_those_of_the_hub(config, file, row, expected, note, tmp_path):
    write(tmp_path / file, [row])
    split = "validation" if config.get("test_split") is None else "test"
    rows, written, notes = made(config, tmp_path, tmp_path / "out", split=split)
    assert rows == [expected]
    assert written["include"] == "/harness/one.yaml" and written["dataset_path"] == "json" and written["tag"] is None
    assert set(written["dataset_kwargs"]["data_files"]) == {split}
    assert written.get("training_split", "kept") == (None if "training_split" in config else "kept")
    assert ("closed book" in written.get("task_alias", "")) is (note == "closed-book")
    assert (not notes) if note is None else (note in notes[0] and len(notes) == 1)


def test_a_subject_of_mmlu_is_picked_out(tmp_path):
    base = {"question": "q", "choices": ["a", "b", "c", "d"]}
    rows = [base | {"subject": s, "answer": a} for s, a in (("virology", "D"), ("anatomy", "A"), ("virology", 0))]
    write(tmp_path / "mmlu" / "test.dev.jsonl", rows)
    write(tmp_path / "mmlu" / "fewshot_dev.jsonl", rows[:1])
    found, written, _ = made(MMLU, tmp_path, tmp_path / "out", fewshot=1)
    assert [row["answer"] for row in found] == [3, 0]
    assert set(written["dataset_kwargs"]["data_files"]) == {"test", "dev"}
    with pytest.raises(KvtailorError, match="no row of it"):
        made(MMLU | {"dataset_name": "astronomy"}, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "file", "row", "said"),
    [
        (
            GSM8K,
            "gsm8k/test.jsonl",
            {"problem": "q", "answer": "1"},
            "line 1 .*expected rows with 'question' and 'answer'",
        ),
        (ARC, "arc_easy/test.jsonl", {"instruction": QUIZ, "answer": "answer9"}, "'9' is none of"),
        (ARC, "arc_easy/test.jsonl", {"instruction": "Say it.", "answer": "answer1"}, "expected rows with"),
        (
            WINOGRANDE,
            "winogrande/dev.jsonl",
            {"sentence": "A b.", "option1": "u", "option2": "v", "answer": "1"},
            "no blank",
        ),
        (PIQA, "piqa/valid.jsonl", {"goal": "g", "sol1": "x", "sol2": "z"}, "'sol2' and 'label'"),
        (LAMBADA, "lambada/test.jsonl", {"text": "one"}, "one word"),
        (HELLASWAG, "hellaswag/val.jsonl", ["a"], "expected rows with"),
        (
            GSM8K,
            "gsm8k/train.jsonl",
            {"question": "q", "answer": "1"},
            "needs a file gsm8k/test.jsonl.*found train.jsonl",
        ),
        (GSM8K, "lambada/train.jsonl", {"question": "q", "answer": "1"}, "no folder"),
        (GSM8K | {"dataset_path": "x/y"}, "gsm8k/test.jsonl", {}, "no local layout here: tasks on arc_challenge"),
    ],
)
def test_other_layouts_are_refused(config, file, row, said, tmp_path):
    write(tmp_path / file, [row])
    with pytest.raises(KvtailorError, match=said):
        made(config, tmp_path, tmp_path / "out")


def test_examples_never_come_from_the_questions(tmp_path):
    write(tmp_path / "arc_easy" / "test.jsonl", [{"instruction": QUIZ, "answer": "answer2"}])
    with pytest.raises(KvtailorError, match="5 examples.*split 'train'.*ask for 0"):
        made(ARC, tmp_path, tmp_path / "out", fewshot=5)
    made(ARC, tmp_path, tmp_path / "out", fewshot=0)
    write(tmp_path / "arc_easy" / "validation.jsonl", [{"instruction": QUIZ, "answer": "answer2"}])
    _, _, [note] = made(ARC, tmp_path, tmp_path / "out", fewshot=5)
    assert "'train'" in note and "'validation'" in note
    write(tmp_path / "winogrande" / "dev.jsonl", [{"instruction": BLANK, "answer": "option2"}])
    with pytest.raises(KvtailorError, match="ask for 0"):
        made(WINOGRANDE | {"num_fewshot": 2}, tmp_path, tmp_path / "out", split="validation")


def test_two_files_of_a_split_are_refused(tmp_path):
    for name in ("test.jsonl", "test.dev.jsonl"):
        write(tmp_path / "lambada" / name, [{"text": "one two"}])
    with pytest.raises(KvtailorError, match=r"several files of it: test.dev.jsonl, test.jsonl"):
        made(LAMBADA, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("folder", "config", "least"),
    [
        ("arc_easy", ARC, 1000),
        ("arc_challenge", ARC | {"dataset_name": "ARC-Challenge"}, 500),
        ("gsm8k", GSM8K, 600),
        ("mmlu", MMLU, 50),
        ("winogrande", WINOGRANDE, 600),
        ("piqa", PIQA, 800),
        ("hellaswag", HELLASWAG, 5000),
        ("boolq", BOOLQ, 1600),
        ("lambada", LAMBADA, 2500),
    ],
)
def test_the_real_files_are_read_whole(folder, config, least, tmp_path):
    data = demo.data_folder()
    if not (data / folder).is_dir():
        pytest.skip(f"no {data / folder}: set KVTAILOR_DATA to a folder that has it")
    rows, _, _ = made(config, data, tmp_path / "out", split="test" if config.get("test_split") else "validation")
    [file] = [*(data / folder).glob("test*.jsonl"), *(data / folder).glob("val*.dev.jsonl")]
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line]
    assert len(rows) >= least and (folder == "mmlu" or len(rows) == len(lines))
