"""Writes what plans lose on real models into README.md and pages of docs/, from the records in docs/records alone.

    python docs/write_real_models.py

What stands between `<!-- real models: NAME -->` and `<!-- /real models -->` is made anew: NAME is `start` for the plans
of README, `all` for every plan that was measured under its own name, `texts` for those that were measured on other
texts than novels, `sets` for scores on LongBench, `needles` for answers from longer texts, `field` for those of the
suite `field`, which cuts each plan to the same bytes. A plan that a model has no records of is a dash there. In
docs/verdicts.md `the run` is what was asked of each model, and `of PLAN` a line for each model of a row of the suite,
with what is the other way round in the numbers of the embedded model on the same page.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from kvtailor.bench.measure.statistics import Estimate, wilson
from kvtailor.bench.report import summarise
from kvtailor.bench.report.suite.ranking import Place, RankedScore, Ranking, rank
from kvtailor.bench.report.table import Row
from kvtailor.bench.report.tables.quality import difference, documents_of
from kvtailor.bench.report.verdict.verdict import judge
from kvtailor.bench.safety.check import MARGIN
from kvtailor.bench.safety.verdict import judged
from kvtailor.bench.schema import Record, latest, read_records
from kvtailor.bench.suite.suite import read_suite
from kvtailor.errors import PlanError
from kvtailor.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "measured.md",
    ROOT / "docs" / "verdicts.md",
    ROOT / "docs" / "how-to" / "ask-later.md",
)
MODELS = {"SmolLM2-135M": "smollm2-135m", "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b"}
"""The folder of records in docs/records of each model."""
TEXTS = {"c4": "C4", "kvtailor-engine.py.txt": "Python"}
"""Texts of the records in docs/records/MODEL-texts."""
SETS = {
    "longbench/multifieldqa_zh": "multifieldqa_zh, F1",
    "longbench/multi_news": "multi_news, ROUGE-L",
}
"""Sets of the records in docs/records/MODEL-longbench, with what is scored."""
KINDS = {"needle": "needles", "passkey": "passkeys", "key_value": "keys"}
"""Kinds of the records in docs/records/MODEL-needles, with what is found."""
LATER = "later questions"
"""What records in docs/records/MODEL-questions are of."""
START = {
    "half": "kivi(key_bits=8, value_bits=4, recent=32)",
    "a third, slower tokens": "kvquant4",
    "a quarter, fast": "turboquant4",
    "less than a quarter, slower tokens": "k3v3",
    "a fifth, slower tokens": "k3v2",
    "fewer tokens, so faster new ones": "snapkv(kernel=21) + adakv @ keep=0.25",
}
"""What README recommends, by what a reader wants."""
EIGHTH = "snapkv, kernel 21 + adakv + turboquant, 4 bits", 0.125, "snapkv + adakv + turboquant4"
"""The row of the suite `field` that README names for an eighth of the bytes, its budget, and how a user writes it."""
ALSO = (
    "| questions that come later | codes of 4 bits, or `kvtailor.read(model, tokenizer, text, plan=plan)` | |"
    " [which plans serve them](docs/how-to/ask-later.md) | | |",
    "| endless decoding | `streamingllm @ tokens=1024` | fixed | forgets the middle;"
    " [beyond memory](docs/how-to/beyond-memory.md) | | |",
)
"""What README says below them."""
NOVELS, NEEDLES = "novels, ΔNLL", "needle, points"
ASKED = {NEEDLES: "needles", "multi-key, points": "keys"}
"""Columns of the suite whose right answers are told, and what one asks for; `NOVELS` is told as nats."""
_BLOCK = re.compile(
    r"(<!-- real models: (start|all|texts|sets|needles|field|questions|the run|of (.+?)) -->\n).*?"
    r"(<!-- /real models -->)",
    re.DOTALL,
)
_EMBEDDED = re.compile(r"<!-- measured: ([^/]+?) -->\n(.*?)<!-- /measured -->", re.DOTALL)
BUDGETS = (0.5, 0.25, 0.125, 0.0625)
_WIDTH = 118
_NAMED = 3
_ORDERS = (
    "loses less on novels than",
    "loses more on novels than",
    "finds more needles than",
    "finds fewer needles than",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one plan lost, on a real model or on the embedded one.

    Attributes:
        share: of the uncompressed bytes.
        group: the budget that it was cut to, among whose plans it is ranked; "codes" where nothing is evicted; "none".
        loss: nats a token of novels over 'full'.
        answers: shares of right answers, by what was asked; on the embedded model `NEEDLES` are all kinds together.
    """

    share: float
    group: float | str
    loss: Estimate | None
    answers: Mapping[str, Estimate]


