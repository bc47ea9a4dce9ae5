"""How the files that users have of the usual task sets look, and the rows that the harness's tasks expect of them.

| folder | rows |
|---|---|
| `gsm8k` | `question`, `answer` |
| `mmlu` | `subject`, `question`, `choices`, `answer` ("A" to "D", or 0 to 3), all subjects in one file |
| `arc_easy`, `arc_challenge` | `question` with `stem` and `choices`, `answerKey`; or the instruction form |
| `winogrande` | `sentence`, `option1`, `option2`, `answer`; or the instruction form |
| `piqa` | `goal`, `sol1`, `sol2`, `label` |
| `hellaswag` | `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label`; or `ctx`, `endings`, `label` |
| `boolq` | `passage`, `question`, `answer` or `label`; or the instruction form, which has no passage |
| `lambada` | `text` |

The instruction form is that of the task sets of LLM-Adapters (`instruction`, `answer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtailor.errors import ArgumentError, KvtailorError

__all__ = ["LocalSet", "local_set"]

Row = Mapping[str, Any]

_USUAL = {"train": ("train",), "validation": ("validation", "dev"), "dev": ("dev",), "test": ("test",)}
# Of these sets the public test split has no answers, so that what circulates as their test is the validation split.
_HIDDEN_TEST = _USUAL | {"validation": ("validation", "dev", "test")}


@dataclass(frozen=True, kw_only=True)
class LocalSet:
    """How the rows of one folder become the rows that a task expects.

    Attributes:
        folder: its name in the data folder.
        expects: the layouts that `convert` takes, in words.
        convert: row -> the task's row, None for one that belongs to another task; KeyError, ValueError and TypeError
            stand for another layout.
        splits: for each split that a task names, the splits of files that may stand for it, best first.
        note: what a reader must know of numbers on such a row, one sentence.
    """

    folder: str
    expects: str
    convert: Callable[[Row], dict[str, Any] | None]
    splits: Mapping[str, Sequence[str]] = field(default_factory=lambda: _USUAL)
    note: Callable[[Row], str | None] = lambda row: None


def _gsm8k(row: Row) -> dict[str, Any]:
    return {"question": row["question"], "answer": row["answer"]}


def _mmlu(subject: str) -> Callable[[Row], dict[str, Any] | None]:
    def convert(row: Row) -> dict[str, Any] | None:
        answer = row["answer"] if isinstance(row["answer"], int) else "ABCD".index(row["answer"])
        if row["subject"] != subject:
            return None
        first, second, third, fourth = row["choices"]
        return {
            "question": row["question"],
            "subject": subject,
            "choices": [first, second, third, fourth],
            "answer": answer,
        }

    return convert


def _arc(row: Row) -> dict[str, Any]:
    if "instruction" in row:
        question, rest = _between(row["instruction"], "correct answer to the question: ", "Answer")
        texts = [text.strip() for text in re.split(r"Answer\d+: ", rest)[1:]]
        labels = [str(i + 1) for i in range(len(texts))]
        key = row["answer"].removeprefix("answer")
    else:
        stem, choices = row["question"], row.get("choices")
        if isinstance(stem, Mapping):
            stem, choices = stem["stem"], stem["choices"]
        if isinstance(choices, Mapping):
            choices = [{"text": t, "label": x} for t, x in zip(choices["text"], choices["label"], strict=True)]
        if choices is None:
            raise KeyError("choices")
        question, key = stem, row["answerKey"]
        texts, labels = [each["text"] for each in choices], [each["label"] for each in choices]
    if key not in labels or len(texts) < 2:
        raise ArgumentError(f"the answer {key!r} is none of the choices {labels}")
    return {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": key}


def _winogrande(row: Row) -> dict[str, Any]:
    if "instruction" in row:
        sentence, rest = _between(row["instruction"], "complete the given sentence: ", "Option1: ")
        first, second = rest.removeprefix("Option1: ").split(" Option2: ")
        found = {"sentence": sentence, "option1": first, "option2": second.strip()}
        answer = row["answer"].removeprefix("option")
    else:
        found, answer = {name: row[name] for name in ("sentence", "option1", "option2")}, row["answer"]
    if answer not in ("1", "2") or "_" not in found["sentence"]:
        raise ArgumentError(f"the answer {answer!r} is not 1 or 2, or the sentence has no blank")
    return {**found, "answer": answer}


def _piqa(row: Row) -> dict[str, Any]:
    return {**{name: row[name] for name in ("goal", "sol1", "sol2")}, "label": int(row["label"])}


def _hellaswag(row: Row) -> dict[str, Any]:
    if "ctx_a" in row:
        parts = {name: row[name] for name in ("activity_label", "ctx_a", "ctx_b")}
    else:
        label, context = row["ctx"].split(": ", 1)
        parts = {"activity_label": label, "ctx_a": context, "ctx_b": ""}
    return {**parts, "endings": list(row["endings"]), "label": str(int(row["label"]))}


def _hellaswag_note(row: Row) -> str | None:
    if "ctx_a" in row:
        return None
    return "The rows do not tell ctx_a from ctx_b, so the unfinished sentence begins as they write it, not capitalised."


def _boolq(row: Row) -> dict[str, Any]:
    if "instruction" in row:
        question, _ = _between(row["instruction"], "question: ", "Answer format:")
        passage, answer = "", {"true": 1, "false": 0}[row["answer"]]
    else:
        question, passage, answer = row["question"], row["passage"], int(row["label" if "label" in row else "answer"])
    return {"passage": passage, "question": question.strip().removesuffix("?"), "label": answer}


def _boolq_note(row: Row) -> str | None:
    if "instruction" not in row:
        return None
    return "The rows have no passages: the questions are asked closed-book, and the numbers are not BoolQ's."


def _lambada(row: Row) -> dict[str, Any]:
    if " " not in row["text"]:
        raise ArgumentError("a text of one word")
    return {"text": row["text"]}


def _between(text: str, before: str, after: str) -> tuple[str, str]:
    """What stands between two markers, and the rest with the second, up to the answer's format."""
    _, found, tail = text.partition(before)
    question, end, _ = tail.partition("\n\n")
    rest = tail[len(question) :].strip().split("Answer format:")[0].strip() if after != "Answer format:" else ""
    if not found or not end or not question or not rest.startswith(after if rest else ""):
        raise ArgumentError(f"an instruction without {before!r}")
    return question, rest


