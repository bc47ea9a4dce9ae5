"""The leaderboard of a suite: its page, and all of it as one table, from records alone.

Each model is ranked by itself. Of several models, a plan's places on all of them stand beside each other, and no number
is of two models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtailor.bench.report.charts import heaviest, losses_by_bytes
from kvtailor.bench.report.page import (
    DASH,
    Block,
    Facts,
    Front,
    Page,
    Part,
    Plan,
    Point,
    Table,
    Text,
    Texts,
    colour,
    render,
)
from kvtailor.bench.report.suite.ranking import FEWER, LEADS, LEVEL, WORSE, Place, RankedColumn, RankedScore, Ranking
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid, number, word
from kvtailor.bench.schema import Record
from kvtailor.ops.sizes import byte_text
from kvtailor.presets import FULL

__all__ = ["board_grid", "leaderboard_page"]

_SMALL_MODEL = 10**9
_WORDS = {LEADS: "leads", LEVEL: "level", WORSE: "worse", FEWER: "behind with fewer bytes"}
_SHADES = {LEADS: 0.2, LEVEL: 0.07}
_NOTE = (
    "Each point is a plan: the share of the uncompressed bytes that it holds, and what it lost to 'full' there, with "
    "the 95 % interval. The line joins the front: no other plan has fewer bytes and loses less by its mean."
)
_LEADS = (
    "By its mean. Below the name: of the other plans of that budget, how many are level with it, and how many are "
    "worse."
)
_SIZE = "Of the whole cache, as long as it was here: such as 300KiB, 2GiB or 25%. Longer contexts take more."
_BESIDE = (
    "All plans that stand at this budget on one of the models or more. Where one stands at another budget on a model, "
    "its words there say so, and are of the plans of that budget. Dark: it leads here on that model; light: it is "
    "level with what leads."
)


@dataclass(frozen=True)
class _Model:
    """A model on the page.

    Attributes:
        ranking: of the plans on it.
        name: what the page calls it; empty where it is the only one.
    """

    ranking: Ranking
    name: str

    @property
    def columns(self) -> dict[str, RankedColumn]:
        """Return by their labels the columns in which 'full' was measured."""
        return {each.label: each for each in self.ranking.columns if each.full is not None}

    @property
    def on(self) -> str:
        """Return which model something is on, as the end of a text; empty where there is no other."""
        return f" on {self.name}" if self.name else ""

    def head(self, label: str) -> str:
        """Return the head of a column of this model."""
        return f"{label}\n{self.name}" if self.name else label


@dataclass(frozen=True)
class _Line:
    """A plan of the suite.

    Attributes:
        text: as the suite has it, see `Place.written`.
        places: on each model, in their order; None where the suite does not have it there.
    """

    text: str
    places: tuple[Place | None, ...]

    @property
    def key(self) -> str:
        """Return what tells it from other lines; of one model, its plan hash."""
        return " ".join(DASH if place is None else place.plan_hash for place in self.places)

    @property
    def named(self) -> Place:
        """Return a place with its name: where two plans of the suite are one on a model, that has the first's."""
        places = [place for place in self.places if place is not None]
        return next((place for place in places if place.written[0] == self.text), places[0])

    def most(self, budget: float) -> float | None:
        """Return the largest share of the bytes with which it stands at a budget; None: it stands nowhere there."""
        return max((each.share or 0 for each in self.places if each and each.budget == budget), default=None)


