"""What can be wrong with a plan: arguments that do not fit, and parts that do not go together."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence

import torch

from kvtailor import find
from kvtailor.errors import KvtailorError, suggest

__all__ = [
    "BUDGETS",
    "SETTINGS",
    "Broken",
    "all_faults",
    "defaults_of",
    "fit",
    "given_of",
    "load",
    "make",
    "wrong_kinds",
]

BUDGETS = ("tokens", "keep", "bytes")
SETTINGS = (*BUDGETS, "slack")


class Broken:
    """Stands for a part of which only the faults are known, so that nothing more is said about it.

    Attributes:
        named: a text names a method here; else there is an unknown word that may or may not belong here.
    """

    def __init__(self, *, named: bool = True):
        self.named = named


def make(name: str, kind: type, arguments: Mapping[str, object], faults: list[str]) -> object:
    """A method with its arguments, or `Broken` and the reasons added to `faults`."""
    known, defaults = [f.name for f in dataclasses.fields(kind) if f.init], defaults_of(kind)
    given = {key: value for key, value in arguments.items() if key in known}
    unknown = [
        f"{name} has no argument {key!r}{suggest(key, known) or '; it takes none'}"
        for key in arguments
        if key not in known
    ]
    unfit = _type_faults(name, kind, given)
    lacking = [key for key in known if key not in defaults and key not in given]
    if lacking:
        unfit.append(f"{name} needs {', '.join(lacking)}: write {name}({', '.join(f'{key}=...' for key in lacking)})")
    made: object = Broken()
    if not unfit:
        try:
            made = kind(**_fitted(kind, given))
        except (ValueError, TypeError) as error:
            unfit.append(str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}")
    faults += unknown + unfit
    return Broken() if unknown else made


def fit(value: object, hint: object) -> object:
    """The value as the annotation wants it: an int may stand for a float, a list for a tuple.

    Raises:
        TypeError: it does not fit.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, inner)
    if origin is typing.Literal:
        if any(value == each and type(value) is type(each) for each in inner):
            return value
    elif origin is tuple or hint is tuple or origin in (list, Sequence):
        if isinstance(value, tuple | list):
            return _fit_tuple(tuple(value), inner if origin is tuple else (*inner, ...))
    elif hint is float:
        if isinstance(value, float | int) and not isinstance(value, bool):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is None or hint is types.NoneType:
        if value is None:
            return value
    elif not isinstance(hint, type) or isinstance(value, hint):
        return value
    raise TypeError


def defaults_of(kind: type) -> dict[str, object]:
    """The arguments that a dataclass has defaults for, and the defaults."""
    found: dict[str, object] = {}
    for f in dataclasses.fields(kind):
        if f.init and f.default is not dataclasses.MISSING:
            found[f.name] = f.default
        elif f.init and f.default_factory is not dataclasses.MISSING:
            found[f.name] = f.default_factory()
    return found


def given_of(method: object, *, everything: bool = False) -> dict[str, object]:
    """The arguments of a method that differ from its defaults (or all of them), typed as its annotations say."""
    kind, values = type(method), _values(method)
    defaults = {} if everything else defaults_of(kind)
    return _fitted(kind, {k: v for k, v in values.items() if k not in defaults or v != defaults[k]})


def all_faults(parts: Mapping[str, object], settings: Mapping[str, object]) -> list[str]:
    """Every fault of parts that do not go together, of budgets and of slack.

    Args:
        parts: a method, None or `Broken` for each room.
        settings: the given ones among `SETTINGS`.
    """
    score = parts["score"]
    recents = score.recents if isinstance(score, find.Scorer) else 0
    evicts = score.named or None if isinstance(score, Broken) else score is not None
    attend = parts["attend"]
    splits = isinstance(attend, find.Attention) and attend.held_tokens(torch.ones(1, dtype=torch.int64)) is not None
    return _parts_faults(parts) + _settings_faults(settings, evicts, recents, splits)


def _settings_faults(settings: Mapping[str, object], evicts: bool | None, recents: int, splits: bool) -> list[str]:
    """`evicts`: whether a scorer is there, None where nobody can say; `splits`: the attention brings a budget."""
    faults = []
    tokens, keep, size, slack = (settings.get(name) for name in SETTINGS)
    if tokens is not None and not (_whole(tokens) and tokens >= 1):
        faults.append(f"tokens is {tokens!r}: give a whole number of tokens from 1 up, per kv head on average")
    elif _whole(tokens) and tokens < recents:
        faults.append(
            f"tokens={tokens} is below the window: the scorer always keeps the newest {recents} tokens; ask for at "
            f"least tokens={recents}, or for a smaller window"
        )
    if keep is not None and not (isinstance(keep, float | int) and not isinstance(keep, bool) and 0 < keep <= 1):
        faults.append(f"keep is {keep!r}: give the fraction of tokens to keep, above 0 and at most 1")
    if size is not None and not (_whole(size) and size >= 1):
        faults.append(f"bytes is {size!r}: give a whole number of bytes from 1 up, or text such as 64MiB")
    if slack is not None and slack != "never" and not (_whole(slack) and slack >= 0):
        faults.append(f"slack is {slack!r}: give a whole number of tokens from 0 up, or never")
    asked = [name for name in BUDGETS if settings.get(name) is not None]
    if len(asked) > 1:
        faults.append(f"there are {len(asked)} budgets, {' and '.join(asked)}: keep one")
    if evicts and not asked and not splits:
        faults.append("a scorer needs a budget, and there is none: add tokens=1024, keep=0.25 or bytes=64MiB")
    if evicts is False and asked:
        faults.append(
            f"there is a budget ({', '.join(asked)}) but no scorer, so nothing would be evicted: add a scorer such as "
            "snapkv, or leave the budget out"
        )
    if evicts is False and slack is not None:
        faults.append("there is slack but no scorer, so nothing would be evicted: add a scorer, or leave slack out")
    return faults


