"""Does a sample of the tests find what all of them find? Apply each listed fault and see which tests fail.

    .venv/bin/python -m tests.mutations.run

A fault is put into a copy of the package in a temporary folder; the sources are never touched. The tests that are named
for it run once, without those marked `long`. The whole has found it if any of them fails; the sample of a day has if
one of those fails that `make test` would have chosen on that day (`tests/support/sampling.py`).

Results are added to `build/mutations.jsonl`, one line a fault, and a run goes on where the last one stopped. A fault
whose lines have changed is run anew. When all are there, `tests/mutations/README.md` is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.listed import MUTATIONS, Mutation
from tests.support.sampling import read_seconds, sample

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "mutations.jsonl"
PAGE = Path(__file__).with_name("README.md")
DAYS = 10


class Recorder:
    """A plugin that notes which tests fail, and on which days each of them is in the sample."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds, self.days, self.failed, self.count = seeds, dict[int, set[str]](), set[str](), 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.count = len(session.items)
        seconds = read_seconds()
        self.days = {seed: {each.nodeid for each in sample(session.items, seed, seconds)} for seed in self.seeds}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A file that cannot be imported fails on every day.
        if report.failed:
            self.failed.add(report.nodeid)
            for chosen in self.days.values():
                chosen.add(report.nodeid)


def seeds_from(day: int) -> list[int]:
    """The seeds of so many days, the first of them `day`."""
    first = date(day // 10000, day // 100 % 100, day % 100)
    return [int((first + timedelta(days=i)).strftime("%Y%m%d")) for i in range(DAYS)]


def run_tests(source: Path, tests: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """What fails with the package in `source`; in a process of its own, which has torch and transformers already."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        sys.path[:0] = [str(source), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        recorder = Recorder(seeds)
        paths = [str(ROOT / "tests" / each) for each in tests]
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long", "--timeout=120"]
        pytest.main([*options, *paths], plugins=[recorder])
        failed = sorted(recorder.failed)
        found = [seed for seed in seeds if recorder.failed & recorder.days.get(seed, recorder.failed)]
        report = {"tests": recorder.count, "failed": len(failed), "first": failed[:3], "found": found}
        os.write(write, json.dumps(report).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    # A process that died has been found out by whoever looks at it.
    return json.loads(text) if text else {"tests": 0, "failed": 1, "first": ["the process died"], "found": [*seeds]}


def name_of(mutation: Mutation) -> str:
    return json.dumps([mutation.path, mutation.old, mutation.new, mutation.tests])


def results(seeds: Sequence[int]) -> dict[str, Any]:
    """What is known already for these days, by the mutation's name."""
    if not RESULTS.exists():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines if line["seeds"] == [*seeds]}


def write_page(known: dict[str, Any], seeds: Sequence[int]) -> None:
    """The table of all mutations, in words that need no other page."""
    rows, whole, on_day, days = [], 0, 0, 0
    for each in MUTATIONS:
        line = known[name_of(each)]
        found = len(line["found"])
        whole, on_day, days = whole + bool(line["failed"]), on_day + (seeds[0] in line["found"]), days + found
        day = "yes" if seeds[0] in line["found"] else "no"
        what = f"{line['failed']} of {line['tests']}" if line["failed"] else "none"
        rows.append(f"| `{each.path}` | {each.wrong} | {what} | {day} | {found} |")
    text = f"""# Mutations

`python -m tests.mutations.run` puts each fault of `tests/mutations/listed.py` into a copy of the package
and runs the tests that are named for it.
The whole are these files without what is marked `long`;
the sample is what `make test` chooses of them on a day.

Run on {datetime.now(UTC):%Y-%m-%d}, samples of the {len(seeds)} days from seed {seeds[0]}.
Of {len(MUTATIONS)} faults the whole finds {whole}, and the sample of the first day {on_day}.
Over all days the samples find {days} of {whole * len(seeds)}.

| file | what is wrong | tests that fail | in the day's sample | days of {len(seeds)} |
|---|---|---|---|---|
"""
    PAGE.write_text(text + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: whole {whole}, day {on_day}, days {days} of {whole * len(seeds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample-seed", type=int, default=int(datetime.now(UTC).strftime("%Y%m%d")))
    parser.add_argument("--only", default="", help="mutations of files whose path has this in it")
    options = parser.parse_args()
    seeds = seeds_from(options.sample_seed)
    known = results(seeds)
    import hypothesis  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for each in MUTATIONS:
            if name_of(each) in known or options.only not in each.path:
                continue
            path = source / "kvtailor" / each.path
            text = path.read_text(encoding="utf-8")
            if text.count(each.old) != 1:
                sys.exit(f"{each.path} has {each.old!r} {text.count(each.old)} times: mend tests/mutations/listed.py")
            path.write_text(text.replace(each.old, each.new), encoding="utf-8")
            report = run_tests(source, each.tests, seeds)
            path.write_text(text, encoding="utf-8")
            known[name_of(each)] = {"name": name_of(each), "seeds": seeds, **report}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name_of(each)]) + "\n")
            found = f"{len(report['found'])} of {len(seeds)} days"
            print(f"{each.path}: {each.wrong}: {report['failed']} of {report['tests']} fail, {found}", flush=True)
    if all(name_of(each) in known for each in MUTATIONS):
        write_page(known, seeds)


if __name__ == "__main__":
    main()
