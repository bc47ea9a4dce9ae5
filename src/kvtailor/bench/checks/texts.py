"""Texts on which a score would mean nothing: repeated, known before, or the same under two names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtailor.bench.checks.fraud import Finding, Fraud
from kvtailor.bench.data.overlap import Calibrated, Sketch, shared, text_hash
from kvtailor.bench.schema import Record

__all__ = ["check_calibration", "check_distinct", "check_repetition", "check_sources", "distinct_8grams", "of_texts"]

_CALIBRATION_MAY_SHARE = 0.01
_SOURCES_MAY_SHARE = 0.5
_FEWEST_SHARED = 3


def check_distinct(hashes: Iterable[str], what: str) -> None:
    """No sample is there twice.

    Raises:
        Fraud: "repeated data", where two samples have the same tokens.
    """
    seen: set[str] = set()
    for index, each in enumerate(hashes):
        if each in seen:
            raise Fraud(
                "repeated data",
                f"sample {index} of {what} has the same tokens as an earlier one, so the samples are fewer than they "
                "seem: give a longer or another text",
            )
        seen.add(each)


def distinct_8grams(texts: Iterable[str]) -> float | None:
    """Share of different ones among all runs of 8 words; None where there is no such run."""
    grams = [
        tuple(words[i : i + 8]) for words in (text.split() for text in texts) for i in range(max(0, len(words) - 7))
    ]
    return len(set(grams)) / len(grams) if grams else None


def check_repetition(texts: Sequence[str], least: float, what: str) -> float | None:
    """Check that the text is no sentence repeated over and over. Returns `distinct_8grams`.

    Raises:
        Fraud: "repeated text", where too few of the runs of 8 words are different.
    """
    share = distinct_8grams(texts)
    if share is not None and share < least:
        raise Fraud(
            "repeated text",
            f"only {share:.0%} of the runs of 8 words of {what} are different, {least:.0%} are needed: on such a text "
            "every cache looks good; give another text",
        )
    return share


def check_calibration(
    calibration: Sequence[Calibrated], texts: Sequence[str], source: str, *, whole: str | None = None
) -> None:
    """What a plan was tuned on has nothing in common with the texts that score it.

    More than 1 % of the runs of 13 words, of either side and at least 3 of them, is too much: two parts of one corpus
    share headings and formulas, but hardly 13 words in a row.

    Args:
        calibration: what the plan's artefacts were made from.
        texts: what is scored, as text.
        source: its name.
        whole: the text that `texts` are pieces of, where it is known.

    Raises:
        Fraud: "calibration on the evaluated text".
    """
    if not calibration:
        return
    hashes = {text_hash(text) for text in [*texts, whole] if text}
    sketch = Sketch.of(texts)
    for made in calibration:
        common = shared(made.sketch, sketch)
        worst = max(common.of_first or 0.0, common.of_second or 0.0)
        if made.text_hash in hashes or (worst > _CALIBRATION_MAY_SHARE and common.count >= _FEWEST_SHARED):
            raise Fraud(
                "calibration on the evaluated text",
                f"{made.name} was made from {made.text_name}, which shares {_percent(common.of_second)} of the runs of "
                f"13 words of {source} and has {_percent(common.of_first)} of its own there; "
                f"{_CALIBRATION_MAY_SHARE:.0%} is allowed: calibrate on another text or score on another one",
            )


def check_sources(texts: Mapping[str, str]) -> None:
    """No two data sets are one text, or one for the most part.

    Args:
        texts: text by the name under which it is reported.

    Raises:
        Fraud: "one text under two names", where they share more than half of the runs of 13 words of either.
    """
    sketches = {name: Sketch.of([text]) for name, text in texts.items()} if len(texts) > 1 else {}
    for (one, first), (other, second) in itertools.combinations(sketches.items(), 2):
        common = shared(first, second)
        worst = max(common.of_first or 0.0, common.of_second or 0.0)
        if texts[one] == texts[other] or (worst > _SOURCES_MAY_SHARE and common.count >= _FEWEST_SHARED):
            raise Fraud("one text under two names", _same_text(one, other, f"share {worst:.0%} of their words"))


def of_texts(records: Sequence[Record]) -> Iterator[Finding]:
    """Same tokens under different names, plans on different tokens, and the same results on different tokens."""
    named: dict[str, Record] = {}
    for record in records:
        if record.text_hash is None or record.text is None:
            continue
        earlier = named.setdefault(record.text_hash, record)
        if earlier.text != record.text:
            how = "have the same tokens"
            yield Finding(
                "one text under two names", _same_text(str(earlier.text), record.text, how), (earlier, record)
            )
    yield from _asked_otherwise(records)
    seen: dict[tuple[str, str, str, tuple[float, ...]], Record] = {}
    for record in records:
        name = next((name for name in ("nll", "kl") if name in record.values), None)
        if name is None or record.error is not None or record.text_hash is None or len(set(record.values[name])) < 2:
            continue
        earlier = seen.setdefault((record.task, record.plan_hash, name, tuple(record.values[name])), record)
        if earlier.text_hash != record.text_hash:
            yield Finding(
                "same results on other data",
                f"plan {record.label!r} gives the same {len(record.values[name])} values in task {record.task!r} on "
                f"{earlier.text} at {dict(earlier.point)} and on {record.text} at {dict(record.point)}: the data was "
                "never read, or is a fallback",
                (earlier, record),
            )


def _asked_otherwise(records: Sequence[Record]) -> Iterator[Finding]:
    """Plans that were measured at a point of 'full', but on other tokens."""
    asked: dict[tuple[object, ...], dict[str, Record]] = {}
    good = [record for record in records if record.error is None and record.text_hash is not None]
    for record in (r for r in good if r.is_full):
        asked.setdefault(_place(record), {})[str(record.text_hash)] = record
    for record in good:
        full = asked.get(_place(record))
        if full and record.text_hash not in full:
            yield Finding(
                "different data",
                f"plan {record.label!r} was given other tokens than 'full' in task {record.task!r} on {record.text} at "
                f"{dict(record.point)}: their difference is not due to the cache; measure both again",
                (*full.values(), record),
            )


def _place(record: Record) -> tuple[object, ...]:
    where = json.dumps(record.point, sort_keys=True, default=str)
    return record.model, record.task, record.task_version, record.text, where, record.state, record.asked


def _same_text(one: str, other: str, how: str) -> str:
    return f"{one} and {other} {how}: they are one data set, or one of them is a fallback; leave one out"


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.1%}"
