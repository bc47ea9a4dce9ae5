"""Plans are scored side by side in forks, and give what they give one after the other."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, UniformModel, contestant, subject

import kvtailor
from kvtailor.bench import forks
from kvtailor.bench.checks import Fraud
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.forks import LostFork, one_thread, score_in_forks, why_no_forks, workers_for
from kvtailor.bench.measure import machine
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.memory import Memory
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.cli import main
from kvtailor.errors import ArgumentError, KvtailorError, PlanError

pytestmark = pytest.mark.skipif(
    why_no_forks(torch.device("cpu")) is not None, reason="processes are forked under Linux alone"
)


def outcomes(calls, workers=2, advance=lambda number: None):
    return dict(score_in_forks(calls, workers, advance))


def test_each_call_is_made_once_in_a_process_of_its_own():
    steps = []

    def call(number):
        def score(advance):
            for _ in range(number):
                advance()
            return number, os.getpid(), torch.get_num_threads()

        return score

    with one_thread(2):
        found = outcomes([call(number) for number in range(7)], 3, steps.append)
    assert sorted(found) == list(range(7)) and [found[n][0] for n in range(7)] == list(range(7))
    assert sorted(steps) == [n for n in range(7) for _ in range(n)]
    pids = {pid for _, pid, _ in found.values()}
    assert os.getpid() not in pids and len(pids) <= 3
    assert {threads for _, _, threads in found.values()} == {1}
    assert not multiprocessing.active_children()


def test_nothing_to_score_forks_nothing():
    assert outcomes([]) == {}


def test_what_products_give_in_a_fork_is_what_they_give_here():
    states, weights = torch.randn(130, 96), torch.randn(96, 200)
    (states @ weights).sum()
    with one_thread(2):
        here = states @ weights
        found = outcomes([lambda advance: states @ weights] * 3)
    assert all(torch.equal(each, here) for each in found.values())


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (Fraud("identity", "it differs"), Fraud, "identity: it differs"),
        (PlanError("snapkv", ["a fault"]), KvtailorError, "a fault"),
        (RuntimeError("nobody raised it on purpose"), RuntimeError, "nobody raised"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_an_error_that_ends_the_run_ends_the_other_forks(error, kind, said, tmp_path):
    def raises(advance):
        raise error

    def waits(advance):
        time.sleep(60)
        (tmp_path / "went on").touch()

    begun = time.monotonic()
    with pytest.raises(kind, match=said):
        outcomes([waits, raises])
    assert time.monotonic() - begun < 30 and not multiprocessing.active_children()
    assert not (tmp_path / "went on").exists()


def test_where_an_error_came_from_is_told_with_it():
    def deep_inside(advance):
        raise ZeroDivisionError("found nothing")

    with pytest.raises(ZeroDivisionError) as raised:
        outcomes([deep_inside])
    assert "deep_inside" in raised.value.__notes__[0]


def test_a_warning_is_given_once_where_all_can_see_it():
    def warns(advance):
        warnings.warn("half of it is missing", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        outcomes([warns] * 5)
        outcomes([warns] * 2)
    assert [str(each.message) for each in found] == ["half of it is missing"] and found[0].filename == __file__
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        outcomes([warns] * 5)
    assert not found


def test_what_cannot_be_sent_is_an_error_with_a_sentence():
    with pytest.raises(RuntimeError, match="a function that cannot be pickled"):
        outcomes([lambda advance: lambda: None])


class Odd(ValueError):
    """Cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Hidden(Exception):
    def __reduce__(self):
        return str, ("no error",)


@pytest.mark.parametrize("error", [Odd("this", "that"), Hidden("this and that")])
def test_an_error_that_cannot_be_sent_keeps_its_words_and_its_place(error):
    def odd_inside(advance):
        raise error

    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: this and that") as raised:
        outcomes([odd_inside])
    assert "odd_inside" in raised.value.__notes__[0]


