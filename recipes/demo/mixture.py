"""Recipe, step 2: the data. ``python -m recipes.demo.mixture`` tokenizes the corpus once (half a minute on two cores).

Every eighth Wikipedia article is spelled as WikiText spells it (spaces before punctuation, `` @-@ ``), so that the
model can read the benchmark that everybody reports. Books stand first in the array, in long pieces, so that long rows
have natural text to look back on.

A training row is either a window of the corpus or generated documents with many questions, and is a function of the
random state alone, so that a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer

from kvtailor.bench.data.synthetic import documents, hidden_facts, word_lists, words
from kvtailor.bench.data.synthetic.documents import SPLITS
from kvtailor.bench.data.synthetic.hidden_facts import Fact
from recipes import demo
from recipes.demo.corpus import read_corpus

__all__ = ["Mixture", "Row", "SENTENCE", "main"]

LIST_SHARE = 0.08
CONTEXT_WEIGHT, REPEAT_WEIGHT, QUESTION_WEIGHT, ANSWER_WEIGHT = 0.2, 0.9, 0.8, 3.0
SENTENCE = re.compile(r"[A-Z][^.!?\n]{25,160}[.!?](?=\s)")
LONG = 2048


@dataclass(frozen=True)
class Row:
    """One training row.

    Attributes:
        tokens: (length + 1,) int64, of which the first ``length`` are inputs and the last ``length`` targets.
        weights: (length,) float32, the weight of each target in the loss.
    """

    tokens: np.ndarray
    weights: np.ndarray


class Mixture:
    """Rows of training data from a tokenizer, the corpus tokens and filler sentences that `main` wrote to ``work``."""

    def __init__(self, work: Path):
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.corpus = np.load(work / "corpus.npy", mmap_mode="r")
        self.book_tokens: int = json.loads((work / "corpus.json").read_text(encoding="utf-8"))["book_tokens"]
        self.sentences: list[str] = json.loads((work / "sentences.json").read_text(encoding="utf-8"))
        self.bos, self.eos = (self.tokenizer.token_to_id(name) for name in ("<bos>", "<eos>"))

    def row(self, state: int, length: int, natural: float) -> Row:
        """One row with ``length`` targets.

        Args:
            state: random state, counted from the first training state.
            length: tokens.
            natural: probability of a window of the corpus, 0.0 to 1.0. A sixth of the other rows are repeated spans of
                random tokens, the rest generated documents.
        """
        rng = documents.random_source("mixture", SPLITS["train"].start + state, "train")
        tokens, weights = [self.bos], [0.0]
        kind = (rng.random() - natural) / max(1e-9, 1.0 - natural)
        if kind >= 1 / 6:
            while len(tokens) < length + 1 - 40:
                left = length + 1 - len(tokens)
                wanted = max(120, int(length * rng.uniform(0.3, 1.1)))
                self._append(tokens, weights, self._document(rng, min(left, wanted), length >= LONG))
        elif kind >= 0:
            self._append(tokens, weights, self._repeats(rng, length))
        if len(tokens) <= length:
            start = self._place(rng, length)
            piece = self.corpus[start : start + length + 1 - len(tokens)].tolist()
            tokens += piece
            weights += [1.0] * len(piece)
        return Row(np.array(tokens[: length + 1], dtype=np.int64), np.array(weights[1 : length + 1], dtype=np.float32))

    def _place(self, rng: random.Random, length: int) -> int:
        """Where a window of the corpus starts: rows of `LONG` tokens and more take half of theirs from books."""
        share = 0.5 if length >= LONG else 0.3
        if rng.random() < share and self.book_tokens > length + 1:
            return rng.randrange(self.book_tokens - length - 1)
        return rng.randrange(min(self.book_tokens, len(self.corpus) - length - 2), len(self.corpus) - length - 1)

    def _append(self, tokens: list[int], weights: list[float], parts: list[tuple[list[int], float]]) -> None:
        for ids, weight in parts:
            tokens += ids
            weights += [weight] * len(ids)
        tokens += [self.eos, self.bos]
        weights += [1.0, 0.0]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _repeats(self, rng: random.Random, length: int) -> list[tuple[list[int], float]]:
        """Spans of random tokens, each of which comes back later."""
        size = self.tokenizer.get_vocab_size()
        spans = [[rng.randrange(3, size) for _ in range(rng.randint(8, 60))] for _ in range(max(2, length // 120))]
        parts = [(span, 0.0) for span in spans]
        left = length - sum(map(len, spans))
        while left > 0:
            span = rng.choice(spans)
            parts.append((span, REPEAT_WEIGHT))
            left -= len(span)
        return parts

    def _list(self, rng: random.Random, length: int) -> list[tuple[list[int], float]]:
        """A list of words and the question for the most common ones."""
        per_word = 2.5
        if rng.random() < 0.6:
            common, times = rng.choice((1, 1, 2, 3)), rng.randint(6, 20)
            count = int(min(length / per_word, common * times * rng.uniform(2, 8)))
            listed = word_lists.common_words(rng, max(word_lists.shortest(common), count), common=common, times=times)
        else:
            asked, kinds = rng.randint(1, 3), rng.randint(10, 40)
            least = word_lists.shortest(asked)
            count = int(min(length / (2 * per_word), rng.randint(least, 300)))
            listed = word_lists.frequent_words(rng, max(least, count), asked=asked, kinds=kinds)
        return [
            (self._ids(listed.context), CONTEXT_WEIGHT),
            (self._ids(listed.question), QUESTION_WEIGHT),
            (self._ids(listed.answer), ANSWER_WEIGHT),
            (self._ids("."), QUESTION_WEIGHT),
        ]

    def _document(self, rng: random.Random, length: int, long: bool) -> list[tuple[list[int], float]]:
        """A document of about ``length`` tokens: facts among prose (or bare records), then questions about them."""
        if rng.random() < LIST_SHARE:
            return self._list(rng, length)
        facts, prose = _facts(rng, length, LONG_KINDS if long else KINDS)
        asked = list({fact.question: fact for fact in facts if fact.question}.values())
        rng.shuffle(asked)
        separator = " " if prose else "\n"
        statements = [fact.sentence for fact in facts]
        questions: list[tuple[list[int], float]] = []
        left = length - 2 - len(self._ids(separator.join(statements)))
        for fact in asked:
            question, answer = self._ids(fact.question), self._ids(fact.answer)
            left -= len(question) + len(answer) + 1
            if questions and left < 0:
                break
            questions += [(question, QUESTION_WEIGHT), (answer, ANSWER_WEIGHT), (self._ids("."), QUESTION_WEIGHT)]
        pieces = statements
        if prose:
            natural, at = rng.random() < 0.5, rng.randrange(len(self.sentences))
            filler: list[str] = []
            while left > 0:
                following = self.sentences[(at + len(filler)) % len(self.sentences)]
                filler.append(following if natural else words.sentence(rng))
                left -= len(self._ids(f" {filler[-1]}"))
            places = sorted(rng.randint(0, len(filler)) for _ in statements)
            pieces, done = [], 0
            for place, statement in zip(places, statements, strict=True):
                pieces += filler[done:place] + [statement]
                done = place
            pieces += filler[done:]
        return [(self._ids(separator.join(pieces)), CONTEXT_WEIGHT), *questions]


KINDS = {
    "records": 4,
    "needle": 3,
    "passkey": 1.5,
    "characters": 3,
    "copy_span": 2,
    "variables": 3,
    "multi_value": 3,
    "multi_query": 2,
    "first_names": 2,
    "all": 3,
}
"""Kinds of generated documents and how often, in proportion."""
LONG_KINDS = {**KINDS, "multi_value": 9}
"""The same for rows of `LONG` tokens and more: after 1,900 steps several values of one key were still half right."""


def _facts(rng: random.Random, length: int, kinds: Mapping[str, float]) -> tuple[list[Fact], bool]:
    """Facts that take a random share of ``length`` tokens, and whether they stand in prose."""
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "records":
        count = max(2, int(length * rng.uniform(0.1, 0.6) / 10))
        return [hidden_facts.record_fact(rng, rng.choice((3, 4, 4, 5))) for _ in range(count)], rng.random() < 0.25
    share = rng.choice((0.02, 0.1, 0.2, 0.35)) * length
    facts: list[Fact] = []
    while not facts or share > 0:
        one = rng.choice(("needle", "characters", "copy_span", "variables", "first_names")) if kind == "all" else kind
        more = _some_facts(rng, one)
        facts += more
        share -= 22 * len(more)
        if kind == "passkey":
            break
    if kind == "all":
        facts.append(hidden_facts.passkey_fact(rng))
        rng.shuffle(facts)
    return facts, True


def _some_facts(rng: random.Random, kind: str) -> list[Fact]:
    if kind == "characters":
        return hidden_facts.character_facts(rng)
    if kind == "variables":
        roots, hops = rng.randint(1, 4), rng.choice((0, 1, 1, 2))
        facts = hidden_facts.variable_facts(rng, roots, hops, rng.randrange(roots))
        last = facts[-1] if hops else None
        direct = []
        for fact in facts[:roots]:
            name, value = fact.sentence[:-1].split(" =")
            direct.append(Fact(fact.sentence, f"\nQuestion: What is the value of {name}? Answer: {name} =", value))
        links = [fact if fact is last else Fact(fact.sentence, "", fact.answer) for fact in facts[roots:]]
        return direct + links
    if kind == "multi_value":
        return hidden_facts.multi_value_facts(rng, rng.choice((1, 2, 3, 4, 4)), rng.choice((3, 5, 5)))
    if kind == "multi_query":
        needles = [hidden_facts.needle_fact(rng) for _ in range(rng.randint(2, 8))]
        first, *others = rng.sample(range(len(needles)), min(len(needles), rng.randint(2, 4)))
        needles[first] = hidden_facts.multi_query_fact(needles, [first, *others])
        return needles
    if kind == "first_names":
        return [hidden_facts.first_name_fact(rng)]
    if kind == "copy_span":
        return [hidden_facts.inscription_fact(rng, rng.randint(8, 16), rng.randint(2, 5))]
    return [hidden_facts.passkey_fact(rng) if kind == "passkey" else hidden_facts.needle_fact(rng)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=demo.data_folder(), help="folder that has train_corpus/")
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder that has tokenizer.json")
    parser.add_argument("--megabytes", type=int, default=140, help="of corpus text, the same share of every file")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.work / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(name) for name in ("<bos>", "<eos>"))
    found = list(read_corpus(given.data, given.megabytes * 1_000_000))
    random.Random(0).shuffle(found)
    found.sort(key=lambda each: not each[0].startswith("books"))
    texts = [text for _, text in found]
    pieces: list[np.ndarray] = []
    book_tokens = 0
    for start in track(range(0, len(texts), 64), description="tokenize"):
        for i, encoding in enumerate(tokenizer.encode_batch(texts[start : start + 64], add_special_tokens=False)):
            pieces.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
            book_tokens += len(pieces[-1]) if found[start + i][0].startswith("books") else 0
    corpus = np.concatenate(pieces)
    np.save(given.work / "corpus.npy", corpus)
    (given.work / "corpus.json").write_text(json.dumps({"book_tokens": book_tokens}), encoding="utf-8")
    sentences = [sentence for text in texts[::4] for sentence in SENTENCE.findall(text)][:40_000]
    (given.work / "sentences.json").write_text(json.dumps(sentences), encoding="utf-8")
    print(
        f"{len(corpus):,} tokens, {sum(map(len, texts)) / len(corpus):.2f} characters per token, "
        f"{len(sentences):,} filler sentences in {given.work}"
    )


if __name__ == "__main__":
    main()
