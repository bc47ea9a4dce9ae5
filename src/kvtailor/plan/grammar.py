"""The one-line form of a plan: a grammar of words, settings and values, read without `eval`.

    line      = words [ "@" settings ]
    words     = word { "+" word }
    word      = name [ "(" settings ")" ]
    settings  = name "=" value { "," name "=" value }
    value     = integer | float | string | bare word | true | false | none | "[" [ value { "," value } ] "]"
              | name "(" [ settings ] ")"

A string stands in double or single quotes; a bare word is a string without them (`pooling=max`), and one with settings
is a word again (`of=pyramid(beta=10)`). `( )` may stand for `[ ]`; both give a tuple. Nothing here depends on which
methods exist, nor which strings name one. Readers never stop at the first mistake: each is a sentence added to
`faults`, and reading goes on behind it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtailor.errors import shown
from kvtailor.ops.sizes import bytes_of, write_bytes

__all__ = [
    "MOST_CHARACTERS",
    "MOST_DEEP",
    "Line",
    "Value",
    "Word",
    "as_word",
    "bytes_of",
    "read_line",
    "too_much",
    "toml_value",
    "write_bytes",
    "write_settings",
    "write_value",
]

MOST_CHARACTERS = 200_000
"""Of the text of a plan: what a table of weights for each head of a large model takes, many times over."""
MOST_DEEP = 32
"""Brackets inside one another."""
_MOST_DIGITS = 40
_MOST_PIECES = 256

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*%?")
_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?")
_KEYWORDS: dict[str, bool | float | None] = {
    "true": True,
    "false": False,
    "none": None,
    "inf": math.inf,
    "+inf": math.inf,
    "-inf": -math.inf,
}
_CLOSING = {"(": ")", "[": "]"}
_OPENING = _CLOSING | {"{": "}"}


@dataclass(frozen=True, kw_only=True)
class Word:
    """One `name(settings)` of a line, or of an argument in it."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name + (f"({write_settings(self.arguments)})" if self.arguments else "")


def as_word(value: Any) -> Any:
    """Return a TOML value as a line would give it: a table with `method` is a word."""
    if isinstance(value, list):
        return tuple(as_word(each) for each in value)
    if isinstance(value, Mapping) and isinstance(value.get("method"), str):
        given = {key: as_word(each) for key, each in value.items() if key != "method"}
        return Word(name=value["method"], arguments=given)
    return None if value == "none" else value


Value = int | float | str | bool | Word | None | tuple["Value", ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line as it was read: its words in their order, and what stood behind the `@`."""

    words: tuple[Word, ...]
    settings: Mapping[str, Value]


class _Unreadable(Exception):
    """A value that the grammar does not have."""


def read_line(text: str, faults: list[str]) -> Line:
    """Read `snapkv(window=32) + kivi(bits=4) @ tokens=1024, slack=64`; mistakes go to `faults`.

    What is too long or too deep to be a plan is one fault, and nothing of it is read.
    """
    if (why := too_much(text)) is not None:
        faults.append(why)
        return Line(words=(), settings={})
    head, *tails = _split(text, "@")
    if len(tails) > 1:
        faults.append("there is more than one '@': write the settings once, behind the last method")
    words = []
    pieces = _split(head, "+")
    if len(pieces) > _MOST_PIECES:
        faults.append(f"{len(pieces)} methods are named: a plan has at most one for each stage")
        return Line(words=(), settings={})
    for piece in pieces:
        if piece.strip():
            word = _read_word(piece.strip(), faults)
            words += [word] if word is not None else []
        elif len(pieces) > 1:
            faults.append("a '+' has nothing on one side: put a method on both sides, or leave it out")
    if len(pieces) == 1 and not head.strip():
        faults.append("no method is named: write at least one, for example 'full'")
    settings: dict[str, Value] = {}
    for tail in tails:
        if not tail.strip():
            faults.append("nothing stands behind the '@': write settings like tokens=1024, or leave the '@' out")
        settings |= _read_settings(tail, "behind the '@'", faults)
    return Line(words=tuple(words), settings=settings)


def too_much(text: str) -> str | None:
    """Why a text cannot be a plan, whatever its words: its length, bytes, how deep brackets go; None: it can."""
    if len(text) > MOST_CHARACTERS:
        return f"it has {len(text)} characters, and a plan has at most {MOST_CHARACTERS}"
    if not _is_unicode(text):
        return "it holds bytes that are no text"
    depth = deepest = 0
    for _, mark in _marks(text):
        depth = max(0, depth + (mark in _OPENING) - (mark in _OPENING.values()))
        deepest = max(deepest, depth)
    if deepest > MOST_DEEP:
        return f"its brackets are {deepest} deep, and those of a plan at most {MOST_DEEP}"
    return None


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which stands for bytes that could not be decoded."""
    return not any("\ud800" <= mark <= "\udfff" for mark in text)


def write_value(value: object) -> str:
    """A value as `read_line` reads it back, and the same type; but a word without arguments is its bare name."""
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str) and _BARE.fullmatch(value) and not value[0].isdigit() and value.lower() not in _KEYWORDS:
        return value
    if isinstance(value, tuple | list):
        return "[" + ", ".join(write_value(each) for each in value) + "]"
    return "none" if value is None else toml_value(value)


