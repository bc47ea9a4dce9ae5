"""The kinds of task that there are, and what is wrong with settings and measures that a suite asks of them.

A task's file is found in the folders of `bench.tasks`, and its class is read as a syntax tree and not imported, so that
a suite can be checked, a table read and `kvtailor bench --help` shown before anything heavy is loaded.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from kvtailor.bench import tasks
from kvtailor.bench.tasks import settings as declaring
from kvtailor.bench.tasks.contract import AllAtOnce, Task
from kvtailor.bench.tasks.settings import Metric, Option, Setting, setting_of
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName, suggest

__all__ = [
    "Declared",
    "FIELDS",
    "GENERATED",
    "KINDS",
    "Kind",
    "Metric",
    "SHARES",
    "TEXTS",
    "found_kinds",
    "is_path",
    "measure_faults",
    "metric_of",
    "read_kind",
    "setting_faults",
]

_FORMS = ("PlanByPlan", "AllAtOnce")
_KNOWN = tuple({**Task.__annotations__, **AllAtOnce.__annotations__})
_CLASS = re.compile(r"^class (\w+)\(([^()]*)\):", re.MULTILINE)
_AFTER_CLASS = re.compile(r"^[^\s#)]", re.MULTILINE)
_METHOD = re.compile(r"^    (?:def |async def |@)", re.MULTILINE)
_FIELD = re.compile(r"^    (\w+) *:", re.MULTILINE)
_OPTION_TYPES = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A field of a task that a suite may set.

    Attributes:
        name: of the field.
        default: what is taken where nothing is given; `dataclasses.MISSING` where it must be given.
        setting: what is declared beside it.
        option: its option of the command line; None: there is none.
    """

    name: str
    default: Any
    setting: Setting
    option: Option | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of task, as its file declares it.

    Attributes:
        module: of `bench.tasks`.
        class_name: in it.
        settings: what a suite may set, `text` included.
        needs: those of the settings that must be there.
        sizes: settings that count tokens; their sum (of a list, the largest) must fit into the model's positions.
        extra: tokens that it generates besides, unless `Task.generated` tells other numbers for some settings.
        metrics: names in `Record.metrics`; None: they are known only when it has run.
        declared: its settings but for `text`.
        told: its metrics with what they are.
        reads_text, of_each_text, reads_data, of_cost, own_cache, by_sample, values, timings, sets, set_name, order,
            usual: see `bench.tasks.contract.Task`.
    """

    module: str
    class_name: str
    settings: tuple[str, ...]
    needs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    extra: int = 0
    reads_text: bool = False
    of_each_text: bool = False
    reads_data: bool = False
    of_cost: bool = False
    own_cache: bool = False
    by_sample: bool = False
    metrics: tuple[str, ...] | None = ()
    values: tuple[str, ...] = ()
    timings: tuple[str, ...] = ()
    sets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    set_name: str = ""
    order: int = 100
    usual: bool = False
    declared: tuple[Declared, ...] = ()
    told: tuple[Metric, ...] = ()

    @property
    def asked_as(self) -> tuple[str, ...]:
        """The words by which `--tasks` names it: its sets, or its own name."""
        return tuple(self.sets) or (self.module,)

    def load(self) -> type[Task]:
        """Return the class.

        Raises:
            KvtailorError: it cannot be imported here.
        """
        try:
            module = importlib.import_module(f"{tasks.__name__}.{self.module}")
        except ImportError as error:
            raise KvtailorError(f"The task {self.module!r} cannot be imported: {error}") from error
        return cast(type[Task], getattr(module, self.class_name))

    def default(self, name: str) -> Any:
        """Return the task's own value of a setting where nothing is given; None where it has none."""
        found = next((each.default for each in self.declared if each.name == name), MISSING)
        return None if found is MISSING else found