def test_a_warning_of_a_kind_that_cannot_be_sent_costs_no_result():
    class Local(UserWarning):
        pass

    def warns(advance):
        warnings.warn("of a local kind", Local, stacklevel=1)
        return 3

    with pytest.warns(UserWarning, match="of a local kind"):
        assert outcomes([warns, warns]) == {0: 3, 1: 3}


def test_a_thread_that_logs_or_lives_on_holds_up_no_fork(tmp_path):
    log = logging.getLogger("test of forks")
    handler, stop = logging.FileHandler(tmp_path / "log"), threading.Event()
    log.addHandler(handler)

    def write():
        while not stop.is_set():
            log.warning("x" * 10000)

    def call(advance):
        threading.Thread(target=time.sleep, args=(60,)).start()
        log.warning("from a fork")
        return 1

    writer = threading.Thread(target=write)
    writer.start()
    begun = time.monotonic()
    try:
        for _ in range(20):
            assert outcomes([call] * 2) == {0: 1, 1: 1}
    finally:
        stop.set()
        writer.join()
        log.removeHandler(handler)
    assert time.monotonic() - begun < 40 and not multiprocessing.active_children()


CLOSED = """
import os
from kvtailor.bench.forks import score_in_forks

os.close(1)
found = dict(score_in_forks([lambda advance: print("said") or 5] * 2, 2, lambda number: None))
os.write(2, str(found).encode())
"""


def test_an_output_that_was_closed_is_no_matter():
    found = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=60)
    assert "{0: 5, 1: 5}" in found.stderr or "{1: 5, 0: 5}" in found.stderr, found.stderr


def test_what_goes_wrong_between_two_records_ends_the_forks(dummy_tasks):
    caches = {name: DummyCache(keep=20 + number) for number, name in enumerate(["one", "two", "three", "four"])}
    plans = [FULL, *map(contestant, caches)]

    def finish(record):
        if record.label != "full":
            raise KeyboardInterrupt

    try:
        run(subject(CountingModel(), **caches), plans, dummy_tasks, bandwidth=False, workers=2, finish=finish)
    except KeyboardInterrupt as kept:
        # The traceback holds every frame.
        assert kept.__traceback__ is not None and not multiprocessing.active_children()
    else:
        pytest.fail("it went on")


def test_a_fork_that_dies_loses_its_own_call_alone():
    def dies(advance):
        os.kill(os.getpid(), signal.SIGKILL)

    calls = [dies if number % 3 == 1 else (lambda advance, number=number: number) for number in range(8)]
    found = outcomes(calls)
    lost = {number for number, each in found.items() if isinstance(each, LostFork)}
    assert lost == {1, 4, 7} and all(found[n] == n for n in found if n not in lost)
    assert "SIGKILL" in str(found[1]) and "memory" in str(found[1])


def test_a_run_that_is_left_leaves_no_process():
    going = score_in_forks([lambda advance: 1, lambda advance: time.sleep(60)], 2, lambda number: None)
    assert next(going) == (0, 1)
    going.close()
    assert not multiprocessing.active_children()


ORPHANS = """
import os, time
from kvtailor.bench.forks import score_in_forks

def call(advance):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.05)
        advance()

for _ in score_in_forks([call, call], 2, lambda number: None):
    pass
"""


def test_forks_end_with_the_process_that_made_them():
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()

    def alive():
        found = []
        for pid in pids:
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    # One that nobody waits for stays as a zombie.
                    found += [pid] if stat.read().rpartition(")")[2].split()[0] != "Z" else []
            except FileNotFoundError:
                pass
        return found

    end = time.monotonic() + 30
    while alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive()


PLANS = [
    "streaming @ tokens=40",
    "snapkv @ keep=0.5",
    "kivi4",
    "kvzip @ keep=0.5",
    "quest",
    "pairs + asymkv @ tokens=15",
]


