"""Sinks by name, as `kvtailor bench --send-to` and `kvtailor.evaluate(sinks=...)` take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtailor.bench.schema import Record
from kvtailor.bench.sinks.contract import RecordSink
from kvtailor.bench.sinks.to_mlflow import MlflowSink
from kvtailor.bench.sinks.to_wandb import WandbSink
from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["SINKS", "Sinks", "sink_named", "sinks_of"]

SINKS = ("wandb", "mlflow")


class Sinks:
    """Several sinks as one; none of them where nothing is to be sent."""

    def __init__(self, sinks: Sequence[RecordSink]):
        self._sinks = tuple(sinks)

    def take(self, record: Record) -> None:
        """Pass a record on to each."""
        for sink in self._sinks:
            sink.take(record)


@contextmanager
def sinks_of(asked: str | Sequence[str | RecordSink]) -> Iterator[Sinks]:
    """Give the sinks that are asked for, and close each when the run has ended.

    Raises:
        UnknownName: there is no sink of a name.
        KvtailorError: its package is not installed, or something that is no sink.
    """
    each = [part.strip() for part in asked.split(",") if part.strip()] if isinstance(asked, str) else list(asked)
    for sink in each:
        if not isinstance(sink, str | RecordSink):
            raise KvtailorError(
                f"asked to send records to {sink!r}, of type {type(sink).__name__}: give {', '.join(SINKS)}, or an "
                "object of a class that derives from kvtailor.bench.sinks.contract.RecordSink"
            )
    made = [sink_named(sink) if isinstance(sink, str) else sink for sink in each]
    with ExitStack() as stack:
        yield Sinks([stack.enter_context(sink) for sink in made])


def sink_named(text: str) -> RecordSink:
    """Return the sink of a name; `NAME:PROJECT` names the project (W&B) or the experiment (MLflow) as well.

    Raises:
        UnknownName: there is none.
        KvtailorError: its package is not installed.
    """
    name, _, project = text.partition(":")
    if name not in SINKS:
        raise UnknownName("sink of records", name, SINKS)
    return WandbSink(project=project or None) if name == "wandb" else MlflowSink(experiment=project or None)