def found_kinds() -> dict[str, Kind]:
    """Return the kinds of task whose files lie in the folders of `bench.tasks`, in the order that they declare.

    Raises:
        KvtailorError: a declaration cannot be read, or two tasks share an option and declare it differently.
    """
    files = sorted(path for folder in tasks.__path__ for path in Path(folder).glob("*.py"))
    found = {kind.module: kind for path in files if (kind := read_kind(path)) is not None}
    options: dict[str, tuple[str, Option]] = {}
    for name, kind in found.items():
        for option in (each.option for each in kind.declared if each.option is not None):
            other, same = options.setdefault(option.flag, (name, option))
            if same != option:
                raise KvtailorError(
                    f"the tasks {other!r} and {name!r} declare the option {option.flag} differently: name one "
                    "`Option` in bench/tasks/settings.py and refer to it in both"
                )
    return dict(sorted(found.items(), key=lambda each: (each[1].order, each[0])))


def read_kind(path: Path) -> Kind | None:
    """Return the kind of task that a file declares; None for a file without a task.

    Raises:
        KvtailorError: it holds two tasks, or a declaration that is not made of literals and of what
            `bench.tasks.settings` offers; or the task's name is not the file's.
    """
    try:
        return _read(path)
    except (AttributeError, AssertionError, SyntaxError, TypeError, ValueError) as error:
        if isinstance(error, KvtailorError):
            raise
        raise KvtailorError(
            f"the task file {path} cannot be read ({type(error).__name__}: {error}): mend it, or move it out of the "
            "folder"
        ) from error


def _read(path: Path) -> Kind | None:
    text = path.read_text(encoding="utf-8")
    classes = [found for found in _CLASS.finditer(text) if _is_task(found[1], found[2])]
    if not classes:
        return None
    if len(classes) > 1:
        names = " and ".join(found[1] for found in classes)
        raise KvtailorError(f"{path} holds the tasks {names}: one task is one file, give each its own")
    body = _head(text, classes[0], path)
    facts = {name: _value(value, path, name) for name, value in _class_variables(body)}
    if facts.get("name") != path.stem:
        raise KvtailorError(
            f"{path}: the task is named {facts.get('name')!r}, but its file {path.stem!r}: give both one name"
        )
    declared = tuple(_declared(body, path))
    told = facts.get("metrics", ())
    _check_facts(facts, path)
    own = {each.name for each in dataclasses.fields(Kind)} - {"metrics", "settings", "declared"}
    return Kind(
        module=path.stem,
        class_name=body.name,
        settings=(*(("text",) if facts.get("reads_text") else ()), *(each.name for each in declared)),
        needs=tuple(each.name for each in declared if each.default is MISSING),
        sizes=tuple(each.name for each in declared if each.setting.counts_tokens),
        extra=facts.get("generates", 0),
        metrics=None if told is None else tuple(metric.name for metric in told),
        declared=declared,
        told=tuple(told or ()),
        **{name: value for name, value in facts.items() if name in own},
    )


# What a class variable must be, where `Task` declares one of these types and no collection.
_SINGLE = {
    name: _OPTION_TYPES[one]
    for name, annotation in Task.__annotations__.items()
    if (one := annotation.removeprefix("ClassVar[").removesuffix("]")) in _OPTION_TYPES
}


