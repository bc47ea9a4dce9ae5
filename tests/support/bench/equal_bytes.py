"""A small suite with a leaderboard, and made-up records of it: no number in here was measured."""

from __future__ import annotations

import random

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
MODEL = {"model": "made-up", "parameters": 6_000_000}


def suite_in(folder):
    """The suite, read from a file in a folder."""
    (folder / "equal.toml").write_text(SUITE)
    return read_suite(folder / "equal.toml")


def records_of(suite):
    chance, found = random.Random(5), []
    cells = {row.labels[0]: row.cells for table in suite.tables_for("made-up") for row in table.rows}
    asked = [str(cell.tasks[0]) for cell in cells["best"]]
    base = [chance.uniform(2, 3) for _ in range(20)]
    for name, (share, loss, right) in PLANS.items():
        plan = cells[name][0].plan if name != "full" else "full"
        common = {
            **MODEL,
            "plan_hash": suite.contestant(plan).hash,
            "bytes_full": 100_000,
            "tokens_seen": 100,
            "bytes_held": round(100_000 * share),
        }
        nll = tuple(x + loss + (chance.gauss(0, 0.02) if loss else 0) for x in base)
        found.append(
            record(plan, "perplexity", asked=asked[0], values={"nll": nll}, samples=20, text_hash="t", **common)
        )
        for kind, hits in (("needle", right), ("arithmetic", 2 if name == "full" else 0)):
            for depth, count in ((0.1, min(hits, 10)), (0.9, max(0, hits - 10))):
                if name == "half done" and depth == 0.9:
                    continue
                values = {"hit": (1.0,) * count + (0.0,) * (10 - count)}
                found.append(
                    record(
                        plan,
                        "needle",
                        asked=asked[1 if kind == "needle" else 2],
                        values=values,
                        samples=10,
                        point={"depth": depth},
                        text_hash=f"{kind}{depth}",
                        **common,
                    )
                )
    broken = suite.contestant(cells["broken"][0].plan)
    found.append(record("x", "needle", asked=asked[1], plan_hash=broken.hash, error="It broke.", **MODEL))
    speed = str(cells["best again"][0].tasks[0])
    for run, plan, tpot in (("one", "full", 2.0), ("one", "best", 3.0), ("two", "full", 9.0)):
        written = cells[plan][0].plan if plan != "full" else "full"
        timings = {"tpot": {"median": tpot, "q1": tpot, "q3": tpot, "p10": tpot, "count": 5, "left_out": 0}}
        found.append(
            record(
                written,
                "speed",
                asked=speed,
                plan_hash=suite.contestant(written).hash,
                run=run,
                timings=timings,
                **MODEL,
            )
        )
    return found