def leaderboard_page(rankings: Sequence[Ranking], lines: Sequence[str], records: Sequence[Record]) -> str:
    """Return the page as text.

    Args:
        rankings: of one suite, one for each model, from `rank_each`.
        lines: for each which model, when, where and with what, from `provenance`.
        records: those that the plans were ranked by among them, for their bytes.
    """
    models, board = _named(rankings), rankings[0].board
    several, by_key = len(models) > 1, {record.key: record for record in records}
    budgets = [each for each in board.budgets if any(ranking.at(each) for ranking in rankings)]
    full, *others = _lines(models)
    plans = _plans(full, others, several=several)
    asked = list(_questions(models, [full, *others], plans, by_key))
    size = f"{_SIZE} A share is one of the cache of the model that is chosen." if several else _SIZE
    parts = [
        *([Part("front", "Bytes against loss", [Front(note=_NOTE, size=size)])] if asked else []),
        *([Part("models", "The models, uncompressed", [_uncompressed(models, by_key)])] if several else []),
        Part("leaders", "Who leads", list(_leaders(models, budgets)), note=_LEADS),
        *(
            Part(
                f"at-{_slug(each)}",
                f"{_percent(each)} of the bytes",
                blocks=[_table(models, full, others, each)],
                note=_BESIDE if several else "",
            )
            for each in budgets
        ),
        Part("rest", "Plans", [block for model in models for block in _rest(model)]),
    ]
    title = f"{board.title}: {', '.join(each.name or each.ranking.last.model for each in models)}"
    rules = list(_rules(models))
    return render(Page(title=title, about=" ".join(lines), rules=rules, parts=parts, plans=plans, questions=asked))


def board_grid(rankings: Sequence[Ranking]) -> Grid:
    """All plans at their budgets as one table, for CSV; `full` comes first.

    Of several models one stands below the other: `model` says which, `cache` in which dtype it holds keys and values,
    and `in the suite` has the plan as it is written there, the same for all of them.

    Args:
        rankings: of one suite, one for each model, from `rank_each`.
    """
    several = len(rankings) > 1
    labels = list(dict.fromkeys(each.label for ranking in rankings for each in ranking.columns))
    timed = list(dict.fromkeys(label for ranking in rankings for label in ranking.timed))
    of_model = ("model", "cache", "in the suite") if several else ()
    rows, plans = [], []
    for ranking in rankings:
        columns = {each.label: each for each in ranking.columns}
        held = ranking.last.held_in
        for place in (ranking.full, *ranking.places):
            told = (ranking.last.model, held, " or ".join(place.written))
            rows.append(
                (
                    word(place.plan),
                    *(map(word, told) if several else ()),
                    word(place.family),
                    word(place.label),
                    EMPTY if place.budget is None else number(100 * place.budget, 2),
                    _bytes(place),
                    *(_score_cell(columns[each], place) if each in columns else EMPTY for each in labels),
                    *(_time(place, label) for label in timed),
                )
            )
            plans.append(place.plan_hash)
    heads = ("plan", *of_model, "family", "named", "budget", "bytes, %", *labels, *timed)
    return Grid(name="leaderboard", title=rankings[0].board.title, heads=heads, rows=tuple(rows), plans=tuple(plans))


def _named(rankings: Sequence[Ranking]) -> list[_Model]:
    """The models with their names: the last parts, where these tell them apart."""
    whole = [ranking.last.model for ranking in rankings]
    short = [name.rstrip("/").rsplit("/", 1)[-1] for name in whole]
    names = [""] if len(whole) == 1 else short if len(set(short)) == len(short) else whole
    return [_Model(ranking, name) for ranking, name in zip(rankings, names, strict=True)]


def _lines(models: Sequence[_Model]) -> list[_Line]:
    """The plans in the order in which the budgets have them, 'full' first, and those that stand at none last."""
    board = models[0].ranking.board
    by_text = [{text: place for place in each.ranking.places for text in place.written} for each in models]
    found: dict[str, _Line] = {}
    for text in dict.fromkeys(text for places in by_text for text in places):
        line = _Line(text, tuple(places.get(text) for places in by_text))
        found.setdefault(line.key, line)
    placed = [line for budget in board.budgets for line in _at(list(found.values()), budget)]
    first = {line.key: line for line in [*placed, *found.values()]}
    return [_Line(FULL, tuple(each.ranking.full for each in models)), *first.values()]


def _at(lines: Sequence[_Line], budget: float) -> list[_Line]:
    """The lines of which a place stands at a budget, from many bytes to few."""
    there = [(most, line) for line in lines if (most := line.most(budget)) is not None]
    return [line for _, line in sorted(there, key=lambda each: -each[0])]


