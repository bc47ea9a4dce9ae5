"""Recipe, step 6: how far methods lie apart. ``python -m recipes.demo.separate`` (half an hour on one core).

Every plan answers the same generated documents (the question stands inside the prompt that is compressed) and continues
the same windows of novels. Prints the tables of the model card: each plan's value, and its paired difference to the
full cache with a 95 % interval; then whether the orders that the literature expects hold. The orders are fixed in
`EXPECTED` before anything is measured, and a broken one is printed as broken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvtailor.bench.measure.paired_hits import share_difference
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.progress import watch
from kvtailor.bench.runner import contestants_of, plan_run, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import Task
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import ArgumentError
from kvtailor.presets import FULL
from recipes import demo

__all__ = ["EXPECTED", "EVICTING", "KEEPS", "Order", "QUANTISED", "compare", "main", "samples", "tables"]

KEEPS = (0.5, 0.25, 0.125, 0.0625)
EVICTING = (
    "snapkv(kernel=5)",
    "snapkv(kernel=21)",
    "snapkv(kernel=21) + adakv",
    "pyramidkv",
    "h2o",
    "streaming",
    "sliding_window",
    "random",
)
QUANTISED = (
    "kivi(key_bits=8, value_bits=8)",
    "kivi(key_bits=4, value_bits=8)",
    "kivi(key_bits=8, value_bits=4)",
    "kivi(key_bits=2, value_bits=8)",
    "kivi(key_bits=8, value_bits=2)",
    "kivi(bits=2)",
)


@dataclass(frozen=True)
class Order:
    """That one plan does at least as well as another on a task.

    Attributes:
        better, worse: plans; "{keep}" stands for each of `KEEPS`.
        task: "needle" (share of right answers) or "perplexity" (nats per token of novels).
    """

    better: str
    worse: str
    task: str


EXPECTED = (
    Order(FULL, "snapkv(kernel=5) @ keep={keep}", "needle"),
    Order("snapkv(kernel=5) @ keep={keep}", "streaming @ keep={keep}", "needle"),
    Order("snapkv(kernel=21) @ keep={keep}", "streaming @ keep={keep}", "needle"),
    Order("snapkv(kernel=5) @ keep={keep}", "random @ keep={keep}", "needle"),
    Order("streaming @ keep={keep}", "random @ keep={keep}", "needle"),
    Order("streaming @ keep={keep}", "sliding_window @ keep={keep}", "perplexity"),
    Order("streaming @ keep={keep}", "random @ keep={keep}", "perplexity"),
    Order("kivi(key_bits=8, value_bits=4)", "kivi(key_bits=4, value_bits=8)", "perplexity"),
    Order("kivi(key_bits=8, value_bits=2)", "kivi(key_bits=2, value_bits=8)", "perplexity"),
    Order("kivi(key_bits=8, value_bits=2)", "kivi(key_bits=2, value_bits=8)", "needle"),
)
GOODNESS = {"needle": ("hit", 1.0), "perplexity": ("nll", -1.0)}


def samples(records: Sequence[Record], label: str, task: str, name: str) -> list[float]:
    """The values ``name`` of one plan on one task, over all points in their order.

    Raises:
        ArgumentError: the plan failed, or was not measured.
    """
    chosen = [record for record in records if record.task == task and record.label == label]
    errors = [record.error for record in chosen if record.error]
    if errors or not chosen:
        raise ArgumentError(
            f"asked for {name} of {label!r} on {task}: {errors[0] if errors else 'it was not measured'}"
        )
    return [value for record in chosen for value in (record.values or {})[name]]


def compare(records: Sequence[Record], order: Order) -> list[tuple[str, str, Estimate]]:
    """How much better the better plan of ``order`` did, as (better, worse, paired difference) for each keep."""
    name, sign = GOODNESS[order.task]
    found = []
    keeps = KEEPS if "{keep}" in order.better + order.worse else KEEPS[:1]
    for keep in keeps:
        better, worse = order.better.format(keep=keep), order.worse.format(keep=keep)
        ours, theirs = (samples(records, label, order.task, name) for label in (better, worse))
        first, second = (ours, theirs) if sign > 0 else (theirs, ours)
        found.append(
            (better, worse, share_difference(ours, theirs) if name == "hit" else mean_difference(first, second))
        )
    return found


def tables(records: Sequence[Record]) -> str:
    """Markdown: right answers, nats of the answers, and nats of novels, each with the difference to the full cache."""
    parts = []
    for title, task, name, digits in (
        ("Right answers, in percent", "needle", "hit", 0),
        ("Nats per answer token", "needle", "nll", 2),
        ("Nats per token of novels", "perplexity", "nll", 3),
    ):
        scale = 100 if name == "hit" else 1
        full = samples(records, FULL, task, name)
        mean = scale * sum(full) / len(full)
        parts += ["", f"{title}; full cache {mean:.{digits}f}, {len(full)} samples", ""]
        parts.append("| plan | " + " | ".join(f"keep={keep}" for keep in KEEPS) + " |")
        parts.append("|---" * (len(KEEPS) + 1) + "|")
        for plan in EVICTING:
            cells = [
                _cell(samples(records, f"{plan} @ keep={keep}", task, name), full, scale, digits) for keep in KEEPS
            ]
            parts.append(f"| {plan} | " + " | ".join(cells) + " |")
        parts += ["", "| plan | value |", "|---|---|"]
        parts += [
            f"| {plan} | {_cell(samples(records, plan, task, name), full, scale, digits)} |" for plan in QUANTISED
        ]
    return "\n".join(parts)


def _cell(ours: list[float], full: list[float], scale: int, digits: int) -> str:
    # Of hits the card shows percent, and nothing else is scaled.
    found = share_difference(ours, full) if scale != 1 else mean_difference(ours, full)
    value = f"{scale * sum(ours) / len(ours):.{digits}f}"
    if found.low is None or found.high is None:
        return value
    return f"{value} ({scale * found.low:+.{digits}f} to {scale * found.high:+.{digits}f})"


def _verdicts(records: Sequence[Record]) -> list[str]:
    lines = []
    for order in EXPECTED:
        for better, worse, found in compare(records, order):
            assert found.low is not None and found.high is not None
            verdict = "holds" if found.low > 0 else "BROKEN" if found.high < 0 else "not told apart"
            lines.append(
                f"{verdict:<14} {order.task:<10} {better} >= {worse}: "
                f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="'demo', a folder or a hub name")
    parser.add_argument("--data", type=Path, default=demo.data_folder(), help="folder that has books_eval/")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document, and of a window of novels")
    parser.add_argument("--documents", type=int, default=5, help="per depth, of 10 depths")
    parser.add_argument("--windows", type=int, default=48, help="of novels")
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    subject = Subject.load(given.model, dtype="float32")
    plans = [f"{plan} @ keep={keep}" for plan in EVICTING for keep in KEEPS] + list(QUANTISED)
    contestants = contestants_of(plans)
    novels = sorted((given.data / "books_eval").glob("*.txt"))
    if not novels:
        raise SystemExit(f"no books_eval/*.txt in {given.data}: give --data or set KVTAILOR_DATA")
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in novels)
    tasks: list[Task] = [
        Needle(
            lengths=(given.length,),
            depths=tuple(round(i / 9, 3) for i in range(10)),
            documents=given.documents,
            state=700_000,
        ),
        Perplexity(
            text=text,
            source="novels",
            context=given.length - 256,
            continuation=256,
            windows=given.windows,
        ),
    ]
    with watch(*plan_run(tasks, contestants), Console(stderr=True)) as seen:
        records = run(
            subject, contestants, tasks, out=given.out, advance=seen.step, finish=seen.finish, bandwidth=False
        )
    print(tables(records))
    print("\n" + "\n".join(_verdicts(records)))
    held = {r.label: {"seen": r.tokens_seen, "held": r.tokens_held, "bytes": r.bytes_held} for r in records}
    print(json.dumps(held))


if __name__ == "__main__":
    main()
