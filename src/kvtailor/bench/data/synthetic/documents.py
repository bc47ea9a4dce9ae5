"""Generated documents whose end needs their beginning: needles, passkeys, records, characters, copies, variables.

Pure standard library, offline, and a function of its arguments alone: the same ``(task, state, split, length, depth,
options)`` gives the same document on every machine. The three splits draw from disjoint ranges of states, so that no
instance that a model was trained or a method calibrated on is used in an evaluation.

A document is a ``context``, a ``question`` that ends just before the answer, and the ``answer`` with its leading
space::

    document = make_document("needle", state=7, length=4000, depth=0.25)
    right = continuation_of(document.prompt).startswith(document.answer)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial

from kvtailor.bench.data.synthetic import words
from kvtailor.bench.data.synthetic.hidden_facts import Fact
from kvtailor.bench.data.synthetic.plots import ALL_TASKS, FURTHER, TASKS, Plot
from kvtailor.bench.data.synthetic.word_lists import LISTS, WordList, shortest
from kvtailor.errors import ArgumentError

__all__ = ["ALL_TASKS", "Document", "Plot", "SPLITS", "TASKS", "make_document", "random_source"]

SPLITS: Mapping[str, range] = {
    "evaluation": range(1_000_000),
    "calibration": range(1_000_000, 2_000_000),
    "train": range(2_000_000, 2**31),
}


@dataclass(frozen=True)
class Document:
    """One generated document and the one question that its context answers.

    Attributes:
        context: text in which the asked fact stands.
        question: text that follows the context and ends right before the answer (no trailing space).
        answer: what the continuation must begin with, leading space included.
        task: one of `ALL_TASKS`.
        state: the random state that it was generated from.
        split: "evaluation", "calibration" or "train".
        depth: where in the context the fact was to stand, 0.0 (start) to 1.0 (end). Lists of words have no depth and
            ignore it.
        meta: what the task adds; for all but lists of words also ``fact`` (the asked sentence), ``fact_at`` (its
            character offset in the context) and ``depth_found`` (``fact_at`` over the last offset at which it could
            stand).
        parts: the things that the answer consists of, for recall in any order; the stripped answer if it is one.
    """

    context: str
    question: str
    answer: str
    task: str
    state: int
    split: str
    depth: float
    meta: Mapping[str, object] = field(default_factory=dict)
    parts: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """Context and question: what a model is given."""
        return self.context + self.question


def random_source(task: str, state: int, split: str) -> random.Random:
    """The random source of one document.

    Raises:
        ArgumentError: unknown ``split``, or ``state`` outside of the split's range in `SPLITS`.
    """
    if split not in SPLITS:
        raise ArgumentError(f"asked for split {split!r}, but there are {', '.join(SPLITS)}: use one of them")
    states = SPLITS[split]
    if state not in states:
        raise ArgumentError(
            f"asked for state {state} in split {split!r}, whose states are {states.start} to "
            f"{states.stop - 1}: take one of those, so that splits stay disjoint"
        )
    return random.Random(f"{task}:{state}")


def make_document(
    task: str,
    *,
    state: int,
    split: str = "evaluation",
    length: int,
    depth: float = 0.5,
    count_tokens: Callable[[str], int] | None = None,
    filler: Sequence[str] | None = None,
    **task_options: object,
) -> Document:
    """Generate one document of at most ``length`` that is as long as whole sentences (or records) allow.

    Args:
        task: one of `ALL_TASKS`.
        state: random state, from the range of the split in `SPLITS`.
        split: "evaluation", "calibration" or "train".
        length: of context and question together, in characters, or in tokens if ``count_tokens`` is given; the answer
            is not counted.
        depth: where the asked fact stands in the context, 0.0 (start) to 1.0 (end). Tasks with several facts spread
            them evenly and ask the one nearest to the depth; ``meta["depth_found"]`` has what came out.
        count_tokens: text to its number of tokens, without special tokens.
        filler: sentences to hide the facts in; a run of them from a random place is taken. None: a template grammar.
        **task_options: needle ``digits, distractors``; passkey ``digits``; key_value ``digits, prose, records`` (None
            or absent: as many lines as fit); characters ``people``; copy_span ``span, cue`` (words); variables
            ``hops, distractors, digits``; multi_value ``values, digits``; multi_query ``queries, distractors, digits``;
            first_names ``people``; tool_call ``calls, digits``; arithmetic ``links, distractors``; rules
            ``digits``; common_words
            ``common, times, others``; frequent_words ``asked, kinds``.

    Raises:
        ArgumentError: unknown task, split, option or state, depth outside of 0 to 1, empty filler, or a length that the
            facts and the question alone exceed.
    """
    if task not in ALL_TASKS:
        guess = get_close_matches(task, ALL_TASKS, 1)
        raise ArgumentError(
            f"asked for task {task!r}, but there are {', '.join(ALL_TASKS)}"
            + (f": did you mean {guess[0]!r}?" if guess else ": use one of them")
        )
    if not 0.0 <= depth <= 1.0:
        raise ArgumentError(f"asked for depth {depth}, but a depth is a share of the context: give 0.0 to 1.0")
    if filler is not None and not filler:
        raise ArgumentError("asked for a filler without any sentence: give sentences, or None for the built-in ones")
    rng, size = random_source(task, state, split), count_tokens or len
    if task in LISTS:
        listed = _word_list(task, task_options, rng, length, size)
        return Document(
            listed.context, listed.question, listed.answer, task, state, split, depth, listed.meta, listed.asked
        )
    draw = partial(_plot, task, depth, task_options)
    if task == "key_value" and task_options.get("records") is None and not task_options.get("prose"):
        plot = _as_many_records_as_fit(draw, rng, length, size)
    else:
        plot = draw(rng)
    pieces = _with_prose(plot, rng, depth, length, size, filler) if plot.prose else list(plot.facts)
    separator = " " if plot.prose else "\n"
    texts = [piece.sentence if isinstance(piece, Fact) else piece for piece in pieces]
    place = next(i for i, piece in enumerate(pieces) if piece is plot.facts[plot.asked])
    before = len(separator.join(texts[:place])) + (len(separator) if place else 0)
    fact = plot.facts[plot.asked]
    context = separator.join(texts)
    found = before / max(1, len(context) - len(fact.sentence))
    meta = {"fact": fact.sentence, "fact_at": before, "depth_found": found, **plot.meta}
    parts = fact.parts or (fact.answer.strip(),)
    document = Document(context, fact.question, fact.answer, task, state, split, depth, meta, parts)
    if size(document.prompt) > length:
        raise ArgumentError(
            f"asked for a {task} document of length {length}, but its facts and question alone take "
            f"{size(document.prompt)}: ask for at least that, or for fewer or shorter facts"
        )
    return document


def _plot(task: str, depth: float, options: Mapping[str, object], rng: random.Random, **more: object) -> Plot:
    try:
        return (TASKS.get(task) or FURTHER[task])(rng, depth, **{**options, **more})
    except TypeError as error:
        raise ArgumentError(
            f"asked for options {dict(options)} of task {task!r}: {error}; see make_document"
        ) from error


def _word_list(
    task: str, options: Mapping[str, object], rng: random.Random, length: int, size: Callable[[str], int]
) -> WordList:
    """The longest list of the task that stays within ``length``."""
    start = rng.getstate()

    def list_of(count: int) -> WordList:
        rng.setstate(start)
        try:
            return LISTS[task](rng, count, **options)
        except TypeError as error:
            raise ArgumentError(f"asked for options {dict(options)} of task {task!r}: {error}") from error

    low = shortest(int(str(options.get("asked", options.get("common", 3)))))
    high = low + 1
    while size(list_of(high).context + list_of(high).question) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        text = list_of(middle)
        low, high = (middle, high) if size(text.context + text.question) <= length else (low, middle)
    found = list_of(low)
    if size(found.context + found.question) > length:
        raise ArgumentError(
            f"asked for a {task} document of length {length}, but {low} words and the question alone take "
            f"{size(found.context + found.question)}: ask for at least that"
        )
    return found


def _as_many_records_as_fit(
    draw: Callable[..., Plot], rng: random.Random, length: int, size: Callable[[str], int]
) -> Plot:
    """The largest number of records whose lines and question stay within ``length``, at least one."""
    start = rng.getstate()

    def plot_of(count: int) -> Plot:
        rng.setstate(start)
        return draw(rng, records=count)

    def taken(plot: Plot) -> int:
        return size("\n".join(fact.sentence for fact in plot.facts) + plot.facts[plot.asked].question)

    low, high = 1, max(2, length)
    per_record = max(1, taken(plot_of(32)) // 32)
    high = min(high, 2 * length // per_record + 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(plot_of(middle)) <= length else (low, middle)
    return plot_of(low)


def _with_prose(
    plot: Plot, rng: random.Random, depth: float, length: int, size: Callable[[str], int], filler: Sequence[str] | None
) -> list[Fact | str]:
    """The facts among filler sentences, as many as ``length`` leaves room for."""
    left = length - size(" ".join(fact.sentence for fact in plot.facts) + plot.facts[plot.asked].question)
    sentences: list[str] = []
    at = rng.randrange(len(filler)) if filler is not None else 0
    while left > 0:
        text = filler[(at + len(sentences)) % len(filler)] if filler is not None else words.sentence(rng)
        left -= size(f" {text}")
        if left >= 0:
            sentences.append(text)
    while True:
        pieces = _interleave(plot, depth, sentences)
        text = " ".join(piece.sentence if isinstance(piece, Fact) else piece for piece in pieces)
        if not sentences or size(text + plot.facts[plot.asked].question) <= length:
            return pieces
        sentences.pop()


def _interleave(plot: Plot, depth: float, sentences: Sequence[str]) -> list[Fact | str]:
    """Facts put before the sentence at which their share of the prose, in characters, is reached."""
    total, read = sum(map(len, sentences)), 0
    count = len(plot.facts)
    waiting = [(depth if count == 1 else i / (count - 1), fact) for i, fact in enumerate(plot.facts)]
    pieces: list[Fact | str] = [plot.before] if plot.before else []
    for text in sentences:
        while waiting and read + len(text) / 2 > waiting[0][0] * total:
            pieces.append(waiting.pop(0)[1])
        pieces.append(text)
        read += len(text)
    return pieces + [fact for _, fact in waiting]
