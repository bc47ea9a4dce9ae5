"""What the recipe measures on a model without any compression; `evaluate` prints it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvtailor.bench.data.synthetic import hidden_facts, words
from kvtailor.bench.data.synthetic.documents import ALL_TASKS, Document, make_document, random_source

__all__ = [
    "ASKED",
    "ROOM_TO_ANSWER",
    "Retrieval",
    "agreement",
    "bits_per_byte",
    "continues_with",
    "nats_by_context",
    "quiz",
    "recall",
    "retrieval",
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
    most = len(tokenizer(document.answer, add_special_tokens=False)["input_ids"]) + 4
    made = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0, inputs["input_ids"].shape[1] :]
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
    facts: list[hidden_facts.Fact] = []
    told = ""
    while count_tokens(told) < length / 3:
        facts += [
            hidden_facts.needle_fact(rng),
            hidden_facts.record_fact(rng),
            hidden_facts.first_name_fact(rng),
            *hidden_facts.character_facts(rng),
        ]
        told = "".join(f"{fact.question}{fact.answer}." for fact in facts)
    sentences = [fact.sentence for fact in facts]
    left = length - count_tokens(told) - count_tokens(" ".join(sentences))
    while left > 0:
        sentences.append(words.sentence(rng))
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
