"""`python -m benchmarks.micro host`: which plans it times, against what, what it says, and where the time goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import make_dataclass

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks.micro import by_function, host
from benchmarks.micro.__main__ import micro
from benchmarks.micro.by_function import Spent, functions_of, told
from benchmarks.micro.timer import Measured, Side
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.plan import Plan, registry

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model of two layers, and the threads of before."""
    monkeypatch.setitem(RANDOM_SHAPES, host.MODEL, {**RANDOM_SHAPES[host.MODEL], "num_hidden_layers": 2})
    # Whatever else runs on this machine.
    monkeypatch.setattr(host.Neighbours, "disturbed", lambda self: False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*words: str) -> Result:
    return CliRunner().invoke(micro, ["host", *words])


def test_it_runs_and_ends_with_json() -> None:
    torch.set_num_threads(2)
    found = run("--plans", "full; kivi4", "--rounds", "2")
    assert found.exit_code == 0, found.output
    told, said = json.loads(found.stdout.splitlines()[-1]), found.stdout
    base, full, kivi = told["tables"]["host"]
    assert [row["name"] for row in (base, full, kivi)] == ["DynamicCache + sdpa", "full", "kivi4"]
    assert base["ratio"] == 1 and base["above_us_a_layer"] == 0
    above = (full["median_ms"] - base["median_ms"]) / 2 * 1e3
    assert full["above_us_a_layer"] == pytest.approx(above) and f"{above:+6.0f} us a layer" in said
    # Keys and values of 2 layers and 2 heads of 32, in float32, of a prompt of 256 tokens and at least one more.
    assert full["cache_bytes"] >= 257 * 2 * 2 * 2 * 32 * 4 > kivi["cache_bytes"]
    assert told["refused"] == {} and "host disturbed" in told["tables"]
    # One thread unless another number is asked for, whatever torch would take.
    assert told["machine"]["threads"] == 1 and "\n1 thread of " in said and "DynamicCache with sdpa" in said


def test_threads_are_those_that_were_asked_for() -> None:
    found = run("--plans", "full", "--rounds", "1", "--threads", "2")
    assert found.exit_code == 0 and "\n2 threads of " in found.stdout


