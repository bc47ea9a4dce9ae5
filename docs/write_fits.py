"""Writes what fits on real models found into docs/fit.md, from docs/records/fits alone.

    python docs/write_fits.py                           # the table between <!-- fits: start --> and <!-- /fits -->
    python docs/write_fits.py FOLDER NAME HUB_NAME      # before it, publishes a fit as docs/records/fits/NAME/fit.json

A published fit is `fit.json` as `kvtailor fit --out FOLDER` wrote it, with the name that the hub has for the model.
`kvtailor.Fit.load` reads it.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.fitting.result import RESULT_FILE, Fit
from kvtailor.fitting.verdict import Judged
from kvtailor.ops.files import seal_json

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "fit.md"
RECORDS = ROOT / "docs" / "records" / "fits"
_BLOCK = re.compile(r"(<!-- fits: start -->\n).*?(<!-- /fits -->)", re.DOTALL)
_HEAD = (
    "| model | context | asked | chosen | bytes | loss | best preset beside | chosen less this one | right | minutes |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def publish(folder: Path, name: str, hub_name: str, into: Path = RECORDS) -> Path:
    """Write the fit of a folder under the model's name on the hub, and return where it lies."""
    where = into / name
    where.mkdir(parents=True, exist_ok=True)
    fit = replace(Fit.load(folder), model=hub_name)
    (where / RESULT_FILE).write_text(seal_json(json.dumps(fit.as_dict(), ensure_ascii=False)), encoding="utf-8")
    return where


def read(records: Path = RECORDS) -> list[Fit]:
    """Return the published fits: by model, the least memory first."""
    found = [Fit.load(each.parent) for each in records.glob(f"*/{RESULT_FILE}")]
    return sorted(found, key=lambda fit: (fit.model, fit.question.memory or 0))


def written(page: str, fits: list[Fit]) -> str:
    """Return a page with its table made anew."""
    lines = [*_HEAD, *(_row(fit) for fit in fits)]
    return _BLOCK.sub(lambda hit: f"{hit[1]}{chr(10).join(lines)}\n{hit[2]}", page)


def best_preset(fit: Fit) -> Judged | None:
    """Return the preset of the proof that loses least and is not the plan itself; None where there is no other."""
    others = [each for each in fit.proof if each.origin == "preset" and each.plan != fit.plan]
    return min(others, key=lambda each: each.loss.value, default=None)


def span(found: Estimate) -> str:
    """Return a difference in nats with its interval, as the table shows it."""
    return f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def _share(part: float) -> str:
    return f"{100 * part:.1f} %"


def _row(fit: Fit) -> str:
    plan, preset = fit.chosen, best_preset(fit)
    right = " and ".join(f"{each.right} of {each.asked}" for each in (plan, preset) if each is not None)
    cells = (
        fit.model.split("/")[-1],
        f"{fit.question.context}",
        _share((fit.question.memory or 0) / fit.full),
        f"`{plan.label}`",
        _share(plan.bytes / fit.full),
        span(plan.loss),
        *(("-", "-") if preset is None else (f"`{preset.label}`", span(fit.against[preset.label]))),
        right,
        f"{(fit.seconds or 0.0) / 60:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        publish(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
