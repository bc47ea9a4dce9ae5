"""Does a sample of the tests find what all of them find? Apply each listed fault and see which tests fail.

    .venv/bin/python -m tests.mutations.run

A fault is put into a copy of the package in a temporary folder; the sources are never touched. Of the tests that are
named for it, those run first that `make test` chooses on the day (`tests/support/sampling.py`), up to the first that
fails: the sample has found the fault, and so has the whole. Where none fails the others follow, without those marked
`long`, and the whole has found it if one of these fails.

Results are added to `build/mutations.jsonl`, one line a fault, and a run goes on where the last one stopped. A fault
whose lines have changed is run anew. `tests/mutations/README.md` is written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.listed import MUTATIONS, Mutation
from tests.support.sampling import read_seconds, sample

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "mutations.jsonl"
PAGE = Path(__file__).with_name("README.md")


class Recorder:
    """A plugin that runs the day's sample first, and ends at the first test that fails."""

    def __init__(self, seed: int) -> None:
        self.seed, self.sampled, self.failed, self.tests, self.ran = seed, set[str](), "", 0, 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = sample(items, self.seed, read_seconds())
        self.sampled, self.tests = {item.nodeid for item in chosen}, len(items)
        items[:] = [item for item in items if item in chosen] + [item for item in items if item not in chosen]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A file that cannot be imported fails on every day.
        if report.failed:
            self.failed = self.failed or report.nodeid
            self.sampled.add(report.nodeid)


def run_tests(source: Path, tests: Sequence[str], seed: int) -> dict[str, Any]:
    """The first test that fails with the package in `source`, in a process of its own, which has torch already."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        sys.path[:0] = [str(source), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        recorder = Recorder(seed)
        paths = [str(ROOT / "tests" / each) for each in tests]
        options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long", "--timeout=120"]
        pytest.main([*options, *paths], plugins=[recorder])
        by = ("sample" if recorder.failed in recorder.sampled else "whole") if recorder.failed else "nothing"
        report = {"by": by, "test": recorder.failed, "ran": recorder.ran, "tests": recorder.tests}
        os.write(write, json.dumps(report).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    # A process that died has been found out by whoever looks at it.
    return json.loads(text) if text else {"by": "sample", "test": "the process died", "ran": 0, "tests": 0}


def cost(mutation: Mutation) -> float:
    """Seconds of the dear tests among those that are named for it, as the sampler knows them."""
    files = tuple(f"tests/{each}::" for each in mutation.tests)
    return sum(seconds for name, seconds in read_seconds().items() if name.startswith(files))


def write(path: Path, text: str) -> None:
    """Write a module; what was compiled from it could look as new as it, and goes."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def name_of(mutation: Mutation) -> str:
    return json.dumps([mutation.path, mutation.old, mutation.new, mutation.tests])


def results(seed: int) -> dict[str, Any]:
    """What is known already for this day, by the mutation's name."""
    if not RESULTS.exists():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines if line.get("seed") == seed}


def write_page(known: dict[str, Any], seed: int) -> None:
    """The table of the mutations that have run, in words that need no other page."""
    rows, counts = [], {"sample": 0, "whole": 0, "nothing": 0}
    for each in (each for each in MUTATIONS if name_of(each) in known):
        line = known[name_of(each)]
        counts[line["by"]] += 1
        rows.append(f"| `{each.path}` | {each.wrong} | {line['by']} | {line['ran']} of {line['tests']} |")
    text = f"""# Mutations

`python -m tests.mutations.run` puts each fault of `tests/mutations/listed.py` into a copy of the package
and runs the tests that are named for it, those of the day's sample first, up to the first that fails.
The sample is what `make test` chooses on a day; the whole are all tests of these files but what is marked `long`.

Run on {datetime.now(UTC):%Y-%m-%d} with the sample of seed {seed}.
{len(rows)} of {len(MUTATIONS)} faults have been tried.
The sample finds {counts["sample"]} of the {counts["sample"] + counts["whole"]} that the whole finds.
Nothing finds {counts["nothing"]}.

| file | what is wrong | found by | tests run |
|---|---|---|---|
"""
    PAGE.write_text(text + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: of {len(rows)} faults {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample-seed", type=int, default=int(datetime.now(UTC).strftime("%Y%m%d")))
    parser.add_argument("--only", default="", help="mutations of files whose path has this in it")
    options = parser.parse_args()
    seed = options.sample_seed
    known = results(seed)
    import hypothesis  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        # Those whose tests are cheap first.
        for each in sorted(MUTATIONS, key=cost):
            if name_of(each) in known or options.only not in each.path:
                continue
            path = source / "kvtailor" / each.path
            text = path.read_text(encoding="utf-8")
            if text.count(each.old) != 1:
                sys.exit(f"{each.path} has {each.old!r} {text.count(each.old)} times: mend tests/mutations/listed.py")
            write(path, text.replace(each.old, each.new))
            report = run_tests(source, each.tests, seed)
            write(path, text)
            known[name_of(each)] = {"name": name_of(each), "seed": seed, **report}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name_of(each)]) + "\n")
            print(f"{each.path}: {each.wrong}: {report['by']}, {report['ran']} of {report['tests']}", flush=True)
            write_page(known, seed)


if __name__ == "__main__":
    main()
