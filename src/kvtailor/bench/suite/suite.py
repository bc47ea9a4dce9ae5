"""Suites: the tables of a published report, as TOML, with the plans, tasks and settings that fill them.

    title = "..."                        report = "where the tables come from"
    awaits = ["rocketkv", "telepathy"] # names of plans and tasks that may be missing: then the table shows it
    [settings.default]                   # what {name} stands for, anywhere below
    budget = 256
    [settings.demo]                      # what differs for one model, found by the last part of its name
    budget = 64
    [tasks.ppl]                          # a task of `bench.kinds` with its settings; with `for`, one for each value
    run = "perplexity"
    text = "{Dataset}"
    [resources]                          # of each cell on a cluster, see `bench.resources`
    cpus = 2
    [[tables]]
    name = "budget"
    title = "Budget {budget}"
    note = "a sentence below the table"
    labels = ["Method", "Dataset"]       # variables of the row that stand in front of it
    for_rows = { Dataset = ["wikitext2", "c4"] }    # every row once for each; `for` repeats the table, or one row
    columns = [{ label = "PPL", task = "ppl", value = "metrics.perplexity", digits = 2, scale = 1.0 }]
    rows = [{ Method = "snapkv", plan = "snapkv @ tokens={budget}" }]

Tables without `columns` have those at the top of the file. A plan may have `share=0.25` as its budget: the largest
`keep=` whose cache takes a quarter of the uncompressed bytes after as many tokens as the setting `context` says, which
`bench.suite.fitted` finds for a model before a run and writes below `[fitted.MODEL]`. `[leaderboard]` asks for a page
that ranks the rows of all tables at equal bytes; `Leaderboard` has its keys.

`{scorers}`, `{allocators}` and `{evicting}` (presets) are lists of all that are there, as a plan writes them. A cell
takes its keys from its column and its row (the row goes before): `plan`, `task`, `value`, and where it compares `shows`
("ratio", or "change" in per cent) and `against` (a plan; 'full' where it is not given). For `value` see
`bench.suite.cells.SuiteCell.measure`. Other keys of a row are variables. One run measures every task once, for the
plans of the cells that show it.

Below `[leaderboard]` stand the budgets at which plans are ranked, and when a task says nothing:

    title = "..."
    budgets = [0.5, 0.25]      # shares of the uncompressed bytes
    tolerance = 0.02           # a plan fits a budget whose bytes exceed it by no more than this part of it
    least_right = 0.5          # a task says nothing where 'full' itself is right less often

They are ranked by the columns whose `value` is `paired.NAME`; without one there is no leaderboard.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.resources import CellResources, read_resources
from kvtailor.bench.suite.cells import SuiteCell, SuiteTable, check_keys, tables_of
from kvtailor.errors import KvtailorError, PlanError, UnknownName, suggest
from kvtailor.ops.files import read_toml
from kvtailor.plan import registry
from kvtailor.plan.check import SETTINGS
from kvtailor.plan.grammar import Word, read_line

__all__ = ["DEFAULT", "Leaderboard", "Suite", "SuiteError", "everything", "read_leaderboard", "read_suite", "suites"]

DEFAULT = "default"
_HOME = Path(__file__).parents[2] / "suites"
SHAPES = ("positions", "head_size", "layers", "kv_heads")
"""Numbers of a model that `[shapes]` may name: most tokens, and of the layers that have a cache the smallest."""
_KEYS = (
    "title",
    "report",
    "awaits",
    "settings",
    "shapes",
    "given",
    "tasks",
    "resources",
    "columns",
    "tables",
    "leaderboard",
    "fitted",
)
_RULE = ("of", "from", "most", "less", "times", "cpu", "cuda")
_SHARE = re.compile(r"\bshare=")


class SuiteError(KvtailorError, ValueError):
    """A suite that cannot be run. Holds all of its faults at once, each a whole sentence."""

    def __init__(self, suite: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        head = f"the suite {suite!r} has {len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}:"
        super().__init__("\n  - ".join([head, *self.faults]))


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tables of one report.

    Attributes:
        name: the file's name.
        title: what it is about.
        report: where its tables come from; empty where they are not published.
        awaits: names that plans and tasks use and this kvtailor may not have yet: of methods and presets (`rocketkv`),
            of a method's argument (`kivi.only`), of a plan's setting (`@resident_layers`), of tasks (`telepathy`).
        settings: by model, the values of `{name}`; 'default' has all of them, a model those that differ.
        tasks: the tasks by name, as written.
        tables: the tables, as written.
        resources: of the cells, on a cluster.
        leaderboard: how its rows are ranked; None: they are not.
        fitted: by model, the plans that stand for those with `share=`.
        shapes: how settings follow from the shapes of a model that has none of its own, see `bench.suite.shapes`.
        given: by model, the settings that `shapes` and a user gave it; they go before all others.
    """

    name: str
    title: str
    report: str
    awaits: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[str, Any]
    tables: Sequence[Any]
    resources: CellResources = field(default_factory=CellResources)
    leaderboard: Leaderboard | None = None
    fitted: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _tables: dict[str, tuple[SuiteTable, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _contestants: dict[str, Contestant] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have settings of their own."""
        return tuple(name for name in self.settings if name != DEFAULT)

    def settings_of(self, model: str) -> dict[str, Any]:
        """The settings for a model: its own, found by its name or by the last part of its name, over the default."""
        own = next((name for name in self.models if _last(name) == _last(model)), DEFAULT)
        return {**everything(), **self.settings[DEFAULT], **self.settings[own], **self.given.get(model, {})}

    def has_settings_of(self, model: str) -> bool:
        """Whether the suite names settings for this model."""
        return any(_last(name) == _last(model) for name in self.models)

    def tables_for(self, model: str) -> tuple[SuiteTable, ...]:
        """The tables with all places filled for this model, and its own budgets in place of shares; made once."""
        if model not in self._tables:
            written = tables_of(self.tables, self.tasks, self.settings_of(model), self.awaits, [])
            self._tables[model] = tuple(_budgeted(written, self.fitted.get(model, {})))
        return self._tables[model]

    def shares_of(self, model: str) -> list[str]:
        """The plans with `share=` as the tables for this model write them, each once."""
        tables = tables_of(self.tables, self.tasks, self.settings_of(model), self.awaits, [])
        plans = (plan for each in _cells_of(tables) for plan in (each.plan, each.against) if plan is not None)
        return [plan for plan in dict.fromkeys(plans) if _SHARE.search(plan)]

    def contestant(self, plan: str) -> Contestant:
        """The contestant of a plan, which is read once; `missing` names what it awaits.

        Raises:
            SuiteError: the plan has faults.
        """
        if plan not in self._contestants:
            faults: list[str] = []
            found = _contestant(plan, self.awaits, faults)
            if found is None:
                raise SuiteError(self.name, faults)
            self._contestants[plan] = found
        return self._contestants[plan]

    def arrived(self) -> list[str]:
        """The names in `awaits` that this kvtailor has by now: they are to be taken out."""
        return [name for name in self.awaits if _is_here(name)]


def suites() -> dict[str, Path]:
    """The suites that come with kvtailor, by name."""
    return {path.stem: path for path in sorted(_HOME.glob("*.toml"))}


def read_suite(name_or_path: str | Path) -> Suite:
    """A suite that comes with kvtailor, by its name, or one of a TOML file.

    Raises:
        UnknownName: no suite has this name, and no file is there.
        SuiteError: with all faults at once, for all models that have settings.
    """
    path = suites().get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise UnknownName("suite", str(name_or_path), suites())
    faults: list[str] = []
    try:
        raw = tomllib.loads(read_toml(path))
    except OSError as error:
        raise SuiteError(path.stem, [f"{path} cannot be read: {error}"]) from error
    # Beside its own error, a ValueError, tomllib lets through Python's errors for long numbers and deep brackets.
    except (ValueError, RecursionError) as error:
        raise SuiteError(path.stem, [f"{path} is not TOML: {error}"]) from error
    check_keys(raw, _KEYS, "the file", faults)
    suite = Suite(
        name=path.stem,
        title=_typed(raw, "title", str, "", faults),
        report=_typed(raw, "report", str, "", faults),
        awaits=tuple(map(str, _typed(raw, "awaits", list, [], faults))),
        settings=_settings(_typed(raw, "settings", dict, {}, faults), faults),
        tasks=_typed(raw, "tasks", dict, {}, faults),
        tables=_with_columns(_typed(raw, "tables", list, [], faults), _typed(raw, "columns", list, [], faults)),
        leaderboard=read_leaderboard(_typed(raw, "leaderboard", dict, {}, faults), faults),
        fitted=_typed(raw, "fitted", dict, {}, faults),
        shapes=_typed(raw, "shapes", dict, {}, faults),
        given=_typed(raw, "given", dict, {}, faults),
        resources=read_resources(_typed(raw, "resources", dict, {}, faults), faults),
    )
    for key in ("title", "tasks", "tables"):
        if not getattr(suite, key):
            faults.append(f"the file has no {key}: write them")
    if not faults:
        _check(suite, faults)
    if faults:
        raise SuiteError(suite.name, list(dict.fromkeys(faults)))
    return suite


def _check(suite: Suite, faults: list[str]) -> None:
    """Everything of every model."""
    for name, rule in suite.shapes.items():
        if name not in suite.settings[DEFAULT]:
            faults.append(f"[shapes] names {name!r}, which is no setting{suggest(name, suite.settings[DEFAULT])}")
        if not isinstance(rule, dict):
            faults.append(f'[shapes] {name} is {rule!r}: write a rule, such as {{ most = "positions", less = 512 }}')
            continue
        check_keys(rule, _RULE, f"[shapes] {name}", faults)
        faults += [
            f"[shapes] {name} follows {rule[key]!r}, which is no number of a model{suggest(str(rule[key]), SHAPES)}"
            for key in ("of", "most")
            if rule.get(key, SHAPES[0]) not in SHAPES
        ]
        if "of" in rule and not (isinstance(rule.get("from"), int) and rule["from"] > 0):
            faults.append(f"[shapes] {name}: write from = the number that the published setting is of")
        faults += [
            f"[shapes] {name}: {key} is {rule[key]!r}: give a number"
            for key, kinds in (("less", int), ("times", int | float))
            if not isinstance(rule.get(key, 0), kinds)
        ]
    faults += [
        f"[given] {model!r} holds no settings: {own!r}"
        for model, own in suite.given.items()
        if not isinstance(own, dict)
    ]
    used: set[str] = set()
    plans: set[str] = set()
    for model in (DEFAULT, *suite.models):
        scope = suite.settings_of(model) if model != DEFAULT else {**everything(), **suite.settings[DEFAULT]}
        tables = _budgeted(tables_of(suite.tables, suite.tasks, scope, suite.awaits, faults), {})
        names = [table.name for table in tables]
        faults += [f"two tables have the name {name!r}: give each its own" for name in names if names.count(name) > 1]
        for table in tables:
            faults += [
                f"table {table.name!r}: two columns are called {label!r}: give each its own label"
                for label in table.columns
                if table.columns.count(label) > 1
            ]
            for cell in _cells_of([table]):
                plans |= {plan for plan in (cell.plan, cell.against) if plan is not None}
                used |= {task.kind for task in cell.tasks}
    for plan in sorted(plans):
        contestant = _contestant(plan, suite.awaits, faults)
        used |= set(contestant.missing) if contestant is not None else set()
    if faults:
        return
    # What has arrived is no fault of a suite that an older kvtailor wrote; a test of ours finds it.
    faults += [
        f"awaits names {name!r}, which no plan and no task uses: take it out"
        for name in suite.awaits
        if name not in used and not _is_here(name)
    ]


def _with_columns(tables: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """The tables, those without columns with the file's."""
    return [{"columns": columns, **each} if columns and isinstance(each, dict) else each for each in tables]


def _cells_of(tables: Iterable[SuiteTable]) -> Iterator[SuiteCell]:
    return (cell for table in tables for row in table.rows for cell in row.cells)


def _budgeted(tables: Iterable[SuiteTable], known: Mapping[str, str]) -> list[SuiteTable]:
    """The tables with the budgets that are known in place of shares; a share that was not fitted is of the tokens."""

    def of(plan: str) -> str:
        return known.get(plan) or _SHARE.sub("keep=", plan)

    def cell_of(cell: SuiteCell) -> SuiteCell:
        against = None if cell.against is None else of(cell.against)
        return replace(cell, plan=of(cell.plan), written=cell.plan, against=against)

    return [
        replace(table, rows=tuple(replace(row, cells=tuple(map(cell_of, row.cells))) for row in table.rows))
        for table in tables
    ]


def _contestant(plan: str, awaits: Sequence[str], faults: list[str]) -> Contestant | None:
    """The contestant of a plan in which only names of `awaits` may be missing; None where it has faults."""
    line = read_line(plan, found := [])
    words = list(_words_of(line.words))
    names = {word.name: word.name for word in words}
    names |= {f"{word.name}.{each}": each for word in words for each in word.arguments}
    names |= {f"@{each}": each for each in line.settings}
    missing = {name: short for name, short in names.items() if name in awaits and not _is_here(name)}
    try:
        contestant = Contestant.of(plan)
    except PlanError as error:
        # A fault that names what is awaited adds nothing.
        found = [fault for fault in error.faults if not any(repr(short) in fault for short in missing.values())]
        contestant = Contestant.of(plan, may_be_missing=True)
    if found or (contestant.missing and not missing):
        faults += [f"the plan {plan!r}: {fault}" for fault in found]
        return None
    return replace(contestant, missing=tuple(missing)) if contestant.missing else contestant


def _words_of(values: Iterable[object]) -> Iterator[Word]:
    """Every word, and those among their arguments: what is a string there may be the name of a method."""
    for value in values:
        if isinstance(value, str):
            yield Word(name=value, arguments={})
        elif isinstance(value, tuple):
            yield from _words_of(value)
        elif isinstance(value, Word):
            yield value
            yield from _words_of(value.arguments.values())


def _is_here(name: str) -> bool:
    """Whether this kvtailor has what an entry of `awaits` names."""
    if name.startswith("@"):
        return name[1:] in SETTINGS
    method, _, argument = name.partition(".")
    stage = next((stage for stage in registry.stages() if method in registry.methods(stage)), None)
    if argument:
        kind = None if stage is None else registry.load(stage, method)
        return kind is not None and argument in getattr(kind, "__dataclass_fields__", {})
    return stage is not None or method in registry.presets() or method in KINDS


def _settings(found: Mapping[str, Any], faults: list[str]) -> dict[str, dict[str, Any]]:
    default = found.get(DEFAULT, {})
    for model, own in found.items():
        if not isinstance(own, dict):
            faults.append(f"settings.{model} is {own!r}: write [settings.{DEFAULT}] and below it name = value")
        else:
            faults += [
                f"[settings.{model!r}] sets {each!r}, which [settings.{DEFAULT}] does not have{suggest(each, default)}"
                for each in own
                if each not in default
            ]
    return {DEFAULT: default, **{model: own for model, own in found.items() if isinstance(own, dict)}}


def _typed(raw: Mapping[str, Any], key: str, kind: type, default: Any, faults: list[str]) -> Any:
    value = raw.get(key, default)
    if isinstance(value, kind):
        return value
    faults.append(f"{key} is {value!r}: write a {'text' if kind is str else 'table' if kind is dict else 'list'}")
    return default


def _last(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


@cache
def everything() -> dict[str, list[str]]:
    """The lists by the name that a suite writes: `{scorers}`, `{allocators}`, `{evicting}`.

    A method is there under its name, or as its first example where its name alone is not enough. The allocator of plans
    that name none is not among them: it is what a plan without one does.
    """
    return {
        "scorers": _words("score"),
        "allocators": _words("allocate"),
        "evicting": [name for name, preset in registry.presets().items() if "score" in preset.plan],
    }


def _words(stage: str) -> list[str]:
    examples = {name: getattr(registry.load(stage, name), "examples", ()) for name in registry.methods(stage)}
    return [some[0] if some else name for name, some in examples.items() if name != registry.null(stage)]


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """How the rows of a suite's tables are ranked.

    Attributes:
        title: of the page.
        budgets: shares of the uncompressed bytes, from many to few.
        tolerance: a plan fits a budget where its bytes are at most `1 + tolerance` times that share.
        least_right: share of right answers that 'full' must reach in a task, else no plan is judged by it.
    """

    title: str
    budgets: tuple[float, ...]
    tolerance: float = 0.02
    least_right: float = 0.5

    def budget_of(self, share: float) -> float | None:
        """Return the smallest budget that a share of the bytes fits; None where it fits none."""
        return min((each for each in self.budgets if share <= each * (1 + self.tolerance)), default=None)

    @property
    def rules(self) -> str:
        """How plans are ranked, as a suite's file has it: two leaderboards of the same rules have the same text."""
        return f"budgets = {list(self.budgets)}, tolerance = {self.tolerance:g}, least_right = {self.least_right:g}"


def read_leaderboard(raw: Mapping[str, Any], faults: list[str]) -> Leaderboard | None:
    """The leaderboard as a suite writes it; None where it asks for none, or has a fault.

    Args:
        raw: the table `[leaderboard]`; empty where there is none.
        faults: what is wrong is added here, a sentence each.
    """
    if not raw:
        return None
    known = [field.name for field in fields(Leaderboard)]
    found = [f"leaderboard has the unknown key {key!r}{suggest(key, known)}" for key in raw if key not in known]
    title, budgets = raw.get("title"), raw.get("budgets")
    if not isinstance(title, str) or not title:
        found.append("leaderboard has no title: write one")
    if not _are_shares(budgets) or list(budgets or ()) != sorted(set(budgets or ()), reverse=True):
        found.append(f"leaderboard: budgets is {budgets!r}: give shares above 0 and below 1, from many to few")
    for name in ("tolerance", "least_right"):
        if name in raw and not _is_share(raw[name]):
            found.append(f"leaderboard: {name} is {raw[name]!r}: give a number from 0 to below 1")
    faults += found
    if found:
        return None
    numbers = {name: float(raw[name]) for name in ("tolerance", "least_right") if name in raw}
    return Leaderboard(title=str(title), budgets=tuple(map(float, raw["budgets"])), **numbers)


def _are_shares(budgets: object) -> bool:
    return isinstance(budgets, Sequence) and bool(budgets) and all(_is_share(each) and each > 0 for each in budgets)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
