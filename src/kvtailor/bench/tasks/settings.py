"""What a task's class body is written with: settings, options of the command line, metrics, and what tasks share.

`kvtailor bench --help` imports every task, so this module imports nothing heavy; pydantic comes with the first value
that is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, MinLen

from kvtailor.bench.data.synthetic.plots import ALL_TASKS
from kvtailor.errors import KvtailorError, UnknownName

__all__ = [
    "BATCHES",
    "CONTEXT",
    "CONTEXTS",
    "CONTINUATION",
    "Column",
    "DOCUMENT_KINDS",
    "Count",
    "Counts",
    "Declared",
    "EXAMPLES",
    "NEW_TOKENS",
    "ROUNDS",
    "STATE",
    "STATES_APART",
    "Shown",
    "Share",
    "Shares",
    "WINDOWS",
    "Whole",
    "Metric",
    "Option",
    "Setting",
    "declared_of",
    "setting",
    "value_faults",
]

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Counts = Annotated[tuple[Count, ...], MinLen(1)]
Shares = Annotated[tuple[Share, ...], MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of `kvtailor bench`.

    Attributes:
        flag: as it is typed, such as "--new-tokens".
        help: what `kvtailor bench --help` shows.
        unit: "bytes" where a text such as 8GiB is read as a number of bytes; else empty.
        default: what is taken where it is not given, as it would be typed; None: the task's own default.
        like: the option whose value is taken where this one is not given.
        most: the largest number; read from the setting's annotation where it is not given.
        type: of one value: int, float, str; bool for a flag without a value. Read from the setting's annotation, as
            are `listed` (several values in one text, with ',' between) and `least`.
    """

    flag: str
    help: str
    unit: str = ""
    default: Any = None
    like: Option | None = None
    most: int | None = None
    type: type = int
    listed: bool = False
    least: int | None = None

    @property
    def name(self) -> str:
        """The name of its value."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is declared beside a field of a task.

    Attributes:
        option: of the command line; None: there is none.
        each: the option has several values, and the task is measured once for each of them.
        counts_tokens: it is a number of tokens. The sum of all such settings must fit into the model's positions, of a
            list the largest.
        choices: the texts that it may be; empty: anything of its type.
        what: what it chooses, for the sentence that refuses another choice.
        times: the option's value is multiplied by it.
    """

    option: Option | None = None
    each: bool = False
    counts_tokens: bool = False
    choices: tuple[str, ...] = ()
    what: str = ""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number of a task's records.

    Attributes:
        name: in `Record.metrics`; by layer also `NAME_0`, `NAME_1`, ...
        unit: as `results.csv` writes it, such as "nats per token"; empty where it has none.
        higher_is_better: None where neither end is better.
        mean_of: the list of `Record.values` whose mean it is; a record in which it is not is refused.
        meaning: half a sentence; empty where the name says it.
    """

    name: str
    unit: str = ""
    higher_is_better: bool | None = None
    mean_of: str | None = None
    meaning: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table, whose rows are plans.

    Attributes:
        head: its heading.
        number: a metric, or what the report makes of metrics, fields and timings, such as `nll_over_full`.
        digits: behind the point; None: three figures.
        scale: what a number is multiplied by.
        form: how a number is written, see `bench.report.tables.tables.FORMS`.
        beside: a second number that the form shows or divides by.
        sign: a + stands before what is above 0.
        unit: stands behind it.
        interval: its interval stands below it.
        ends: CSV has the interval's ends too.
        is_difference: it is a difference to 'full', which is 0 for 'full' itself.
    """

    head: str
    number: str
    digits: int | None = None
    scale: float = 1.0
    _: KW_ONLY
    form: str = "number"
    beside: str = ""
    sign: bool = False
    unit: str = ""
    interval: bool = False
    ends: bool = False
    is_difference: bool = False


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The columns of a task.

    Attributes:
        first: in the first table of a page, where a plan is one line over all points of the task.
        terminal: the same in a terminal, where there is less space.
        title: of the task's own table, with a line for each plan at each point.
        note: how to read that table.
        own: its columns; none: there is no such table.
    """

    first: Sequence[Column] = ()
    terminal: Sequence[Column] = ()
    title: str = ""
    note: str = ""
    own: Sequence[Column] = ()


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A field of a task that a suite may set.

    Attributes:
        name: of the field.
        default: what is taken where nothing is given; `dataclasses.MISSING` where it must be given.
        setting: what is declared beside it.
        option: its option of the command line; None: there is none.
        hint: what its values must be.
    """

    name: str
    default: Any
    setting: Setting
    option: Option | None
    hint: Any


