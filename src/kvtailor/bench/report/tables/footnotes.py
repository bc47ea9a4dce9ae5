"""What a reader must know to judge the numbers: the sentences below a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtailor.bench import checks
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.statistics import FEWEST
from kvtailor.bench.report.points import Series, base, named, series_of, texts_together
from kvtailor.bench.report.table import OWN, Row, asked_of_both
from kvtailor.bench.report.tables.quality import Measure, documents_over, official_is_mean
from kvtailor.bench.report.verdict.verdict import beats_full, beyond_the_model
from kvtailor.bench.schema import Record
from kvtailor.presets import FULL

__all__ = ["footnotes"]

_AS_MUCH = 0.99
_COMPARED = [name for name, task in KINDS.items() if task.by_sample]
"""Tasks whose records have a number for each sample, so that plans can be compared sample by sample."""


def footnotes(
    records: Sequence[Record], rows: Sequence[Row], measures: Sequence[Measure], *, others: int = 0
) -> Iterator[str]:
    """What the numbers rest on, whole sentences.

    Args:
        records: of one model.
        rows: from `rows_of`.
        measures: from `measures_of`.
        others: records that are left out because they are of another model, dtype or device.
    """
    if others:
        yield (
            f"Left out: {others} records of another model, dtype or device than the one measured last. Put each in a "
            "folder of its own to see them."
        )
    yield from _of_what(records)
    yield from _unequal_samples(records)
    yield from _idle_plans(records)
    yield from checks.warnings_of(records)
    yield from _about_loss(records)
    for task in ("fidelity", "speed", "memory", "capacity"):
        yield from _which_point(series_of(records, task))
    full = next((row for row in rows if row.is_full), None)
    yield from _about_needles(records, full)
    if any(row.recall is not None for row in rows):
        yield "recall: of answers with several parts, the share that the greedy continuation contains, in any order."
    yield from _asked_less(records, rows)
    yield from _about_sets(records)
    hard = [measure.name for measure in measures if full is not None and beyond_the_model(measure, full)]
    if hard:
        yield f"'full' itself gets next to nothing right in {'; '.join(hard)}: that decides nothing about the plans."
    yield from _about_fidelity(records)
    yield from _about_memory(records)
    yield from _about_reading(records)
    yield from _about_time(records)
    surprising = [row.label for row in rows if not row.is_full and beats_full(row)]
    if surprising:
        yield (
            f"Better than 'full' beyond chance: {', '.join(surprising)}. Compression should not do that: look twice "
            "at the text."
        )
    if len([row for row in rows if row.loss is not None]) > 3:
        yield "Each interval is for one plan by itself: the best of several looks a little better than it is."
    yield from _noted(records, rows)


def _about_loss(records: Sequence[Record]) -> Iterator[str]:
    texts = texts_together(records, "perplexity")
    if texts:
        scored, point = [next(iter(each.records.values())) for each in texts], texts[0].point
        names = _listed([str(each.text) for each in scored])
        yield (
            f"ΔNLL: nats per token against 'full' {_interval_words(scored)} of {names} "
            f"({point['context']} tokens compressed, the next {point['continuation']} scored on what is "
            f"left, {sum(each.tokens_scored or 0 for each in scored)} tokens in all, the same for every plan)."
        )
        if sum(each.samples or 0 for each in scored) < 50:
            yield (
                "Fewer than 50 windows: enough for a look, too few for a claim. "
                "Use kvtailor bench --windows 50, or more."
            )
    yield from _which_texts(series_of(records, "perplexity"), texts)


def _about_needles(records: Sequence[Record], full: Row | None) -> Iterator[str]:
    needles = [r for r in records if r.task == "needle" and r.error is None]
    if not needles:
        return
    lengths = sorted({int(str(r.point["length"])) for r in needles})
    kinds = ", ".join(dict.fromkeys(str(r.point["kind"]) for r in needles))
    places = {bool(r.point.get("question_outside")) for r in needles}
    where = "inside or outside of" if len(places) > 1 else "outside of" if True in places else "inside"
    yield (
        f"needle: answers exactly right over {kinds} documents of {' and '.join(map(str, lengths))} tokens, "
        f"question {where} the compressed context; 95 % Wilson intervals."
    )
    if full is not None and full.accuracy is not None and full.accuracy.value < 0.5:
        yield (
            f"'full' itself answers {full.hits} of {full.accuracy.count}: in that column the model is the limit "
            "before any cache is."
        )


def _about_fidelity(records: Sequence[Record]) -> Iterator[str]:
    fidelity = base(series_of(records, "fidelity"))
    if fidelity is not None:
        compared = next(iter(fidelity.records.values()))
        yield (
            f"KL: nats of KL(full || plan) per token, top-1: tokens of which both find the same most likely; "
            f"{compared.tokens_scored} tokens of {compared.samples} windows of {compared.text}, "
            f"{compared.point['context']} tokens compressed before them."
        )


def _noted(records: Sequence[Record], rows: Sequence[Row]) -> Iterator[str]:
    """What the records note of plans, each note once for all that have it, and what has no number."""
    there = [record for record in records if record.plan_hash != OWN]
    places = dict.fromkeys((record.task, record.text) for record in there)
    noted: dict[tuple[str, tuple[tuple[str, str | None], ...]], list[str]] = {}
    for label in sorted({record.label for record in there}):
        own = [record for record in there if record.label == label]
        for note in sorted({note for record in own for note in record.notes}):
            here = {(record.task, record.text) for record in own if note in record.notes}
            noted.setdefault((note, tuple(each for each in places if each in here)), []).append(label)
    for (note, at), labels in sorted(noted.items(), key=lambda pair: pair[0][0]):
        everyone = len(labels) == len([row for row in rows if row.plan_hash != OWN])
        where = _listed([_of_task(each, places) for each in at]) if len(at) < len(places) else ""
        # A note that begins with the name of its task says where it is of.
        where = "" if all(note.startswith(f"{task}:") for task, _ in at) else where
        who = "" if everyone else ", ".join(labels)
        beginning = " on ".join(part for part in (who, where) if part)
        yield f"{beginning}: {note}" if beginning else note
    for row in rows:
        for error in row.errors:
            if row.plan_hash != OWN:
                yield f"{row.label} has no number for {error}"


def _of_task(place: tuple[str, str | None], places: Iterable[tuple[str, str | None]]) -> str:
    """Return a task in words, with the text where it has several."""
    task, text = place
    return task if text is None or sum(name == task for name, _ in places) == 1 else f"{task} {text}"


def _of_what(records: Sequence[Record]) -> Iterator[str]:
    """Of what a share of bytes is."""
    dtypes = {(record.held_in, record.dtype) for record in records if record.bytes_full}
    if len(dtypes) == 1:
        held, own = dtypes.pop()
        more = "; of one in 16 bits they are twice as large" if held == "float32" else ""
        model = " as this model" if held == own else f", where this model computes in {own}"
        yield f"Shares of bytes are of a cache of the same tokens without compression, in {held}{model}{more}."


def _listed(names: Sequence[str]) -> str:
    """Names with commas between; of many, the first ones and how many there are."""
    several = list(dict.fromkeys(names))
    return ", ".join(several) if len(several) <= 8 else f"{', '.join(several[:6])} and {len(several) - 6} others"


def _interval_words(scored: Sequence[Record]) -> str:
    """Over which windows, and with which interval; `mean_difference` gives none over fewer than `FEWEST`."""
    windows = sum(each.samples or 0 for each in scored)
    if windows < FEWEST:
        return f"over {windows} windows, without an interval: none is given below {FEWEST} windows,"
    return f"with a 95 % bootstrap interval over {windows} windows{_from_documents(scored)}"


def _from_documents(scored: Sequence[Record]) -> str:
    """What the windows were drawn by; nothing where it is the windows themselves, or not known."""
    known = documents_over(scored)
    count = len(set(known))
    if not known or count == len(known):
        return ""
    if count < FEWEST:
        return f" (from only {count} documents, so that it says nothing about others)"
    return f" from {count} documents, each of them drawn as a whole,"


def _which_texts(series: Sequence[Series], together: Sequence[Series]) -> Iterator[str]:
    """What the first table's ΔNLL leaves out, where perplexity was measured at points that it is not made of."""
    names = list(zip(series, named(series), strict=True))
    shown, left = ([name for each, name in names if (each in together) is inside] for inside in (True, False))
    if left:
        yield (
            f"perplexity: measured at {len(series)} points; the first table shows {_listed(shown)}, which the same "
            f"plans have, and not {_listed(left)}. The HTML page has tables and charts of all."
        )