def written(page: str, models: Mapping[str, Mapping[str, Row]], rankings: Mapping[str, Ranking]) -> str:
    """Return a page with all of its tables made anew.

    Args:
        page: as it is.
        models: the rows of each model, by the plan as it was asked for.
        rankings: of the suite `field` of each model.
    """

    def block(hit: re.Match[str]) -> str:
        made: dict[str, Callable[[], Iterator[str]]] = {
            "start": lambda: _start(models, rankings),
            "all": lambda: _all(models),
            "texts": lambda: _texts(models),
            "sets": _sets,
            "needles": _needles,
            "field": lambda: _field(rankings),
            "questions": _questions,
            "the run": lambda: _run(models, rankings),
        }
        lines = made[hit[2]]() if hit[3] is None else _verdict(hit[3], _embedded(page), models, rankings)
        return f"{hit[1]}{chr(10).join(lines)}\n{hit[4]}"

    return _BLOCK.sub(block, page)


@cache
def of_plan(plan: Plan) -> tuple[str, ...]:
    """Return a sentence for each real model on which a plan was measured, at whatever budgets; none where it was not.

    Args:
        plan: of whatever budget.
    """
    models, rankings = _published()
    wanted = _methods(plan)
    found = []
    for model in models:
        every = _on(model, models, rankings)
        text = next((text for text in every if _methods_of(text) == wanted), None)
        if text is not None:
            told = (*map(_told_at, every[text]), *_told_on_texts(model, wanted), *_told_later(model, wanted))
            found.append(f"{model}: {'; '.join(told)}.")
        elif wanted in (checked := read_checks().get(model, {})):
            found.append(f"{model}: {checked[wanted]}.")
    return tuple(found)


@cache
def read_checks(records: Path = ROOT / "docs" / "records") -> dict[str, dict[Plan, str]]:
    """Return what the check of each model found of each plan, in words, by the plan without its budget."""
    found: dict[str, dict[Plan, str]] = {}
    for name, folder in MODELS.items():
        if not (where := records / f"{folder}-check").is_dir():
            continue
        there = latest(read_records(where))
        for each in judged(there, MARGIN).values():
            methods, budget = _methods_of(each.plan), each.plan.partition(" @ ")[2]
            # The first of several budgets, which is the largest.
            if methods is not None and each.loss is not None:
                told = f"in a check of {each.windows} windows{budget and f' at `{budget}`'}, {_told(each.loss)}"
                found.setdefault(name, {}).setdefault(methods, told)
    return found


def _told_on_texts(model: str, methods: object) -> Iterator[str]:
    """Each loss on `TEXTS` of a plan of these methods, with its budget where it has one."""
    for file, called in TEXTS.items():
        for plan, loss in read_texts().get(model, {}).get(file, {}).items():
            if _methods_of(plan) == methods:
                budget = plan.partition(" @ ")[2]
                yield f"{called}{budget and f' at {budget}'} {_told(loss)}"


def _told_later(model: str, methods: object) -> Iterator[str]:
    """Right answers to later questions and what they lost, of each plan of these methods, with its budget."""
    asked = read_questions().get(model, {})
    for plan, each in asked.items():
        if plan != "full" and _methods_of(plan) == methods:
            budget, full = plan.partition(" @ ")[2], asked["full"]
            loss = _told(difference(each.values["nll"], full.values["nll"]))
            yield f"{LATER}{budget and f' at {budget}'} {_right(each)} (`full` {_right(full)}), their answers {loss}"


def _right(asked: Record) -> str:
    questions = asked.point["questions"]
    assert isinstance(questions, int) and asked.samples is not None
    return f"{round(questions * sum(asked.values['right']))} of {asked.samples * questions}"


@cache
def read_questions(records: Path = ROOT / "docs" / "records") -> dict[str, dict[str, Record]]:
    """Return what was asked of each plan after its context was compressed, by model and plan."""
    return {
        name: {
            each.label: each
            for each in latest(read_records(records / f"{folder}-questions"))
            if each.task == "ask" and each.error is None
        }
        for name, folder in MODELS.items()
        if (records / f"{folder}-questions").is_dir()
    }