def setting(default: Any = MISSING, *, option: Option | str | None = None, help: str = "", **more: Any) -> Any:
    """Return a field of a task that a suite may set. Its annotation says which values it may have.

    Args:
        default: what is taken where nothing is given; without it a suite must give it.
        option: see `Setting`; a flag alone for one that no other task has.
        help: for `option` where that is a flag.
        more: the other attributes of `Setting`.
    """
    own = Option(flag=option, help=help) if isinstance(option, str) else option
    return dataclasses.field(default=default, metadata={"setting": Setting(option=own, **more)})


@cache
def declared_of(task: type) -> tuple[Declared, ...]:
    """Return the fields of a task that `setting` made.

    Raises:
        KvtailorError: an annotation cannot be read, or no option can be made of it.
    """
    try:
        hints = get_type_hints(task, include_extras=True)
    except NameError as error:
        raise KvtailorError(
            f"{task.__module__}: an annotation of {task.__name__} cannot be read ({error}): import what it names at "
            "the top of the file, outside of TYPE_CHECKING"
        ) from error
    found = []
    for field in dataclasses.fields(task):
        own = field.metadata.get("setting")
        if isinstance(own, Setting):
            hint = hints[field.name]
            option = None if own.option is None else _option(own.option, hint, own.each, task)
            found.append(Declared(name=field.name, default=field.default, setting=own, option=option, hint=hint))
    return tuple(found)


def _option(option: Option, hint: Any, each: bool, task: type) -> Option:
    """The option with what the annotation of its setting says."""
    listed = each
    bounds: dict[str, Any] = {"least": option.least, "most": option.most}
    while (origin := get_origin(hint)) is not None:
        first, *rest = get_args(hint)
        if origin is Annotated:
            for bound in rest:
                bounds |= {"least": bound.ge} if isinstance(bound, Ge) else {}
                bounds |= {"most": bound.le} if isinstance(bound, Le) else {}
        elif origin is tuple:
            listed = True
        elif origin not in (Union, UnionType):
            break
        hint = next(kind for kind in (first, *rest) if kind is not NoneType)
    if hint not in (int, float, str, bool):
        raise KvtailorError(
            f"{task.__module__}: {option.flag} is of the type {hint}, of which no option can be made: annotate its "
            "setting with int, float, str or bool, or a tuple of one of them"
        )
    return replace(option, type=hint, listed=listed, **bounds)


def value_faults(task: type, settings: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each value that a setting of a task cannot have.

    Args:
        task: a dataclass with settings.
        settings: some of them; a list stands for a tuple.
    """
    from pydantic import ValidationError

    given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    refused: dict[str, list[str]] = {}
    try:
        _model(task).model_validate(given)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            refused.setdefault(str(each["loc"][0]), []).append(each["msg"])
    for declared in declared_of(task):
        name, choices = declared.name, declared.setting.choices
        if name in refused:
            yield f"{name} is {settings[name]!r}: {', or '.join(dict.fromkeys(refused[name]))}"
        elif choices and name in settings and settings[name] not in choices:
            yield str(UnknownName(declared.setting.what or name, str(settings[name]), choices))


@cache
def _model(task: type) -> Any:
    """The settings of a task as pydantic reads them: nothing is converted, and none must be there."""
    from pydantic import ConfigDict, create_model

    fields: dict[str, Any] = {each.name: (each.hint, None) for each in declared_of(task)}
    return create_model(task.__name__, __config__=ConfigDict(strict=True), **fields)


DOCUMENT_KINDS = tuple(ALL_TASKS)
STATES_APART = 10_000
"""Random states between two numbers of --state: more than a run has documents of one kind, or rounds."""

CONTEXT = Option(flag="--context", help="Tokens prefilled and compressed.  [512, or what the model has]")
CONTINUATION = Option(flag="--continuation", help="Tokens scored after them.  [a quarter of --context]")
WINDOWS = Option(flag="--windows", help="Windows of each text.  [50, 20 for fidelity]")
EXAMPLES = Option(flag="--examples", help="So many examples of each of longbench, zeroscrolls, harness.  [all]")
STATE = Option(
    flag="--state",
    default=0,
    most=49,
    help="Another number takes other documents: those generated, windows of a text, --examples of a set.",
)
CONTEXTS = Option(
    flag="--contexts",
    like=CONTEXT,
    help="Prompts of speed, memory and speculation in tokens, with ',' between.  [--context]",
)
BATCHES = Option(flag="--batches", default="1", help="Rows of speed and memory, with ',' between.")
NEW_TOKENS = Option(flag="--new-tokens", default="32", help="Tokens decoded in a timed round, with ',' between.")
ROUNDS = Option(flag="--rounds", default=10, help="Timed rounds over all plans.")