def _which_point(series: Sequence[Series]) -> Iterator[str]:
    if len(series) < 2:
        return
    shown = base(series)
    name = next(name for each, name in zip(series, named(series), strict=True) if each is shown)
    yield (
        f"{series[0].task}: measured at {len(series)} points; the first table shows {name}, the first of those that "
        "most plans have. The HTML page has tables and charts of all."
    )


def _about_sets(records: Sequence[Record]) -> Iterator[str]:
    for task, who in (("longcontext", "benchmark"), ("harness", "task")):
        found = [r for r in records if r.task == task and r.error is None]
        if not found:
            continue
        names = ", ".join(dict.fromkeys(str(r.point.get(who)) for r in found))
        metrics = ", ".join(dict.fromkeys(str(r.point["metric"]) for r in found if r.point.get("metric")))
        counts = [len(r.values.get("score", ())) for r in found]
        few, many = min(counts), max(counts)
        count = f"{few}" if few == many else f"{few} to {many}"
        by = f" ({metrics})" if metrics else ""
        yield f"{task}: {names}, by their own metrics{by}; {count} examples each."
        if task == "longcontext" and (odd := dict.fromkeys(_set(r) for r in found if not official_is_mean(r))):
            yield (
                f"The score of {', '.join(odd)} is not the mean of the examples' scores and has no interval; the "
                "differences to 'full' that have one are of that mean."
            )


