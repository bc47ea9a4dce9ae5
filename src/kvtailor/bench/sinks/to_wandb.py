"""Records in Weights & Biases: one run for each plan, in a group for each run of the bench.

Where it goes is W&B's own affair: `wandb login`, `WANDB_MODE=offline`, `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_DIR`.
What goes there is in the records: numbers, plans, the model's name or folder, versions and the processor's name; of
texts their names and hashes alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvtailor.bench.schema import Record
from kvtailor.bench.sinks.contract import RecordSink, facts_of, key_of, lines_of, numbers_of, package
from kvtailor.errors import KvtailorError

__all__ = ["WandbSink"]


class WandbSink(RecordSink):
    """Sends records to Weights & Biases.

    Args:
        project: the project; None: W&B's own choice (`WANDB_PROJECT`, else "uncategorized").

    Raises:
        KvtailorError: wandb is not installed.
    """

    name: ClassVar[str] = "wandb"

    def __init__(self, project: str | None = None):
        self._wandb, self._project = package("wandb"), project
        self._runs: dict[tuple[str, str], Any] = {}
        self._records: dict[tuple[str, str], list[Record]] = {}

    def take(self, record: Record) -> None:
        """Write a record's numbers into the summary of its plan's run, which is begun with its first record.

        Raises:
            KvtailorError: W&B does not take it; the records of the bench are written by then.
        """
        place = record.run, record.plan_hash
        try:
            if place not in self._runs:
                self._runs[place] = self._wandb.init(
                    project=self._project,
                    group=record.run,
                    name=record.label,
                    job_type="kvtailor bench",
                    config=facts_of(record),
                    reinit="create_new",
                )
            self._records.setdefault(place, []).append(record)
            key = key_of(record)
            numbers: dict[str, Any] = {f"{key}/{name}": value for name, value in numbers_of(record).items()}
            if record.error is not None:
                numbers[f"{key}/error"] = record.error
            self._runs[place].summary.update(numbers)
        except Exception as error:
            raise KvtailorError(
                f"asked to send a record to wandb, which failed ({error}): mend it, or leave it out"
            ) from error

    def close(self, *, failed: bool) -> None:
        """Add each plan's records as a file, and end its run."""
        for place, run in self._runs.items():
            artifact = self._wandb.Artifact(
                f"records-{place[1].replace(' ', '-').replace(',', '')}", type="kvtailor-records"
            )
            with artifact.new_file("records.jsonl", mode="w") as file:
                file.write(lines_of(self._records[place]))
            run.log_artifact(artifact)
            run.finish(exit_code=1 if failed else 0)
        self._runs, self._records = {}, {}
