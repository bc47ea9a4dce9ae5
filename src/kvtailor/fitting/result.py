"""What a fit gives back: the plan, the evidence, the front. Frozen, and the same after it was saved and loaded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.front import front_of
from kvtailor.bench.report.words import byte_text
from kvtailor.errors import KvtailorError
from kvtailor.fitting.engines import EngineSetting, nearest_settings, setting_of
from kvtailor.fitting.layers import Additivity, LayerMap
from kvtailor.fitting.question import Question
from kvtailor.fitting.verdict import Family, Judged
from kvtailor.ops.files import make_folder, read_text, seal_json, seal_toml, unseal_json, write_whole
from kvtailor.ops.notebook_html import Share, Shown, Strong, html_block, html_table
from kvtailor.plan import Plan, registry

__all__ = ["RESULT_FILE", "Fit", "FrontPoint", "marked", "short_plan"]

SCHEMA = 1
RESULT_FILE = "fit.json"
PLAN_FILE = "fitted.toml"


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan that was measured on the pieces of the search.

    Attributes:
        plan: in one line.
        origin: "fitted", "layers", "words" or "preset".
        label: the preset's name, or the plan.
        memory: the limit that it was made for, bytes.
        bytes: of all rows, from what was measured on one.
        loss: KL to the full cache on text, and the mean KL on answers on top, with its interval.
        text: KL on text alone, nats per token.
        points_lost: most points of percent of right answers that it lost in a family of the search, of those that the
            full cache can do; None where none was asked.
        best: no other point has fewer bytes and loses less.
    """

    plan: str
    origin: str
    label: str
    memory: int
    bytes: int
    loss: Estimate
    text: float | None = None
    points_lost: float | None = None
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The answer to a question.

    Attributes:
        model: its name.
        dtype: of the cache.
        question: what was asked.
        full: bytes of the uncompressed cache at the question's context and batch.
        effort: how much was tried.
        state: random state.
        plan: the plan, in one line.
        sentence: what was shown of it.
        told: by label of each other plan of the proof, "better", "worse" or "not told apart".
        against: by label, the paired difference of the loss to that plan.
        needed: windows that would tell it from the best preset; None where it is told, or none is beside it.
        proof: every plan that the proof measured, 'full' apart; the plan itself among them.
        front: what the search measured at several memories.
        layers: what stage 1 found; None where it did not run.
        additivity: whether its losses added up.
        tokens_by_head: tokens that each layer and kv head was measured to hold under the plan.
        sizes: bytes of the plan at other contexts and batches: (context, batch, bytes, full bytes).
        regret: what choosing by text alone would have cost in right answers, a sentence; None where no answers were
            asked.
        notes: whole sentences: what is not as it was asked, and what a reader must know.
        asked: texts, tasks and methods that were left out, as they were asked for.
        seconds: that the whole took, since it was last started.
        counts: how much was measured, by name.
    """

    model: str
    dtype: str
    question: Question
    full: int
    effort: str
    state: int
    plan: str
    sentence: str
    told: Mapping[str, str]
    against: Mapping[str, Estimate]
    needed: int | None
    proof: tuple[Judged, ...]
    front: tuple[FrontPoint, ...]
    layers: LayerMap | None
    additivity: Additivity | None
    tokens_by_head: tuple[tuple[float, ...], ...] = ()
    sizes: tuple[tuple[int, int, int, int], ...] = ()
    regret: str | None = None
    notes: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def chosen(self) -> Judged:
        """The plan as the proof measured it."""
        return next(each for each in self.proof if each.plan == self.plan)

    @property
    def short(self) -> str:
        """The plan by the names of its methods."""
        return short_plan(self.plan)

    @property
    def python(self) -> str:
        """The line of Python that uses the plan."""
        return f'cache = kvtailor.cache_for(model, "{self.plan}")'

    @property
    def engines(self) -> tuple[EngineSetting, ...]:
        """The nearest settings of other engines."""
        return nearest_settings(Plan.parse(self.plan))

    def export(self, engine: str) -> EngineSetting:
        """Return the nearest setting of one engine: "vllm", "sglang", "tensorrt-llm", "llama.cpp" or "transformers".

        Raises:
            UnknownName: there is no such engine here.
        """
        return setting_of(Plan.parse(self.plan), engine)

    def toml(self) -> str:
        """Return the plan as TOML, with where it comes from."""
        head = [
            f"# Fitted by kvtailor for {self.model}: {self.question.context} tokens, {self.question.batch} row(s).",
            *(f"# {line}" for line in _wrapped(self.sentence)),
        ]
        return "\n".join([*head, "", Plan.parse(self.plan).to_toml()])

    def save(self, folder: str | Path) -> Path:
        """Write the plan (fitted.toml), the evidence (fit.json) and the page (fit.html); return the plan's path.

        Raises:
            FileError: the folder cannot be written; each file that was there is as it was, or new.
        """
        from kvtailor.fitting.page import page

        where = Path(folder)
        make_folder(where)
        write_whole(where / PLAN_FILE, seal_toml(self.toml()))
        write_whole(where / "fit.html", page(self))
        # The file that says that a fit has ended comes last.
        write_whole(where / RESULT_FILE, seal_json(json.dumps(self.as_dict(), ensure_ascii=False)))
        return where / PLAN_FILE

    @classmethod
    def load(cls, folder: str | Path) -> Fit:
        """Return the result that `save` wrote into a folder.

        Raises:
            KvtailorError: there is none, it is not as it was written, or it is of another schema.
        """
        where = Path(folder) / RESULT_FILE
        try:
            text, sealed = unseal_json(read_text(where))
            found = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise KvtailorError(
                f"asked for the fit in {folder}, which cannot be read ({error}): run `kvtailor fit --out {folder}`"
            ) from error
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise KvtailorError(f"{where} is not a fit of schema {SCHEMA}: run the fit again")
        if not sealed:
            warnings.warn(
                f"{where} has no checksum, so damage to it would not be noticed: an earlier kvtailor wrote it, or an "
                "editor",
                stacklevel=2,
            )
        try:
            return _read(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise KvtailorError(f"{where} is damaged ({error}): run the fit again") from error

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            "schema": SCHEMA,
            **found,
            "question": self.question.as_dict(),
            "against": {label: asdict(each) for label, each in self.against.items()},
            "proof": [asdict(each) for each in self.proof],
            "front": [asdict(each) for each in self.front],
            "layers": None if self.layers is None else self.layers.as_dict(),
            "additivity": None if self.additivity is None else asdict(self.additivity),
        }

    def __repr__(self) -> str:
        sizes = f"{self.chosen.bytes} of {self.full} bytes"
        return (
            f"Fit({self.model!r}, {self.plan!r}, {sizes} at context={self.question.context} and "
            f"batch={self.question.batch}: {self.sentence!r})"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the plan, what was shown of it, and every plan that the proof measured."""
        rows: list[list[Shown]] = [
            [
                Strong(each.label) if each.plan == self.plan else each.label,
                byte_text(each.bytes) if each.bytes else None,
                Share(f"{100 * each.bytes / self.full:.1f} %", each.bytes / self.full) if each.bytes else None,
                "the plan" if each.plan == self.plan else self.told.get(each.label),
            ]
            for each in sorted(self.proof, key=lambda each: each.bytes)
        ]
        heads = ["plan of the proof", "bytes", "of the uncompressed cache", "beside the plan"]
        title = f"{self.model}: {self.question.context} tokens, {self.question.batch} row(s)"
        table = html_table(rows, heads)
        return html_block(title, html_table([[self.python]]), table, lead=self.sentence, notes=self.notes)

    def __str__(self) -> str:
        chosen = self.chosen
        share = chosen.bytes / self.full
        return (
            f"{self.plan}\n  {byte_text(chosen.bytes)} of {byte_text(self.full)} ({100 * share:.1f} %) at "
            f"{self.question.context} tokens and {self.question.batch} row(s). {self.sentence}"
        )


