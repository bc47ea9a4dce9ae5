"""Recipe, step 5: measure, uncompressed. ``python -m kvtailor.demo.evaluate`` (some 20 minutes on one core).

Bits per byte of natural text over consecutive windows that each start with bos; what a longer context is worth on the
same tokens; the share of generated evaluation documents that the model answers, by task, length and depth; and, with
``--draft``, how often the draft's next token is the model's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from kvtailor import demo
from kvtailor.bench import synthetic_facts, synthetic_words
from kvtailor.bench.statistics import Estimate, mean_difference, wilson
from kvtailor.bench.synthetic import ALL_TASKS, Document, make_document, random_source
from kvtailor.hf.loading import load

__all__ = [
    "ASKED",
    "ROOM_TO_ANSWER",
    "Retrieval",
    "agreement",
    "bits_per_byte",
    "continues_with",
    "main",
    "nats_by_context",
    "quiz",
    "recall",
    "retrieval",
    "table",
]

ROOM_TO_ANSWER = 64
SCORED = 128  # last tokens of a row, scored under every context

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{task: (task, {}) for task in ALL_TASKS},
    "needle_of_16": ("needle", {"distractors": 15}),
    "key_value": ("key_value", {"records": 16, "prose": True}),
    "key_value_full": ("key_value", {}),
}
"""Name in the table -> task and its options.

