"""Random texts as plans: each is a plan, or a PlanError that ends soon and is short."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from kvtailor.errors import KvtailorError, PlanError
from kvtailor.ops.sizes import bytes_of
from kvtailor.plan import Plan, registry
from kvtailor.plan.grammar import MOST_CHARACTERS

METHODS = [name for stage in registry.stages() for name in registry.methods(stage)]
PIECES = [
    *"()[]{}=,+@'\"\\.- \n\t\x00\u2028\ud800é🙂",
    "none",
    "true",
    "inf",
    "-inf",
    "nan",
    "1e400",
    "-1",
    "0",
    "9" * 50,
    "1_000",
    "0x10",
    "tokens",
    "keep",
    "bytes",
    "slack",
    "of",
    "preset",
    "method",
    "[[",
    "]]",
    "...",
    "64MiB",
    "1e-5",
    "of=vector",
    *METHODS,
    *registry.presets(),
]


def lines() -> list[str]:
    found = [
        "snapkv(window=16) + adakv + kivi(bits=4) @ tokens=1024, slack=64",
        "hadamard(of=lowrank(heads=2, of=vector(bits=4, block_size=8), only=keys)) + disk(resident_bytes=2GiB)",
        'disk(folder="/tmp/a b", policy=mru)',
        "inverse(of=shuffled(of=pyramid(beta=3), state=2)) + critical(of=h2o(recent=3)) @ bytes=64MiB",
    ]
    for stage in registry.stages():
        for name in registry.methods(stage):
            found += registry.load(stage, name).examples or (name,)
    return found + [f"snapkv + {each} @ tokens=64" for each in found]


def tables(texts: list[str]) -> Iterator[str]:
    for text in texts:
        try:
            yield Plan.parse(text).to_toml()
        except PlanError:
            continue


def mutated(text: str, draw: random.Random) -> str:
    for _ in range(draw.choice([1, 1, 1, 2, 3, 6])):
        at, end = sorted((draw.randrange(len(text) + 1), min(len(text), draw.randrange(len(text) + 1))))
        near, how = min(end, at + draw.choice([0, 1, 1, 3, 10])), draw.random()
        if how < 0.5:
            text = text[:at] + draw.choice(PIECES) + text[near:]
        elif how < 0.7:
            text = text[:at] + text[near:]
        elif how < 0.85:
            text = text[:at] + text[at : at + 20] + text[at:]
        else:
            text = text[:at] + chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x3000)])) + text[near:]
    return text


def fuzz(count: int, state: int) -> tuple[int, float]:
    """Plans that were read, and the longest time that one text took."""
    draw, texts = random.Random(state), lines()
    toml, read, slowest = list(tables(texts)), 0, 0.0
    for _ in range(count):
        of_toml = draw.random() < 0.35
        if draw.random() < 0.8:
            text = mutated(draw.choice(toml if of_toml else texts), draw)
        else:
            text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 25)))
        begin = time.perf_counter()
        try:
            plan = Plan.from_toml(text) if of_toml else Plan.parse(text)
        except PlanError as error:
            assert error.faults and len(str(error)) < 50_000, text
        else:
            read += 1
            assert Plan.parse(str(plan)).hash == plan.hash == Plan.from_toml(plan.to_toml()).hash, text
        slowest = max(slowest, time.perf_counter() - begin)
    return read, slowest


def test_some_mutated_plans() -> None:
    read, slowest = fuzz(3_000, state=1)
    assert read > 25 and slowest < 2


@pytest.mark.long
def test_many_mutated_plans() -> None:
    read, slowest = fuzz(10_000, state=2)
    assert read > 150 and slowest < 2


def wide(name: str, count: int) -> str:
    return f"critical({name}=[{','.join(f'a{i}' for i in range(count))}])"


LONG = {
    "300 deep": ("hadamard(of=" * 300 + "fp8" + ")" * 300, "brackets are 300 deep, and those of a plan at most 32"),
    "5,000 digits": ("snapkv @ tokens=" + "9" * 5000, "tokens is a number of 5000 digits, 999999999999..."),
    "1 MB of brackets": ("[" * 1_000_000, f"it has 1000000 characters, and a plan has at most {MOST_CHARACTERS}"),
    "brackets": ("snapkv(" + "[" * 150_000, "brackets are 150001 deep"),
    "methods": ("a+" * 90_000, "90001 methods are named"),
    "settings": (
        "snapkv(" + ",".join(f"a{i}=1" for i in range(20_000)) + ")",
        "in snapkv\\(...\\) stand 20000 settings",
    ),
    "at": ("@" * 100_000, "more than one '@'"),
    "name": ("a" * 150_000, "150000 characters"),
    "no text": ("snapkv\udcff @ tokens=3", "it holds bytes that are no text"),
    "half a pair": ('disk(folder="\\ud800")', "folder is .*no value|a string that does not end|no text"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_much_is_a_sentence_at_once(name: str) -> None:
    text, message = LONG[name]
    begin = time.perf_counter()
    with pytest.raises(PlanError, match=message) as caught:
        Plan.parse(text)
    assert time.perf_counter() - begin < 5 and len(str(caught.value)) < 50_000 and caught.value.faults
    with pytest.raises(PlanError):
        Plan.from_toml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens=" + "9" * 5000, "a number of thousands of digits"),
        ("tokens=" + "9" * 50, "a number in it is above 1e\\+40"),
        ("a" + ".b" * 5000 + "=1", "its tables are more than 32 deep"),
        ("score=" + "[" * 5000, "brackets are 5000 deep"),
        ("preset=5", "no preset named '5'"),
        ("preset=[[1]]", "no preset named"),
        ("score=1979-05-27", "score is datetime"),
        ("\n".join(f"a{i}=1" for i in range(300)), "has 300 keys"),
    ],
)
def test_toml_that_is_no_plan_is_a_sentence(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_toml(text)


def test_what_a_large_model_takes_is_not_too_much() -> None:
    """One weight for each head of 128 layers of 128 heads."""
    rows = ", ".join("[" + ", ".join(["0.12345"] * 128) + "]" for _ in range(128))
    plan = Plan.parse(f"snapkv + table(weights=[{rows}]) @ tokens=64")
    assert Plan.from_toml(plan.to_toml()).hash == plan.hash == Plan.parse(str(plan)).hash


def test_a_size_is_exact() -> None:
    assert bytes_of("9007199254740993") == 9007199254740993 and bytes_of("0.5KiB") == 512
    for text in ("9" * 5000, "0.3", "1e3"):
        with pytest.raises(ValueError, match="not a whole number of bytes"):
            bytes_of(text)
    assert issubclass(PlanError, KvtailorError)
