"""Recipe, step 2: the data. ``python -m kvtailor.demo.mixture`` tokenizes the corpus once (about a minute on one core).

A training row is either a window of the corpus or generated documents with many questions, and is a function of the
random state alone, so that a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kvtailor import demo
from kvtailor.bench import synthetic, synthetic_facts, synthetic_words
from kvtailor.bench.synthetic import SPLITS
from kvtailor.bench.synthetic_facts import Fact

__all__ = ["Mixture", "Row", "SENTENCE", "main", "read_corpus"]

CONTEXT_WEIGHT, REPEAT_WEIGHT, QUESTION_WEIGHT, ANSWER_WEIGHT = 0.2, 0.9, 0.8, 3.0
SENTENCE = re.compile(r"[A-Z][^.!?\n]{25,160}[.!?](?=\s)")


def read_corpus(data: Path, characters: int) -> Iterator[tuple[str, str]]:
    """(source, text) of training documents, the same share of every file, ``characters`` in all.

    Books are cut into pieces of 20,000 characters, so that a few long ones do not crowd out the rest.

    Raises:
        FileNotFoundError: ``data`` has no ``train_corpus/*.jsonl``.
    """
    files = sorted((data / "train_corpus").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"asked for the training corpus, but {data} has no train_corpus/*.jsonl: give --data or set KVTAILOR_DATA"
        )
    for file in files:
        left = characters // len(files)
        for line in file.open(encoding="utf-8"):
            document = json.loads(line)
            for start in range(0, len(document["text"]), 20_000):
                text = document["text"][start : start + 20_000]
                left -= len(text)
                yield document["source"], text
                if left <= 0:
                    break
            if left <= 0:
                break


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
        rng = synthetic.random_source("mixture", SPLITS["train"].start + state, "train")
        tokens, weights = [self.bos], [0.0]
        kind = (rng.random() - natural) / max(1e-9, 1.0 - natural)
        if kind >= 1 / 6:
            while len(tokens) < length + 1 - 40:
                room = length + 1 - len(tokens)
                wanted = max(120, int(length * rng.uniform(0.3, 1.1)))
                self._append(tokens, weights, self._document(rng, min(room, wanted)))
        elif kind >= 0:
            self._append(tokens, weights, self._repeats(rng, length))
        if len(tokens) <= length:
            start = rng.randrange(len(self.corpus) - length - 1)
            piece = self.corpus[start : start + length + 1 - len(tokens)].tolist()
            tokens += piece
            weights += [1.0] * len(piece)
        return Row(np.array(tokens[: length + 1], dtype=np.int64), np.array(weights[1 : length + 1], dtype=np.float32))

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

    def _document(self, rng: random.Random, room: int) -> list[tuple[list[int], float]]:
        """A document of about ``room`` tokens: facts among prose (or bare records), then questions about them."""
        facts, prose = _facts(rng, room)
        asked = [fact for fact in facts if fact.question]
        rng.shuffle(asked)
        separator = " " if prose else "\n"
        statements = [fact.sentence for fact in facts]
        questions: list[tuple[list[int], float]] = []
        left = room - 2 - len(self._ids(separator.join(statements)))
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
                filler.append(following if natural else synthetic_words.sentence(rng))
                left -= len(self._ids(f" {filler[-1]}"))
            places = sorted(rng.randint(0, len(filler)) for _ in statements)
            pieces, done = [], 0
            for place, statement in zip(places, statements, strict=True):
                pieces += filler[done:place] + [statement]
                done = place
            pieces += filler[done:]
        return [(self._ids(separator.join(pieces)), CONTEXT_WEIGHT), *questions]


def _facts(rng: random.Random, room: int) -> tuple[list[Fact], bool]:
    """Facts that take a random share of ``room`` tokens, and whether they stand in prose."""
    kind = rng.choices(
        ("records", "needle", "passkey", "characters", "copy_span", "variables", "all"), (4, 3, 1.5, 3, 2, 3, 3)
    )[0]
    if kind == "records":
        count = max(2, int(room * rng.uniform(0.1, 0.6) / 10))
        return [synthetic_facts.record_fact(rng, rng.choice((3, 4, 4, 5))) for _ in range(count)], rng.random() < 0.25
    share = rng.choice((0.02, 0.1, 0.2, 0.35)) * room
    facts: list[Fact] = []
    while not facts or share > 0:
        one = rng.choice(("needle", "characters", "copy_span", "variables")) if kind == "all" else kind
        more = _some_facts(rng, one)
        facts += more
        share -= 22 * len(more)
        if kind == "passkey":
            break
    if kind == "all":
        facts.append(synthetic_facts.passkey_fact(rng))
        rng.shuffle(facts)
    return facts, True


def _some_facts(rng: random.Random, kind: str) -> list[Fact]:
    if kind == "characters":
        return synthetic_facts.character_facts(rng)
    if kind == "variables":
        roots, hops = rng.randint(1, 4), rng.choice((0, 1, 1, 2))
        facts = synthetic_facts.variable_facts(rng, roots, hops, rng.randrange(roots))
        last = facts[-1] if hops else None
        direct = []
        for fact in facts[:roots]:
            name, value = fact.sentence[:-1].split(" =")
            direct.append(Fact(fact.sentence, f"\nQuestion: What is the value of {name}? Answer: {name} =", value))
        links = [fact if fact is last else Fact(fact.sentence, "", fact.answer) for fact in facts[roots:]]
        return direct + links
    if kind == "copy_span":
        return [synthetic_facts.inscription_fact(rng, rng.randint(8, 16), rng.randint(2, 5))]
    return [synthetic_facts.passkey_fact(rng) if kind == "passkey" else synthetic_facts.needle_fact(rng)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=demo.data_folder(), help="folder that has train_corpus/")
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder that has tokenizer.json")
    parser.add_argument("--megabytes", type=int, default=40, help="of corpus text, the same share of every file")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.work / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(name) for name in ("<bos>", "<eos>"))
    texts = [text for _, text in read_corpus(given.data, given.megabytes * 1_000_000)]
    order = random.Random(0)
    order.shuffle(texts)
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[start : start + 64], add_special_tokens=False):
            pieces.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
    corpus = np.concatenate(pieces)
    np.save(given.work / "corpus.npy", corpus)
    sentences = [sentence for text in texts[:2000] for sentence in SENTENCE.findall(text)][:40_000]
    (given.work / "sentences.json").write_text(json.dumps(sentences), encoding="utf-8")
    print(
        f"{len(corpus):,} tokens, {sum(map(len, texts)) / len(corpus):.2f} characters per token, "
        f"{len(sentences):,} filler sentences in {given.work}"
    )


if __name__ == "__main__":
    main()
