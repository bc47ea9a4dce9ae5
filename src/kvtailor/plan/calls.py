"""What a function of Python's face is called with, held to its annotations before it does anything."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvtailor.errors import ArgumentError, UnknownName, shown
from kvtailor.plan.arguments import fit, spell

__all__ = ["check_call", "lacked", "told"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
# What an argument that no annotation can tell of must have, by its name, and what it is called.
_MUST_HAVE = {
    "draft": ("a model of transformers", ("config", "forward")),
    "model": ("a model of transformers", ("config", "forward")),
    "streamer": ("a streamer with put and end", ("put", "end")),
    "tokenizer": ("the model's tokenizer", ("__call__",)),
}
_MOST = 2**63
_ORDER = "the model comes first, then what it reads, and a plan is given by name where something is read"


def check_call(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse arguments that a function does not have, or of another kind than it takes, before it begins.

    One decorator for the whole face, so that a new function or argument needs no check of its own. It looks at kinds
    alone: whether a number is too small is for the function to say.
    """
    signature = inspect.signature(function)
    named = inspect.unwrap(function)
    inside = "." in named.__qualname__
    name = named.__qualname__ if inside else f"kvtailor.{named.__name__}"
    taken = [
        each.name for each in signature.parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    open_ended = any(each.kind == each.VAR_KEYWORD for each in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            for each in () if open_ended else kwargs:
                if each not in taken:
                    raise UnknownName(f"argument of {name}", each, taken) from None
            said = str(error)
            raise ArgumentError(
                f"{name}{_in_words(signature, inside)}: {said[:1].lower()}{said[1:]}; "
                f"{'see its arguments' if inside else _ORDER}"
            ) from None
        hints = _hints(named)
        for each, value in given.items():
            hint, parameter = hints.get(each, Any), signature.parameters[each]
            wanted = _wanted(parameter, value, hint)
            if wanted is None:
                continue
            raise ArgumentError(
                f"{name}: {each} must be {wanted}, and is {told(value)}{_as_keywords(each, value)}"
                + ("" if inside else f"; it is {name}{_in_words(signature, inside)}")
            )
        return function(*args, **kwargs)

    return checked


@functools.cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(function))


def _in_words(signature: inspect.Signature, inside: bool) -> str:
    """The arguments that must be given, and the first of the others."""
    parts, by_name = [], False
    for each in list(signature.parameters.values())[inside:]:
        lacks = each.default is each.empty
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or (
            each.kind == each.KEYWORD_ONLY and not (lacks or each.name in ("plan", "cache"))
        ):
            continue
        by_name = by_name or each.kind == each.KEYWORD_ONLY
        parts.append(f"{each.name}=..." if each.kind == each.KEYWORD_ONLY else each.name)
    return f"({', '.join(parts)})"


def lacked(name: str, value: object) -> str | None:
    """Return what an argument of this name must be, one of `_MUST_HAVE`, where the value is none; else None."""
    what, names = _MUST_HAVE[name]
    # A model may be called too, and is no tokenizer.
    like = all(hasattr(value, each) for each in names) and ("forward" in names or not hasattr(value, "forward"))
    return None if like else what


def _wanted(parameter: inspect.Parameter, value: object, hint: Any) -> str | None:
    """What a value must be and is not; None: it may be taken."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    inner = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    if parameter.name in _MUST_HAVE and (hint is Any or Any in inner):
        what = lacked(parameter.name, value)
        kinds = [each for each in inner if each is not Any]
        optional = value is None and parameter.default is None
        if optional or what is None or any(_is_of(value, each) for each in kinds):
            return None
        return " or ".join([*(spell(each) for each in kinds), what])
    if isinstance(value, int) and not -_MOST <= value < _MOST:
        return "a number of at most 64 bits"
    return None if _is_of(value, hint) else spell(hint)


def _is_of(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation; what cannot be told is taken."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in inner)
    if hint is Any or hint is object:
        return True
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if origin is collections.abc.Sequence:
        # Which of its entries is wrong the function says itself.
        return isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)
    if origin is typing.Literal and isinstance(value, str):
        # So does it of a name that is none of its own, with the nearest that are.
        return any(isinstance(each, str) for each in inner)
    if isinstance(origin, type):
        return isinstance(value, origin)
    if getattr(hint, "_is_protocol", False):
        # A protocol asks for names, not for a class.
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    try:
        fit(value, hint)
    except TypeError:
        return False
    return True


def _as_keywords(name: str, value: object) -> str:
    """What to do with a tokenizer's whole answer where one of its tensors is wanted."""
    if isinstance(value, collections.abc.Mapping) and name in value:
        return f": give its [{name!r}], or all of it as **inputs"
    return ""


def told(value: object) -> str:
    """A value as a sentence shows it: short, and never the numbers of a tensor or the layers of a model."""
    if isinstance(value, str):
        return shown(value)
    if value is None or isinstance(value, int | float | Path | list | tuple) and len(repr(value)) <= 60:
        return repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
