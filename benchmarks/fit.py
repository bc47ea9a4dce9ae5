"""Whether `fit` finds the better plan: on novels and questions that no stage of it saw, against every preset.

    python -m benchmarks.fit FOLDER_OF_NOVELS OUT [EFFORT [BUDGET ...]]

Half of the novels are given to `fit`, which keeps the second half of each for its proof; the other novels judge here,
with questions of other random states. For each budget: the fitted plan, stage 1 alone, stage 2 alone, and every shipped
preset that fits the same bytes. Presets that lose far more are known after a few windows; the others get all of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.fitting.layers import solved_plan
from kvtailor.fitting.result import Fit
from kvtailor.fitting.run import fit
from kvtailor.fitting.sizing import Sizer
from kvtailor.fitting.space import Space
from kvtailor.plan import Plan

CONTEXT = 2048
BUDGETS = (0.125, 0.25, 0.5)
ABLATED: tuple[float, ...] = ()
FEW, MANY = 10, 48
KINDS = ("needle", "key_value", "variables", "passkey")
STATE = 7


def main() -> None:
    """Fits, judges, and writes OUT/judged.json."""
    novels, out = sorted(Path(sys.argv[1]).glob("*.txt")), Path(sys.argv[2])
    effort = sys.argv[3] if len(sys.argv) > 3 else "quick"
    subject = Subject.load("demo")
    searched, unseen = novels[::2], novels[1::2]
    sizer = Sizer.of(subject.model, context=CONTEXT, batch=1)
    told: dict[str, object] = {}
    space = Space.of(sizer, None)
    for share in [float(each) for each in sys.argv[4:]] or BUDGETS:
        plans = _fitted(subject, searched, share, out, effort, sizer)
        memory = int(share * sizer.full)
        for name in space.presets:
            plan = space.plan({"how": "preset", "preset": name}, memory)
            if plan is not None:
                plans[name] = plan
        told[str(share)] = _judged(subject, plans, unseen, out / "judging", memory)
        (out / "judged.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def _fitted(subject: Subject, texts: list[Path], share: float, out: Path, effort: str, sizer: Sizer) -> dict[str, Plan]:
    """The plans of `fit`: both stages, each alone."""
    found: dict[str, Plan] = {}
    alone = (("stage 2 alone", ("structure",)),) if share in ABLATED else ()
    for name, stages in (("fitted", ("layers", "structure")), *alone):
        folder = out / "work"
        kept = out / f"{name} {share}"
        if not (kept / "fit.json").is_file():
            # One folder of records: what one budget measured, another need not.
            fit(
                subject, texts, keep_bytes=share, context=CONTEXT, effort=effort, out=folder, stages=stages, timed=False
            )
            Fit.load(folder).save(kept)
        made = Fit.load(kept)
        found[name] = Plan.parse(made.plan)
        print(f"{share} {name}: {made.plan}\n  {made.sentence}", flush=True)
        if made.layers is not None:
            solved = solved_plan(
                made.layers,
                sizer.geometry,
                context=CONTEXT,
                batch=1,
                element=sizer.element,
                memory=int(share * sizer.full),
                size=sizer.most,
            )
            if solved is not None:
                found["stage 1 alone"] = solved.plan
    return found


def _judged(
    subject: Subject, plans: dict[str, Plan], texts: list[Path], folder: Path, memory: int
) -> dict[str, object]:
    """Each plan beside the fitted one: loss on few windows, on many where few do not tell, and right answers."""
    contestants = {name: replace(Contestant.of(str(plan)), label=name) for name, plan in plans.items()}
    full = contestants_of([])[0]
    few = _by_plan(subject, [full, *contestants.values()], texts, FEW, folder)
    found: dict[str, object] = {}
    close = []
    for name, contestant in contestants.items():
        records = few[contestant.hash]
        if records is None:
            found[name] = {"plan": str(plans[name]), "error": "failed"}
        elif name == "fitted" or _difference(few, contestants["fitted"], contestant)[2] > -0.02:
            close.append(contestant)
    many = _by_plan(subject, [full, *close], texts, MANY, folder)
    for name, contestant in contestants.items():
        if name in found:
            continue
        source = many if contestant in close else few
        against = source if contestants["fitted"].hash in source else many
        apart = _difference(
            source | {contestants["fitted"].hash: against[contestants["fitted"].hash]},
            contestants["fitted"],
            contestant,
        )
        loss = mean_difference(_nll(source, contestant), _nll(source, full), documents=_documents(source, full))
        found[name] = {
            "plan": str(plans[name]),
            "windows": len(_nll(source, contestant)),
            "bytes": max(record.bytes_held or 0 for record in source[contestant.hash] or []) / (memory or 1),
            "loss": [loss.value, loss.low, loss.high],
            "fitted minus this": apart,
            "right": {kind: _hits(source, contestant, kind) for kind in KINDS},
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


Found = dict[str, "list[Record] | None"]


def _by_plan(subject: Subject, contestants: list[Contestant], texts: list[Path], windows: int, folder: Path) -> Found:
    pieces, starts, at = [], [], 0
    for path in texts:
        text = path.read_text(encoding="utf-8")
        starts.append(at)
        pieces.append(text)
        at += len(text) + 2
    documents = 1 if windows == FEW else 3
    tasks = [
        Perplexity(
            text="\n\n".join(pieces), source="unseen novels", starts=tuple(starts), context=CONTEXT, windows=windows
        ),
        *(
            Needle(
                kind=kind,
                lengths=(CONTEXT,),
                documents=documents,
                state=20_000 * STATE,
                depths=(0.1, 0.3, 0.5, 0.7, 0.9),
            )
            for kind in KINDS
        ),
    ]
    records = run(subject, contestants, tasks, out=folder, bandwidth=False, judge=lambda found: None)
    found: Found = {}
    for contestant in contestants:
        own = [record for record in records if record.plan_hash == contestant.hash]
        found[contestant.hash] = None if any(record.error for record in own) else own
    return found


def _nll(found: Found, contestant: Contestant) -> tuple[float, ...]:
    return next(each.values["nll"] for each in found[contestant.hash] or [] if each.task == "perplexity")


def _documents(found: Found, contestant: Contestant) -> tuple[float, ...]:
    return next(each.values["document"] for each in found[contestant.hash] or [] if each.task == "perplexity")


def _difference(found: Found, one: Contestant, other: Contestant) -> tuple[float, float, float]:
    """By how much the one loses more, with its interval."""
    apart = mean_difference(_nll(found, one), _nll(found, other), documents=_documents(found, one))
    return apart.value, apart.low or 0.0, apart.high or 0.0


def _hits(found: Found, contestant: Contestant, kind: str) -> list[int]:
    hits = [
        hit for each in found[contestant.hash] or [] if each.point.get("kind") == kind for hit in each.values["hit"]
    ]
    return [round(sum(hits)), len(hits)]


if __name__ == "__main__":
    main()