@cache
def _published() -> tuple[dict[str, dict[str, Row]], dict[str, Ranking]]:
    return read(), read_rankings()


def read(records: Path = ROOT / "docs" / "records") -> dict[str, dict[str, Row]]:
    """Return the rows of each model whose records are there, by plan."""
    return {
        name: {row.label: row for row in summarise(read_records(records / folder)).rows}
        for name, folder in MODELS.items()
        if (records / folder).is_dir()
    }


def read_rankings(records: Path = ROOT / "docs" / "records") -> dict[str, Ranking]:
    """Return the ranking of each model whose records of the suite `field` are there."""
    found = {}
    for name, folder in MODELS.items():
        where = records / f"{folder}-field"
        if where.is_dir():
            ranking = rank(read_suite(where / "suites" / "field.toml"), latest(read_records(where)))
            assert ranking is not None
            found[name] = ranking
    return found


@cache
def read_texts(records: Path = ROOT / "docs" / "records") -> dict[str, dict[str, dict[str, Estimate]]]:
    """Return what plans lost on `TEXTS`, by model, text and plan, of each model that was measured there."""
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for name, folder in MODELS.items():
        if not (where := records / f"{folder}-texts").is_dir():
            continue
        there = [each for each in latest(read_records(where)) if each.error is None]
        full = {each.text: each for each in there if each.plan == "full"}
        found[name] = {text: {} for text in TEXTS}
        for each in there:
            if each.plan != "full" and each.text in full:
                sides = each.values["nll"], full[each.text].values["nll"]
                loss = difference(*sides, documents=documents_of(each))
                found[name][str(each.text)][each.label] = loss
    return found


