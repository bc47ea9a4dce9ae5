"""Small task sets in the layouts of the originals, from fresh random words, and models to ask."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ["stone", "river", "light", "paper", "green", "seven", "house", "winter", "apple", "road", "music", "garden"]


def words(state: random.Random, count: int) -> str:
    return " ".join(state.choices(WORDS, k=count))


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def arc_rows(state: random.Random, count: int, least: int = 3) -> list[dict]:
    rows = []
    for _ in range(count):
        labels = "ABCD"[: state.choice((3, 4))]
        choices = [{"text": words(state, state.randint(1, 5)), "label": label} for label in labels]
        question = {"stem": words(state, state.randint(least, 2 * least)) + "?", "choices": choices}
        rows.append({"id": str(len(rows)), "question": question, "answerKey": state.choice(labels)})
    return rows


def folder(root: Path, state: random.Random) -> Path:
    """arc_easy, gsm8k, lambada, mmlu (two subjects) and winogrande, and a YAML file of rolling log-likelihoods."""
    write(root / "arc_easy" / "ARC-Easy-Test.jsonl", arc_rows(state, 5, 45))
    sums = [{"question": words(state, 25), "answer": f"{words(state, 4)}\n#### {i}"} for i in range(7)]
    write(root / "gsm8k" / "test.jsonl", sums[:3])
    write(root / "gsm8k" / "train.jsonl", sums[3:])
    write(root / "lambada" / "lambada_test.jsonl", [{"text": words(state, n)} for n in (40, 61, 83)])
    questions = [
        {"subject": subject, "question": words(state, 12), "choices": state.sample(WORDS, 4), "answer": answer}
        for subject in ("anatomy", "virology")
        for answer in ("B", 3, "A")
    ]
    write(root / "mmlu" / "test.jsonl", questions)
    write(root / "mmlu" / "fewshot_dev.jsonl", questions)
    return root


def rolling_task(root: Path, state: random.Random, longest: int) -> Path:
    """A task like the harness's wikitext."""
    file = write(root / "pages.jsonl", [{"page": words(state, n)} for n in (5, 90, longest)])
    config = {
        "task": "pages",
        "output_type": "loglikelihood_rolling",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(root / "cache")},
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        "metadata": {"version": 1.0},
    }
    path = root / "pages.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
