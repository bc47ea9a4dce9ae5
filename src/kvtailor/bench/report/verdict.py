"""The sentence above a table, and the ones below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvtailor.bench.report.rows import FULL, OWN, Row
from kvtailor.bench.schema import Record
from kvtailor.bench.statistics import FEWEST

__all__ = ["footnotes", "headline"]

ANSWERS_MAY_DROP = 0.02
COARSE_NATS = 0.05


def headline(rows: Sequence[Row]) -> str:
    """Which plan, at which memory, loses nothing measurable here; if none does, which loses least and how much."""
    full = next((row for row in rows if row.label == FULL), None)
    smaller = [row for row in rows if row.plan_hash != OWN and row.ratio is not None and row.ratio < 0.99]
    if full is None or not smaller:
        return "No plan of this run holds less than the full cache, so there is nothing to choose."
    judged = [row for row in smaller if row.loss is not None or row.accuracy is not None]
    if not judged:
        return "Quality was not measured in this run: nothing can be said about what the saved bytes cost."
    if all(row.loss is None or row.loss.low is None for row in judged) and all(row.accuracy is None for row in judged):
        return f"Too few windows to tell a loss from chance: ask for at least {FEWEST}, better 50."
    fine = [row for row in judged if _loses_nothing(row, full)]
    if fine:
        best = min(fine, key=lambda row: row.ratio or 1.0)
        return f"{best.label} loses nothing measurable here at {_share(best)} of the bytes{_how_sure(best, full)}."
    worse = [row for row in judged if not _beats(row)]
    if not worse:
        return (
            "No verdict: every plan that holds less does better than 'full' beyond chance, so this model does "
            "not use the "
            "context of this text."
        )
    mildest = min(worse, key=lambda row: (_answers_lost(row, full), row.loss.value if row.loss is not None else 0.0))
    what = f"{mildest.loss.value:+.3f} nats per token" if mildest.loss is not None else "fewer right answers"
    if mildest.accuracy is not None and full.hits:
        what += f", {mildest.hits} of {mildest.answers} answers right ('full': {full.hits})"
    return (
        f"Every plan here that saves bytes loses something; the mildest is {mildest.label}: {what}, at "
        f"{_share(mildest)} of "
        "the bytes."
    )


def footnotes(records: Sequence[Record], rows: Sequence[Row]) -> Iterator[str]:
    """What the numbers rest on, whole sentences."""
    scored = next((r for r in records if r.task == "perplexity" and r.error is None), None)
    if scored is not None:
        point = scored.point
        yield (
            f"ΔNLL: nats per token against 'full' with a 95 % bootstrap interval over {scored.samples} windows of "
            f"{scored.text} ({point['context']} tokens compressed, the next {point['continuation']} scored on what is "
            f"left, {scored.tokens_scored} tokens in all, the same for every plan)."
        )
        if (scored.samples or 0) < 50:
            yield "Fewer than 50 windows: enough for a look, too few for a claim. Use --windows 50 or more."
    needles = [r for r in records if r.task == "needle" and r.error is None]
    if needles:
        full = next((row for row in rows if row.label == FULL), None)
        lengths = sorted({int(str(r.point["length"])) for r in needles})
        kinds = ", ".join(dict.fromkeys(str(r.point["kind"]) for r in needles))
        where = "outside of" if needles[0].point["question_outside"] else "inside"
        yield (
            f"needle: answers exactly right over {kinds} documents of {' and '.join(map(str, lengths))} tokens, "
            f"question {where} the compressed context; 95 % Wilson intervals."
        )
        if full is not None and full.accuracy is not None and full.accuracy.value < 0.5:
            yield (
                f"'full' itself answers {full.hits} of {full.answers}: in that column the model is the limit "
                "before any "
                "cache is."
            )
    if any(row.recall is not None for row in rows):
        yield "recall: of answers with several parts, the share that the greedy continuation contains, in any order."
    compared = next((r for r in records if r.task == "fidelity" and r.error is None), None)
    if compared is not None:
        yield (
            f"KL: nats of KL(full || plan) per token, top-1: tokens of which both find the same most likely; "
            f"{compared.tokens_scored} tokens of {compared.samples} windows of {compared.text}, "
            f"{compared.point['context']} tokens compressed before them."
        )
    yield from _about_memory(records)
    yield from _about_time(records)
    surprising = [row.label for row in rows if row.label != FULL and _beats(row)]
    if surprising:
        yield (
            f"Better than 'full' beyond chance: {', '.join(surprising)}. Compression should not do that: look "
            "twice at the "
            "text."
        )
    if len([row for row in rows if row.loss is not None]) > 3:
        yield "Each interval is for one plan by itself: the best of several looks a little better than it is."
    notes = [(note, r.label) for r in records for note in r.notes if r.plan_hash != OWN]
    for note, same in groupby(sorted(set(notes)), key=lambda pair: pair[0]):
        labels = [label for _, label in same]
        everyone = len(labels) == len([row for row in rows if row.plan_hash != OWN])
        yield note if everyone else f"{', '.join(labels)}: {note}"
    for row in rows:
        for error in row.errors:
            if row.plan_hash != OWN:
                yield f"{row.label} has no number for {error}"


def _about_memory(records: Sequence[Record]) -> Iterator[str]:
    fresh = [r for r in records if r.task == "memory" and r.bytes_resident is not None]
    known = [(r, r.bytes_resident, r.bytes_held) for r in fresh if r.bytes_held]
    if not known:
        return
    worst, resident, held = max(known, key=lambda each: abs((each[1] or 0) / (each[2] or 1) - 1))
    assert resident is not None and held is not None
    yield (
        "bytes: unique storages of the whole cache. Checked against fresh processes at "
        f"{worst.point['context']} tokens: "
        f"resident memory grew for each cache by what its ledger says, at worst {100 * (resident / held - 1):+.1f} % "
        f"({worst.label})."
    )


def _about_time(records: Sequence[Record]) -> Iterator[str]:
    tried = [r for r in records if r.task == "speed" and r.error is None]
    timed = [r for r in tried if r.timings]
    busy = [r.label for r in tried if not r.timings]
    if busy:
        whom = "any plan" if not timed else ", ".join(busy)
        yield f"No times for {whom}: other programs disturbed too many of the rounds. Try again on a quiet machine."
    full = next((r for r in timed if r.label == FULL), None)
    if full is None:
        return
    left_out = sum(int(r.timings["tpot"]["left_out"] or 0) for r in timed)
    yield (
        "TTFT, TPOT: medians over that of 'full' in the same interleaved rounds "
        f"({min(r.samples or 0 for r in timed)} or more "
        f"each, {left_out} disturbed samples left out), {full.point['context']} tokens of prompt, "
        f"{full.point['tokens']} "
        f"decoded, batch 1, {full.dtype} on {full.device}, {full.machine.get('threads')} threads."
    )
    text = f"'full' takes {_ms(full, 'ttft')} to the first token and {_ms(full, 'tpot')} for each further one"
    if full.floor_seconds is not None:
        text += f" (reading weights and cache once takes {1000 * full.floor_seconds:.1f} ms)"
    own = next((r for r in timed if r.plan_hash == OWN), None)
    if own is not None:
        text += f"; the model's own cache {_ms(own, 'ttft')} and {_ms(own, 'tpot')}"
    yield text + "."


def _ms(record: Record, name: str) -> str:
    median, q1, q3 = (record.timings[name][key] for key in ("median", "q1", "q3"))
    assert median is not None and q1 is not None and q3 is not None
    return f"{1000 * median:.1f} ms ({1000 * q1:.1f} to {1000 * q3:.1f})"


def _beats(row: Row) -> bool:
    return row.loss is not None and row.loss.high is not None and row.loss.high < 0


def _answers_lost(row: Row, full: Row) -> float:
    """Share of right answers that are lost against 'full'; a drop that counts as none is 0."""
    if row.accuracy is None or full.accuracy is None:
        return 0.0
    lost = full.accuracy.value - row.accuracy.value
    return lost if lost > ANSWERS_MAY_DROP else 0.0


def _loses_nothing(row: Row, full: Row) -> bool:
    # Better beyond chance is no praise: it says that the text or the model is odd, and a footnote says so.
    if row.errors:
        return False
    if row.loss is not None and (
        row.loss.low is None or row.loss.high is None or not row.loss.low <= 0 <= row.loss.high
    ):
        return False
    if row.accuracy is not None and full.accuracy is not None:
        return row.accuracy.value >= full.accuracy.value - ANSWERS_MAY_DROP
    return True


def _how_sure(row: Row, full: Row) -> str:
    parts = []
    if row.loss is not None and row.loss.high is not None and row.loss.low is not None:
        parts.append(f"ΔNLL {row.loss.low:+.3f} to {row.loss.high:+.3f} nats over {row.loss.count} windows")
    if row.accuracy is not None and full.hits:
        parts.append(f"{row.hits} of {row.answers} answers right, 'full' {full.hits}")
    if row.loss is not None and row.loss.high is not None and row.loss.high > COARSE_NATS:
        parts.append(f"losses below {row.loss.high:.2f} nats would not show with so few windows")
    return f" ({'; '.join(parts)})" if parts else ""


def _share(row: Row) -> str:
    assert row.ratio is not None
    return f"{100 * row.ratio:.0f} %"