``needle_of_16`` and ``key_value`` hide 16 keys in prose and ask for one, ``key_value_full`` has nothing but records, as
many as fit.
"""


@dataclass(frozen=True)
class Retrieval:
    """Greedy retrieval of one task at one length and depth.

    Attributes:
        task: one of `ASKED`.
        length: tokens of prompt and answer at most.
        depth: where the fact stands, 0.0 to 1.0.
        scores: for each document the share of its answer's parts that came, 0.0 to 1.0; see `recall`.
    """

    task: str
    length: int
    depth: float
    scores: tuple[float, ...]


@torch.inference_mode()
def recall(model: Any, tokenizer: Any, document: Document) -> float:
    """The share of the answer's parts in the greedy continuation, 0.0 to 1.0.

    One part: 1.0 if the whole answer is how the continuation begins. Several: those that stand in it in any order, as
    in RULER (arXiv 2404.06654); it may be 4 tokens longer than the answer.
    """
    if len(document.parts) == 1:
        return float(continues_with(model, tokenizer, document.prompt, document.answer))
    inputs = tokenizer(document.prompt, return_tensors="pt").to(model.device)
    room = len(tokenizer(document.answer, add_special_tokens=False)["input_ids"]) + 4
    made = model.generate(**inputs, max_new_tokens=room, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(made, skip_special_tokens=True)
    return sum(part in text for part in document.parts) / len(document.parts)


@torch.inference_mode()
def continues_with(model: Any, tokenizer: Any, prompt: str, answer: str) -> bool:
    """Whether the greedy continuation of ``prompt`` begins with ``answer``, in one pass.

    Greedy decoding takes the answer's tokens exactly if each is the most likely one after the prompt and those before.
    """
    before = tokenizer(prompt)["input_ids"]
    wanted = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([before + wanted], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(wanted) + 1).logits[0, :-1]
    return bool(logits.argmax(-1).tolist() == wanted)


def retrieval(
    model: Any, tokenizer: Any, tasks: list[str], lengths: list[int], depths: list[float], documents: int
) -> Iterator[Retrieval]:
    """Retrieval of ``tasks`` (of `ASKED`) on ``documents`` states for each length (tokens) and depth, all different."""

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for name in tasks:
        task, options = ASKED[name]
        for length in lengths:
            for i, depth in enumerate(depths):
                scores = []
                for state in range(i * documents, (i + 1) * documents):
                    document = make_document(
                        task,
                        state=state,
                        length=length - ROOM_TO_ANSWER,
                        depth=depth,
                        count_tokens=count_tokens,
                        **options,
                    )
                    scores.append(recall(model, tokenizer, document))
                yield Retrieval(name, length, depth, tuple(scores))


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, text: str, window: int, windows: int) -> tuple[float, int]:
    """Bits per UTF-8 byte over the first ``windows`` windows of ``window`` tokens (bos included in each).

    Returns:
        Bits per byte, and the number of windows that the text had.
    """
    ids = tokenizer(text[: windows * window * 8], add_special_tokens=False, verbose=False)["input_ids"]
    bits, held, count = 0.0, 0, 0
    for start in range(0, min(len(ids) - window + 2, windows * (window - 1)), window - 1):
        piece = ids[start : start + window - 1]
        inputs = torch.tensor([[tokenizer.bos_token_id, *piece]], device=model.device)
        logits = model(inputs, use_cache=False).logits[0, :-1].float()
        bits += torch.nn.functional.cross_entropy(logits, inputs[0, 1:], reduction="sum").item() / math.log(2)
        held += sum(map(len, tokenizer.convert_ids_to_tokens(piece)))
        count += 1
    return bits / held, count


def quiz(state: int, length: int, count_tokens: Callable[[str], int]) -> str:
    """Facts of several kinds among prose, then a question with its answer for each: ``length`` tokens at least.

    A third of the tokens are questions and answers, which stand at the end; evaluation states only.
    """
    rng = random_source("quiz", state, "evaluation")
    facts: list[synthetic_facts.Fact] = []
    told = ""
    while count_tokens(told) < length / 3:
        facts += [
            synthetic_facts.needle_fact(rng),
            synthetic_facts.record_fact(rng),
            synthetic_facts.first_name_fact(rng),
            *synthetic_facts.character_facts(rng),
        ]
        told = "".join(f"{fact.question}{fact.answer}." for fact in facts)
    sentences = [fact.sentence for fact in facts]
    left = length - count_tokens(told) - count_tokens(" ".join(sentences))
    while left > 0:
        sentences.append(synthetic_words.sentence(rng))
        left -= count_tokens(f" {sentences[-1]}")
    rng.shuffle(sentences)
    rng.shuffle(facts)
    return " ".join(sentences) + "".join(f"{fact.question}{fact.answer}." for fact in facts)


@torch.inference_mode()
def nats_by_context(model: Any, bos: int, row: list[int], contexts: list[int], scored: int = SCORED) -> list[float]:
    """Nats per token of the last ``scored`` tokens of ``row``, read after bos and what each context leaves of the rest.

    Args:
        model: causal language model.
        bos: id of the token that begins every input.
        row: at least as many tokens as the longest context.
        contexts: tokens of input, bos and all but one of the scored tokens included.
        scored: how many tokens are scored, the same for every context.
    """
    found = []
    for context in contexts:
        inputs = torch.tensor([[bos, *row[-context:-1]]], device=model.device)
        logits = model(inputs, use_cache=False, logits_to_keep=scored).logits[0].float()
        targets = torch.tensor(row[-scored:], device=model.device)
        found.append(torch.nn.functional.cross_entropy(logits, targets).item())
    return found


@torch.inference_mode()
def agreement(model: Any, draft: Any, windows: list[list[int]]) -> tuple[float, float, int]:
    """How well ``draft`` foresees ``model`` on windows of token ids that begin with bos.

    Returns:
        The share of places at which both find the same token most likely; the mean overlap of their distributions,
        which is the rate at which speculative sampling accepts a drafted token (arXiv 2211.17192); places.
    """
    same = overlap = 0.0
    count = 0
    for window in windows:
        inputs = torch.tensor([window], device=model.device)
        ours, theirs = (each(inputs, use_cache=False).logits[0].float() for each in (model, draft))
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        overlap += torch.minimum(ours.softmax(-1), theirs.softmax(-1)).sum().item()
        count += len(window)
    return same / count, overlap / count, count


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
    share = 100 * sum(scores) / len(scores)
    if any(score not in (0.0, 1.0) for score in scores):
        return f"{share:.0f} % of {len(scores)}"
    found = wilson(round(sum(scores)), len(scores))
    assert found.low is not None and found.high is not None
    return f"{share:.0f} % of {len(scores)} ({100 * found.low:.0f} to {100 * found.high:.0f})"


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
            share = max(1, given.windows * 2048 // window // len(files))
            found = [bits_per_byte(model, tokenizer, f.read_text(encoding="utf-8"), window, share) for f in files]
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
