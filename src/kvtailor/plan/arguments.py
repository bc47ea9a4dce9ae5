"""The arguments of a method, from the values of a text to the types of its annotations, and back.

A field annotated with a contract takes a method of that contract's stage. A text names it as it names any method, so a
bare word or a word with arguments becomes a method there, and stays what it is everywhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence

from kvtailor.errors import KvtailorError, PlanError, suggest
from kvtailor.method import Method
from kvtailor.plan import registry
from kvtailor.plan.grammar import Word, as_word, read_line

__all__ = [
    "Broken",
    "defaults_of",
    "explanations",
    "fit",
    "given_of",
    "identity_of",
    "load",
    "make",
    "nested",
    "samples_of",
    "spell",
    "type_faults",
    "with_nested",
    "word_of",
]


class Broken:
    """Stands for a part of which only the faults are known, so that no further fault is reported for it.

    Attributes:
        named: a text names a method here; else there is an unknown word that may or may not belong here.
    """

    def __init__(self, *, named: bool = True):
        self.named = named


def load(stage: str, name: str, arguments: Mapping[str, object], faults: list[str]) -> object:
    """The method of a stage by name, or `Broken` and the reasons added to `faults`."""
    try:
        return make(name, registry.load(stage, name), arguments, faults)
    except KvtailorError as error:
        faults.append(str(error))
        return Broken()


def make(name: str, kind: type[Method], arguments: Mapping[str, object], faults: list[str]) -> object:
    """A method with its arguments, or `Broken` and the reasons added to `faults`."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known, defaults = [f.name for f in fields if f.init], defaults_of(kind)
    hints = _hints(kind)  # type: ignore[arg-type]
    unknown = [
        f"{name} has no argument {key!r}{suggest(key, known) or '; it takes none'}"
        for key in arguments
        if key not in known
    ]
    inside: list[str] = []
    given = {
        key: _methods_in(value, hints[key], f"{name}: {key}", inside)
        for key, value in arguments.items()
        if key in known
    }
    whole = {key: value for key, value in given.items() if not _is_broken(value)}
    unfit = _unfit(name, kind, whole)
    lacking = [key for key in known if key not in defaults and key not in given]
    if lacking:
        bare = f"{name}({', '.join(f'{key}=...' for key in lacking)})"
        unfit.append(
            f"{name} needs {', '.join(lacking)}: write {f'for example {kind.examples[0]}' if kind.examples else bare}"
        )
    made: object = Broken()
    if not unfit and len(whole) == len(given):
        try:
            made = kind(**_fitted(kind, given))
        except (ValueError, TypeError) as error:
            unfit.append(str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}")
    faults += unknown + inside + unfit
    return Broken() if unknown else made


def samples_of(kind: type[Method]) -> list[Method]:
    """Some methods of a class: its examples, or where it has none the one with its defaults.

    Raises:
        PlanError: an example has faults.
    """
    faults: list[str] = []
    words = [word for text in kind.examples for word in read_line(text, faults).words]
    made = [make(word.name, kind, word.arguments, faults) for word in words]
    if faults:
        raise PlanError(", ".join(kind.examples), faults)
    return [each for each in made if isinstance(each, Method)] or [kind()]


def fit(value: object, hint: object) -> object:
    """The value in the type of the annotation: an int may stand for a float, a list for a tuple.

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


def explanations(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of each attribute under `Attributes:`, on one line."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        _, _, listed = inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("\nAttributes:\n")
        names: list[str] = []
        for line in listed.split("\n"):
            if line and not line.startswith("    "):
                break
            head = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
            if head is not None:
                names = head[1].split(", ")
                found |= dict.fromkeys(names, head[2])
            else:
                found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def given_of(method: object, *, everything: bool = False) -> dict[str, object]:
    """The arguments of a method that differ from its defaults (or all of them), in the types of its annotations."""
    kind, values = type(method), _values(method)
    defaults = {} if everything else defaults_of(kind)
    return _fitted(kind, {k: v for k, v in values.items() if k not in defaults or v != defaults[k]})


def word_of(method: object, *, everything: bool = False) -> Word:
    """The word of a text that names this method, and the methods among its arguments."""
    given = given_of(method, everything=everything)
    return Word(
        name=registry.name_of(method), arguments={key: _worded(value, everything) for key, value in given.items()}
    )


def identity_of(method: object) -> object:
    """What a hash is over: name, all arguments, methods among them likewise, and the hash of the files it read."""
    if isinstance(method, tuple | list):
        return [identity_of(each) for each in method]
    if not isinstance(method, Method):
        return method
    arguments = {key: identity_of(value) for key, value in given_of(method, everything=True).items()}
    content = method.content_hash
    return [registry.name_of(method), arguments, *([content] if content is not None else [])]


def with_nested(method: object) -> Iterator[Method]:
    """The method, and after it every method among its arguments and theirs."""
    for each in _methods_of(method):
        yield each
        for inside in nested(each):
            yield from with_nested(inside)


def nested(method: Method) -> list[Method]:
    """The methods among a method's own arguments, in their order."""
    return [each for value in _values(method).values() for each in _methods_of(value)]


