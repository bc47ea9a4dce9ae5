"""Recipe, step 5: measure, uncompressed. ``python -m recipes.demo.evaluate`` (some 20 minutes on one core).

Bits per byte of natural text over consecutive windows that each start with bos; what a longer context is worth on the
same tokens; the share of generated evaluation documents that the model answers, by task, length and depth; and, with
``--draft``, how often the draft's next token is the model's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from kvtailor.bench.measure.paired_hits import share
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.hf.model.loading import load
from recipes import demo
from recipes.demo.measures import (
    ASKED,
    Retrieval,
    agreement,
    bits_per_byte,
    nats_by_context,
    quiz,
    retrieval,
)

__all__ = ["main", "table"]


def table(results: list[Retrieval], lengths: list[int]) -> str:
    """Markdown: one line per task, one column per length, the mean score over all depths in percent, with documents."""
    lines = ["| task | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    for task in dict.fromkeys(result.task for result in results):
        cells = []
        for length in lengths:
            scores = [s for result in results if (result.task, result.length) == (task, length) for s in result.scores]
            cells.append(_percent(scores))
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(scores: list[float]) -> str:
    found = share(scores)
    assert found.low is not None and found.high is not None
    return f"{100 * found.value:.0f} % of {len(scores)} ({100 * found.low:.0f} to {100 * found.high:.0f})"


def _natural_rows(tokenizer: Any, files: list[Path], length: int, count: int) -> list[list[int]]:
    """``count`` rows of ``length`` tokens spread evenly over the texts of ``files``."""
    rows = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        each = count // len(files)
        rows += [ids[i * (len(ids) - length) // each :][:length] for i in range(each)]
    return rows


def _use_of_context(model: Any, tokenizer: Any, rows: list[list[int]], contexts: list[int]) -> dict[int, Estimate]:
    """Nats per token that each context saves over the shortest one, with a paired interval."""
    nats = [nats_by_context(model, tokenizer.bos_token_id, row, contexts) for row in rows]
    return {
        context: mean_difference([row[0] for row in nats], [row[i] for row in nats])
        for i, context in enumerate(contexts)
        if i
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="'demo', a folder or a hub name")
    parser.add_argument("--data", type=Path, default=demo.data_folder(), help="folder that has wikitext2/, books_eval/")
    parser.add_argument("--tasks", default=",".join(ASKED))
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens of prompt and answer")
    parser.add_argument("--depths", type=int, default=10, help="number of depths from 0 to 1")
    parser.add_argument("--documents", type=int, default=3, help="per task, length and depth")
    parser.add_argument("--windows", type=int, default=50, help="of each natural text, 2,048 tokens each")
    parser.add_argument("--rows", type=int, default=60, help="on which contexts are compared; 0: none")
    parser.add_argument("--draft", help="also compare this smaller model's next tokens: 'demo-draft' or a folder")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load(given.model, dtype=torch.float32)
    longest = model.config.max_position_embeddings
    told: dict[str, Any] = {"bits_per_byte": {}, "use_of_context": {}, "agreement": {}, "retrieval": []}
    novels = sorted((given.data / "books_eval").glob("*.txt"))
    wiki = given.data / "wikitext2" / "test.raw.txt"
    texts = {
        name: file for name, file in [("WikiText-2 raw test", [wiki]), ("novels", novels)] if file and file[0].is_file()
    }
    if not texts:
        print(f"no wikitext2/ and books_eval/ in {given.data}: natural text is not measured (give --data)")

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for name, files in texts.items() if given.windows else ():
        for window in (256, 2048):
            each = max(1, given.windows * 2048 // window // len(files))
            found = [bits_per_byte(model, tokenizer, f.read_text(encoding="utf-8"), window, each) for f in files]
            value, count = sum(v * n for v, n in found) / sum(n for _, n in found), sum(n for _, n in found)
            told["bits_per_byte"][f"{name}, {count} windows of {window}"] = round(value, 4)
            print(f"{name}: {value:.4f} bits per byte, {count} windows of {window} tokens", flush=True)
    contexts = [c for c in (256, 512, 1024, 2048, 4096) if c <= longest]
    if given.rows:
        rows = {"quizzes": [tokenizer(quiz(i, longest, count_tokens))["input_ids"] for i in range(given.rows)]}
        if novels:
            rows["novels"] = _natural_rows(tokenizer, novels, longest, given.rows)
        for name, chosen in rows.items():
            saved = _use_of_context(model, tokenizer, chosen, contexts)
            told["use_of_context"][name] = {context: asdict(estimate) for context, estimate in saved.items()}
            for context, e in saved.items():
                print(
                    f"{name}: {e.value:.3f} nats per token less at {context} than at {contexts[0]} tokens "
                    f"({e.low} to {e.high}, {e.count} rows)",
                    flush=True,
                )
    if given.draft:
        draft = load(given.draft, dtype=torch.float32)[0]
        for name, files in texts.items():
            windows = [[tokenizer.bos_token_id, *row] for row in _natural_rows(tokenizer, files, 1023, 48)]
            same, overlap, count = agreement(model, draft, windows)
            told["agreement"][name] = {"greedy": same, "overlap": overlap, "places": count}
            print(
                f"{name}: greedy agreement {100 * same:.1f} %, overlap {100 * overlap:.1f} %, {count} places",
                flush=True,
            )
    lengths = [int(length) for length in given.lengths.split(",")]
    depths = [round(i / max(1, given.depths - 1), 3) for i in range(given.depths)]
    results: list[Retrieval] = []
    tasks = [task for task in given.tasks.split(",") if task]
    whole = len(tasks) * len(lengths) * len(depths)
    for result in track(retrieval(model, tokenizer, tasks, lengths, depths, given.documents), "retrieval", total=whole):
        results.append(result)
    if results:
        print(table(results, lengths))
    told["retrieval"] = [asdict(result) for result in results]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
