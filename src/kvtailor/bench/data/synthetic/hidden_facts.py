"""Facts that generated documents hide and ask for: numbers under keys, people, inscriptions, variables, tool calls."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from kvtailor.bench.data.synthetic import words
from kvtailor.errors import ArgumentError

__all__ = [
    "Fact",
    "arithmetic_facts",
    "character_facts",
    "first_name_fact",
    "inscription_fact",
    "multi_query_fact",
    "multi_value_facts",
    "needle_fact",
    "number",
    "passkey_fact",
    "record_fact",
    "reworded_fact",
    "ruled_fact",
    "tool_call_fact",
    "variable_facts",
]

_REWORDED = (
    ("keeps her trumpet upstairs", "Who plays a brass instrument?"),
    ("rows to work each morning", "Who owns a boat?"),
    ("sells loaves beside that chapel", "Who is the baker?"),
    ("mends shoes until midnight", "Who is the cobbler?"),
    ("sets bones and stitches wounds", "Who is the doctor?"),
    ("grew up along the Nile", "Who was born in Egypt?"),
    ("learned to walk in Osaka", "Who is from Japan?"),
    ("has twelve beehives", "Who makes honey?"),
    ("cannot eat any cheese", "Who must avoid milk?"),
    ("reads with both hands", "Who is blind?"),
    ("buried her husband last spring", "Who is a widow?"),
    ("ran forty kilometres yesterday", "Who won the marathon?"),
)
"""What is said of a person, and a question about it in other words, for a reader who knows what the one means."""
_DEEDS = ("open", "close", "find", "move", "paint", "count", "sell", "lock", "send", "print", "start", "check")


@dataclass(frozen=True)
class Fact:
    """One statement that can be hidden in prose, and how to ask for it.

    Attributes:
        sentence: the statement, without surrounding spaces.
        question: asks for it, beginning with a line break; ends right before the answer.
        answer: leading space included.
        parts: what the answer must contain in any order, if that is several things; empty: the answer itself.
    """

    sentence: str
    question: str
    answer: str
    parts: tuple[str, ...] = ()


def number(rng: random.Random, digits: int) -> str:
    """A number of exactly ``digits`` digits with its leading space."""
    return f" {rng.randrange(10 ** (digits - 1), 10**digits)}"


def needle_fact(rng: random.Random, digits: int = 5) -> Fact:
    """A number of ``digits`` digits under a key of two words."""
    stem, answer = f"The special number for {words.pair(rng)} is", number(rng, digits)
    return Fact(f"{stem}{answer}.", f"\nQuestion: What is {stem[0].lower()}{stem[1:-3]}? Answer: {stem}", answer)


def passkey_fact(rng: random.Random, digits: int = 5) -> Fact:
    """A pass key of ``digits`` digits, stated twice."""
    answer = number(rng, digits)
    sentence = f"The pass key is{answer}. Remember it:{answer} is the pass key."
    return Fact(sentence, "\nQuestion: What is the pass key? Answer: The pass key is", answer)


def multi_value_facts(rng: random.Random, values: int = 4, digits: int = 5) -> list[Fact]:
    """``values`` numbers of ``digits`` digits under one key of two words; the answer lists them in their order.

    After RULER's multi-value needles (arXiv 2404.06654): recall counts the numbers that the continuation contains.
    """
    if values < 1:
        raise ArgumentError(f"asked for {values} values under one key: ask for 1 or more")
    key = words.pair(rng)
    numbers = [number(rng, digits) for _ in range(values)]
    question = f"\nQuestion: What are the special numbers for {key}? Answer: The special numbers for {key} are"
    parts = tuple(value.strip() for value in numbers)
    return [
        Fact(f"One of the special numbers for {key} is{value}.", question, ",".join(numbers), parts)
        for value in numbers
    ]


def multi_query_fact(needles: list[Fact], asked: list[int]) -> Fact:
    """The needle ``asked[0]`` with a question for all needles whose indices are in ``asked``, in that order.

    After RULER's multi-query needles (arXiv 2404.06654).
    """
    stems = [needles[i].sentence[: -1 - len(needles[i].answer)] for i in asked]
    keys = [stem.removeprefix("The special number for ").removesuffix(" is") for stem in stems]
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    answers = [needles[i].answer for i in asked]
    rest = "".join(f", for {key} is{answer}" for key, answer in zip(keys[1:], answers[1:], strict=True))
    return Fact(
        needles[asked[0]].sentence,
        f"\nQuestion: What are the special numbers for {listed}? Answer: {stems[0]}",
        answers[0] + rest,
        tuple(answer.strip() for answer in answers),
    )


def reworded_fact(rng: random.Random) -> Fact:
    """A person of whom something is said; the question shares no word with it, so that no words can be matched.

    After the idea of NoLiMa (arXiv 2502.05167); the sentences are our own.
    """
    name = rng.choice(words.FIRST_NAMES)
    said, question = rng.choice(_REWORDED)
    return Fact(f"{name} {said}.", f"\nQuestion: {question} Answer:", f" {name}")


def ruled_fact(rng: random.Random, digits: int = 5) -> tuple[str, Fact]:
    """Two rules for every answer, and a number under a key of two words, whose answer keeps both of them."""
    first, last = (word.capitalize() for word in rng.sample(words.NOUNS, 2))
    needle = needle_fact(rng, digits)
    rules = f"You begin every answer with the word {first}. You end every answer with the word {last}."
    stem = needle.sentence[: -1 - len(needle.answer)]
    question = f"\nQuestion: What is {stem[0].lower()}{stem[1:-3]}? Answer:"
    answer = f" {first}{needle.answer} {last}"
    return rules, Fact(needle.sentence, question, answer, (first, needle.answer.strip(), last))


def first_name_fact(rng: random.Random) -> Fact:
    """A made-up person is introduced by the full name; asked is the first name that belongs to the surname."""
    surname, first = words.invented(rng).capitalize(), rng.choice(words.FIRST_NAMES)
    place = words.invented(rng).capitalize()
    return Fact(
        f"{first} {surname} came to town from {place}.",
        f"\nQuestion: What is the first name of {surname}? Answer: The first name of {surname} is",
        f" {first}",
    )


def record_fact(rng: random.Random, digits: int = 4) -> Fact:
    """A number of ``digits`` digits under a made-up key."""
    key, answer = words.invented(rng), number(rng, digits)
    return Fact(f"{key}:{answer}.", f"\nQuestion: Which number has {key}? Answer: {key}:", answer)


def character_facts(rng: random.Random) -> list[Fact]:
    """Where one made-up person lives, what the work is and what is carried: three facts."""
    name = f"{rng.choice(words.FIRST_NAMES)} {words.invented(rng).capitalize()}"
    kinds = [
        ("lives in", f" {words.invented(rng).capitalize()}", f"Where does {name} live?"),
        ("works as a", f" {rng.choice(words.JOBS)}", f"What is the work of {name}?"),
        ("carries the", f" {words.pair(rng)}", f"What does {name} carry?"),
    ]
    return [
        Fact(f"{name} {verb}{answer}.", f"\nQuestion: {ask} Answer: {name} {verb}", answer)
        for verb, answer, ask in kinds
    ]


def inscription_fact(rng: random.Random, span: int = 12, cue: int = 4) -> Fact:
    """A span of ``span`` words in no order of English; the question repeats ``cue`` of them, the answer is the rest."""
    if not 0 < cue < span:
        raise ArgumentError(
            f"asked for a cue of {cue} words in a span of {span} words: ask for a cue of 1 to {span - 1}"
        )
    chosen = [rng.choice(words.NOUNS) if rng.random() < 0.5 else words.invented(rng) for _ in range(span)]
    cue_text, rest = " ".join(chosen[:cue]), "".join(f" {word}" for word in chosen[cue:])
    stem = f"The inscription reads: {cue_text}"
    return Fact(f"{stem}{rest}.", f"\nQuestion: What does the inscription read? Answer: {stem}", rest)


def variable_facts(rng: random.Random, roots: int, hops: int, asked: int, digits: int = 5) -> list[Fact]:
    """``roots`` variables that hold numbers, then ``hops`` links that start at root ``asked``.

    The question names the last link and the answer leads back to the number: ``c =`` asks for `` b = a = 48213``.
    """
    names = words.distinct(rng, roots + hops)
    numbers = [number(rng, digits) for _ in range(roots)]
    chain = [names[asked], *names[roots:]]
    walk = "".join(f" {name} =" for name in reversed(chain[:-1]))
    question = f"\nQuestion: What is the value of {chain[-1]}? Answer: {chain[-1]} ="
    values = [
        Fact(f"{name} ={value}.", question, walk + value) for name, value in zip(names[:roots], numbers, strict=True)
    ]
    return values + [
        Fact(f"{new} = {old}.", question, walk + numbers[asked]) for old, new in zip(chain, chain[1:], strict=False)
    ]


def arithmetic_facts(
    rng: random.Random, roots: int, links: int, asked: int, smallest: int = 20, largest: int = 60
) -> list[Fact]:
    """``roots`` variables that hold numbers, then ``links`` that each add to or take from the one before, 2 to 9.

    The chain starts at root ``asked``. The question names its last variable, and the answer is that one's value, which
    stands nowhere in the text.
    """
    names = words.distinct(rng, roots + links)
    numbers = [rng.randint(smallest, largest) for _ in range(roots)]
    chain, value, steps = [names[asked], *names[roots:]], numbers[asked], []
    for new, old in zip(chain[1:], chain, strict=False):
        change = rng.randint(2, 9) * rng.choice((-1, 1))
        value += change
        steps.append(f"{new} = {old} {'+' if change > 0 else '-'} {abs(change)}.")
    question = f"\nQuestion: What is the value of {chain[-1]}? Answer: {chain[-1]} ="
    held = [f"{name} = {number}." for name, number in zip(names[:roots], numbers, strict=True)]
    return [Fact(sentence, question, f" {value}") for sentence in (*held, *steps)]


def tool_call_fact(rng: random.Random, digits: int = 4) -> Fact:
    """A call of a made-up tool as JSON, under a made-up id; the question repeats the id, the answer is all of the JSON.

    Its arguments are a text, a number of ``digits`` digits and a truth value, in an order that is drawn.
    """
    identity, tool = words.invented(rng), f"{rng.choice(_DEEDS)}_{rng.choice(words.NOUNS)}"
    values = [rng.choice(words.NOUNS), int(number(rng, digits)), rng.random() < 0.5]
    rng.shuffle(values)
    keys = rng.sample(words.NOUNS, len(values))
    call = json.dumps({"tool": tool, "arguments": dict(zip(keys, values, strict=True))})
    stem = f"Call {identity}:"
    return Fact(f"{stem} {call}", f"\nQuestion: What was call {identity}? Answer: {stem}", f" {call}")