def _set(record: Record) -> str:
    return f"{record.point.get('benchmark')} {record.point.get('subset')}"


def _asked_less(records: Sequence[Record], rows: Sequence[Row]) -> Iterator[str]:
    full = next((row.plan_hash for row in rows if row.is_full), None)
    if full is None:
        return
    points = series_of(records, "needle")
    wanted = len([each for each in points if full in each.records])
    if 0 < wanted < len(points):
        yield (
            f"'full' has a record of {wanted} of the {len(points)} lengths, depths and kinds of needle documents: the "
            "other ones count in no share, since nothing can be compared there."
        )
    for row in rows:
        had = len(asked_of_both(records, row.plan_hash, full))
        if row.accuracy is not None and had < wanted:
            yield (
                f"{row.label}: its answers are of {had} of the {wanted} lengths, depths and kinds that 'full' was "
                "asked, so the two shares are of different documents."
            )


def _about_memory(records: Sequence[Record]) -> Iterator[str]:
    fresh = [r for r in records if r.task == "memory" and r.bytes_resident is not None]
    known = [(r, r.bytes_resident, r.bytes_held) for r in fresh if r.bytes_held]
    if not known:
        return
    worst, resident, held = max(known, key=lambda each: abs((each[1] or 0) / (each[2] or 1) - 1))
    assert resident is not None and held is not None
    yield (
        f"bytes: unique storages of the whole cache. Checked against fresh processes at {worst.point['context']} "
        "tokens: resident memory grew for each cache by what its ledger says, at worst "
        f"{100 * (resident / held - 1):+.1f} % ({worst.label})."
    )


def _about_reading(records: Sequence[Record]) -> Iterator[str]:
    """Plans that read less than they hold, each by its fullest cache."""
    found: dict[str, Record] = {}
    for record in records:
        if record.error is None and record.tokens_read is not None and record.tokens_held:
            fullest = found.setdefault(record.label, record)
            if record.tokens_held > (fullest.tokens_held or 0):
                found[record.label] = record
    if found:
        each = "; ".join(f"{label} {r.tokens_read:.0f} of {r.tokens_held:.0f}" for label, r in found.items())
        yield (
            f"Each new token read less than is held: {each} tokens. What is not read takes memory all the same, and "
            "several tokens that are fed at once read everything."
        )