_INSTRUCTION = "or 'instruction' and 'answer' as LLM-Adapters writes them"
_ARC = f"'question' (with 'stem' and 'choices') and 'answerKey', {_INSTRUCTION}"
_SETS: dict[tuple[str, str | None], LocalSet] = {
    ("openai/gsm8k", "main"): LocalSet(folder="gsm8k", expects="'question' and 'answer'", convert=_gsm8k),
    ("allenai/ai2_arc", "ARC-Easy"): LocalSet(folder="arc_easy", expects=_ARC, convert=_arc),
    ("allenai/ai2_arc", "ARC-Challenge"): LocalSet(folder="arc_challenge", expects=_ARC, convert=_arc),
    ("allenai/winogrande", "winogrande_xl"): LocalSet(
        folder="winogrande",
        expects=f"'sentence', 'option1', 'option2' and 'answer', {_INSTRUCTION}",
        convert=_winogrande,
        splits=_HIDDEN_TEST,
    ),
    ("baber/piqa", None): LocalSet(folder="piqa", expects="'goal', 'sol1', 'sol2' and 'label'", convert=_piqa),
    ("Rowan/hellaswag", None): LocalSet(
        folder="hellaswag",
        expects="'activity_label', 'ctx_a', 'ctx_b', 'endings' and 'label', or 'ctx', 'endings' and 'label'",
        convert=_hellaswag,
        note=_hellaswag_note,
    ),
    ("aps/super_glue", "boolq"): LocalSet(
        folder="boolq",
        expects=f"'passage', 'question' and 'answer' or 'label', {_INSTRUCTION}",
        convert=_boolq,
        splits=_HIDDEN_TEST,
        note=_boolq_note,
    ),
    ("EleutherAI/lambada_openai", "default"): LocalSet(folder="lambada", expects="'text'", convert=_lambada),
}


def local_set(task: str, config: Mapping[str, Any]) -> LocalSet:
    """The local layout for a task's configuration.

    Raises:
        KvtailorError: its data set has none.
    """
    path, name = str(config.get("dataset_path")), config.get("dataset_name")
    if path == "cais/mmlu" and name:
        expects = f"'subject' ({name}), 'question', four 'choices' and 'answer'"
        return LocalSet(folder="mmlu", expects=expects, convert=_mmlu(str(name)))
    found = _SETS.get((path, name))
    if found is None:
        known = sorted({each.folder for each in _SETS.values()} | {"mmlu"})
        raise KvtailorError(
            f"asked for the task {task!r} from a local folder, but its data set {path} ({name}) has no local layout "
            f"here: tasks on {', '.join(known)} have one; run it without a folder, or give a YAML file of your own"
        )
    return found