@cache
def judgements(records: Path = ROOT / "docs" / "records") -> dict[tuple[str, str], dict[str, str]]:
    """Return what the report of each model's records says of each plan's loss: "shown", "harmful", or "not shown".

    Returns:
        by model and by "novels", one of `TEXTS` or `LATER`.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, folder in MODELS.items():
        if (records / folder).is_dir():
            found[name, "novels"] = _words(read_records(records / folder))
        if (records / f"{folder}-texts").is_dir():
            there = read_records(records / f"{folder}-texts")
            for text, called in TEXTS.items():
                found[name, called] = _words([each for each in there if each.text == text])
        if name in read_questions(records):
            found[name, LATER] = _words([*read_questions(records)[name].values()])
    return found


def _words(records: Sequence[Record]) -> dict[str, str]:
    run = summarise(records)
    return {
        each.row.label: "shown" if each.complete and each.shown else "harmful" if each.worse else "not shown"
        for each in judge(run.rows, run.measures, run.margins).judged
    }


def _judged(plan: str) -> str:
    """One word of a plan over all models and texts, as the report of their records has it."""
    words = {where: told.get(plan, "not shown") for where, told in judgements().items()}
    harmful: dict[str, list[str]] = {}
    for (model, text), word in words.items():
        if word == "harmful":
            harmful.setdefault(text, []).append(model)
    if harmful:
        return "harmful: " + "; ".join(f"{text} on {' and '.join(models)}" for text, models in harmful.items())
    return "safe" if {*words.values()} == {"shown"} else "not shown"


def _start(models: Mapping[str, Mapping[str, Row]], rankings: Mapping[str, Ranking]) -> Iterator[str]:
    yield f"| you want | start from | bytes | {' | '.join(f'at most lost on {name}' for name in models)} | judged |"
    yield "|---|---|---|" + "---|" * len(models) + "---|"
    for want, plan in START.items():
        rows = [rows.get(plan) for rows in models.values()]
        cells = [*(_at_most(name, plan, row) for name, row in zip(models, rows, strict=True)), _judged(plan)]
        yield f"| {want} | `{plan}` | {_bytes(rows)} | {' | '.join(cells)} |"
    yield from _eighth(rankings)
    yield from ALSO


def _eighth(rankings: Mapping[str, Ranking]) -> Iterator[str]:
    """The row of `EIGHTH`: upper ends on novels, right answers, and what the report says of this plan alone."""
    label, budget, written = EIGHTH
    if not rankings:
        return
    keeps, cells, harmed = set(), [], []
    for name, ranking in rankings.items():
        place = next(each for each in ranking.at(budget) if each.label == label)
        told = _of_place(ranking, place)
        assert told.loss is not None and told.loss.high is not None
        right = told.answers[NEEDLES]
        keeps.add(float(place.plan.partition(" @ keep=")[2]))
        cells.append(f"{told.loss.high:.3f}, -, -; {round(right.value * right.count)} of {right.count}")
        records = read_records(ROOT / "docs" / "records" / f"{MODELS[name]}-field")
        word = _words([each for each in records if each.label in ("full", place.plan)])[place.plan]
        harmed += [name] if word == "harmful" else []
    word = f"harmful, judged alone: novels on {' and '.join(harmed)}" if harmed else "not shown"
    plan = f"`{written} @ keep={min(keeps):.2f}` to {max(keeps):.2f}, by the model; or `fit`, above"
    yield f"| an eighth, of 2,048 tokens | {plan} | {100 * budget:g} % | {' | '.join(cells)} | {word} |"


def _at_most(model: str, plan: str, row: Row | None) -> str:
    """The upper ends of the losses on novels and `TEXTS`, and the right answers."""
    if row is None:
        return "-"
    there = read_texts().get(model, {})
    losses = [row.loss, *(there.get(text, {}).get(plan) for text in TEXTS)]
    highs = [None if each is None else each.high for each in losses]
    # No minus before a nought.
    told = ", ".join("-" if high is None else f"{round(high, 3) + 0.0:.3f}" for high in highs)
    return told if row.accuracy is None else f"{told}; {row.hits} of {row.accuracy.count}"


def _texts(models: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    there = read_texts()
    heads = [f"{name}, {text}" for name in there for text in ("novels", *TEXTS.values())]
    yield f"| plan | bytes | {' | '.join(heads)} |"
    yield "|---|---|" + "---|" * len(heads)
    plans = dict.fromkeys(plan for texts in there.values() for losses in texts.values() for plan in losses)
    rows = {plan: [models[name].get(plan) for name in there] for plan in plans}
    for plan in sorted(plans, key=lambda plan: -min((row.ratio or 9 for row in rows[plan] if row), default=9)):
        cells = []
        for name, row in zip(there, rows[plan], strict=True):
            losses = [None if row is None else row.loss, *(there[name][text].get(plan) for text in TEXTS)]
            cells += ["-" if each is None else _told(each) for each in losses]
        yield f"| `{plan}` | {_bytes(rows[plan])} | {' | '.join(cells)} |"


@cache
def read_sets(records: Path = ROOT / "docs" / "records") -> dict[tuple[str, str], dict[str, Record]]:
    """Return what was scored on `SETS`, by model and set, and by plan."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for name, model in MODELS.items():
        if (where := records / f"{model}-longbench").is_dir():
            there = [each for each in latest(read_records(where)) if each.error is None]
            for of in SETS:
                scored = {each.label: each for each in there if each.text == of}
                found |= {(name, of): scored} if scored else {}
    return found


def _sets() -> Iterator[str]:
    """Scores, of 100: of `full`, and of each plan less these."""
    for i, ((name, of), scored) in enumerate(read_sets().items()):
        full = scored["full"]
        if i:
            yield ""
        yield f"| {name}, {full.samples} examples: plan | bytes | {SETS[of]} |"
        yield "|---|---|---|"
        for plan, each in scored.items():
            assert each.bytes_held is not None and each.bytes_full is not None
            lost = difference(each.values["score"], full.values["score"], top=100.0)
            ends = lost.interval(1, signed=True)
            score = f"{fmean(full.values['score']):.1f}"
            told = score if each is full else f"{lost.value:+.1f}" + (f" ({ends})" if ends else "")
            yield f"| `{plan}` | {100 * each.bytes_held / each.bytes_full:.0f} % | {told} |"


@cache
def read_needles(
    records: Path = ROOT / "docs" / "records",
) -> dict[str, dict[tuple[str, int], dict[str, tuple[float, ...]]]]:
    """Return what was right, 1 or 0 of each document, by model, kind of `KINDS` and length, and plan."""
    found: dict[str, dict[tuple[str, int], dict[str, tuple[float, ...]]]] = {}
    for name, folder in MODELS.items():
        if (where := records / f"{folder}-needles").is_dir():
            for each in latest(read_records(where)):
                kind, length = each.point["kind"], each.point["length"]
                if each.error is None and kind in KINDS and isinstance(length, int):
                    of = found.setdefault(name, {}).setdefault((str(kind), length), {})
                    of[each.label] = (*of.get(each.label, ()), *each.values["hit"])
    return found


