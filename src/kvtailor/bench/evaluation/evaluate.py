"""`kvtailor.evaluate`: plans against `full` on texts and tasks, in one call from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtailor.bench.build import make_task
from kvtailor.bench.evaluation.asked import settings_of
from kvtailor.bench.evaluation.given import lines_of, options_of, tasks_of, texts_of
from kvtailor.bench.evaluation.result import Evaluation
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import summarise
from kvtailor.bench.resources import CellResources
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record
from kvtailor.bench.sinks.contract import RecordSink
from kvtailor.bench.sinks.named import sinks_of
from kvtailor.bench.subject import Subject
from kvtailor.cluster import Executor
from kvtailor.hf.model import processes as process_group
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call

__all__ = ["evaluate"]


@check_call
def evaluate(
    model: str | Path | Subject | Any,
    texts: object = None,
    *,
    plans: str | Plan | Sequence[str | Plan],
    tasks: str | Sequence[str] = "perplexity",
    tokenizer: Any = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    again: bool = False,
    share: bool = True,
    allow: Sequence[str] = (),
    margin: float = 0.02,
    margin_points: float = 10.0,
    sinks: str | Sequence[str | RecordSink] = (),
    on_record: Callable[[Record], None] | None = None,
    executor: Executor | None = None,
    resources: CellResources | None = None,
    **options: Any,
) -> Evaluation:
    """Return what plans lose and save against `full`, measured by the bench on the same tokens.

    ```python
    found = kvtailor.evaluate("demo", plans=["snapkv @ keep=0.25", "kivi(bits=4)"], context=256, windows=20)
    found                                    # in a notebook: the table
    print(found)                             # elsewhere: the same as text
    found.row("kivi(bits=4)").loss           # nats per token over `full`, with its 95 % interval
    found.records                            # every measurement, as `kvtailor bench` writes it
    ```

    It is `kvtailor bench` as a function: the same runner, records, sanity checks and first sentence, and its options
    by their names (`--new-tokens 32` is `new_tokens=32`, `--needles 512,1024` is `needles=[512, 1024]`).
    `full` is always measured too. Nothing is written unless `out` is given, and nothing is sent unless `sinks` are.

    Args:
        model: a transformers model (then with `tokenizer`), or the name or folder of one.
        texts: what to measure on: a text, the path of one, `wikitext2`, `c4` or `pg19`, several of these, or texts by
            name. None: generated documents, on which perplexity is no measure of English.
        plans: plans in one line, paths of TOML files, or `Plan` objects.
        tasks: names as of `--tasks`, such as `["perplexity", "needle", "longbench:qasper"]`.
        tokenizer: of a model that is given as an object.
        data: folder with data sets in their original layouts; None: they come from their usual home.
        out: folder for the records; what it has already is not measured again. None: nothing is written.
        again: measure anew what `out` has.
        share: a prompt goes through the model once for all plans; the numbers are the same without, see
            `docs/bench.md`.
        allow: sanity checks that may fail, by name; every record then has a note of it.
        margin: nats per token below which a loss on a text must be shown to lie, for the first sentence.
        margin_points: points of percent, the same for right answers.
        sinks: where records go besides: "wandb", "mlflow", or objects of `kvtailor.bench.sinks`.
        on_record: called with each record as soon as it is there.
        executor: of a cluster; None: here.
        resources: what a cell takes of the cluster.
        **options: settings of the tasks, by the names of the options of `kvtailor bench`.

    Raises:
        SettingsError: a task, a text or a setting that there is not, or that no task reads; all at once.
        PlanError: a plan has faults.
        Fraud: results that cannot be what they say.
        KvtailorError: the model, a text or a task is not to be had here.
    """
    wanted = tasks_of(tasks)
    values = options_of(options, wanted)
    names, own = texts_of(texts, wanted)
    margins = Margins(nats=margin, points=margin_points)
    contestants = contestants_of(lines_of(plans))
    folder = None if out is None else Path(out)
    if not process_group.started().first:
        # Of processes that share a model one writes and sends; what it knows from before it tells the others.
        folder, sinks = None, ()
    with sinks_of(sinks) as receiver:
        subject = Subject.of(model, tokenizer, "an evaluation")
        made = [
            make_task(
                kind,
                settings,
                subject,
                data=None if data is None else Path(data),
                text=own.get(str(settings.get("text"))),
            )
            for kind, settings in settings_of(wanted, values, names, subject)
        ]

        def finish(record: Record) -> None:
            receiver.take(record)
            if on_record is not None:
                on_record(record)

        records = run(
            subject,
            contestants,
            made,
            out=folder,
            finish=finish,
            resume=not again,
            allow=allow,
            share=share,
            executor=executor,
            resources=resources,
            bandwidth=any(KINDS[task.name].of_cost for task in made),
        )
    return Evaluation(records=tuple(records), summary=summarise(records, margins), out=folder)
