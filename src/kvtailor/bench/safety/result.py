"""What `kvtailor.check_model` gives back, and how it is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtailor.bench.safety.page import PAGE
from kvtailor.bench.safety.verdict import (
    HARMFUL,
    NOT_MEASURED,
    NOT_SHOWN,
    SAFE,
    SHARES,
    Verdict,
    mildest,
    taken,
)
from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.ops.notebook_html import html_block, html_table
from kvtailor.plan import Plan

__all__ = ["ModelCheck", "filled", "left_out"]

_COLUMNS = 80
_NAME = 27


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """Which plans are safe on a model.

    Attributes:
        model: its name.
        dtype: in which it was computed.
        text: what was measured on.
        context: tokens of a window that were compressed.
        continuation: tokens after them that were scored.
        margin: nats a token that a safe plan loses at most.
        length: tokens at which the shares of bytes are told.
        facts: what the model's configuration, weights and keys say, a sentence each.
        verdicts: of each plan that was measured.
        without: why others were not, by plan.
        records: every measurement, as the bench writes it.
        out: the folder that the records are in; None where nothing was written.
        unanswered: why no questions were asked; empty where they were, or where no plan drops tokens.
    """

    model: str
    dtype: str
    text: str
    context: int
    continuation: int
    margin: float
    length: int
    facts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    without: Mapping[str, str] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    out: Path | None = None
    unanswered: str = ""

    @cached_property
    def take(self) -> Mapping[str, Verdict | None]:
        """The plan to take at "about half", "a quarter", "a fifth" and "an eighth" of 16-bit bytes; None: none is safe
        there."""
        return taken(self.verdicts)

    @property
    def next(self) -> str:
        """What to type next."""
        chosen = next((each for words in ("a quarter", "about half") if (each := self.take[words])), None)
        if chosen is None:
            return f"kvtailor fit --model {self.model} --text FILE --memory 50%"
        return f'kvtailor run --model {self.model} --plan "{chosen.plan}" --prompt-file FILE'

    def verdict(self, plan: str | Plan) -> Verdict:
        """Return the verdict of a plan, in any spelling; of a preset's name that whose budget the check chose.

        Raises:
            UnknownName: it was not measured.
        """
        text = str(plan)
        for each in self.verdicts:
            if text in (each.plan, each.plan.partition(" @ ")[0]):
                return each
        try:
            wanted = Plan.parse(text)
        except KvtailorError:
            wanted = None
        for each in self.verdicts:
            if wanted is not None and Plan.parse(each.plan) == wanted:
                return each
        raise UnknownName("plan in this check", text, [each.plan for each in self.verdicts])

    def of(self, word: str) -> list[Verdict]:
        """Return the verdicts with one of the words, the plans of fewest bytes first."""
        return sorted((each for each in self.verdicts if each.word == word), key=lambda each: each.bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the records."""
        verdicts = [{**asdict(each), "sentence": each.sentence} for each in self.verdicts]
        return {
            "model": self.model,
            "dtype": self.dtype,
            "text": self.text,
            "context": self.context,
            "continuation": self.continuation,
            "margin": self.margin,
            "length": self.length,
            "facts": list(self.facts),
            "verdicts": verdicts,
            "take": {words: None if each is None else each.plan for words, each in self.take.items()},
            "next": self.next,
            "not_measured": dict(self.without),
            "unanswered": self.unanswered or None,
            "out": None if self.out is None else str(self.out),
        }

    def lines(self) -> list[str]:
        """Return the whole of it as lines, each for a terminal of 80 columns."""
        found = [*filled(f"{self.model}: {'; '.join(self.facts)}.")] if self.facts else [self.model]
        windows = max((each.windows for each in self.verdicts), default=0)
        found += filled(
            f"Measured on {windows} windows of {self.context} + {self.continuation} tokens ({self.text}), each plan "
            "against the uncompressed cache on the same tokens; plans that are shown to be harmful on the first of "
            f"them on those alone{self._cut_short(windows)}. A row: bytes of a cache in 16 bits after {self.length:,} "
            f"tokens, nats a token lost, the 95 % interval{self._asked}."
        )
        told = {
            SAFE: f"Safe here: at most {self.margin:g} nats a token lost at the upper end of the 95 % interval",
            NOT_SHOWN: f"Not shown: {self.margin:g} lies inside the interval",
            HARMFUL: f"Harmful here: more than {self.margin:g} at the lower end",
            NOT_MEASURED: "Not measured",
        }
        for word, title in told.items():
            some = self.of(word)
            if some:
                found += ["", title]
                found += [line for each in some for line in _row(each)]
        found += left_out(self.without)
        if self.unanswered:
            found += filled(f"No questions were asked: {self.unanswered}")
        found += ["", f"Take, {self._of_how_many}, by bytes:"]
        for words, share in SHARES.items():
            found += filled(f"  {words + ':':<12} {self._advice(words, share)}", hang=15)
        found += filled(self._of_prose)
        found += ["", f"Next: {self.next}"]
        return found

    def _cut_short(self, windows: int) -> str:
        """Which others have fewer windows."""
        fewer = [each.plan for each in self.verdicts if each.word != HARMFUL and 0 < each.windows < windows]
        return f", and {', '.join(fewer)}, which takes longest, as well (name it for all)" if fewer else ""

    @property
    def _of_how_many(self) -> str:
        count = sum(each.loss is not None for each in self.verdicts)
        return "of the one plan that was measured" if count == 1 else f"of the {count} plans that were measured"

    @property
    def _of_prose(self) -> str:
        """That other texts can lose more, as Python on SmolLM2 (docs/measured.md); empty for one of the caller."""
        told = "These windows are prose; code, say, can lose several times as much: --text FILE."
        return told if self.text == PAGE else ""

    @property
    def _asked(self) -> str:
        answers = next((each.inside for each in self.verdicts if each.inside is not None), None)
        if answers is None:
            return ""
        return (
            f", and for plans that drop tokens the right answers to {answers.count} questions that stand inside the "
            f"prompt, and to the same ones after it (the uncompressed cache: {answers.full})"
        )

    def _advice(self, words: str, share: float) -> str:
        best = self.take[words]
        if best is not None:
            return f"{best.plan} ({_share(best)}, at most {max(0.0, best.bound):.3f} nats){_later(best)}"
        near = mildest(self.verdicts, share)
        search = f"kvtailor fit --model {self.model} --text FILE --memory {100 * share:g}%"
        if near is None or near.loss is None:
            return f"no plan here; {search}"
        return f"none is shown to be safe; {near.plan} lost {near.loss.value:+.3f}; {search}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """For notebooks: a table, and what to take above it."""
        rows = [
            [each.plan, _share(each), each.word, "-" if each.loss is None else each.told, each.cause or ""]
            for word in (SAFE, NOT_SHOWN, HARMFUL, NOT_MEASURED)
            for each in self.of(word)
        ]
        lead = "; ".join(f"{words}: {self._advice(words, share)}" for words, share in SHARES.items())
        table = html_table(rows, ["plan", "bytes", "here", "loss", "cause"])
        notes = [note for note in (*self.facts, self._of_prose) if note]
        return html_block(f"kvtailor.check_model: {self.model}", table, lead=lead, notes=notes)


def _row(each: Verdict) -> list[str]:
    """A plan: its name, bytes, loss and answers; below it why it harms, where its name does not say it."""
    name = f"  {each.plan}"
    if each.loss is None:
        return filled(f"{name}: {each.error}", hang=6)
    low, high = each.loss.low, each.loss.high
    numbers = f"{_share(each):>5} {each.loss.value:>+9.4f}"
    numbers += "" if low is None or high is None else f" {f'{low:+.4f} to {high:+.4f}':>20}"
    asked = [answers for answers in (each.inside, each.after) if answers is not None]
    numbers += "".join(f"  {answers.right} of {answers.count}" for answers in asked)
    found = [f"{name:<{_NAME}}{numbers}"] if len(name) < _NAME else [*filled(name, 4), f"{'':<{_NAME}}{numbers}"]
    if each.word != SAFE and each.cause and "keep=" not in each.plan:
        found += filled(f"      {each.cause}", hang=6)
    return found


def _later(each: Verdict) -> str:
    return ", and not for questions that come after the context" if each.forgets else ""


def _share(each: Verdict) -> str:
    return f"{100 * each.bytes:.0f} %"


def left_out(without: Mapping[str, str]) -> list[str]:
    """Return the lines that say what was not measured, names of one reason together; none where nothing was left out.

    Args:
        without: why, by name.
    """
    names: dict[str, list[str]] = {}
    for name, why in without.items():
        names.setdefault(why, []).append(name)
    reasons = [f"{', '.join(those)} ({why})" for why, those in names.items()]
    return ["", *filled(f"Left out: {'; '.join(reasons)}.")] if reasons else []


def filled(line: str, hang: int = 2) -> list[str]:
    """Return a line in as many as a terminal of 80 columns needs; blanks that align columns stay.

    Args:
        line: with the blanks that it begins with.
        hang: blanks before the further ones.
    """
    lead = len(line) - len(line.lstrip(" "))
    return textwrap.wrap(
        line.lstrip(" "),
        _COLUMNS,
        initial_indent=" " * lead,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
