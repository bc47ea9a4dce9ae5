"""The page of a fit, made from the result alone: the plan, every choice, the proof, and the evidence behind them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.page import (
    DASH,
    Block,
    Facts,
    Front,
    HeatMap,
    Maps,
    Page,
    Part,
    Plan,
    Point,
    Table,
    Text,
    Texts,
    question,
    render,
)
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid
from kvtailor.bench.report.words import milliseconds, significant
from kvtailor.encode.contract import CodecContext
from kvtailor.errors import KvtailorError
from kvtailor.fitting.answer import Answer, FrontPoint
from kvtailor.fitting.layers import PLAIN, LayerMap
from kvtailor.fitting.verdict import Family, Judged
from kvtailor.ops.sizes import byte_text, bytes_of, write_bytes
from kvtailor.plan import Plan as ParsedPlan
from kvtailor.presets import FULL

__all__ = ["page"]

_ORIGINS = {
    "layers": ("fitted by layers", "p0", "circle"),
    "words": ("fitted in words", "p2", "diamond"),
    "preset": ("preset", "p1", "triangle"),
    "fitted": ("fitted", "p4", "square"),
    "full": ("uncompressed", "pf", "square"),
}
"""What the page calls the origins of plans, and how it draws them."""
_AXIS = "KL on text and answers of the search, nats per token"


def page(found: Answer) -> str:
    """Return the page of a fit as text."""
    plans, chosen = _plans(found), found.chosen
    points = [
        Point(plans[each.plan].number, each.bytes, each.bytes / found.full, *_ends_of(each))
        for each in found.front
        if _drawable(each)
    ]
    asked, memory = found.question, found.question.memory or chosen.bytes
    search = question(
        "the search",
        _AXIS,
        "nats per token (KL)",
        found.full,
        points,
        axis_short="KL, text + answers, nats/token",
        log="always",
        limit=asked.memory,
        limit_text=None if asked.memory is None else byte_text(asked.memory),
        loss_limit=asked.loss,
        plan=plans[found.plan].number,
    )
    middle = (chosen.seconds or {}).get("median")
    return render(
        Page(
            title=f"{found.model}: {_in_words(found)}",
            about=f"{found.dtype}; the uncompressed cache has {byte_text(found.full)} at this load.",
            advice=found.sentence,
            source="unseen",
            facts=[
                ("bytes", f"{byte_text(chosen.bytes)}, {_percent(chosen.bytes, found.full)}"),
                ("loss on unseen text", f"{_interval(chosen.loss)} nats" if chosen.nll else DASH),
                ("right answers", f"{chosen.right} of {chosen.asked}" if chosen.asked else DASH),
                ("a decoded token", DASH if middle is None else f"{milliseconds(middle)} ms"),
            ],
            spellings=[
                ("plan", "The plan", found.plan),
                ("python", "Python", found.python),
                ("command", "Command line", f"kvtailor run --model {found.model} --plan fitted.toml"),
                ("toml", "TOML, as in fitted.toml", found.toml()),
            ],
            parts=list(_parts(found, plans, bool(points))),
            plans=plans,
            questions=[search] if points else [],
            memory=(memory, _spelled(memory)),
        )
    )


def _parts(found: Answer, plans: Mapping[str, Plan], drawn: bool) -> Iterator[Part]:
    """The parts in their order; one without numbers is a sentence."""
    yield Part("front", "Bytes against loss", list(_front(found, plans, drawn)), source="search")
    windows = max((len(each.nll) for each in found.proof), default=0)
    note = (
        f"The best few and the best presets, on {windows} windows of text and on documents that the search never saw. "
        "All plans have the same windows, so that their losses are compared in pairs. A family of questions is 'seen' "
        "where the search had other documents of it; below its right answers are the nats per token of the answers. In "
        "'the plan minus this one' a number below 0 means that the plan loses less; 'not told apart' means that the "
        "interval has 0 in it."
    )
    yield Part("proof", "The proof", list(_proof(found, plans)), note=note, source="unseen")
    yield _sensitivity(found)
    yield _tokens(found)
    yield _additivity(found)
    yield _sizes(found)
    yield _engines(found)
    if found.regret is not None:
        note = "What a choice by text alone would have cost in right answers."
        yield Part("regret", "Regret", [found.regret], note=note, source="unseen")
    if found.notes:
        yield Part("notes", "Notes", [Texts(texts=found.notes)])
    facts = [(name, f"{count:,}") for name, count in found.counts.items()]
    facts.append(("seconds in all", DASH if found.seconds is None else f"{found.seconds:,.1f}"))
    facts += [("effort", found.effort), ("random state", str(found.state)), ("dtype", found.dtype)]
    yield Part("measured", "What was measured", [Facts(facts=facts)])


def _plans(found: Answer) -> dict[str, Plan]:
    """Each plan by its text: the front from the fewest bytes up, then what the proof alone measured."""
    ranked = sorted(found.front, key=lambda each: (each.bytes, each.loss.value))
    proved = {each.plan: each for each in found.proof if each.error is None and each.nll}
    every: dict[str, FrontPoint | Judged] = {each.plan: each for each in found.proof if each.origin != FULL}
    order = dict.fromkeys([*(each.plan for each in ranked), *every])
    every |= {each.plan: each for each in ranked}
    plans = {}
    for number, plan in enumerate(order, 1):
        each = every[plan]
        words, kind, shape = _ORIGINS.get(each.origin, (each.origin, "p5", "square"))
        told = [f"{words.capitalize()}."]
        if isinstance(each, FrontPoint):
            told.append(f"Measured on {each.loss.count} pieces of the search.")
        if plan in proved:
            loss = _interval(proved[plan].loss)
            told.append(f"In the proof it loses {loss} nats per token to the full cache, on unseen text.")
        else:
            told.append("It was not in the proof.")
        plans[plan] = Plan(
            number=str(number), label=each.label, plan=plan, kind=kind, shape=shape, group=words, told=tuple(told)
        )
    return plans


def _drawable(each: FrontPoint) -> bool:
    """Whether a point has a place on two logarithmic axes: its bytes were measured, and its loss is a number."""
    return each.bytes > 0 and all(math.isfinite(end) for end in _ends_of(each) if end is not None)


def _ends_of(each: FrontPoint) -> tuple[float, float | None, float | None]:
    return each.loss.value, each.loss.low, each.loss.high


def _front(found: Answer, plans: Mapping[str, Plan], drawn: bool) -> Iterator[Block | str]:
    if not found.front:
        yield "The search measured no plan at several memories."
        return
    missing = ""
    if lacking := sum(not _drawable(each) for each in found.front):
        missing = f" {lacking} plans of the table have no bytes or no finite loss, so they are not in the picture."
    if found.plan not in {each.plan for each in found.front}:
        missing += " The plan itself was measured by the proof alone, so it is not among these points."
    note = (
        "Bytes against loss, of plans that were measured on the pieces of the search; bars are 95 % intervals. The "
        "line joins the front: no other plan has fewer bytes and loses less. The search chose among these plans by "
        f"these very numbers, so the proof below is what counts.{missing}"
    )
    groups = list(Counter(plans[each.plan].group for each in found.front).items())
    yield Front(
        note=note,
        size="Of the whole cache at this load: such as 300KiB, 1.5MiB, 2GiB or 25%.",
        groups=groups,
        chart=drawn,
    )
    ranked = sorted(found.front, key=lambda each: int(plans[each.plan].number))
    heads = (
        "plan",
        "bytes\n% of the uncompressed",
        "loss\nKL on text, answers on top; nats per token, 95 %",
        "pieces",
        "made for",
    )
    rows = tuple(
        (
            _named(each),
            _bytes(each.bytes, found.full),
            _estimate(each.loss),
            Cell(text=str(each.loss.count), value=each.loss.count),
            Cell(text=byte_text(each.memory), value=each.memory),
        )
        for each in ranked
    )
    tags = {each.plan: _tag(found, each, best=each.best) for each in ranked}
    names = tuple(each.plan for each in ranked)
    grid = Grid(name="front", title="all plans that the search measured", heads=heads, rows=rows, plans=names)
    yield Table(grid=grid, tags=tags)


def _proof(found: Answer, plans: Mapping[str, Plan]) -> Iterator[Block | str]:
    """The best few and the best presets on text and tasks that the search never saw."""
    if found.needed is not None:
        yield f"About {found.needed:,} windows would tell the plan from the best preset."
    families = {family.name: family for each in found.proof for family in each.families}
    timed = any(each.seconds for each in found.proof)
    ranked = sorted(found.proof, key=lambda each: (each.origin != FULL, each is not found.chosen))
    heads = (
        "plan",
        "bytes\n% of the uncompressed",
        "loss\nnats per token more than full, 95 %",
        "the plan minus this one\nnats per token, paired; 95 % over all pairs of plans",
        "the plan is",
        *(f"{name}\n{_family_note(family)}" for name, family in families.items()),
        *(["a token\nms, median and quartiles"] if timed else []),
    )
    rows = tuple(
        (
            _named(each),
            _bytes(each.bytes, found.full),
            *_compared(found, each),
            *(_right(each, name) for name in families),
            *([_time(each.seconds)] if timed else []),
        )
        for each in ranked
    )
    classes = {each.plan: "full" if each.origin == FULL else "chosen" for each in (*ranked[:1], found.chosen)}
    names = tuple(each.plan for each in ranked)
    grid = Grid(name="proof", title="the plans of the proof", heads=heads, rows=rows, plans=names)
    yield Table(grid=grid, tags={each.plan: _tag(found, each) for each in ranked}, classes=classes)


def _named(each: FrontPoint | Judged) -> Cell:
    text = each.plan if each.label == each.plan else f"{each.label}: {each.plan}"
    return Cell(text=text, value=each.label)


def _tag(found: Answer, each: FrontPoint | Judged, *, best: bool = False) -> str:
    words = _ORIGINS.get(each.origin, (each.origin,))[0]
    return ", ".join([words, *["the plan"] * (each.plan == found.plan), *["on the front"] * best])


def _bytes(count: int, full: int) -> Cell:
    """Bytes and their share; no cache has 0, so that 0 stands for what was not measured."""
    return Cell(text=byte_text(count), value=count, interval=_percent(count, full)) if count else EMPTY


def _estimate(found: Estimate) -> Cell:
    return Cell(text=significant(found.value), value=found.value, interval=_ends(found))


def _compared(found: Answer, each: Judged) -> tuple[Cell, Cell, Cell]:
    """The loss, its paired difference, and what that says."""
    if each.error is not None:
        return EMPTY, EMPTY, Cell(text=f"not measured: {each.error}")
    if each.origin == FULL:
        return Cell(text="reference", value=0.0), EMPTY, EMPTY
    loss = _estimate(each.loss) if each.nll else EMPTY
    if each is found.chosen:
        return loss, EMPTY, Cell(text="the plan")
    difference = found.against.get(each.label)
    told = found.told.get(each.label)
    return loss, EMPTY if difference is None else _estimate(difference), Cell(text=told) if told else EMPTY


def _right(each: Judged, name: str) -> Cell:
    own = next((family for family in each.families if family.name == name), None)
    if own is None or not own.hits:
        return EMPTY
    answers = f"{significant(fmean(own.nll))} nats" if own.nll else None
    return Cell(text=f"{sum(own.hits):g} of {len(own.hits)}", value=fmean(own.hits), interval=answers)


def _family_note(family: Family) -> str:
    seen = "seen family" if family.seen else "unseen family"
    return f"right answers, {seen}" + ("" if family.counts else "; not counted: full fails it")


def _time(seconds: Mapping[str, float | None] | None) -> Cell:
    middle = (seconds or {}).get("median")
    if seconds is None or middle is None:
        return EMPTY
    low, high = seconds.get("q1"), seconds.get("q3")
    quartiles = None if low is None or high is None else f"{milliseconds(low)} to {milliseconds(high)}"
    return Cell(text=milliseconds(middle), value=middle, interval=quartiles)


def _sensitivity(found: Answer) -> Part:
    title, layers = "What each layer loses by itself", found.layers
    if layers is None:
        return Part("layers", title, ["Stage 1 did not run, so no layer was measured by itself."])
    kept = _kept(layers)
    sides = [("keys", _without_first(layers.keys)), ("values", _without_first(layers.values))]
    shade = _log_shade([value for _, rows in (*sides, ("kept", kept)) for _, row in rows for value in row])
    widths = [f"{width} bits" for width in layers.widths[1:]]
    shares = [f"{100 * share:g} %" for share in layers.shares[1:]]
    asked = [(name, f"{name}: bits of an element", widths, rows) for name, rows in sides]
    asked.append(("kept", f"share of the tokens kept by {layers.score}", shares, kept))
    maps = [
        HeatMap(
            caption=caption,
            across="layer",
            columns=columns,
            rows=[label for label, _ in rows],
            cells=[
                [
                    (_brief(value), shade(value), f"layer {label}, {name}, {column}: {value:.6g} nats per token")
                    for column, value in zip(columns, row, strict=True)
                ]
                for label, row in rows
            ],
        )
        for name, caption, columns, rows in asked
        if columns
    ]
    note = (
        "Nats per token, KL to the full cache, where that layer alone is compressed in that way. The mean of "
        f"{layers.pieces} pieces. Darker loses more; one logarithmic scale for all maps. Layers are counted from 0 "
        f"over those that are compressed. {'Unencoded' if layers.widths[:1] == (PLAIN,) else 'The first width'} and "
        "all tokens kept lose nothing by definition, and are left out."
    )
    return Part("layers", title, [Maps(maps=maps)], note=note, source="search")


def _without_first(side: Sequence[Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    return [(str(layer), row[1:]) for layer, row in enumerate(side)]


def _kept(layers: LayerMap) -> list[tuple[str, Sequence[float]]]:
    alone = all(len(groups) == 1 for groups in layers.kept)
    return [
        (str(layer) if alone else f"{layer}, head {group}", row[1:])
        for layer, groups in enumerate(layers.kept)
        for group, row in enumerate(groups)
    ]


def _log_shade(values: Sequence[float]) -> Callable[[float], float]:
    """Return the function from a loss to how dark it is, 0 to 1, on a logarithmic scale over all losses."""
    above = [value for value in values if value > 0]
    low, high = (math.log(min(above)), math.log(max(above))) if above else (0.0, 0.0)

    def shade(value: float) -> float:
        if value <= 0:
            return 0.0
        return 0.05 + 0.95 * (math.log(value) - low) / (high - low) if high > low else 0.5

    return shade


def _brief(value: float) -> str:
    """Two figures in as little space as possible: 0.012, 3.1e-5."""
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.2g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def _tokens(found: Answer) -> Part:
    """What each layer and head holds under the plan."""
    title, held, codecs = "What each layer got", found.tokens_by_head, _codecs(found)
    if not held:
        return Part(
            "tokens",
            title,
            blocks=["How many tokens each layer and head holds was not measured."],
        )
    total = sum(sum(row) for row in held)
    most = max((sum(row) for row in held), default=0.0) or 1.0
    top = max((value for row in held for value in row), default=0.0) or 1.0
    count = max(len(row) for row in held)
    rows = []
    for layer, row in enumerate(held):
        share, mean = sum(row) / total if total else 0.0, sum(row) / max(1, len(row))
        codec = codecs[layer] if codecs is not None and layer < len(codecs) else None
        rows.append(
            (
                Cell(text=str(layer), value=layer),
                EMPTY if codec is None else Cell(text=codec),
                Cell(text=f"{100 * share:.1f} %", value=share, shade=sum(row) / most),
                Cell(text=f"{mean:,.1f}".removesuffix(".0"), value=mean) if row else EMPTY,
                *(Cell(text=f"{value:,.0f}", value=value, shade=value / top) for value in row),
                *[EMPTY] * (count - len(row)),
            )
        )
    note = (
        f"Tokens that the plan held of one row's {found.question.context:,} after the prompt, by layer and kv head, as "
        "measured in the proof. Bytes are recorded for the whole cache only; what a layer's tokens are stored as is "
        "the plan's own setting."
    )
    heads = (
        "layer",
        "stored as",
        "share of all tokens held",
        "tokens\nmean head",
        *(f"head {i}" for i in range(count)),
    )
    names = tuple(str(layer) for layer in range(len(held)))
    grid = Grid(name="tokens", title="tokens by layer and head", heads=heads, rows=tuple(rows), plans=names)
    return Part("tokens", title, [Table(grid=grid, numbered=False)], note=note, source="unseen")


def _codecs(found: Answer) -> list[str] | None:
    """What each layer is stored as, in the plan language; None where the plan has another number of layers."""
    count = len(found.tokens_by_head)
    codec = ParsedPlan.parse(found.plan).encode
    try:
        each = [codec.for_layer(CodecContext(layer=layer, layers=count)) for layer in range(count)]
    except (KvtailorError, ValueError, IndexError):
        return None
    return ["as it is" if own.exact else str(ParsedPlan(encode=own)) for own in each]


def _additivity(found: Answer) -> Part:
    title, added = "Do the losses of layers add up?", found.additivity
    if added is None:
        why = "stage 1 did not run" if found.layers is None else "there is no optimum of stage 1 for this question"
        return Part("additivity", title, [f"Not measured: {why}."])
    count = "" if found.layers is None else f", the mean of {found.layers.pieces} pieces"
    facts = [
        ("sum of its layers' losses", significant(added.predicted)),
        ("measured", significant(added.measured)),
        ("measured is", DASH if added.ratio is None else f"{significant(added.ratio)} times"),
    ]
    note = "Stage 1 assumes that the losses of layers, each measured alone, add up. This is how far they do."
    of = Text(text=f"Nats per token{count}, of the optimum of stage 1:", code=added.plan)
    return Part("additivity", title, [Facts(facts=facts), of], note=note, source="search")


def _sizes(found: Answer) -> Part:
    title = "The plan at other contexts and batches"
    if not found.sizes:
        return Part("sizes", title, ["No other sizes were computed."])
    known = {(context, batch): (size, full) for context, batch, size, full in found.sizes}
    contexts, batches = sorted({each[0] for each in known}), sorted({each[1] for each in known})
    rows = []
    for context in contexts:
        sizes = [known.get((context, batch)) for batch in batches]
        cells = [
            EMPTY
            if size is None
            else Cell(text=byte_text(size[0]), value=size[0], interval=f"{_percent(*size)} of {byte_text(size[1])}")
            for size in sizes
        ]
        rows.append((Cell(text=f"{context:,}", value=context), *cells))
    heads = ("tokens", *(f"{batch:,} row{'s' if batch > 1 else ''}" for batch in batches))
    names = tuple(map(str, contexts))
    grid = Grid(name="sizes", title=title, heads=heads, rows=tuple(rows), plans=names)
    note = "From closed forms, with the same plan. What it loses at another context was not measured."
    table = Table(grid=grid, numbered=False, classes={str(found.question.context): "asked"})
    return Part("sizes", title, [table], note=note, source="computed")


def _engines(found: Answer) -> Part:
    rows = tuple(
        (
            Cell(text=each.engine),
            *(Cell(text=text) if text else EMPTY for text in (each.setting, f"{each.lacks} {each.skipping}".strip())),
        )
        for each in found.engines
    )
    grid = Grid(
        name="engines",
        title="Nearest settings of other engines",
        heads=("engine", "nearest setting", "what it lacks"),
        rows=rows,
        plans=tuple(each.engine for each in found.engines),
    )
    note = (
        "A neighbour of the plan and not the plan: nothing of what was measured here is true of it. A dash under "
        "'nearest setting': that engine has none that comes near."
    )
    return Part("engines", grid.title, [Table(grid=grid, numbered=False)], note=note, source="documented")


def _percent(part: float, whole: float) -> str:
    """A share of a whole."""
    return f"{significant(100 * part / whole)} %" if whole else DASH


def _ends(found: Estimate) -> str | None:
    """The interval of an estimate; None where there is none."""
    if found.low is None or found.high is None:
        return None
    return f"{significant(found.low)} to {significant(found.high)}"


def _interval(found: Estimate) -> str:
    """An estimate with its interval, in nats."""
    return f"{significant(found.value)} ({_ends(found) or 'no interval: too few samples'})"


def _spelled(memory: int) -> str:
    """A size as a reader would write it, where that is exact."""
    try:
        exact = bytes_of(byte_text(memory)) == memory
    except ValueError:
        exact = False
    return byte_text(memory) if exact else write_bytes(memory)


def _in_words(found: Answer) -> str:
    """The question as a sentence without its verb."""
    asked = found.question
    limits = []
    if asked.memory is not None:
        limits.append(f"in {byte_text(asked.memory)}, {_percent(asked.memory, found.full)} of the uncompressed bytes")
    bounds = []
    if asked.loss is not None:
        bounds.append(f"at most {asked.loss:g} nats per token lost")
    if asked.points is not None:
        bounds.append(f"at most {asked.points:g} points of right answers lost in any family")
    if asked.seconds is not None:
        bounds.append(f"at most {1e3 * asked.seconds:g} ms for a decoded token")
    if bounds:
        limits.append(f"with {' and '.join(bounds)}")
    goal = {"loss": "the least loss", "bytes": "the fewest bytes", "time": "the least time for a token"}[asked.aim]
    rows = f"{asked.batch:,} rows" if asked.batch > 1 else "1 row"
    return f"{goal} {', '.join(limits)}, at {asked.context:,} tokens and {rows}"