def _read(found: dict[str, Any]) -> Fit:
    layers, additivity = found["layers"], found["additivity"]
    found |= {
        "question": Question.from_dict(found["question"]),
        "against": {label: Estimate(**each) for label, each in found["against"].items()},
        "proof": tuple(_judged(each) for each in found["proof"]),
        "front": tuple(FrontPoint(**{**each, "loss": Estimate(**each["loss"])}) for each in found["front"]),
        "layers": None if layers is None else LayerMap.from_dict(layers),
        "additivity": None if additivity is None else Additivity(**additivity),
        "tokens_by_head": tuple(tuple(row) for row in found["tokens_by_head"]),
        "sizes": tuple(tuple(row) for row in found["sizes"]),
        "notes": tuple(found["notes"]),
    }
    return Fit(**found)


def _judged(found: dict[str, Any]) -> Judged:
    series = ("hits", "full", "nll")
    families = tuple(Family(**{**each, **{name: tuple(each[name]) for name in series}}) for each in found["families"])
    own = {name: tuple(found[name]) for name in ("nll", "full", "documents")}
    return Judged(**{**found, **own, "families": families})


def marked(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Return points from the fewest bytes up, each with whether no other has fewer bytes and loses less."""
    best = {id(each) for each in front_of(points, _place)}
    return tuple(replace(each, best=id(each) in best) for each in sorted(points, key=_place))


def _place(point: FrontPoint) -> tuple[float, float]:
    return point.bytes, point.loss.value


def short_plan(text: str) -> str:
    """Return a plan by the names of its methods and its budget: 'snapkv + table + by_layer @ tokens=316'."""
    plan = Plan.parse(text)
    named = [registry.name_of(part) for stage, part in plan.parts.items() if part is not None]
    nulls = {registry.null(stage) for stage in registry.stages()}
    budget = text.partition(" @ ")[2]
    return (" + ".join(name for name in named if name not in nulls) or "full") + (f" @ {budget}" if budget else "")


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]