def tasks():
    text = generated_text(12000)
    return [
        Perplexity(text=text, source="generated text", context=96, continuation=24, windows=3),
        Needle(lengths=(160,), depths=(0.2, 0.8), documents=1),
    ]


def measured(records):
    return [
        (r.key, r.label, r.task, dict(r.point), dict(r.metrics), dict(r.values), r.bytes_held, r.bytes_alive, r.notes)
        + (r.prefill, r.prefill_own, r.reads_held, r.rounding, r.error)
        for r in records
    ]


@pytest.mark.always
def test_records_are_those_of_one_process(tmp_path):
    asked, plans, model = tasks(), contestants_of(PLANS), Subject.load("demo-draft", dtype="float32")
    with one_thread(2):
        alone = run(model, plans, asked, bandwidth=False)
    told = []
    several = run(model, plans, asked, out=tmp_path, bandwidth=False, workers=3, advance=told.append)
    assert measured(several) == measured(alone)
    assert len(told) == sum(task.units(len(plans)) for task in asked)
    assert {record.machine["threads"] for record in several} == {1}
    assert sorted(map(str, measured(read_records(tmp_path)))) == sorted(map(str, measured(several)))


def test_what_a_fork_has_compared_is_not_compared_again():
    model, plans = Subject.load("demo-draft", dtype="float32"), contestants_of(["kvzip @ keep=0.5", "kivi4"])
    task = Needle(lengths=(160,), depths=(0.1, 0.4, 0.6, 0.9), documents=1)
    found = run(model, plans, [task], bandwidth=False, workers=2)
    compared = [record.label for record in found if record.prefill_compared]
    assert sorted(compared) == ["kivi4", "kvzip @ keep=0.5"]


@pytest.fixture(scope="module")
def dummy_tasks():
    text = generated_text(4000)
    return [
        Perplexity(text=text, source="generated text", context=100, continuation=20, windows=6),
        Needle(lengths=(300, 400), depths=(0.0,), documents=2),
    ]


def test_a_plan_that_fails_in_a_fork_has_a_record_and_is_not_tried_again(dummy_tasks, monkeypatch):
    caches = {"one": DummyCache(keep=20), "two": DummyCache(keep=21), "three": DummyCache(keep=22)}
    plans = [FULL, *map(contestant, caches)]
    model = subject(CountingModel(), **caches)
    here, new_cache = os.getpid(), Subject.new_cache

    def made(self, plan, *given, **named):
        if plan.label == "two":
            assert os.getpid() != here
            raise MemoryError("no room")
        if plan.label == "three":
            os.kill(os.getpid(), signal.SIGKILL)
        return new_cache(self, plan, *given, **named)

    monkeypatch.setattr(Subject, "new_cache", made)
    found = run(model, plans, dummy_tasks, bandwidth=False, workers=2)
    errors = {label: [r.error for r in found if r.label == label] for label in ("full", "one", "two", "three")}
    assert set(errors["full"] + errors["one"]) == {None}
    assert all("memory" in each for each in errors["two"])
    assert all("SIGKILL" in each for each in errors["three"])


def test_a_finished_run_is_not_measured_again(dummy_tasks, tmp_path, monkeypatch):
    versions = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}
    monkeypatch.setattr(machine, "versions", lambda: dict(versions))
    caches = {"one": DummyCache(keep=20), "two": DummyCache(keep=21), "three": DummyCache(keep=22)}
    plans = [FULL, *map(contestant, caches)]

    def go(chosen, workers=2):
        return run(
            subject(CountingModel(), **caches), chosen, dummy_tasks, out=tmp_path, bandwidth=False, workers=workers
        )

    first, some = go(plans[:3]), len(read_records(tmp_path))
    more = go(plans)
    assert len(read_records(tmp_path)) == some + len(dummy_tasks[0].texts()) + dummy_tasks[1].points()
    assert [r.run for r in more if r.label != "three"] == [r.run for r in first]
    assert go(plans, workers=3) == more
    # Other threads round otherwise.
    assert torch.get_num_threads() == 1 or {r.run for r in go(plans, workers=1)}.isdisjoint(r.run for r in more)


