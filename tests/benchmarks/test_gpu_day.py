"""`make gpu-day`: pieces resume, results are kept whole, bars are null where nothing was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, needs_triton

from kvtailor.ops.dispatch import TRITON_OPERATIONS

REPOSITORY = Path(__file__).parents[2]
JSON = 'import json; print("told"); print(json.dumps({"tables": {"a table": [{"name": "a", "median_ms": 2.0}]}}))'


@pytest.fixture
def day() -> SimpleNamespace:
    """The modules of benchmarks/gpu_day."""
    from benchmarks.gpu_day import __main__, bars, folder, page, readings, run, steps, verdict

    return SimpleNamespace(
        main=__main__.main,
        bars=bars,
        Folder=folder.Folder,
        page=page,
        Readings=readings.Readings,
        run=run.run,
        steps=steps,
        verdict=verdict,
    )


def step(day: SimpleNamespace, name: str, code: str, seconds: int = 1, **more: Any) -> Any:
    return day.steps.Step(name=name, piece=1, seconds=seconds, words=("-c", code), **more)


def measured(name: str, tables: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"step": name, "piece": 1, "seconds": 1.0, "status": "done", "reason": None, "environment": {}}
    return {**told, "tables": tables, **more}


def rows(**medians: float) -> list[dict[str, Any]]:
    return [{"name": name, "median_ms": value} for name, value in medians.items()]


def test_a_step_that_is_done_does_not_run_again(day: SimpleNamespace, tmp_path: Path) -> None:
    count = tmp_path / "count"
    counted = f"open({str(count)!r}, 'a').write('x'); {JSON}"
    wanted = [step(day, "first", counted), step(day, "second", JSON)]
    folder = day.Folder(tmp_path / "out")
    assert day.run(folder, wanted, limit=60, say=lambda line: None)
    assert day.run(day.Folder(tmp_path / "out"), wanted, limit=60, say=lambda line: None)
    assert count.read_text() == "x"
    assert folder.last("first")["tables"] == {"a table": [{"name": "a", "median_ms": 2.0}]}
    assert "told" in (tmp_path / "out" / "log.txt").read_text()
    # On another machine, whose folder is empty, it goes on from what came back.
    moved = day.Folder(tmp_path / "other", tmp_path / "out")
    assert day.run(moved, wanted, limit=60, say=lambda line: None) and count.read_text() == "x"
    assert len(day.Folder(tmp_path / "other").records) == 2


def test_what_takes_too_long_is_left_and_runs_the_next_time(day: SimpleNamespace, tmp_path: Path) -> None:
    said: list[str] = []
    folder, slow = day.Folder(tmp_path), step(day, "slow", JSON, seconds=10_000)
    assert not day.run(folder, [step(day, "quick", JSON), slow], limit=60, say=said.append)
    assert folder.status("quick") == "done" and folder.status("slow") == "left" and "left, it is thought" in said[-1]
    # It is the first of its call now, and there will never be more time.
    assert day.run(folder, [step(day, "quick", JSON), slow], limit=60, say=said.append)
    assert folder.status("slow") == "done"


def test_a_step_ends_with_its_time_and_is_not_lost(day: SimpleNamespace, tmp_path: Path) -> None:
    sleeps = "import time; time.sleep(60)"
    folder = day.Folder(tmp_path)
    assert not day.run(folder, [step(day, "quick", JSON), step(day, "hangs", sleeps)], limit=18, say=lambda line: None)
    assert folder.status("hangs") == "left"
    # A whole call for itself was not enough: it would take every later call.
    assert day.run(folder, [step(day, "hangs", sleeps)], limit=17, say=lambda line: None)
    assert folder.status("hangs") == "failed" and "did not end" in folder.last("hangs")["reason"]


def test_what_fails_says_why_and_runs_again_when_asked(day: SimpleNamespace, tmp_path: Path) -> None:
    folder = day.Folder(tmp_path)
    bad, silent = step(day, "bad", "raise SystemExit('no such device')"), step(day, "silent", "pass")
    said: list[str] = []
    assert day.run(folder, [bad, silent], limit=60, say=said.append)
    assert "no such device" in folder.last("bad")["reason"] and "it printed no JSON" in folder.last("silent")["reason"]
    day.run(folder, [bad], limit=60, say=said.append)
    assert said[-1] == "bad: failed before" and len(folder.records) == 2
    day.run(folder, [step(day, "bad", JSON)], limit=60, again=True, say=said.append)
    assert folder.status("bad") == "done"


def test_failed_tests_are_named(day: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): assert False\n")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull)
    tests = day.steps.Step(
        name="tests-kernels",
        piece=1,
        seconds=1,
        words=(*words, str(tmp_path / "test_two.py")),
        kind="tests",
        environment=(("TRITON_INTERPRET", "1"),),
    )
    folder = day.Folder(tmp_path / "out")
    day.run(folder, [tests], limit=60, say=lambda line: None)
    counts = folder.last("tests-kernels")["tests"]
    assert counts["passed"] == 1 and len(counts["failed"]) == 1 and counts["failed"][0].endswith("::test_b")
    outcomes = day.verdict.outcomes(day.Readings.of(folder.records))
    assert {outcome.won for outcome in outcomes} == {False}


def test_a_record_that_was_cut_off_is_dropped_and_any_other_is_an_error(day: SimpleNamespace, tmp_path: Path) -> None:
    whole = json.dumps(measured("first", {}))
    (tmp_path / "records.jsonl").write_text(f"{whole}\n{whole[:20]}")
    assert len(day.Folder(tmp_path).records) == 1
    assert (tmp_path / "records.jsonl").read_text() == f"{whole}\n"
    (tmp_path / "records.jsonl").write_text(f"{whole[:20]}\n{whole}\n")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        day.Folder(tmp_path)
    with pytest.raises(ValueError, match="which is no folder"):
        day.Folder(tmp_path / "out", tmp_path / "nowhere")


def test_nothing_measured_is_null_everywhere(day: SimpleNamespace, tmp_path: Path) -> None:
    folder = day.Folder(tmp_path)
    day.page.write_page(folder, day.steps.steps())
    told = json.loads((tmp_path / "bars.json").read_text())
    assert {each["measured"] for each in told["bars"]} == {None} == {each["met"] for each in told["bars"]}
    assert all(each["why_null"] for each in told["bars"])
    assert set(told["won"]) == set(TRITON_OPERATIONS) and set(told["won"].values()) == {None}
    assert told["constant"] == "WON_ON_CUDA: frozenset[str] = frozenset()"
    page = (tmp_path / "page.md").read_text()
    assert "0 of" in page and "| null |" in page and "**no**" not in page


def test_every_bar_of_the_specification_is_there(day: SimpleNamespace) -> None:
    named = {point.bar for point in day.bars.BARS}
    wanted = [f"G{n}" for n in range(1, 9)] + [f"E{n}" for n in range(1, 10)] + [f"C{n}" for n in range(1, 7)]
    assert named >= set(wanted)


def test_a_bar_is_met_by_the_number_and_its_direction(day: SimpleNamespace) -> None:
    table = "grouped heads, 32 on 8, 32768 tokens, 8 rows"
    sides = {"sdpa, heads folded": 4.0, "sdpa as transformers calls it": 6.0, "kvtailor kivi 4 bits": 1.6}
    found = day.Readings.of(
        [
            measured(
                "kernels-32k",
                {
                    table: rows(**sides),
                    "appending, 32768 tokens": rows(**{"a token into its slot": 0.2, "attention, bfloat16": 2.0}),
                },
            )
        ]
    )
    points = {(each.bar, each.asks): each for each in day.bars.BARS}
    g2 = next(each for (bar, asks), each in points.items() if bar == "G2" and table in asks and "64" in asks)
    # Over the faster of torch's two forms, which flatters less.
    assert g2.measured(found) == 2.5 and g2.met(found) is True
    g8 = next(each for (bar, asks), each in points.items() if bar == "G8" and each.read is not None)
    assert g8.measured(found) == 0.1 and g8.met(found) is False
    # A kernel whose answer was off has no row, and so no bar is met.
    del sides["kvtailor kivi 4 bits"]
    assert g2.met(day.Readings.of([measured("kernels-32k", {table: rows(**sides)})])) is None


def test_over_full_is_over_the_faster_full(day: SimpleNamespace) -> None:
    plan = "kivi(bits=4, group=64, recent=128)"
    table = "decode random-llama3-8b 32768 tokens 8 rows"
    sides = {"full, reference, graphs": 12.0, "full, triton, graphs": 15.0, f"{plan}, triton, graphs": 10.0}
    found = day.Readings.of([measured("whole-8b-32k-8-rows", {table: rows(**sides)})])
    (point,) = [each for each in day.bars.BARS if plan in each.asks and "8 rows" in each.asks and each.bar == "E2"]
    assert point.measured(found) == pytest.approx(1.2) and point.met(found) is False


def test_what_has_won_needs_every_condition(day: SimpleNamespace) -> None:
    passed = measured("tests-kernels", {}, tests={"passed": 3, "skipped": 0, "failed": []})
    tables: dict[str, Any] = {}
    for model, tokens, count in day.verdict._POINTS:
        sides = {}
        for plan in day.verdict._PLANS:
            sides |= {f"{plan}, reference, graphs": 2.0, f"{plan}, triton, graphs": 1.0}
        tables[f"decode {model} {tokens} tokens {count} rows"] = rows(**sides)

    def won(*records: dict[str, Any]) -> dict[str, bool | None]:
        outcomes = day.verdict.outcomes(day.Readings.of(records))
        return {outcome.operation: outcome.won for outcome in outcomes}

    unknown = dict.fromkeys(TRITON_OPERATIONS)
    assert won(passed, measured("whole", tables)) == {**unknown, "attention": True}
    assert won(measured("whole", tables))["attention"] is None
    slower = {**tables, next(iter(tables)): rows(**{"full, reference, graphs": 1.0, "full, triton, graphs": 1.0})}
    assert won(passed, measured("whole", slower))["attention"] is False
    assert set(day.verdict.OPERATIONS) == set(TRITON_OPERATIONS)
    # The newest record of a step counts.
    assert won(passed, measured("whole", tables), measured("whole", slower))["attention"] is False


def test_pieces_fit_a_call_and_the_rehearsal_has_every_step(day: SimpleNamespace) -> None:
    for piece in range(1, day.steps.PIECES + 1):
        assert 0 < day.steps.estimate(piece) <= 545, piece
    real, tiny = day.steps.steps(), day.steps.steps(rehearsal=True)
    assert [each.name for each in real] == [each.name for each in tiny]
    assert len({each.name for each in real}) == len(real)
    for each in real:
        # Every path that pytest is given is there.
        assert all((REPOSITORY / word).exists() for word in each.words if word.startswith("tests/")), each.name
    page = (REPOSITORY / "docs" / "gpu-day.md").read_text()
    for piece in range(1, day.steps.PIECES + 1):
        assert f"| {piece} | {day.steps.estimate(piece)} s |" in page


def option(words: tuple[str, ...], name: str, usual: str = "") -> list[str]:
    """The values of an option of a command, with ',' between."""
    text = words[words.index(name) + 1] if name in words else usual
    return [each.strip() for each in text.split(",") if each.strip()]


def written(day: SimpleNamespace) -> dict[str, set[str]]:
    """The tables that the real steps write, and the sides of each, by the names that the benches give them."""
    from benchmarks.micro import cases, kernels, whole
    from kvtailor.ops.dispatch import using

    with using("triton"):
        ours = cases.kernels_of(torch.device(DEVICE))
        one_row = kernels._of_one_row(ours)
        made = {name: {side.name for side in make(ours, 64, 1)} for name, (_, make, _, _) in one_row.items()}
    titles = {name: title for name, (title, *_) in one_row.items()}
    attention = {"a plain read of the bfloat16 bytes", *kernels._FOLDS, *(f"kvtailor {name}" for name in cases.SIDES)}
    attention |= {f"decoded first, {name}" for name in kernels._DECODED_FIRST}
    found: dict[str, set[str]] = {}
    for words in (each.words for each in day.steps.steps()):
        contexts, forms = option(words, "--contexts"), option(words, "--implementations", "reference,triton")
        plans = ["full", *words[words.index("--plans") + 1].split("; ")] if "--plans" in words else []
        rows = option(words, "--batches", "1")
        if "kernels" in words:
            for context in contexts:
                for case in option(words, "--cases"):
                    tables = (
                        [f"{titles[case]}, {context} tokens"]
                        if case in titles
                        else [
                            f"{title}, {context} tokens" + (f", {count} rows" if count != "1" else "")
                            for title, *_ in cases.HEADS
                            for count in rows
                        ]
                    )
                    for table in tables:
                        found.setdefault(table, set()).update(made.get(case, attention))
        if "whole" in words:
            (model,), own = option(words, "--model"), set() if "--no-own" in words else {whole.OWN}
            ways = whole.GRAPHS[option(words, "--graphs", "both")[0]]
            sides = {whole.side_name(plan, form, graphs=way) for plan in plans for form in forms for way in ways} | own
            for context in contexts:
                for count in rows:
                    found.setdefault(f"decode {model} {context} tokens {count} rows", set()).update(sides)
            once = {whole.side_name(plan, form) for plan in plans for form in forms} | own
            for context in option(words, "--prefill"):
                found.setdefault(f"prompt {model} {context} tokens", set()).update(once)
    return found


@needs_triton
def test_bars_read_what_the_steps_write(day: SimpleNamespace) -> None:
    """Names stand in two places; a bar that reads a table of another name would be null for ever."""
    from benchmarks.micro import host, link

    asked: set[tuple[str, str]] = set()

    class Asked(day.Readings):  # type: ignore[misc, name-defined]
        def row(self, table: str, side: str) -> None:
            asked.add((table, side))

    empty = Asked(tables={}, bench={}, tests={})
    for point in day.bars.BARS:
        assert point.measured(empty) is None
    day.verdict.outcomes(empty)
    found = written(day)
    of_host = {(table, side) for table, side in asked if table == "host"}
    assert {side for _, side in of_host} <= {host.BASE, *host.plans()}
    # A bar names both forms of `full`, of which one table may have the one alone.
    missing = [(table, side) for table, side in asked - of_host if side not in found.get(table, ())]
    assert [each for each in missing if ", reference" not in each[1]] == []
    assert all((table, side.replace("reference", "triton")) not in missing for table, side in missing)
    assert len(asked) > 60
    assert {"plain(block_size=1024)", "vector(bits=8)", "kivi(bits=4, group=64, recent=128)"} == set(link._CODECS)
    assert "resident_layers=2" in link._RESIDENT


def test_a_rehearsal_and_a_gpu_never_share_a_folder(day: SimpleNamespace, tmp_path: Path) -> None:
    folder = day.Folder(tmp_path)
    folder.add(measured("host", {"host": rows(**{"full": 1.0, "DynamicCache + sdpa": 1.0})}), "")
    day.page.write_page(folder, day.steps.steps())
    met = [each["met"] for each in json.loads((tmp_path / "bars.json").read_text())["bars"]]
    assert met.count(True) == 1
    with pytest.raises(SystemExit):
        day.main(["--rehearse", "--out", str(tmp_path), "--list"])
    tiny = measured("host", folder.records[0]["tables"], environment={"TRITON_INTERPRET": "1"})
    other = day.Folder(tmp_path / "tiny")
    other.add(tiny, "")
    day.page.write_page(other, day.steps.steps(rehearsal=True))
    assert {each["met"] for each in json.loads((tmp_path / "tiny" / "bars.json").read_text())["bars"]} == {None}


def call(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_day", "--rehearse", "--out", str(out), *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}


def alive(session: int) -> list[int]:
    """Processes of a session that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, which may hold anything: state, parent, group, session.
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(folder.name))
    return found