def _about_time(records: Sequence[Record]) -> Iterator[str]:
    shown = base(series_of(records, "speed"))
    tried = [] if shown is None else list(shown.records.values())
    timed = [r for r in tried if r.timings]
    runs = len({r.run for r in timed})
    if runs > 1:
        yield "Times of different runs are not compared: no ratio where the 'full' that is shown is of another run."
    busy = [r.label for r in tried if not r.timings]
    if busy:
        whom = "any plan" if not timed else ", ".join(busy)
        yield f"No times for {whom}: other programs disturbed too many of the rounds. Try again on a quiet machine."
    full = next((r for r in timed if r.is_full), None)
    if full is None:
        return
    left_out = sum(int(r.timings["tpot"]["left_out"] or 0) for r in timed)
    yield (
        "TTFT, TPOT: medians over that of 'full' in the same interleaved rounds "
        f"({min(r.samples or 0 for r in timed)} or more each, {left_out} disturbed samples left out), "
        f"{full.point['context']} tokens of prompt, {full.point['tokens']} decoded, batch "
        f"{full.point.get('batch', 1)}, {full.dtypes} on {full.device}, {full.machine.get('threads')} threads."
    )
    text = f"'full' takes {_ms(full, 'ttft')} to the first token and {_ms(full, 'tpot')} for each further one"
    if full.floor_seconds is not None:
        text += f" (reading weights and cache once takes {1000 * full.floor_seconds:.1f} ms)"
    own = next((r for r in timed if r.plan_hash == OWN), None)
    if own is not None:
        text += f"; the model's own cache {_ms(own, 'ttft')} and {_ms(own, 'tpot')}"
    yield text + "."
    if full.point.get("graphs"):
        yield "Plans decode by CUDA graphs, whose recording is in their times; the model's own cache decodes as ever."


def _ms(record: Record, name: str) -> str:
    median, q1, q3 = (record.timings[name][key] for key in ("median", "q1", "q3"))
    assert median is not None and q1 is not None and q3 is not None
    return f"{1000 * median:.1f} ms ({1000 * q1:.1f} to {1000 * q3:.1f})"


def _unequal_samples(records: Sequence[Record]) -> Iterator[str]:
    """Tasks in which plans have unequal numbers of points or samples, a sentence each.

    A plan that failed at a point has a sentence of its own elsewhere, so such points do not count here.
    """
    failed = {(r.task, r.plan_hash) for r in records if r.error is not None}
    for task in _COMPARED:
        series = series_of(records, task)
        plans = {h: r.label for each in series for h, r in each.records.items() if h != OWN and (task, h) not in failed}
        counts = {
            label: (
                sum(plan in each.records for each in series),
                sum(each.records[plan].samples or 0 for each in series if plan in each.records),
            )
            for plan, label in plans.items()
        }
        most = max(counts.values(), default=(0, 0))
        fewer = [f"{label} {_counted(*count)}" for label, count in counts.items() if count != most]
        if fewer:
            others = FULL if counts.get(FULL) == most else next(x for x, count in counts.items() if count == most)
            yield (
                f"{task}: not every plan has the same samples: {', '.join(fewer)}, where {others} has "
                f"{_counted(*most)}. Only what a plan and 'full' both have is compared; run the bench again for what "
                "is missing."
            )


def _idle_plans(records: Sequence[Record]) -> Iterator[str]:
    """Plans whose every result is that of 'full' to the last bit while they hold no fewer bytes: a sentence each.

    Plans that read less than they hold, or that keep bytes elsewhere than 'full' does, did something else and have no
    such sentence.
    """
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for task in _COMPARED:
        for each in series_of(records, task):
            full = next((r for r in each.records.values() if r.is_full), None)
            if full is None or not full.values:
                continue
            for record in each.records.values():
                if not record.is_full and record.plan_hash != OWN:
                    pairs.setdefault(record.label, []).append((record, full))
    for label, found in pairs.items():
        if all(_is_idle(record, full) for record, full in found):
            yield (
                f"{label} did nothing here: each of its {sum(r.samples or 0 for r, _ in found)} samples is that of "
                "'full' to the last bit, and it holds no fewer bytes. These contexts may be shorter than its budget, "
                "or than what it leaves in full precision: ask for longer ones, or for a smaller budget."
            )


def _is_idle(record: Record, full: Record) -> bool:
    if record.bytes_held is None or record.bytes_full is None or record.bytes_held < _AS_MUCH * record.bytes_full:
        return False
    if record.traffic is not None or set(record.bytes_by_tier or {}) != set(full.bytes_by_tier or {}):
        return False
    if record.tokens_read is not None and record.tokens_held is not None and record.tokens_read < record.tokens_held:
        return False
    return record.values == full.values


def _counted(points: int, samples: int) -> str:
    return f"{samples} samples at {points} {'point' if points == 1 else 'points'}"