def _check_facts(facts: Mapping[str, Any], path: Path) -> None:
    """Raise where a class variable is of another type than `Task` declares: it would be misread without a word."""
    wrong = [
        f"{name} is {facts[name]!r}, not {kind.__name__}"
        for name, kind in _SINGLE.items()
        if name in facts and type(facts[name]) is not kind
    ]
    for name in ("values", "timings"):
        found = facts.get(name, ())
        if not (isinstance(found, tuple | list) and all(isinstance(each, str) for each in found)):
            wrong.append(f"{name} is {found!r}, not a tuple of names")
    told = facts.get("metrics") or ()
    if not (isinstance(told, tuple | list) and all(isinstance(each, Metric) for each in told)):
        wrong.append(f"metrics is {told!r}, not a tuple of Metric")
    else:
        names = [each.name for each in told]
        wrong += [f"the metric {name!r} is declared twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if wrong:
        raise KvtailorError(f"{path}: {'; '.join(wrong)}")


def _is_task(name: str, bases: str) -> bool:
    """A public class made from one of the two forms of a task."""
    parents = {base.strip().rsplit(".", 1)[-1] for base in bases.split(",")}
    return not name.startswith("_") and bool(parents & set(_FORMS))


def _head(text: str, found: re.Match[str], path: Path) -> ast.ClassDef:
    """The class as far as its first method: parsing whole files would take longer than all else that `--help` does.

    Raises:
        KvtailorError: a field stands behind a method, where it would be missed.
    """
    rest = text[found.end() :]
    whole = rest[: end.start()] if (end := _AFTER_CLASS.search(rest)) else rest
    head, methods = (whole[: at.start()], whole[at.start() :]) if (at := _METHOD.search(whole)) else (whole, "")
    if late := _FIELD.search(methods):
        raise KvtailorError(
            f"{path}: the field {late[1]} of {found[1]} stands behind a method: put it before the first"
        )
    lines = "\n" * text.count("\n", 0, found.start())
    [body] = ast.parse(f"{lines}{found[0]}{head}", filename=str(path)).body
    assert isinstance(body, ast.ClassDef)
    return body


def _class_variables(body: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Name and value of the class variables that a task may declare."""
    for name, annotation, value in _annotated(body):
        of_class = annotation.removeprefix("typing.").startswith("ClassVar")
        if of_class and value is not None and name in Task.__annotations__:
            yield name, value
        elif name in Task.__annotations__ and not of_class:
            raise ArgumentError(f"{name} is a field, and must be a ClassVar")
        elif of_class and name not in _KNOWN and (near := get_close_matches(name, _KNOWN, 1, 0.85)):
            # A class variable of its own is free, but not one that is taken for another.
            raise ArgumentError(f"no task declares {name}; did you mean {near[0]!r}?")


def _annotated(body: ast.ClassDef) -> Iterator[tuple[str, str, ast.expr | None]]:
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation), node.value


def _declared(body: ast.ClassDef, path: Path) -> Iterator[Declared]:
    """The fields that are made by `setting`; a suite sets no other."""
    for name, annotation, value in _annotated(body):
        if isinstance(value, ast.Call) and ast.unparse(value.func).rsplit(".", 1)[-1] == "setting":
            made = _value(value, path, name)
            setting = setting_of(made)
            assert setting is not None, "`setting` declares one"
            yield Declared(name=name, default=made.default, setting=setting, option=_option(setting, annotation, path))


def _option(setting: Setting, annotation: str, path: Path) -> Option | None:
    if not isinstance(setting.option, str):
        return setting.option
    one, *more = annotation.replace(" ", "").split("|")
    if one not in _OPTION_TYPES or more not in ([], ["None"]):
        raise KvtailorError(
            f"{path}: {setting.option} is of the type {annotation}, of which no option can be made: give an `Option`, "
            f"or one of {', '.join(_OPTION_TYPES)}"
        )
    return Option(flag=setting.option, help=setting.help, type=_OPTION_TYPES[one], listed=setting.each)


def _value(node: ast.expr, path: Path, name: str) -> Any:
    """The value of a declaration.

    Raises:
        KvtailorError: it is not made of literals and of names of `bench.tasks.settings`.
    """
    names: Sequence[str] = declaring.__all__
    known = {each: getattr(declaring, each) for each in names}
    try:
        return eval(compile(ast.Expression(node), str(path), "eval"), {"__builtins__": _OPTION_TYPES, **known})
    except Exception as error:
        raise KvtailorError(
            f"{path}, line {node.lineno}: {name} is declared as {ast.unparse(node)[:80]!r}, which cannot be read "
            f"({error}): write it with literals and with names of bench.tasks.settings ({', '.join(names)})"
        ) from error


GENERATED = "generated"
TEXTS = ("wikitext2", "c4", "pg19", GENERATED)
FIELDS = (
    "tokens_held",
    "tokens_read",
    "tokens_seen",
    "bytes_held",
    "bytes_full",
    "bytes_resident",
    "bytes_peak",
    "bytes_peak_decode",
    "weight_bytes",
    "floor_seconds",
    "samples",
)
"""Fields of a record that a column may show."""
SHARES = ("kept", "reduction", "compression")
"""Computed from `bytes_held` and `bytes_full`: held/full, 1 - held/full, full/held."""
KINDS: dict[str, Kind] = found_kinds()
"""Kinds of task by the name that their records bear."""


def metric_of(task: str, name: str) -> Metric | None:
    """Return what a task declares of a metric; None for a metric or a task that no file declares.

    Args:
        task: of a record.
        name: in `Record.metrics`, with or without the number of a layer.
    """
    stem = name.rstrip("0123456789").removesuffix("_")
    told = {metric.name: metric for metric in KINDS[task].told} if task in KINDS else {}
    return told.get(name) or told.get(stem)


def setting_faults(
    name: str, settings: Mapping[str, object], subject: str = "", positions: int | None = None
) -> list[str]:
    """Return what is wrong with the settings of a task, whole sentences.

    Args:
        name: one of `KINDS`.
        settings: as a suite writes them.
        subject: name of the model, for the sentence about its positions.
        positions: most tokens of the model; None: any number.
    """
    if name not in KINDS:
        return [str(UnknownName("task", name, KINDS))]
    kind = KINDS[name]
    faults = [
        f"{name} has no setting {each!r}{suggest(each, kind.settings)}"
        for each in settings
        if each not in kind.settings
    ]
    faults += [f"{name} needs the setting {each!r}: give it" for each in kind.needs if each not in settings]
    text = settings.get("text", GENERATED)
    if not isinstance(text, str) or not (text in TEXTS or is_path(text)):
        faults.append(f"text is {text!r}, which is neither a path nor a text that is known{suggest(str(text), TEXTS)}")
    for each in kind.declared:
        choices = each.setting.choices
        if choices and each.name in settings and settings[each.name] not in choices:
            what = each.setting.what or f"{each.name} of {name}"
            faults.append(str(UnknownName(what, str(settings[each.name]), choices)))
    try:
        extra = kind.load().generated(settings)
    except UnknownName as error:
        extra = 0
        faults.append(str(error))
    except KvtailorError:
        # It cannot be imported here; who makes it is told so.
        extra = kind.extra
    sizes: dict[str, int] = {}
    for size_name in kind.sizes:
        size = _largest(settings[size_name] if size_name in settings else kind.default(size_name))
        if isinstance(size, str):
            faults.append(f"{size_name} is {settings[size_name]!r}: {size}")
        elif size is not None:
            sizes[size_name] = size
    total = sum(sizes.values()) + extra
    if sizes and positions is not None and total > positions and settings.get("beyond") is not True:
        asked = " + ".join(f"{each}={size}" for each, size in sizes.items())
        more = f" and {extra} more to generate" if extra else ""
        faults.append(
            f"asked for {name} with {asked}{more}, {total} tokens, but {subject} has {positions} positions: give a "
            f"smaller {' or '.join(sizes)}"
        )
    return faults


def measure_faults(name: str, measure: str) -> list[str]:
    """Return what is wrong with a measure that a column asks of a kind of task, whole sentences."""
    kind = KINDS[name]
    head, _, tail = measure.partition(".")
    if not tail:
        known = (*FIELDS, *SHARES)
        return [] if measure in known else [f"there is no measure {measure!r}{suggest(measure, known)}"]
    of_samples = dict.fromkeys(("mean", "geometric", "paired"), kind.values)
    groups = {"metrics": kind.metrics, "timings": kind.timings, **of_samples}
    if head not in groups:
        return [f"there is no measure {measure!r}: begin with one of {', '.join(groups)}"]
    found = groups[head]
    if found is None or tail in found:
        return []
    return [f"{name} has no measure {measure!r}{suggest(measure, [f'{head}.{each}' for each in found])}"]


def is_path(text: str) -> bool:
    """Return whether the setting `text` names a file and no corpus."""
    return bool(Path(text).suffix) or len(Path(text).parts) > 1


def _largest(value: object) -> int | str | None:
    """The largest of the counts; a sentence where it is no count; None where nothing is asked."""
    each = list(value) if isinstance(value, list | tuple) else [value]
    if each == [None]:
        return None
    counts = [x for x in each if isinstance(x, int) and not isinstance(x, bool) and x > 0]
    return max(counts) if counts and len(counts) == len(each) else "give a number of tokens, at least 1"
