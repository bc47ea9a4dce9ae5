"""The grammar of the one-line form, without any method."""

from __future__ import annotations

import math
import tomllib

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvtailor.plan.grammar import Word, bytes_of, read_line, toml_value, write_bytes, write_settings, write_value

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.builds(Word, name=NAMES, arguments=st.dictionaries(NAMES, inner, min_size=1, max_size=3))
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal, and of equal types all the way down."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Word) and isinstance(b, Word):
        return a.name == b.name and same(tuple(a.arguments.items()), tuple(b.arguments.items()))
    return type(a) is type(b) and a == b


# Values within values take long to draw on a busy machine.
@how(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_values_round_trip_with_their_types(settings: dict[str, object]) -> None:
    faults: list[str] = []
    line = read_line(f"a({write_settings(settings)}) + b @ {write_settings(settings) or 'c=1'}", faults)
    assert not faults
    assert [word.name for word in line.words] == ["a", "b"]
    assert all(same(line.words[0].arguments[key], value) for key, value in settings.items())
    assert not settings or all(same(line.settings[key], value) for key, value in settings.items())


@given(st.recursive(SCALARS.filter(lambda x: x is not None), lambda inner: st.lists(inner, max_size=3), max_leaves=8))
@example("\x7f\x00\u2028\U0001f600")
def test_toml_values_round_trip(value: object) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


@given(st.text(alphabet="ab(=)[],+@\"' .-1\\e", max_size=30) | st.text(max_size=20))
def test_no_text_ever_raises(text: str) -> None:
    faults: list[str] = []
    line = read_line(text, faults)
    assert faults or line.words


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("+7", 7),
        ("1_000", 1000),
        ("TRUE", True),
        ("None", None),
        ("inf", math.inf),
        ("max", "max"),
        ("a-b.c", "a-b.c"),
        ("'it is'", "it is"),
        (r'"a\"b"', 'a"b'),
        ("64MiB", "64MiB"),
        ("[1, [2, 3],]", (1, (2, 3))),
        ("(1, 2)", (1, 2)),
        ("[]", ()),
        ("b(y=1)", Word(name="b", arguments={"y": 1})),
        ("b()", Word(name="b", arguments={})),
        ("[b ( y = [c(z=d)] ), 2]", (Word(name="b", arguments={"y": (Word(name="c", arguments={"z": "d"}),)}), 2)),
        ('"b(y=1)"', "b(y=1)"),
        ('"true"', "true"),
        ('"a, b + c @ d)"', "a, b + c @ d)"),
    ],
)
def test_values(text: str, value: object) -> None:
    faults: list[str] = []
    line = read_line(f"m(x={text}) + n @ y=1", faults)
    assert not faults
    assert line.words == (Word(name="m", arguments={"x": value}), Word(name="n", arguments={}))
    assert same(line.words[0].arguments["x"], value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no method is named"),
        ("a + ", "a '+' has nothing on one side"),
        ("a + + b", "a '+' has nothing on one side"),
        ("a @", "nothing stands behind the '@'"),
        ("a @ x=1 @ y=2", "more than one '@'"),
        ("9lives", "does not begin with a name"),
        ("a(1)", "in a(...) stands '1', which has no name: write name=value"),
        ("a(x=1, x=2)", "in a(...) x is given twice"),
        ("a(x=)", "in a(...) x is empty"),
        ("a(x='b)", "not a name with arguments"),
        ('a(x="b", y=c"d")', "no value"),
        ("a(x=[1, 2)", "not a name with arguments"),
        ("a(x=1)(y=2)", "not a name with arguments"),
        ("a b", "not a name with arguments"),
        ("a(x=__import__('os'))", "in __import__(...) stands \"'os'\", which has no name: write name=value"),
        ("a(x=b(1, y=[2, c(z=)]))", "in b(...) stands '1', which has no name"),
        ("a(x=b(1, y=[2, c(z=)]))", "in c(...) z is empty"),
        ("a(x=b(y=1)z)", "which is no value"),
        ("a(x=-b(y=1))", "which is no value"),
        ("a @ 3", "behind the '@' stands '3'"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    faults: list[str] = []
    read_line(text, faults)
    assert any(fault in sentence for sentence in faults), faults


def test_reading_goes_on_behind_a_fault() -> None:
    faults: list[str] = []
    line = read_line("a(1, x=2) + 9 + b(y=) + c(z=3) @ w=!, v=4", faults)
    assert len(faults) == 4
    assert line.words == (
        Word(name="a", arguments={"x": 2}),
        Word(name="b", arguments={}),
        Word(name="c", arguments={"z": 3}),
    )
    assert line.settings == {"v": 4}


@given(st.integers(0, 2**50))
def test_sizes_round_trip(count: int) -> None:
    assert bytes_of(write_bytes(count)) == count


@pytest.mark.parametrize("text", ["", "x", "1.5", "-3", "3T", "0.3KiB", "1e3", "MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        bytes_of(text)


def test_bare_words_are_only_written_where_they_read_back() -> None:
    assert [write_value(text) for text in ("max", "true", "None", "1x", "a b", "")] == [
        "max",
        '"true"',
        '"None"',
        '"1x"',
        '"a b"',
        '""',
    ]
