"""A small suite with a leaderboard, and made-up records of it: no number in here was measured."""

from __future__ import annotations

import json
import random
from math import exp
from statistics import fmean

from tests.support.bench.made_records import record

from kvtailor.bench.suite.suite import read_suite

SUITE = """
title = "Equal"
[leaderboard]
title = "At equal bytes <b>"
budgets = [0.5, 0.25]
tolerance = 0.02
[settings.default]
context = 100
[tasks.text]
run = "perplexity"
[tasks.easy]
run = "needle"
lengths = [100]
[tasks.hard]
run = "needle"
lengths = [100]
kind = "arithmetic"
[tasks.speed]
run = "speed"
[[columns]]
label = "text"
task = "text"
value = "paired.nll"
[[columns]]
label = "easy"
task = "easy"
value = "paired.hit"
[[columns]]
label = "hard"
task = "hard"
value = "paired.hit"
[[tables]]
name = "some"
title = "Some"
labels = ["Plan"]
rows = [
    { Plan = "best", plan = "knorm @ share=0.25" },
    { Plan = "near", plan = "keydiff @ share=0.25" },
    { Plan = "far", plan = "tova @ share=0.25" },
    { Plan = "small", plan = "h2o @ share=0.25" },
]
[[tables]]
name = "others"
title = "Others"
labels = ["Plan"]
rows = [
    { Plan = "over", plan = "random @ share=0.25" },
    { Plan = "large", plan = "random(state=1) @ share=0.5" },
    { Plan = "half done", plan = "random(state=2) @ share=0.25" },
    { Plan = "broken", plan = "random(state=3) @ share=0.25" },
    { Plan = "never", plan = "random(state=4) @ share=0.25" },
]
[[tables]]
name = "times"
title = "Times"
labels = ["Plan"]
columns = [{ label = "TPOT", task = "speed", value = "timings.tpot", shows = "ratio" }]
rows = [{ Plan = "best again", plan = "knorm @ share=0.25" }]
"""
# Share of the bytes, mean loss in nats, and how many of 20 easy answers are right.
PLANS = {
    "full": (1.0, 0.0, 20),
    "best": (0.255, 0.05, 18),
    "near": (0.249, 0.055, 17),
    "far": (0.25, 0.4, 3),
    "small": (0.2, 0.4, 3),
    "over": (0.2551, 0.01, 20),
    "large": (0.9, 0.0, 20),
    "half done": (0.25, 0.01, 20),
}
OTHER_PLANS = {
    "full": (1.0, 0.0, 20),
    "best": (0.25, 0.3, 4),
    "near": (0.24, 0.01, 20),
    "far": (0.26, 0.02, 19),
    "over": (0.249, 0.4, 19),
}
"""On another model: what was best is worse, `far` stands at another budget, and the others were not measured."""
MODEL = {"model": "made-up", "parameters": 6_000_000, "cache_dtype": "bfloat16"}


def suite_in(folder, fitted=None):
    """The suite, read from a file in a folder.

    Args:
        folder: where it is written.
        fitted: by model, what `keep=` was found for plans with `share=`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sections = [
        f"[fitted.{json.dumps(model)}]\n" + "".join(f"{json.dumps(a)} = {json.dumps(b)}\n" for a, b in plans.items())
        for model, plans in (fitted or {}).items()
    ]
    (folder / "equal.toml").write_text("\n".join([SUITE, *sections]))
    return read_suite(folder / "equal.toml")


def records_of(suite, model="made-up", plans=PLANS, full=100_000, day=2):
    """Records of a model.

    Args:
        suite: from `suite_in`.
        model: its name.
        plans: as `PLANS`.
        full: bytes of its uncompressed cache.
        day: on which it was measured.
    """
    chance, found = random.Random(5), []
    cells = {row.labels[0]: row.cells for table in suite.tables_for(model) for row in table.rows}
    asked = [str(cell.tasks[0]) for cell in cells["best"]]
    base = [chance.uniform(2, 3) for _ in range(20)]
    of_model = {**MODEL, "model": model, "started": f"2026-01-{day:02}T00:00:00.000+00:00"}
    for name, (share, loss, right) in plans.items():
        plan = cells[name][0].plan if name != "full" else "full"
        common = {
            **of_model,
            "plan_hash": suite.contestant(plan).hash,
            "bytes_full": full,
            "tokens_seen": 100,
            "bytes_held": round(full * share),
        }
        nll = tuple(x + loss + (chance.gauss(0, 0.02) if loss else 0) for x in base)
        found.append(
            record(
                plan,
                "perplexity",
                asked=asked[0],
                values={"nll": nll},
                metrics={"nll": fmean(nll), "perplexity": exp(fmean(nll))},
                samples=20,
                point={"context": 100, "continuation": 10, "chunk": None},
                text="t",
                text_hash="t",
                **common,
            )
        )
        for kind, hits in (("needle", right), ("arithmetic", 2 if name == "full" else 0)):
            for depth, count in ((0.1, min(hits, 10)), (0.9, max(0, hits - 10))):
                if name == "half done" and depth == 0.9:
                    continue
                values = {"hit": (1.0,) * count + (0.0,) * (10 - count), "nll": (0.1,) * 10}
                found.append(
                    record(
                        plan,
                        "needle",
                        asked=asked[1 if kind == "needle" else 2],
                        values=values,
                        samples=10,
                        point={"kind": kind, "length": 100, "depth": depth, "question_outside": False},
                        text_hash=f"{kind}{depth}",
                        **common,
                    )
                )
    broken = suite.contestant(cells["broken"][0].plan)
    found.append(record("x", "needle", asked=asked[1], plan_hash=broken.hash, error="It broke.", **of_model))
    speed = str(cells["best again"][0].tasks[0])
    for run, plan, tpot in (("one", "full", 2.0), ("one", "best", 3.0), ("two", "full", 9.0)):
        written = cells[plan][0].plan if plan != "full" else "full"
        each = {"median": tpot, "q1": tpot, "q3": tpot, "p10": tpot, "count": 5, "left_out": 0}
        timings = {"ttft": each, "tpot": each}
        found.append(
            record(
                written,
                "speed",
                asked=speed,
                plan_hash=suite.contestant(written).hash,
                run=run,
                point={"context": 100, "tokens": 16, "batch": 1, "rounds": 5},
                samples=5,
                timings=timings,
                **of_model,
            )
        )
    return found