def _rules(models: Sequence[_Model]) -> Iterator[str]:
    board, several = models[0].ranking.board, len(models) > 1
    yield (
        "A plan stands at the smallest budget that its measured bytes fit, at most "
        f"{100 * board.tolerance:g} % above it. Losses are paired with 'full' on the same samples; intervals "
        "are of 95 %. A dash is what was not measured."
    )
    yield (
        "In each column the plan that loses least by its mean leads its budget. Another one is worse where a paired "
        "test on the same samples shows that it loses more than the leader, at 5 % for all pairs of that budget and "
        "column together; it is level where the test does not, which is no proof that both are equal. A plan with 5 % "
        "fewer bytes than the leader, or less still, is not called worse: bytes that it does not use may be what it "
        "lacks."
    )
    if several:
        yield (
            "Each model is ranked by itself, among the plans that were measured on it; no number here is of two "
            "models, and none is averaged over them. A line is one plan of the suite: where it has a share of the "
            "bytes as its budget, the tokens that it keeps for it were found for each model. Shares are of the "
            f"uncompressed cache, {', '.join(f'{each.name} in {each.ranking.last.held_in}' for each in models)}."
        )
    sizes = [(each.name or "This model", each.ranking.last.parameters or 0) for each in models]
    small = [f"{name} has {count / 1e6:.1f} million parameters" for name, count in sizes if 0 < count < _SMALL_MODEL]
    if small:
        yield (f"{', '.join(small)}. What holds here need not hold on a model of billions, and the other way round.")


def _plans(full: _Line, others: Sequence[_Line], *, several: bool) -> dict[str, Plan]:
    return {
        line.key: Plan(
            number=str(number),
            label=line.named.label,
            plan=line.text if several else line.named.plan,
            kind="pf" if line is full else colour(number - 2),
            whole=line is full,
        )
        for number, line in enumerate([full, *others], 1)
    }


def _questions(
    models: Sequence[_Model], lines: Sequence[_Line], plans: Mapping[str, Plan], records: Mapping[str, Record]
) -> Iterator[dict[str, object]]:
    """What each plan held and lost on each model in each column that says something."""
    for label in _labels(models):
        for index, model in enumerate(models):
            column = model.columns.get(label)
            if column is not None and column.silent is None:
                numbers: dict[str, str] = {}
                for line in lines:
                    place = line.places[index]
                    if place is not None:
                        numbers.setdefault(place.plan_hash, plans[line.key].number)
                asked = _question(model, column, numbers, records)
                if asked is not None:
                    yield asked


def _question(
    model: _Model, column: RankedColumn, numbers: Mapping[str, str], records: Mapping[str, Record]
) -> dict[str, object] | None:
    """What each plan held and lost in a column; None where there is no point.

    Args:
        model: of the column.
        column: one that says something.
        numbers: of the plans on the page, by their plan hash on this model.
        records: by key.
    """
    by = (-1 if column.higher else 1) * (100 if column.hits else 1)
    found, written = [], {}
    for place in model.ranking.places:
        score = place.scores.get(column.label)
        record = None if score is None else heaviest(score.keys, records)
        if score is None or record is None or not record.bytes_held or not record.bytes_full:
            continue
        loss = score.difference.map(lambda each: by * each)
        share = record.bytes_held / record.bytes_full
        point = Point(numbers[place.plan_hash], record.bytes_held, share, loss.value, loss.low, loss.high)
        found.append((point, score.keys))
        written[point.number] = place.plan
    unit = "points of right answers" if column.hits else "nats per token"
    axis = f"{unit} lost" if column.hits else f"{unit} over full"
    own = {"plans": written} if model.name else {}
    whole = numbers[model.ranking.full.plan_hash]
    asked = losses_by_bytes(column.label + model.on, axis, unit, found, records, whole=whole, **own)
    if asked is not None and model.name:
        asked["full_text"] = f"{asked['full_text']} in {model.ranking.last.held_in}"
    return asked


def _labels(models: Sequence[_Model]) -> list[str]:
    """The columns in which 'full' was measured on any model."""
    return list(dict.fromkeys(label for model in models for label in model.columns))