def test_every_preset_is_there_with_a_budget_that_binds() -> None:
    by_name = {plan.partition(" @")[0]: plan for plan in host.plans()}
    assert set(registry.presets()) <= set(by_name) and len(set(host.plans())) == len(host.plans())
    evicting = [Plan.parse(plan) for plan in host.plans() if Plan.parse(plan).evicts]
    assert len(evicting) > 10 and all(plan.tokens == host.PROMPT // 2 for plan in evicting)
    assert by_name["kivi4"] == "kivi4" and by_name["rocketkv"] == "rocketkv @ tokens=128"


@pytest.mark.filterwarnings("ignore")
def test_every_preset_runs_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # MiniCache needs two layers of the upper half.
    monkeypatch.setitem(RANDOM_SHAPES, host.MODEL, {**RANDOM_SHAPES[host.MODEL], "num_hidden_layers": 4})
    ready = host.prepared(host.plans(), CPU)
    assert [side.name for side in ready.sides] == [host.BASE, *host.plans()] and ready.refused == {}
    # Half of the prompt, and one token.
    bytes_of = {side.name: side.cache_bytes for side in ready.sides}
    assert bytes_of["snapkv @ tokens=128"] < 0.6 * bytes_of["full"]


def test_a_plan_that_cannot_be_run_is_named_with_the_reason() -> None:
    # Host memory is no other tier than the device's own where that is the CPU.
    bench = host.bench(plans=["full", "plain(block_size=32) + host"], rounds=1, device=CPU)
    (cell,) = bench.cells
    said: list[str] = []
    table = cell.measure(said.append)
    assert [row["name"] for row in table.rows["host"]] == [host.BASE, "full"] and len(said) == cell.samples
    (reason,) = bench.found["refused"].values()
    assert "host" in reason
    assert f"  not here: plain(block_size=32) + host: {' '.join(reason.split())}" in table.lines


def test_what_is_no_plan_and_what_is_not_in_the_table_are_refused() -> None:
    assert "kivi4" in run("--plans", "kivi44").output and run("--plans", "kivi44").exit_code != 0
    found = run("--plans", "full;kivi4", "--profile", "kivi2")
    assert found.exit_code != 0 and "kivi4" in found.output and "kivi2" in found.output
    assert "--plans names no plan" in run("--plans", " ; ").output


def test_a_table_that_was_disturbed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for busy in (True, False):
        monkeypatch.setattr(host.Neighbours, "disturbed", lambda self, busy=busy: busy)
        times = [Measured(host.BASE, [0.01]), Measured("full", [0.012])]
        monkeypatch.setattr(host, "time_in_turns", lambda *a, times=times, **k: times)
        table = host.bench(plans=["full"], rounds=1, device=CPU).cells[0].measure(lambda name: None)
        assert any("took processor time" in line for line in table.lines) is busy
        assert table.rows["host disturbed"] is busy and "+1000 us a layer" in "\n".join(table.lines)


@pytest.mark.parametrize(
    ("words", "profiled"), [(["--profile"], ["full", "kivi4"]), (["--profile", "kivi4"], ["kivi4"])], ids=str
)
def test_the_profile_is_of_one_plan_or_of_each(words: list[str], profiled: list[str]) -> None:
    found = run("--plans", "full; kivi4", "--rounds", "1", *words)
    assert found.exit_code == 0, found.output
    tables = json.loads(found.stdout.splitlines()[-1])["tables"]
    assert [name for name in tables if name.startswith("profile")] == [f"profile {plan}" for plan in profiled]
    for plan in profiled:
        rows = tables[f"profile {plan}"]
        assert 10 < len(rows) <= by_function.MOST
        above = [row["own_us"] - row["base_us"] for row in rows]
        assert above == sorted(above, reverse=True) and above[0] > 0
        # Functions of ours have their file below `src/kvtailor`, and the base calls none of them.
        ours = [row for row in rows if row["function"].startswith(("engine/", "hf/"))]
        assert ours and all(row["base_calls"] == 0 < row["calls"] for row in ours)
        assert f"time by function, {plan}, a token and layer" in found.stdout


def test_what_dataclasses_write_is_told_apart() -> None:
    few, many = make_dataclass("Few", ["one", "two"]), make_dataclass("Many", list("abcdef"))
    side = Side(name="a side", run=lambda _: (few(1, 2), many(*range(6)), few(3, 4)))
    found = functions_of(side, 1, lambda name: None)
    calls = {name.partition(" ")[2]: spent.calls for name, spent in found.items()}
    assert calls["__init__(one, two))"] == 2 and calls["__init__(a, b, c, d, ...))"] == 1


def test_a_function_is_counted_and_timed_by_its_own() -> None:
    def inner() -> None:
        sum(range(20_000))

    def outer() -> None:
        for _ in range(3):
            inner()

    said: list[str] = []
    found = functions_of(Side(name="a side", run=lambda _: outer()), 4, said.append)
    by_end = {name.rpartition(".")[2].rstrip(")"): spent for name, spent in found.items()}
    assert said == ["a side"] * 4 and by_end["inner"].calls == 12 and by_end["outer"].calls == 4
    summed = found["<built-in method builtins.sum>"]
    assert summed.calls == 12 and summed.seconds > by_end["inner"].seconds > 0


def test_rows_of_a_profile_are_a_token_and_layer_above_the_base() -> None:
    ours = {"shared": Spent(8.0, 8), "ours": Spent(4.0, 80), "less": Spent(1.0, 1)}
    base = {"shared": Spent(6.0, 8), "less": Spent(2.0, 4), "theirs": Spent(9.0, 1)}
    lines, rows = told("a plan", ours, base, tokens=2, layers=4)
    assert [row["function"] for row in rows] == ["ours", "shared", "less"]
    assert rows[0] == {"function": "ours", "own_us": 0.5e6, "base_us": 0.0, "calls": 10.0, "base_calls": 0.0}
    assert rows[1]["base_us"] == 0.75e6 and "a plan, a token and layer: 1625000 us under the profiler" in lines[1]
    many = {f"f{n}": Spent(float(n), 1) for n in range(50)}
    assert len(told("a plan", many, {}, tokens=1, layers=1)[1]) == by_function.MOST
