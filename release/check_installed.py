"""Try an installed kvtailor as a user would: `ls`, `check`, `run` and a bench of seconds, all on the embedded model.

    VENV/bin/python release/check_installed.py [--kernels present|absent]

It needs nothing but the installed package and no network. It runs in an empty folder, so that what is imported is what
was installed. Exit code 1 with a sentence where something is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LICENCES = ("LICENSE", "CC-BY-SA-3.0.txt", "NOTICE")
PLAN = "snapkv + kivi(bits=4, recent=32) @ tokens=64"
BENCH = ("--tasks", "perplexity", "--windows", "4", "--context", "256", "--continuation", "64")


class Failed(Exception):
    """What was expected and what was found, in one sentence."""


def call(*words: str, folder: Path) -> str:
    """Standard output of the installed program `kvtailor` with these words.

    Raises:
        Failed: it ended with another code than 0.
    """
    program = Path(sys.executable).with_name("kvtailor")
    # Neither this checkout nor a model's hub can help.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KVTAILOR_CPU")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    begin = time.perf_counter()
    done = subprocess.run([str(program), *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"kvtailor {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(f"  kvtailor {words[0]}: {time.perf_counter() - begin:.1f} s", flush=True)
    return done.stdout


def json_of(text: str) -> dict[str, Any]:
    """The object on the last line of an output."""
    found: dict[str, Any] = json.loads(text.rstrip("\n").rpartition("\n")[2])
    return found


def expect(holds: bool, sentence: str) -> None:
    """Raise `Failed` with the sentence where the condition does not hold."""
    if not holds:
        raise Failed(sentence)


def check_files() -> None:
    """The licence texts are in the metadata, and the version is that of the code."""
    found = importlib.metadata.distribution("kvtailor")
    names = {path.name for path in found.files or () if ".dist-info/licenses/" in path.as_posix()}
    expect(set(LICENCES) <= names, f"licence texts: expected {', '.join(LICENCES)}, found {sorted(names)}")
    expression = found.metadata["License-Expression"]
    expect(expression == "Apache-2.0 AND CC-BY-SA-3.0", f"licence expression: found {expression}")


def check_verbs(folder: Path, kernels: str | None) -> None:
    """`ls`, `check`, `run` and `bench` give what they should; `kernels` says whether C++ must run or must not."""
    version = importlib.metadata.version("kvtailor")
    printed = call("--version", folder=folder)
    expect(printed.split()[-1] == version, f"version: the metadata have {version}, the program prints {printed}")

    listed = json_of(call("ls", "--json", folder=folder))
    expect({"snapkv", "h2o"} <= listed["stages"]["score"].keys(), f"ls: scorers are {list(listed['stages']['score'])}")
    expect("kivi4" in listed["presets"], f"ls: presets are {list(listed['presets'])}")
    expect(bool(listed["calibrations"]), "ls: there are no calibration files")

    checked = json_of(call("check", PLAN, "--model", "demo", "--json", folder=folder))
    expect(checked["faults"] == [], f"check: {PLAN} has faults {checked['faults']}")
    forms = {
        each["operation"]: each["implementation"] for each in checked["implementations"] if each["device"] == "cpu"
    }
    in_c = sorted(operation for operation, form in forms.items() if form.startswith("C++"))
    if kernels is not None:
        expect(bool(in_c) == (kernels == "present"), f"kernels: expected {kernels}, C++ runs {in_c or 'nothing'}")

    (folder / "prompt.txt").write_text("The treasure lies below the old oak at the river. " * 60, encoding="utf-8")
    words = ("--plan", PLAN, "--prompt-file", "prompt.txt", "--max-new-tokens", "8", "--json")
    ran = json_of(call("run", *words, folder=folder))
    expect(ran["new_tokens"] == 8 and bool(ran["text"]), f"run: no text of 8 tokens: {ran}")
    expect(0 < ran["bytes_held"] < ran["bytes_full"], f"run: {ran['bytes_held']} of {ran['bytes_full']} bytes are held")

    call("bench", "--plans", f"{PLAN}; streaming @ keep=0.25", *BENCH, "--out", "results", "--json", folder=folder)
    check_records(folder / "results")


def check_records(folder: Path) -> None:
    """A bench wrote a page, and records of three plans without errors and with finite losses."""
    expect(
        (folder / "report.html").is_file(), f"bench: no report.html among {sorted(p.name for p in folder.iterdir())}"
    )
    lines = [line for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    records = [json.loads(line) for line in lines]
    losses = {each["plan"]: each["metrics"]["nll"] for each in records if each["metrics"].get("nll") is not None}
    expect(len(losses) == 3, f"bench: losses of full and two plans were expected, found {losses}")
    expect(all(math.isfinite(loss) for loss in losses.values()), f"bench: losses are {losses}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=("present", "absent"), help="whether the C++ kernels must be there")
    given = parser.parse_args()
    try:
        check_files()
        with tempfile.TemporaryDirectory() as folder:
            check_verbs(Path(folder), given.kernels)
    except Failed as failed:
        print(f"check_installed: {failed}", file=sys.stderr)
        return 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(f"  installed package works on Python {version} (kernels {given.kernels or 'not asked for'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