def _uncompressed(models: Sequence[_Model], records: Mapping[str, Record]) -> Table:
    """What each model is, and what its uncompressed cache takes and reaches."""
    labels = _labels(models)
    rows = []
    for model in models:
        last, full = model.ranking.last, model.ranking.full
        every = [heaviest(score.keys, records) for score in full.scores.values()]
        longest = max(
            (each for each in every if each is not None), key=lambda each: each.tokens_seen or 0, default=None
        )
        seen = None if longest is None else longest.tokens_seen
        size = None if longest is None else longest.bytes_full
        rows.append(
            (
                word(model.name),
                EMPTY if not last.parameters else number(last.parameters / 1e6, 1),
                word(last.held_in),
                EMPTY if seen is None else number(seen, 0, f"{seen:,}"),
                EMPTY if size is None else number(size, 0, byte_text(size)),
                *(_full_cell(model.columns.get(label)) for label in labels),
            )
        )
    heads = ("model", "parameters,\nmillions", "cache", "tokens\nat most", "bytes", *labels)
    names = tuple(model.name for model in models)
    return Table(grid=Grid(name="models", title="models", heads=heads, rows=tuple(rows), plans=names), numbered=False)


def _full_cell(column: RankedColumn | None) -> Cell:
    """What 'full' itself has in a column."""
    if column is None or column.full is None:
        return EMPTY
    found, silent = column.full, "; says nothing here" if column.silent else ""
    if not column.hits:
        return Cell(text=f"{found.value:.3f}", value=found.value, interval=f"nats, {found.count} samples{silent}")
    ends = found.interval(0, scale=100)
    return Cell(text=f"{100 * found.value:.0f} %", value=found.value, interval=f"{ends} % of {found.count}{silent}")


def _leaders(models: Sequence[_Model], budgets: Sequence[float]) -> Iterator[Block]:
    """Who leads at each budget, and how many are level with it."""
    yield from _silent(models)
    labels, several = _labels(models), len(models) > 1
    rows, plans = [], []
    for budget in budgets:
        for model in models:
            if model.ranking.at(budget):
                name = [word(model.name)] if several else []
                cells = (_leader(model.ranking, budget, model.columns.get(label)) for label in labels)
                rows.append((number(100 * budget, 1, _percent(budget)), *name, *cells))
                plans.append(f"{_percent(budget)}{model.on}")
    heads = ("bytes", *(["model"] if several else []), *labels)
    grid = Grid(name="leaders", title="who leads", heads=heads, rows=tuple(rows), plans=tuple(plans))
    yield Table(grid=grid, numbered=False)


def _silent(models: Sequence[_Model]) -> Iterator[Text]:
    """Why a column says nothing, once where that is so on all models."""
    found: dict[tuple[str, str], list[_Model]] = {}
    for model in models:
        for column in model.ranking.columns:
            if column.silent:
                found.setdefault((column.label, column.silent), []).append(model)
    for (label, why), there in found.items():
        on = "" if len(there) == len(models) else f" on {' and '.join(model.name for model in there)}"
        yield Text(lead=f"{label}{on}.", text=why)


def _leader(ranking: Ranking, budget: float, column: RankedColumn | None) -> Cell:
    if column is None:
        return Cell(text=DASH, interval="not measured")
    if column.silent is not None:
        return Cell(text=DASH, interval="says nothing here")
    found = [(place, place.scores[column.label]) for place in ranking.at(budget) if column.label in place.scores]
    best = next((place for place, score in found if score.standing == LEADS), None)
    if best is None:
        return Cell(text=DASH, interval="no plan is right at all" if found else "not measured")
    count = {name: sum(score.standing == name for _, score in found) for name in (LEVEL, WORSE, FEWER)}
    behind = f", {count[FEWER]} behind with fewer bytes" if count[FEWER] else ""
    words = f"of {len(found) - 1}, {count[LEVEL]} level, {count[WORSE]} worse{behind}"
    return Cell(text=best.label, interval=words)