def _parts_faults(parts: Mapping[str, object]) -> list[str]:
    faults = []
    score, encode, attend = parts["score"], parts["encode"], parts["attend"]
    if score is None:
        for room in ("allocate", "select"):
            if not isinstance(parts[room], Broken) and find.name_of(parts[room]) != find.null(room):
                faults.append(
                    f"{find.name_of(parts[room])} works on scores, but there is no scorer, so nothing would be "
                    "evicted: add a scorer such as snapkv, or leave it out"
                )
    if isinstance(attend, find.Attention):
        name, wanted = find.name_of(attend), attend.needs_codec
        if wanted is not None and isinstance(encode, find.Codec) and find.name_of(encode) != wanted:
            faults.append(
                f"{name} reads what the codec {wanted!r} stores, but the codec is {find.name_of(encode)!r}: "
                f"name {wanted} as the codec, or another attention"
            )
        if isinstance(score, find.Scorer) and score.needs.mass and not attend.gives_mass:
            faults.append(
                f"{find.name_of(score)} needs the attention mass of every held token, which {name} does not give: "
                f"leave {name} out, or take a scorer without mass such as snapkv"
            )
    return faults


def wrong_kinds(parts: Mapping[str, object]) -> list[str]:
    """Faults of a plan written in Python: rooms that hold no method of theirs, arguments of a wrong type."""
    faults: list[str] = []
    for room, part in parts.items():
        wanted = find.contract(room)
        if not isinstance(part, wanted) and not (part is None and find.null(room) is None):
            faults.append(
                f"{room} is {part!r}, a {type(part).__name__}: give a {wanted.__name__}, or write the plan as text "
                "for Plan.parse"
            )
        elif part is not None:
            faults += _type_faults(find.name_of(part), type(part), _values(part))
    return faults


def load(room: str, name: str, arguments: Mapping[str, object], faults: list[str]) -> object:
    """The method of a room by name, or `Broken` and the reasons added to `faults`."""
    try:
        return make(name, find.load(room, name), arguments, faults)
    except KvtailorError as error:
        faults.append(str(error))
        return Broken()


def _whole(value: object) -> typing.TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _values(method: object) -> dict[str, object]:
    return {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}  # type: ignore[arg-type]


def _fitted(kind: type, values: Mapping[str, object]) -> dict[str, object]:
    """The values as the annotations want them; what does not fit stays as it is."""
    hints, found = typing.get_type_hints(kind), dict(values)
    for key, value in values.items():
        with contextlib.suppress(TypeError):
            found[key] = fit(value, hints.get(key, object))
    return found


def _type_faults(name: str, kind: type, values: Mapping[str, object]) -> list[str]:
    hints, defaults, faults = typing.get_type_hints(kind), defaults_of(kind), []
    for key, value in values.items():
        try:
            fit(value, hints.get(key, object))
        except TypeError:
            usual = f"; the default is {defaults[key]!r}" if key in defaults else ""
            faults.append(f"{name}: {key} is {value!r}, but it must be {_spell(hints[key])}{usual}")
    return faults


def _fit_union(value: object, hints: tuple[object, ...]) -> object:
    fits = []
    for hint in hints:
        try:
            fits.append(fit(value, hint))
        except TypeError:
            continue
    if not fits:
        raise TypeError
    return next((each for each in fits if type(each) is type(value)), fits[0])


def _fit_tuple(values: tuple[object, ...], hints: tuple[object, ...]) -> object:
    if not hints or hints == (...,):
        return values
    if hints[-1] is ...:
        return tuple(fit(value, hints[0]) for value in values)
    if len(values) != len(hints):
        raise TypeError
    return tuple(fit(value, hint) for value, hint in zip(values, hints, strict=True))


def _spell(hint: object) -> str:
    """An annotation in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(each) for each in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(each) for each in inner)
    if hint is types.NoneType or hint is None:
        return "none"
    return hint.__name__ if isinstance(hint, type) and not inner else str(hint)
