"""What ATSKV's networks learn from: features of held tokens, and the attention that later tokens really give them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.bench.data.synthetic.documents import SPLITS, TASKS, Document, make_document
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.needle import code_document
from kvtailor.calibration.passages import Passage
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.hf.make_cache import cache_for
from kvtailor.presets import FULL
from kvtailor.score.atskv import ATSKV
from kvtailor.types import Held

__all__ = ["Example", "Text", "as_text", "cut_passage", "documents_of", "examples_of", "held_before"]

_FUTURE = 128
_BLOCK = 64
_SHORTEST, _LONGEST = 20, 250


@dataclass(frozen=True)
class Text:
    """Tokens that end with something to predict.

    Attributes:
        ids: (n,) int64.
        cuts: where a prompt ends, at each of which the tokens after it are the future.
        future: most tokens after a cut that count.
        source: "text" or "questions".
    """

    ids: Tensor
    cuts: tuple[int, ...]
    future: int
    source: str


@dataclass(frozen=True)
class Example:
    """One prompt in all compressed layers; n candidates, neither sinks nor the window.

    Attributes:
        features: (l, h, n, f) float16.
        mass: (l, h, n) float32 attention that each candidate gets, mean over the future's queries and the group.
        tokens: of the prompt.
        source: see `Text`.
    """

    features: Tensor
    mass: Tensor
    tokens: int
    source: str


def cut_passage(passage: Passage) -> Text:
    """A passage with two cuts, in its middle and before its last `_FUTURE` tokens."""
    size = int(passage.ids.numel())
    future = max(1, min(_FUTURE, size // 4))
    return Text(passage.ids, (size // 2, size - future), future, "text")


def documents_of(subject: Subject, passages: Sequence[Passage], context: int, state: int) -> list[Document]:
    """As many generated documents as there are passages: facts among the passages' own sentences, and a question.

    Of the split "calibration", so that no instance is ever part of an evaluation. A document that does not fit into
    `context` tokens is left out.
    """
    sentences = [
        f"{each.strip()}."
        for passage in passages
        for each in " ".join(passage.text.split()).split(". ")
        if _SHORTEST < len(each) < _LONGEST
    ]
    draw = random.Random(state)
    states, kinds = SPLITS["calibration"], list(TASKS)
    found = []
    for index in range(len(passages)):
        length, depth = draw.randrange(context // 3, max(context - context // 8, context // 3 + 1)), draw.random()
        try:
            document = make_document(
                kinds[index % len(kinds)],
                state=states[(1000 * state + index) % len(states)],
                split="calibration",
                length=length,
                depth=depth,
                count_tokens=subject.count,
                filler=sentences or None,
            )
        except ValueError:
            continue
        found.append(document)
    return found


def as_text(subject: Subject, document: Document) -> Text:
    """A document with one cut, before its answer."""
    context, question, answer = code_document(subject, document)
    prompt = torch.cat([context, question])
    return Text(torch.cat([prompt, answer]), (int(prompt.numel()),), int(answer.numel()), "questions")


def examples_of(subject: Subject, text: Text, scorer: ATSKV) -> Iterator[Example]:
    """One example for each cut, from a single forward.

    Args:
        subject: the model.
        text: tokens and cuts.
        scorer: whose features are read.
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {cut: [] for cut in text.cuts}

    def see(states: LayerStates) -> None:
        for cut, layers in found.items():
            layers.append(_of_layer(states, cut, text.future, scorer))

    cache = cache_for(subject.model, FULL)
    with watched(cache, see):
        subject.forward(text.ids[None], cache, last_only=True)
    for cut, layers in found.items():
        features, mass = (torch.stack(each) for each in zip(*layers, strict=True))
        if features.shape[2]:
            yield Example(features, mass, cut, text.source)


def held_before(states: LayerStates, cut: int, window: int) -> Held:
    """What the layer would hold of the first `cut` tokens alone, at the end of their prefill."""
    heads = states.keys.shape[0]
    columns = torch.arange(cut, device=states.keys.device)
    window = min(window, cut)
    return Held(
        keys=states.keys[None, :, :cut],
        values=states.values[None, :, :cut],
        positions=columns.expand(1, heads, cut),
        valid=torch.ones((1, heads, cut), dtype=torch.bool, device=columns.device),
        first=columns.new_zeros(1),
        seen=cut,
        layer=states.layer,
        layers=states.layer + 1,
        scaling=states.scaling,
        softmax=states.softmax,
        queries=states.queries[None, :, cut - window : cut],
        query_columns=columns[cut - window :],
    )


def _of_layer(states: LayerStates, cut: int, future: int, scorer: ATSKV) -> tuple[Tensor, Tensor]:
    """Features (h, n, f) float16 and future attention (h, n) of the candidates of one layer."""
    held = held_before(states, cut, scorer.window)
    end = min(cut + future, states.queries.shape[1])
    candidates = slice(min(scorer.sinks, cut), max(cut - scorer.window, min(scorer.sinks, cut)))
    features, mass = [], []
    for head in range(states.keys.shape[0]):
        features.append(scorer.features(held, 0, head)[candidates].half().cpu())
        total = torch.zeros(cut, device=states.keys.device, dtype=torch.float32)
        for first in range(cut, end, _BLOCK):
            last = min(first + _BLOCK, end)
            total += states.attention(head, first, last)[..., :cut].mean(0).sum(0)
        mass.append((total / (end - cut))[candidates].cpu())
    return torch.stack(features), torch.stack(mass)
