"""Records in MLflow: one run for each plan, with a tag that names the run of the bench.

Where it goes is MLflow's own affair: `MLFLOW_TRACKING_URI`, which without a server is a file on this machine. What goes
there is in the records: numbers, plans, the model's name or folder, versions and the processor's name; of texts their
names and hashes alone.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from kvtailor.bench.schema import Record
from kvtailor.bench.sinks.contract import RecordSink, facts_of, key_of, lines_of, numbers_of, package
from kvtailor.errors import KvtailorError

__all__ = ["MlflowSink"]

_LONGEST_PARAMETER = 6000  # characters that MLflow takes; the file of records has the whole


class MlflowSink(RecordSink):
    """Sends records to MLflow.

    Args:
        experiment: its name; None: `MLFLOW_EXPERIMENT_NAME`, else "kvtailor".

    Raises:
        KvtailorError: mlflow is not installed.
    """

    name: ClassVar[str] = "mlflow"

    def __init__(self, experiment: str | None = None):
        self._mlflow = package("mlflow")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "kvtailor"
        self._client: Any = None
        self._where: str | None = None
        self._runs: dict[tuple[str, str], str] = {}
        self._records: dict[tuple[str, str], list[Record]] = {}

    def take(self, record: Record) -> None:
        """Log a record's numbers as metrics of its plan's run, which is begun with its first record.

        Raises:
            KvtailorError: MLflow does not take it; the records of the bench are written by then.
        """
        place = record.run, record.plan_hash
        try:
            if place not in self._runs:
                self._runs[place] = self._begun(record)
            self._records.setdefault(place, []).append(record)
            key, now = key_of(record), int(1000 * time.time())
            metric = self._mlflow.entities.Metric
            metrics = [metric(f"{key}/{name}", value, now, 0) for name, value in numbers_of(record).items()]
            self._client.log_batch(self._runs[place], metrics=metrics)
            if record.error is not None:
                self._client.set_tag(self._runs[place], f"error {key}", record.error)
        except Exception as error:
            raise KvtailorError(
                f"asked to send a record to mlflow, which failed ({error}): mend it, or leave it out"
            ) from error

    def close(self, *, failed: bool) -> None:
        """Add each plan's records as a file, and end its run."""
        for place, run in self._runs.items():
            self._client.log_text(run, lines_of(self._records[place]), "records.jsonl")
            self._client.set_terminated(run, status="FAILED" if failed else "FINISHED")
        self._runs, self._records = {}, {}

    def _begun(self, record: Record) -> str:
        """The identifier of a new run."""
        if self._client is None:
            self._client = self._mlflow.MlflowClient()
        if self._where is None:
            found = self._client.get_experiment_by_name(self._experiment)
            self._where = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run = self._client.create_run(self._where, run_name=record.label, tags={"kvtailor.bench_run": record.run})
        facts = {name: str(value) for name, value in facts_of(record).items()}
        parameter = self._mlflow.entities.Param
        given = [parameter(name, value) for name, value in facts.items() if len(value) <= _LONGEST_PARAMETER]
        self._client.log_batch(run.info.run_id, params=given)
        return str(run.info.run_id)