def toml_value(value: object) -> str:
    """A value as TOML; TOML has no null, so None is the string "none". A word is its name, or a table with `method`."""
    if isinstance(value, Word) and value.arguments:
        inside = ", ".join(f"{key} = {toml_value(each)}" for key, each in value.arguments.items())
        return f'{{ method = "{value.name}", {inside} }}'
    if isinstance(value, Word):
        return f'"{value.name}"'
    if isinstance(value, str) or value is None:
        # TOML refuses a raw DEL, which JSON allows; all else of a JSON string is TOML.
        return json.dumps("none" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_settings(settings: Mapping[str, object]) -> str:
    """`name=value, name=value` in the order given."""
    return ", ".join(f"{name}={write_value(value)}" for name, value in settings.items())


def _read_word(text: str, faults: list[str]) -> Word | None:
    hit = _NAME.match(text)
    if hit is None:
        faults.append(f"{shown(text)} does not begin with a name: write a method such as snapkv(window=32)")
        return None
    name, rest = hit.group(), text[hit.end() :].strip()
    if not rest:
        return Word(name=name, arguments={})
    if rest[0] == "(" and _balanced(rest):
        return Word(name=name, arguments=_read_settings(rest[1:-1], f"in {name}(...)", faults))
    faults.append(f"{shown(text)} is not a name with arguments: write {name}, or {name}(name=value, ...)")
    return Word(name=name, arguments={})


def _read_settings(text: str, where: str, faults: list[str]) -> dict[str, Value]:
    read: dict[str, Value] = {}
    pieces = [piece.strip() for piece in _split(text, ",")] if text.strip() else []
    if len(pieces) > _MOST_PIECES:
        faults.append(f"{where} stand {len(pieces)} settings, which no method has")
        return read
    for piece in pieces:
        name, equals, value = piece.partition("=")
        name = name.strip()
        if not equals or not _NAME.fullmatch(name):
            faults.append(f"{where} stands {shown(piece)}, which has no name: write name=value")
        elif name in read:
            faults.append(f"{where} {name} is given twice: keep one")
        else:
            try:
                read[name] = _read_value(value.strip(), faults)
            except _Unreadable as error:
                faults.append(
                    f'{where} {name} is {error}: write a number, a word, "a string", true, false, none or [..]'
                )
    return read


def _read_value(text: str, faults: list[str]) -> Value:
    if text.lower() in _KEYWORDS:
        return _KEYWORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise _Unreadable(f"a number of {len(text)} digits, {text[:12]}...")
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _BARE.fullmatch(text):
        return text
    if text[:1] in ("'", '"'):
        return _read_string(text)
    if text[:1] in _CLOSING and text.endswith(_CLOSING[text[0]]):
        pieces = [piece.strip() for piece in _split(text[1:-1], ",")]
        if pieces[-1] == "":
            pieces.pop()
        return tuple(_read_value(piece, faults) for piece in pieces)
    hit = _NAME.match(text)
    if hit is not None and text[hit.end() :].lstrip()[:1] == "(" and _balanced(text[hit.end() :].lstrip()):
        return _read_word(text, faults)
    raise _Unreadable("empty" if not text else f"{shown(text)}, which is no value")


def _read_string(text: str) -> str:
    try:
        if text[0] == '"':
            read = str(json.loads(text))
            if _is_unicode(read):
                return read
        if len(text) > 1 and text.endswith("'") and "'" not in text[1:-1]:
            return text[1:-1]
    except ValueError:
        pass
    raise _Unreadable(f"{shown(text)}, a string that does not end")


def _balanced(text: str) -> bool:
    """Whether the bracket that opens `text` closes at its very end."""
    depth = 0
    for at, mark in _marks(text):
        depth += (mark in _CLOSING) - (mark in _CLOSING.values())
        if depth == 0:
            return at == len(text) - 1
    return False


def _split(text: str, separators: str) -> list[str]:
    """The pieces between separators that stand outside of brackets and strings."""
    pieces, start, depth = [], 0, 0
    for at, mark in _marks(text):
        if mark in separators and depth == 0:
            pieces.append(text[start:at])
            start = at + 1
        depth = max(0, depth + (mark in _CLOSING) - (mark in _CLOSING.values()))
    return [*pieces, text[start:]]


def _marks(text: str) -> list[tuple[int, str]]:
    """Each character outside of strings with its place. A quote inside of a bare word is an ordinary character."""
    marks, quote, escaped = [], "", False
    for at, mark in enumerate(text):
        if quote:
            if mark == quote and not escaped:
                quote = ""
            escaped = mark == "\\" and quote == '"' and not escaped
        elif mark in "'\"":
            quote = mark
        else:
            marks.append((at, mark))
    return marks