@needs_triton
def test_a_killed_piece_goes_on(day: SimpleNamespace, tmp_path: Path) -> None:
    """The first step ends, the second is killed with the whole run, and the next call does not run the first again."""
    words = ("--only", "machine", "--only", "tests-kernels")
    state, out = tmp_path / "state.json", tmp_path / "records.jsonl"
    process = subprocess.Popen(
        call(tmp_path, *words), cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"tests-kernels: begun"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if sys.platform == "linux":
        # What the step has started must not go on beside the next call.
        deadline = time.monotonic() + 20
        while alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive(process.pid) == []
    told = {each["step"]: each["status"] for each in json.loads(state.read_text())["steps"]}
    assert told["machine"] == "done" and told["tests-kernels"] == "left"
    first = out.read_text()
    begin = time.monotonic()
    done = subprocess.run(
        call(tmp_path, *words), cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine: done before" in done.stdout and out.read_text().startswith(first), time.monotonic() - begin
    assert [record["step"] for record in day.Folder(tmp_path).records] == ["machine", "tests-kernels"]


@needs_triton
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", range(1, 6))
def test_every_piece_is_rehearsed(piece: int, day: SimpleNamespace, tmp_path: Path) -> None:
    done = subprocess.run(
        call(tmp_path, "--piece", str(piece), "--limit", "1700"),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = day.Folder(tmp_path)
    wanted = [each.name for each in day.steps.steps(rehearsal=True) if each.piece == piece]
    assert [record["step"] for record in folder.records] == wanted
    assert {record["status"] for record in folder.records} == {"done"}
    page = (tmp_path / "page.md").read_text()
    assert "A rehearsal" in page
    # Whatever it measured, no bar is met by a rehearsal.
    assert {each["met"] for each in json.loads((tmp_path / "bars.json").read_text())["bars"]} <= {None}