def test_what_is_weighed_or_timed_stays_in_this_process(monkeypatch):
    asked, here = [], os.getpid()

    def scored(self, given, plan, sample, advance):
        asked.append((os.getpid(), torch.get_num_threads()))
        raise KvtailorError("seen enough")

    monkeypatch.setattr(Memory, "score", scored)
    before = torch.get_num_threads()
    plans = contestants_of(["streaming @ tokens=40", "kivi4"])
    run(Subject.load("demo-draft"), plans, [Memory(context=64)], bandwidth=False, workers=2)
    assert asked and set(asked) == {(here, before)}


def test_workers_that_cannot_be_are_refused(monkeypatch):
    model = subject(UniformModel())
    with pytest.raises(ArgumentError, match="0 workers"):
        run(model, [FULL], [], workers=0)
    with pytest.raises(ArgumentError, match="a cluster"):
        run(model, [FULL], [], workers=2, executor=object())
    elsewhere = replace(model, model=SimpleNamespace(device=torch.device("cuda"), config=UniformModel.config))
    if elsewhere.device.type == "cuda":
        with pytest.raises(ArgumentError, match="cuda"):
            run(elsewhere, [FULL], [], workers=2)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ArgumentError, match="darwin"):
        run(model, [FULL], [], workers=2)


def in_a_daemon(pipe):
    pipe.send((why_no_forks(torch.device("cpu")), workers_for(torch.device("cpu"), 1000, 4)))


def test_a_daemon_scores_one_after_the_other():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=in_a_daemon, args=(theirs,), daemon=True)
    process.start()
    why, workers = ours.recv()
    process.join()
    assert "daemon" in why and workers == 1


def test_no_workers_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(Subject, "prefill", None)
    with pytest.raises(ArgumentError, match="0 workers"):
        kvtailor.check_model("demo-draft", plans=["kivi4"], workers=0)
    with pytest.raises(ArgumentError, match="0 workers"):
        kvtailor.fit("demo-draft", generated_text(20000), memory="25%", context=96, workers=0)


def test_as_many_workers_as_threads_plans_and_memory_allow(monkeypatch):
    cpu, free = torch.device("cpu"), 100 << 30
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(forks, "free_bytes", lambda device: free)
    assert workers_for(cpu, 1 << 30, 40) == 16
    assert workers_for(cpu, 1 << 30, 3) == 3
    assert workers_for(torch.device("cuda"), 1 << 30, 40) == 1
    free = 8 << 30
    assert workers_for(cpu, 14 << 30, 40) == 1
    assert 2 <= workers_for(cpu, 1 << 30, 40) < 8
    free = 1000
    assert workers_for(cpu, 1 << 30, 40) == 1


def test_the_command_line_refuses_workers_beside_a_cluster():
    found = CliRunner().invoke(main, ["bench", "--workers", "2", "--ray", "local"])
    assert found.exit_code == 2 and "--workers beside --ray" in found.output
    assert CliRunner().invoke(main, ["bench", "--workers", "0"]).exit_code == 2


def test_the_command_line_scores_side_by_side(tmp_path):
    line = ["bench", "--model", "demo-draft", "--plans", "streaming @ keep=0.5; kivi4", "--tasks", "perplexity,speed"]
    sizes = ["--context", "64", "--continuation", "16", "--windows", "5", "--rounds", "1", "--new-tokens", "4"]
    found = CliRunner().invoke(main, [*line, *sizes, "--workers", "2", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    records = read_records(tmp_path)
    assert sorted(r.label for r in records if r.task == "perplexity") == ["full", "kivi4", "streaming @ keep=0.5"]
    assert {r.machine["threads"] for r in records if r.task == "perplexity"} == {1}
    assert {r.machine["threads"] for r in records if r.task == "speed"} == {torch.get_num_threads()}