def _methods_of(value: object) -> Iterator[Method]:
    """An argument itself, or what a list in it has, where these are methods."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _methods_of(each)
    elif isinstance(value, Method):
        yield value


def type_faults(method: object) -> list[str]:
    """What does not fit its annotation in a method that Python made, or in the methods among its arguments."""
    faults = []
    for each in with_nested(method):
        faults += _unfit(registry.name_of(each), type(each), _values(each))
    return faults


def _values(method: object) -> dict[str, object]:
    return {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}  # type: ignore[arg-type]


@functools.cache
def _hints(kind: type) -> Mapping[str, object]:
    """Return the annotations, evaluated once: they are strings, and evaluating them took most of the time of making a
    plan.
    """
    return types.MappingProxyType(typing.get_type_hints(kind))


def _worded(value: object, everything: bool) -> object:
    if isinstance(value, tuple | list):
        return tuple(_worded(each, everything) for each in value)
    return word_of(value, everything=everything) if isinstance(value, Method) else value


def _methods_in(value: object, hint: object, where: str, faults: list[str]) -> object:
    """The value with its words made into methods, if the annotation is that of a method."""
    stages = _stages_in(hint)
    if stages and isinstance(value, tuple | list):
        return tuple(_methods_in(each, hint, where, faults) for each in value)
    if not stages or not isinstance(value, str | Word) or (isinstance(value, str) and _fits(value, hint)):
        return value
    word = Word(name=value, arguments={}) if isinstance(value, str) else value
    if not any(word.name in registry.methods(each) for each in registry.stages()) and word.name in registry.presets():
        inside = _in_preset(word, stages, where, faults)
        if inside is None:
            return Broken()
        word = inside
    stage = next((each for each in stages if word.name in registry.methods(each)), stages[0])
    homes = [each for each in registry.stages() if word.name in registry.methods(each)]
    if homes and stage not in homes:
        wanted = f"{spell(registry.contract(stage))}, one of {', '.join(registry.methods(stage))}"
        faults.append(f"{where} is {word.name}, a method of {homes[0]}, but it must be {wanted}")
        return Broken()
    return load(stage, word.name, word.arguments, faults)


def _in_preset(word: Word, stages: Sequence[str], where: str, faults: list[str]) -> Word | None:
    """The method that a preset inside an argument stands for; None: it is no one method of these stages."""
    table = registry.presets()[word.name].plan
    parts = {key: as_word({"method": each} if isinstance(each, str) else each) for key, each in table.items()}
    brought = ", ".join(f"{key} {each}" for key, each in parts.items())
    if len(parts) != 1 or not parts.keys() <= set(stages):
        faults.append(
            f"{where} is the preset {word.name}, which brings {brought or 'nothing'}, but it must be one method of "
            f"{' or '.join(stages)}: write that, or the preset beside it"
        )
        return None
    found: Word = next(iter(parts.values()))
    if word.arguments:
        faults.append(f"{where} is the preset {word}, and a preset takes no arguments here: write {found} with yours")
        return None
    return found


def _stages_in(hint: object) -> list[str]:
    """The stages whose contracts an annotation names."""
    own = [stage for stage in registry.stages() if registry.contract(stage) is hint]
    return own + [stage for each in typing.get_args(hint) for stage in _stages_in(each)]


def _is_broken(value: object) -> bool:
    return any(map(_is_broken, value)) if isinstance(value, tuple) else isinstance(value, Broken)


def _fitted(kind: type, values: Mapping[str, object]) -> dict[str, object]:
    """The values in the types of the annotations; what does not fit stays as it is."""
    hints, found = _hints(kind), dict(values)
    for key, value in values.items():
        with contextlib.suppress(TypeError):
            found[key] = fit(value, hints.get(key, object))
    return found


def _fits(value: object, hint: object) -> bool:
    try:
        fit(value, hint)
    except TypeError:
        return False
    return True


def _unfit(name: str, kind: type, values: Mapping[str, object]) -> list[str]:
    hints, defaults, faults = _hints(kind), defaults_of(kind), []
    for key, value in values.items():
        if not _fits(value, hints.get(key, object)):
            usual = f"; the default is {_said(defaults[key])}" if key in defaults else ""
            faults.append(f"{name}: {key} is {_said(value)}, but it must be {spell(hints[key])}{usual}")
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


def _said(value: object) -> str:
    """A value as a fault shows it."""
    if isinstance(value, Method):
        return str(word_of(value))
    return str(value) if isinstance(value, Word) else repr(value)


def spell(hint: object) -> str:
    """An annotation in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(each) for each in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(each) for each in inner)
    if hint is types.NoneType or hint is None:
        return "none"
    stages = [stage for stage in registry.stages() if registry.contract(stage) is hint]
    if stages:
        return f"a method of {stages[0]}"
    if origin is tuple and _stages_in(hint):
        return f"a list of methods of {_stages_in(hint)[0]}, in [ ]"
    return hint.__name__ if isinstance(hint, type) and not inner else str(hint)