def _table(models: Sequence[_Model], full: _Line, others: Sequence[_Line], budget: float) -> Table:
    """The plans of a budget, with a column for each model beside that of the others.

    Of several models the losses come first, which a narrow window then shows beside each other, and no family.
    """
    several, lines = len(models) > 1, [full, *_at(others, budget)]
    each = list(enumerate(models))
    scored = [(i, model.columns[label]) for label in _labels(models) for i, model in each if label in model.columns]
    timed = [(i, label) for i, model in each for label in model.ranking.timed]
    grid = Grid(
        name=f"leaderboard-{_slug(budget)}",
        title=f"plans at {_percent(budget)} of the bytes",
        heads=(
            "plan",
            *(["family", "bytes, %"] if not several else []),
            *(models[i].head(column.label) for i, column in scored),
            *((model.head("bytes, %") for model in models) if several else ()),
            *(models[i].head(label) for i, label in timed),
        ),
        rows=tuple(
            (
                word(line.named.label),
                *([word(line.named.family), _bytes(line.named)] if not several else []),
                *(_score_cell(column, line.places[i], budget, shaded=several) for i, column in scored),
                *(map(_bytes, line.places) if several else ()),
                *(_time(line.places[i], label) for i, label in timed),
            )
            for line in lines
        ),
        plans=tuple(line.key for line in lines),
    )
    return Table(grid=grid.without_empty_columns() if several else grid, classes={full.key: "full"})


def _rest(model: _Model) -> Iterator[Block]:
    """The plans as they are written, and those that stand at no budget, each with the reason."""
    places = model.ranking.places
    written = [(place.label, place.plan) for place in places if place.budget]
    yield Facts(facts=written, summary=f"The plans as they are written{model.on}", definitions=True)
    rest = [place for place in places if place.budget is None]
    if rest:
        texts = [f"{each.label}, {each.plan}: {_why(each)}" for each in rest]
        yield Texts(heading=f"At no budget{model.on}", texts=texts)


def _why(place: Place) -> str:
    if place.share is not None:
        return f"it holds {100 * place.share:.1f} % of the bytes, more than any budget here"
    return place.missing or "it was not measured"


def _score_cell(
    column: RankedColumn, place: Place | None, budget: float | None = None, *, shaded: bool = False
) -> Cell:
    """What a plan lost in a column.

    Args:
        column: of the model that the place is on.
        place: None: the plan has none there.
        budget: at which it is shown; its words say where it stands if that is another. None: they do not.
        shaded: whether a standing at that budget is a colour too.
    """
    score = None if place is None else place.scores.get(column.label)
    if place is None or score is None:
        return EMPTY
    return Cell(
        text=_mean(column, score),
        value=score.difference.value,
        interval=_small(column, score, place, budget),
        ends=score.difference.ends,
        keys=score.keys,
        shade=_SHADES.get(score.standing or "") if shaded and place.budget == budget else None,
    )


def _mean(column: RankedColumn, score: RankedScore) -> str:
    return f"{100 * score.mean:.0f} %" if column.hits else f"{score.difference.value:+.3f}"


def _small(column: RankedColumn, score: RankedScore, place: Place, budget: float | None) -> str | None:
    if place.budget is None and place.share is not None and place.label == FULL:
        if not column.hits:
            return f"{score.mean:.3f} nats"
        ends = None if column.full is None else column.full.interval(0, scale=100)
        return ends and f"{ends} %"
    if column.hits:
        ends = score.difference.interval(0, scale=100, signed=True)
        between = f"{100 * score.difference.value:+.0f} ({ends})"
    else:
        between = score.difference.interval(3, signed=True) or "too few samples for an interval"
    elsewhere = budget is not None and place.budget != budget
    away = ("at no budget" if place.budget is None else f"at {_percent(place.budget)}") if elsewhere else ""
    standing = " ".join(filter(None, [_WORDS.get(score.standing or "", ""), away]))
    return f"{between}; {standing}" if standing else between


def _bytes(place: Place | None) -> Cell:
    return EMPTY if place is None or place.share is None else number(100 * place.share, 1)


def _time(place: Place | None, label: str) -> Cell:
    return number(place.times[label], 2) if place is not None and label in place.times else EMPTY


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _slug(budget: float) -> str:
    return f"{budget:g}".replace(".", "-")
