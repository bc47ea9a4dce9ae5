"""Which facts a generated document hides, and which of them it asks for: one function for each task."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtailor.bench.data.synthetic import hidden_facts
from kvtailor.bench.data.synthetic.hidden_facts import Fact
from kvtailor.bench.data.synthetic.word_lists import LISTS
from kvtailor.errors import ArgumentError

__all__ = ["ALL_TASKS", "FURTHER", "Plot", "TASKS"]


@dataclass(frozen=True)
class Plot:
    """The facts of a document in the order in which they appear, and which of them is asked.

    Attributes:
        facts: at least one; a single fact stands at the asked depth, several are spread evenly.
        asked: index in ``facts``.
        prose: whether filler sentences stand between the facts; without, the facts are lines and fill the length.
        before: stands before all else, whatever the depth; empty: nothing.
        meta: what the task adds to `Document.meta`.
    """

    facts: Sequence[Fact]
    asked: int
    prose: bool = True
    before: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)


def _needle(rng: random.Random, depth: float, *, digits: int = 5, distractors: int = 0) -> Plot:
    return Plot([hidden_facts.needle_fact(rng, digits) for _ in range(distractors + 1)], round(depth * distractors))


def _passkey(rng: random.Random, depth: float, *, digits: int = 5) -> Plot:
    return Plot([hidden_facts.passkey_fact(rng, digits)], 0)


def _key_value(rng: random.Random, depth: float, *, digits: int = 4, records: int = 16, prose: bool = False) -> Plot:
    by_key: dict[str, Fact] = {}
    while len(by_key) < records:
        fact = hidden_facts.record_fact(rng, digits)
        by_key.setdefault(fact.sentence.split(":")[0], fact)
    return Plot(list(by_key.values()), round(depth * (records - 1)), prose, meta={"records": records})


def _characters(rng: random.Random, depth: float, *, people: int = 4) -> Plot:
    facts = [fact for _ in range(people) for fact in hidden_facts.character_facts(rng)]
    rng.shuffle(facts)
    return Plot(facts, round(depth * (len(facts) - 1)), meta={"people": people})


def _copy_span(rng: random.Random, depth: float, *, span: int = 12, cue: int = 4) -> Plot:
    return Plot([hidden_facts.inscription_fact(rng, span, cue)], 0, meta={"span": span, "cue": cue})


def _variables(rng: random.Random, depth: float, *, hops: int = 1, distractors: int = 3, digits: int = 5) -> Plot:
    asked = round(depth * distractors)
    return Plot(hidden_facts.variable_facts(rng, distractors + 1, hops, asked, digits), asked, meta={"hops": hops})


def _multi_value(rng: random.Random, depth: float, *, values: int = 4, digits: int = 5) -> Plot:
    facts = hidden_facts.multi_value_facts(rng, values, digits)
    return Plot(facts, round(depth * (values - 1)), meta={"values": values})


def _multi_query(rng: random.Random, depth: float, *, queries: int = 4, distractors: int = 0, digits: int = 5) -> Plot:
    if queries < 1 or distractors < 0:
        raise ArgumentError(
            f"asked for {queries} queries and {distractors} distractors: ask for 1 or more queries and 0 or more "
            "distractors"
        )
    by_key: dict[str, Fact] = {}
    while len(by_key) < queries + distractors:
        fact = hidden_facts.needle_fact(rng, digits)
        by_key.setdefault(fact.question, fact)
    facts = list(by_key.values())
    first = round(depth * (len(facts) - 1))
    others = rng.sample([i for i in range(len(facts)) if i != first], queries - 1)
    facts[first] = hidden_facts.multi_query_fact(facts, [first, *others])
    return Plot(facts, first, meta={"queries": queries})


def _first_names(rng: random.Random, depth: float, *, people: int = 8) -> Plot:
    by_name: dict[str, Fact] = {}
    while len(by_name) < people:
        fact = hidden_facts.first_name_fact(rng)
        by_name.setdefault(fact.question, fact)
    return Plot(list(by_name.values()), round(depth * (people - 1)), meta={"people": people})


def _tool_call(rng: random.Random, depth: float, *, calls: int = 1, digits: int = 4) -> Plot:
    by_id: dict[str, Fact] = {}
    while len(by_id) < calls:
        fact = hidden_facts.tool_call_fact(rng, digits)
        by_id.setdefault(fact.question, fact)
    return Plot(list(by_id.values()), round(depth * (calls - 1)), meta={"calls": calls})


def _arithmetic(rng: random.Random, depth: float, *, links: int = 2, distractors: int = 3) -> Plot:
    asked = round(depth * distractors)
    facts = hidden_facts.arithmetic_facts(rng, distractors + 1, links, asked)
    return Plot(facts, asked, meta={"links": links})


TASKS: Mapping[str, Callable[..., Plot]] = {
    "needle": _needle,
    "passkey": _passkey,
    "key_value": _key_value,
    "characters": _characters,
    "copy_span": _copy_span,
    "variables": _variables,
    "multi_value": _multi_value,
    "multi_query": _multi_query,
    "first_names": _first_names,
}
"""Tasks that ask for facts, each of which stands at a depth. Generated text is made of these, one after the other, so
that another one here would change every text, and what was calibrated on it."""


def _reworded(rng: random.Random, depth: float) -> Plot:
    return Plot([hidden_facts.reworded_fact(rng)], 0)


def _rules(rng: random.Random, depth: float, *, digits: int = 5) -> Plot:
    rules, fact = hidden_facts.ruled_fact(rng, digits)
    return Plot([fact], 0, before=rules)


FURTHER: Mapping[str, Callable[..., Plot]] = {
    "tool_call": _tool_call,
    "arithmetic": _arithmetic,
    "reworded": _reworded,
    "rules": _rules,
}
"""More of that kind, which are no part of generated text; the embedded models were not trained on them."""

ALL_TASKS: tuple[str, ...] = (*TASKS, *LISTS, *FURTHER)
"""All of them, and the lists of words, whose answer is spread over the whole context."""
