"""What a fit gives back: the plan, the evidence, the front. Frozen, and the same after it was saved and loaded."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.errors import KvtailorError
from kvtailor.fitting.answer import Answer, FrontPoint
from kvtailor.fitting.layers import Additivity, LayerMap
from kvtailor.fitting.page import page
from kvtailor.fitting.question import Question
from kvtailor.fitting.verdict import Family, Judged
from kvtailor.ops.files import make_folder, read_text, seal_json, seal_toml, unseal_json, write_whole
from kvtailor.ops.notebook_html import Share, Shown, Strong, html_block, html_table
from kvtailor.ops.sizes import byte_text

__all__ = ["RESULT_FILE", "Fit"]

SCHEMA = 1
RESULT_FILE = "fit.json"
PLAN_FILE = "fitted.toml"


@dataclass(frozen=True, kw_only=True, repr=False)
class Fit(Answer):
    """What a fit gives back; the same after it was saved and loaded."""

    def save(self, folder: str | Path) -> Path:
        """Write the plan (fitted.toml), the evidence (fit.json) and the page (fit.html); return the plan's path.

        Raises:
            FileError: the folder cannot be written; each file that was there is as it was, or new.
        """
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
        ) + "".join(f"\n  - {note}" for note in self.notes)


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