def _needles() -> Iterator[str]:
    """Right answers from texts of several lengths, where `full` has more than one."""
    columns = [
        (f"{name}: {KINDS[kind]} of {length:,}", hits)
        for name, there in read_needles().items()
        for (kind, length), hits in sorted(there.items(), key=lambda item: ([*KINDS].index(item[0][0]), item[0][1]))
        if sum(hits["full"]) > 1
    ]
    yield f"| plan | {' | '.join(head for head, _ in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for plan in dict.fromkeys(plan for _, hits in columns for plan in hits):
        cells = [f"{sum(hits[plan]):.0f} of {len(hits[plan])}" if plan in hits else "-" for _, hits in columns]
        yield f"| `{plan}` | {' | '.join(cells)} |"


def _all(models: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    yield f"| plan | bytes | {' | '.join(models)} |"
    yield "|---|---|" + "---|" * len(models)
    plans = dict.fromkeys(plan for rows in models.values() for plan, row in rows.items() if not row.is_full)
    least = {plan: min(r.ratio or 9 for rows in models.values() if (r := rows.get(plan))) for plan in plans}
    for plan in sorted(plans, key=lambda plan: -least[plan]):
        rows = [rows.get(plan) for rows in models.values()]
        yield f"| `{plan}` | {_bytes(rows)} | {' | '.join(map(_lost, rows))} |"


def _questions() -> Iterator[str]:
    """Questions that come after the compressed context, and what they lose, of each model that was asked."""
    for i, (name, asked) in enumerate(read_questions().items()):
        full = asked["full"]
        if i:
            yield ""
        yield f"| {name}: plan | bytes | questions right | documents with all right | nats a token of answers |"
        yield "|---|---|---|---|---|"
        for plan, each in sorted(asked.items(), key=lambda item: -(item[1].bytes_held or 0)):
            assert each.bytes_held is not None and each.bytes_full is not None
            loss = difference(each.values["nll"], full.values["nll"])
            told = f"{fmean(full.values['nll']):.3f}" if each is full else _told(loss)
            yield (
                f"| `{plan}` | {100 * each.bytes_held / each.bytes_full:.0f} % | {_right(each)} |"
                f" {round(sum(each.values['worst']))} of {each.samples} | {told} |"
            )


def _field(rankings: Mapping[str, Ranking]) -> Iterator[str]:
    heads = [f"{name}, {100 * budget:g} %" for name in rankings for budget in BUDGETS]
    yield f"| plan | {' | '.join(heads)} |"
    yield "|---|" + "---|" * len(heads)
    scores: dict[tuple[str, float, str], Mapping[str, RankedScore]] = {}
    for name, ranking in rankings.items():
        for budget in BUDGETS:
            for place in ranking.at(budget):
                # Of several plans of one name at a budget the first, which has most bytes.
                scores.setdefault((name, budget, place.label), place.scores)
    for label in dict.fromkeys(label for _, _, label in scores):
        cells = [_score(scores.get((name, budget, label))) for name in rankings for budget in BUDGETS]
        yield f"| {label} | {' | '.join(cells)} |"


def _score(scores: Mapping[str, RankedScore] | None) -> str:
    """Nats a token of novels over 'full' with their interval, and the share of needles that were found."""
    if not scores or (loss := scores.get("novels, ΔNLL")) is None:
        return "-"
    told = _told(loss.difference)
    hits = scores.get("needle, points")
    return f"{told}; {100 * hits.mean:.0f} %" if hits else told


def _run(models: Mapping[str, Mapping[str, Row]], rankings: Mapping[str, Ranking]) -> Iterator[str]:
    for model in models:
        columns = rankings[model].columns if model in rankings else ()
        novels = next((each.full for each in columns if each.label == NOVELS and each.full is not None), None)
        told = [f"novels {novels.value if novels else models[model]['full'].value('perplexity.nll'):.3f} nats"]
        for column in columns:
            if column.label in ASKED and column.full is not None:
                silent = ", which therefore say nothing" if column.silent else ""
                told.append(f"{_answered(column.full, ASKED[column.label])}{silent}")
        yield from _bullet(f"{model}, `full`: {', '.join(told)}.")


def _verdict(
    name: str,
    embedded: Mapping[str, Sequence[Measured]],
    models: Mapping[str, Mapping[str, Row]],
    rankings: Mapping[str, Ranking],
) -> Iterator[str]:
    every = {model: _by_label(rankings[model], models[model]) for model in models if model in rankings}
    plan = suite_rows().get(name)
    checked = {} if plan is None else {model: there.get(plan) for model, there in read_checks().items()}
    if not any(name in found or checked.get(model) for model, found in every.items()):
        yield "Not measured on a real model."
        return
    for model, found in every.items():
        if name not in found:
            yield from _bullet(f"{model}: {checked.get(model) or 'not measured'}.")
            continue
        told = f"{model}: {'; '.join(_told_at(each) for each in found[name])}."
        otherwise = "; ".join(_otherwise(name, found, embedded))
        otherwise = (
            f" Shown here, and the other way round by the embedded model's means: {otherwise}." if otherwise else ""
        )
        yield from _bullet(told + otherwise)


def _otherwise(
    name: str, found: Mapping[str, Sequence[Measured]], embedded: Mapping[str, Sequence[Measured]]
) -> Iterator[str]:
    """Clauses on the plans whose order is shown on a real model, and is another one by the embedded model's means."""
    for group in dict.fromkeys(each.group for each in found[name] if each.group != "none"):
        ours, there = _at(found[name], group), _at(embedded.get(name, ()), group)
        if ours is None or there is None:
            continue
        others: dict[str, list[str]] = {}
        for other in found:
            theirs, that = _at(found[other], group), _at(embedded.get(other, ()), group)
            if other == name or theirs is None or that is None:
                continue
            order = _order(ours.loss, theirs.loss)
            if order * _means(there.loss, that.loss) < 0:
                others.setdefault(f"loses {'less' if order < 0 else 'more'} on novels than", []).append(other)
            order = _order(ours.answers.get(NEEDLES), theirs.answers.get(NEEDLES))
            if order * _means(there.answers.get(NEEDLES), that.answers.get(NEEDLES)) < 0:
                others.setdefault(f"finds {'more' if order > 0 else 'fewer'} needles than", []).append(other)
        said = [f"{words} {_listed(others[words])}" for words in _ORDERS if words in others]
        if said:
            where = "among codes" if group == "codes" else f"at {100 * float(group):g} %"
            yield f"{where} it {' and '.join(said)}"


def _order(one: Estimate | None, other: Estimate | None) -> int:
    """-1 where the first is shown to be less, 1 where it is shown to be more: their intervals do not meet."""
    if one is None or one.low is None or one.high is None:
        return 0
    if other is None or other.low is None or other.high is None:
        return 0
    return (one.low > other.high) - (one.high < other.low)


def _means(one: Estimate | None, other: Estimate | None) -> int:
    return 0 if one is None or other is None else (one.value > other.value) - (one.value < other.value)


def _at(plans: Sequence[Measured], group: float | str) -> Measured | None:
    """Of several of one budget the one with most bytes."""
    return max((each for each in plans if each.group == group), key=lambda each: each.share, default=None)


def _by_label(ranking: Ranking, rows: Mapping[str, Row]) -> dict[str, list[Measured]]:
    """What a model's records say of each row of the suite: as it was cut to its bytes, or as it was measured alone."""
    found: dict[str, list[Measured]] = {}
    for place in sorted(ranking.places, key=lambda each: -(each.share or 0)):
        if place.scores and place.share is not None:
            found.setdefault(place.label, []).append(_of_place(ranking, place))
    alone: dict[Plan | None, list[Measured]] = {}
    for text, row in rows.items():
        if not row.is_full and row.loss is not None:
            alone.setdefault(_methods_of(text.partition(" @ ")[0]), []).append(_of_row(row))
    return {label: alone[plan] for label, plan in suite_rows().items() if plan in alone} | found


@cache
def suite_rows() -> dict[str, Plan | None]:
    """Return the plan of each row of the suite as it is today, without its budget."""
    tables = read_suite("field").tables_for("demo")
    return {row.labels[0]: _methods_of(row.cells[0].plan.partition(" @ ")[0]) for table in tables for row in table.rows}


def _on(
    model: str, models: Mapping[str, Mapping[str, Row]], rankings: Mapping[str, Ranking]
) -> dict[str, list[Measured]]:
    """What a model's records say of each plan, by its text without a budget."""
    found: dict[str, list[Measured]] = {}
    for place in sorted(rankings[model].places if model in rankings else (), key=lambda each: -(each.share or 0)):
        if place.scores and place.share is not None:
            found.setdefault(place.plan.partition(" @ ")[0], []).append(_of_place(rankings[model], place))
    for text, row in models[model].items():
        if not row.is_full and row.loss is not None:
            found.setdefault(text.partition(" @ ")[0], []).append(_of_row(row))
    return found


def _of_place(ranking: Ranking, place: Place) -> Measured:
    counts = {column.label: column.full.count for column in ranking.columns if column.full and not column.silent}
    assert place.share is not None
    return Measured(
        share=place.share,
        group="codes" if " @ " not in place.plan else "none" if place.budget is None else place.budget,
        loss=place.scores[NOVELS].difference if NOVELS in place.scores else None,
        answers={
            label: wilson(place.scores[label].mean * counts[label], counts[label])
            for label in ASKED
            if label in place.scores and label in counts
        },
    )


def _of_row(row: Row) -> Measured:
    answers = {} if row.accuracy is None else {NEEDLES: row.accuracy}
    group = "none" if " @ " in row.label else "codes"
    return Measured(share=row.ratio or 1.0, group=group, loss=row.loss, answers=answers)


def _embedded(page: str) -> dict[str, list[Measured]]:
    """What a page says of each plan on the embedded model."""
    found: dict[str, list[Measured]] = {}
    for name, body in _EMBEDDED.findall(page):
        for line in " ".join(body.split()).split("- ")[1:]:
            share = re.match(r"([\d.]+) % of the bytes", line)
            loss = re.search(r"novels (\S+) \((\S+) to (\S+)\)", line)
            right = re.search(r"answers together (\d+) % right", line)
            if share is None or loss is None:
                continue
            held = float(share[1]) / 100
            codes = f"\n### {name}\n" in page.partition("\n## Codes, nothing evicted\n")[2].partition("\n## ")[0]
            group = "codes" if codes else min((b for b in BUDGETS if held <= 1.02 * b), default="none")
            made = Measured(
                share=held,
                group=group,
                loss=Estimate(float(loss[1]), float(loss[2]), float(loss[3]), 0),
                answers={} if right is None else {NEEDLES: Estimate(float(right[1]) / 100, None, None, 0)},
            )
            found.setdefault(name, []).append(made)
    return found


def _methods(plan: Plan) -> Plan:
    return replace(plan, tokens=None, keep=0.5, bytes=None) if plan.evicts else plan


@cache
def _methods_of(text: str) -> Plan | None:
    """The plan of a text without its budget; None where this kvtailor does not have it."""
    for written in (text, f"{text} @ keep=0.5"):
        try:
            return _methods(Plan.parse(written))
        except PlanError:
            continue
    return None


def _told_at(each: Measured) -> str:
    told = [] if each.loss is None else [f"novels {_told(each.loss)}"]
    told += [_answered(each.answers[label], of) for label, of in ASKED.items() if label in each.answers]
    return f"{100 * each.share:.1f} % of the bytes, {', '.join(told)}"


def _answered(right: Estimate, of: str) -> str:
    ends = right.interval(0, scale=100)
    return f"{round(right.value * right.count)} of {right.count} {of} ({ends} %)"


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(quoted[:_NAMED]) + more


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _told(loss: Estimate) -> str:
    ends = loss.interval(3, signed=True)
    return f"{loss.value:+.3f}" + (f" ({ends})" if ends else "")


def _bytes(rows: list[Row | None]) -> str:
    shares = sorted({round(100 * row.ratio) for row in rows if row and row.ratio is not None})
    return f"{' to '.join(map(str, (shares[0], shares[-1])[: len(set(shares))]))} %" if shares else "-"


def _lost(row: Row | None) -> str:
    """Nats a token over 'full' with both ends, and the answers that were right."""
    if row is None or row.loss is None:
        return "-"
    told = _told(row.loss)
    return told if row.accuracy is None else f"{told}; {row.hits} of {row.accuracy.count}"


if __name__ == "__main__":
    _models, _rankings = read(), read_rankings()
    for _page in PAGES:
        _page.write_text(written(_page.read_text(encoding="utf-8"), _models, _rankings), encoding="utf-8")
        print(_page.relative_to(ROOT))
