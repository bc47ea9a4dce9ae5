"""Lists of words whose answer needs all of the context: which words stand in it most often."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtailor.bench.data.synthetic import words
from kvtailor.errors import ArgumentError

__all__ = ["LISTS", "WordList", "common_words", "frequent_words", "shortest"]

ZETA_EXPONENT = 2.0  # RULER's alpha of the frequent words


@dataclass(frozen=True)
class WordList:
    """Words in the order in which they are written.

    Attributes:
        words: all of them, with repetitions.
        asked: the words that stand most often, in the order of their first place.
        meta: what the task adds to a document's ``meta``.
    """

    words: list[str]
    asked: tuple[str, ...]
    meta: Mapping[str, object]

    @property
    def context(self) -> str:
        """The list as text."""
        return "Words: " + ", ".join(self.words) + "."

    @property
    def question(self) -> str:
        """Asks for the words, ends right before the answer."""
        if len(self.asked) == 1:
            return "\nQuestion: Which word is the most common? Answer: The most common word is"
        return (
            f"\nQuestion: Which {len(self.asked)} words are the most common? "
            f"Answer: The {len(self.asked)} most common words are"
        )

    @property
    def answer(self) -> str:
        """The asked words, leading space included."""
        return " " + ", ".join(self.asked)


def shortest(asked: int) -> int:
    """The fewest words in which ``asked`` most common ones are distinct from the rest."""
    return max(36, 4 * asked * asked)


def common_words(rng: random.Random, count: int, *, common: int = 1, times: int = 10, others: int = 1) -> WordList:
    """``common`` nouns stand ``times`` times each among nouns that stand ``others`` times, ``count`` words in all.

    After RULER's common words extraction (arXiv 2404.06654), which has 10 words 30 times among words 3 times. A list
    too short for that repeats the common words less often, but at least once more than the others.

    Raises:
        ArgumentError: ``common``, ``times`` or ``others`` below 1, or ``times`` not above ``others``.
    """
    if common < 1 or others < 1 or times <= others:
        raise ArgumentError(
            f"asked for {common} common words {times} times among words {others} times: ask for at least one common "
            "word, and for it more often than the others"
        )
    times = max(others + 1, min(times, count // (2 * common)))
    kinds = common + max(0, count - common * times) // others + 1
    pool = list(dict.fromkeys([*words.NOUNS, *words.ADJECTIVES, *words.JOBS]))
    if kinds > len(pool):
        pool += [word for word in words.distinct(rng, kinds) if word not in pool]
    drawn = rng.sample(pool, min(kinds, len(pool)))
    chosen, rest = drawn[:common], drawn[common:]
    filler = [word for word in rest for _ in range(others)][: max(0, count - common * times)]
    listed = chosen * times + filler
    rng.shuffle(listed)
    return WordList(listed, tuple(sorted(chosen, key=listed.index)), {"common": common, "times": times})


def frequent_words(rng: random.Random, count: int, *, asked: int = 3, kinds: int = 40) -> WordList:
    """``count`` invented words drawn by a zeta law of exponent 2, of which the ``asked`` most frequent are asked.

    After RULER's frequent words extraction (arXiv 2404.06654). Drawn again until the asked words can be told
    from the next.

    Raises:
        ArgumentError: ``asked`` below 1 or not below ``kinds``, or ``count`` too short to tell them apart.
    """
    if not 0 < asked < kinds:
        raise ArgumentError(f"asked for the {asked} most frequent of {kinds} words: ask for 1 to {kinds - 1}")
    if count < shortest(asked):
        raise ArgumentError(
            f"asked for the {asked} most frequent among {count} words, which are too few to tell them apart: "
            f"ask for {shortest(asked)} words or more"
        )
    chosen = words.distinct(rng, kinds)
    weights = [rank**-ZETA_EXPONENT for rank in range(1, kinds + 1)]
    while True:
        listed = rng.choices(chosen, weights, k=count)
        ranked = Counter(listed).most_common()
        if len(ranked) > asked and ranked[asked - 1][1] > ranked[asked][1]:
            top = [word for word, _ in ranked[:asked]]
            return WordList(listed, tuple(sorted(top, key=listed.index)), {"kinds": kinds})


LISTS: Mapping[str, Callable[..., WordList]] = {"common_words": common_words, "frequent_words": frequent_words}
"""Tasks whose answer is spread over the whole context, so that they have no depth."""
