"""Records in W&B and MLflow: only where they are asked for, nothing made up, and refused in words where they are not.

The stand-ins check the calls; the real packages, where they are installed, write to folders of this machine alone.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.bench.frauds import record

import kvtailor
from kvtailor.bench.schema import Record
from kvtailor.bench.sinks.contract import RecordSink, facts_of, key_of, lines_of, numbers_of
from kvtailor.bench.sinks.named import SINKS, sink_named, sinks_of
from kvtailor.cli import main
from kvtailor.errors import KvtailorError, UnknownName

EXTRAS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def made(label: str = "knorm @ keep=0.5", **fields: Any) -> Record:
    given = {
        "run": "20261123-1",
        "started": "2026-11-23T10:00:00.000+00:00",
        "plan_hash": label[:6],
        "text": "mine",
        "point": {"context": 64, "chunk": None},
        "metrics": {"nll": 2.5, "bits_per_byte": None},
        "values": {"nll": (2.5,)},
        "samples": 1,
        "bytes_held": 50,
        "bytes_full": 200,
        "machine": {"torch": "2", "threads": 1, "load": 0.5},
    }
    return record(label, "perplexity", **{**given, **fields})


def test_what_is_sent_is_what_the_record_has():
    found = made(timings={"ttft": {"median": 0.5, "q1": None}})
    assert key_of(found) == "perplexity/mine/context 64"
    numbers = numbers_of(found)
    assert numbers["ratio"] == 0.25 and numbers["nll"] == 2.5 and numbers["ttft_median_seconds"] == 0.5
    assert {"bits_per_byte", "tokens_read", "ttft_q1_seconds"} & set(numbers) == set(), "null is not there"
    facts = facts_of(found)
    assert facts["plan"] == found.plan and facts["torch"] == "2" and "model_hash" not in facts and "load" not in facts


def test_two_points_never_share_a_key():
    texts = ["a,b", "a;b", "a b", "x" * 300, "x" * 301, "a/b"]
    keys = [key_of(made(text=text)) for text in texts] + [key_of(made(point={"context": size})) for size in (64, 65)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) < 200 and not set(key) - set("abcdefghijklmnopqrstuvwxyz0123456789 _-./:") for key in keys)


@pytest.mark.parametrize("name", SINKS)
def test_a_package_that_is_not_there_is_refused_with_what_to_do(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(KvtailorError, match=f"asked to send records to {name}, which is not installed: `pip install"):
        sink_named(name)
    with pytest.raises(KvtailorError, match=f"`pip install 'kvtailor.{name}.'`"):
        sink_named(name)
    assert name in EXTRAS, "the extra that the sentence names"
    found = CliRunner().invoke(main, ["bench", "--send-to", name, "--tasks", "perplexity"])
    assert found.exit_code == 2 and "which is not installed" in found.output and "Traceback" not in found.output


def test_a_package_that_is_broken_is_not_called_missing(monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text("import no_such_part_of_it")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KvtailorError, match="which is installed and cannot be imported .*no_such_part_of_it"):
        sink_named("wandb")


def test_unknown_sinks_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'wandb'"), sinks_of("wandbb"):
        pass
    with pytest.raises(KvtailorError, match="of type int: give wandb, mlflow"), sinks_of([3]):
        pass


class Kept(RecordSink):
    """A sink of the test."""

    name = "kept"

    def __init__(self, fails: bool = False):
        self.records: list[Record] = []
        self.closed: list[bool] = []
        self.fails = fails

    def take(self, record: Record) -> None:
        if self.fails:
            raise KvtailorError("The sink is full.")
        self.records.append(record)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def test_a_sink_of_ones_own_gets_every_record_and_is_closed(tmp_path):
    sink = Kept()
    found = kvtailor.evaluate("demo", plans="knorm @ keep=0.5", sinks=[sink], context=64, continuation=8, windows=5)
    assert sink.records == list(found.records) and sink.closed == [False]
    full = Kept(fails=True)
    with pytest.raises(KvtailorError, match="The sink is full"):
        kvtailor.evaluate("demo", plans="full", sinks=[full], out=tmp_path, context=64, continuation=8, windows=5)
    assert full.closed == [True] and len(list(tmp_path.glob("*.jsonl"))) == 1, "the record was written before"


class Wandb(ModuleType):
    """Stands for wandb: notes what is called."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.runs: list[SimpleNamespace] = []

    def init(self, **given: Any) -> Any:
        self.begun.append(given)
        run = SimpleNamespace(summary={}, artifacts=[], ended=[])
        run.log_artifact = run.artifacts.append
        run.finish = lambda exit_code: run.ended.append(exit_code)
        self.runs.append(run)
        return run

    def Artifact(self, name: str, type: str) -> Any:
        text = SimpleNamespace(name=name, type=type, written="")

        @contextmanager
        def new_file(path: str, mode: str):  # type: ignore[no-untyped-def]
            def write(more: str) -> None:
                text.written += more

            yield SimpleNamespace(write=write)

        text.new_file = new_file
        return text


def test_wandb_gets_a_run_for_each_plan(monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    one, again, other = made(), made(point={"context": 128}), made("full", error="There is no space.")
    with sinks_of("wandb:trial") as sinks:
        assert fake.begun == [], "nothing is begun before there is a record"
        for each in (one, other, again):
            sinks.take(each)
    assert [given["name"] for given in fake.begun] == [one.label, "full"]
    assert {given["project"] for given in fake.begun} == {"trial"} and fake.begun[0]["group"] == one.run
    assert all(given["reinit"] == "create_new" for given in fake.begun), "a run of the user's own is left alone"
    summary = fake.runs[0].summary
    assert summary["perplexity/mine/context 64/nll"] == 2.5 and summary["perplexity/mine/context 128/nll"] == 2.5
    assert fake.runs[1].summary["perplexity/mine/context 64/error"] == "There is no space."
    assert fake.runs[0].artifacts[0].written == lines_of([one, again])
    assert [run.ended for run in fake.runs] == [[0], [0]]


def test_a_run_that_fails_ends_as_one(monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(RuntimeError), sinks_of(["wandb"]) as sinks:
        sinks.take(made())
        raise RuntimeError
    assert fake.runs[0].ended == [1]


class Client:
    """Stands for MLflow's client."""

    calls: list[tuple[str, Any]] = []

    def get_experiment_by_name(self, name: str) -> None:
        self.calls.append(("asked", name))

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.calls.append(("run", (experiment, run_name, tags)))
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run {run_name}"))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        self.calls.append(("batch", (run, list(metrics), list(params))))

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.calls.append(("tag", (run, name, value)))

    def log_text(self, run: str, text: str, file: str) -> None:
        self.calls.append(("text", (run, text, file)))

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append(("end", (run, status)))


def test_mlflow_gets_a_run_for_each_plan(monkeypatch):
    fake = ModuleType("mlflow")
    fake.MlflowClient = Client  # type: ignore[attr-defined]
    entities = SimpleNamespace(Metric=lambda *of: ("metric", *of), Param=lambda *of: ("param", *of))
    fake.entities = entities  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setattr(Client, "calls", [])
    one, other = made(), made("full", error="There is no space.")
    with sinks_of("mlflow:trial") as sinks:
        assert Client.calls == []
        sinks.take(one)
        sinks.take(other)
    runs = [what for name, what in Client.calls if name == "run"]
    assert [run[:2] for run in runs] == [("id of trial", one.label), ("id of trial", "full")]
    sent = [metric for name, what in Client.calls if name == "batch" for metric in what[1]]
    assert ("metric", "perplexity/mine/context 64/nll", 2.5) in [metric[:3] for metric in sent]
    assert ("tag", ("run full", "error perplexity/mine/context 64", "There is no space.")) in Client.calls
    assert ("text", (f"run {one.label}", lines_of([one]), "records.jsonl")) in Client.calls
    assert [what for name, what in Client.calls if name == "end"] == [
        (f"run {one.label}", "FINISHED"),
        ("run full", "FINISHED"),
    ]


def test_what_a_tracker_refuses_is_told_and_not_swallowed(monkeypatch):
    class Refusing(Client):
        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            raise OSError("no server")

    fake = ModuleType("mlflow")
    fake.MlflowClient = Refusing  # type: ignore[attr-defined]
    fake.entities = SimpleNamespace(Metric=tuple, Param=lambda *of: of)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    said = pytest.raises(KvtailorError, match="asked to send a record to mlflow, which failed .no server.")
    with said, sinks_of("mlflow") as sinks:
        sinks.take(made())


def installed(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@installed("wandb")
def test_the_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    with sinks_of("wandb:trial") as sinks:
        for each in (made(), made("full"), made(point={"context": 128})):
            sinks.take(each)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    data = b"".join(path.read_bytes() for run in runs for path in run.glob("*.wandb"))
    assert b"perplexity/mine/context 128/nll" in data and b"knorm @ keep=0.5" in data


@installed("mlflow")
def test_the_real_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    one, other = made(), made("full", error="There is no space.")
    with sinks_of("mlflow:trial") as sinks:
        for each in (one, other, made(point={"context": 128})):
            sinks.take(each)
    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert {run.info.run_name for run in found} == {one.label, "full"}
    [run] = [run for run in found if run.info.run_name == one.label]
    assert run.data.metrics["perplexity/mine/context 64/ratio"] == 0.25 and run.data.params["plan"] == one.plan
    assert "perplexity/mine/context 64/bits_per_byte" not in run.data.metrics and run.info.status == "FINISHED"
    path = client.download_artifacts(run.info.run_id, "records.jsonl", str(tmp_path))
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["point"]["context"] for line in lines] == [64, 128]
