"""`kvtailor.fit`: from a question and texts to a plan that is shown to answer it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtailor.bench.data.overlap import text_hash
from kvtailor.bench.forks import chosen_workers
from kvtailor.bench.measure.kept_prompts import NOT_SHARED, KeptPrompts
from kvtailor.bench.resources import CellResources
from kvtailor.bench.stages import Progress, Silent
from kvtailor.bench.subject import Subject
from kvtailor.cluster import Executor
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.fitting.effort import Effort, effort_of
from kvtailor.fitting.material import material_of, named_texts
from kvtailor.fitting.question import Question, QuestionError, load_faults
from kvtailor.fitting.result import RESULT_FILE, Fit
from kvtailor.fitting.sizing import Sizer
from kvtailor.fitting.stages import BEST_FILE, Fitting
from kvtailor.plan import Plan, registry
from kvtailor.plan.calls import check_call

__all__ = ["fit", "reachable"]


_STAGES = ("layers", "structure")
_MADE_OF = {"kivi", "table", "by_layer"}


@check_call
def fit(
    model: str | Path | Subject | Any,
    texts: object,
    *,
    memory: int | str | None = None,
    bytes_per_token: float | None = None,
    keep_bytes: float | str | None = None,
    loss: float | None = None,
    points: float | None = None,
    tpot: float | str | None = None,
    context: int,
    batch: int = 1,
    tokenizer: Any = None,
    tasks: Sequence[str | Path] | None = None,
    proof_tasks: Sequence[str] | None = None,
    without: Sequence[str] = (),
    effort: str | Effort = "normal",
    stages: Sequence[str] = ("layers", "structure"),
    timed: bool = True,
    out: str | Path | None = None,
    state: int = 0,
    executor: Executor | None = None,
    resources: CellResources | None = None,
    workers: int | None = None,
    share: bool = True,
    progress: Progress | None = None,
) -> Fit:
    """Return the plan that answers a question on a model, with the evidence.

    ```python
    found = kvtailor.fit("demo", "notes.txt", memory="2MiB", context=2048)
    print(found)
    cache = kvtailor.cache_for(model, found.plan)
    ```

    Args:
        model: a transformers model (then with `tokenizer`), or the name or folder of one.
        texts: what to measure on, the more like the model's work the better: a text, the path of one, or several. The
            second half of each is kept for the proof.
        memory, bytes_per_token, keep_bytes: limit of the cache's bytes, one of them; see `Question.of`.
        loss: most nats per token to lose on text. points: most points of percent of right answers.
        tpot: most time of a decoded token of all rows, such as "12ms". Of memory, loss and time the one that has no
            limit is made as small as it can be.
        context: tokens of each row's prompt. batch: rows.
        tokenizer: of a model that is given as an object.
        tasks: families of generated documents, or files of JSON lines with `prompt` and `answer`; None: `needle` and
            `key_value`; empty: none, so that text alone decides.
        proof_tasks: families that only the proof has.
        without: methods and presets that no plan may have, such as "kvzip" (it reads a prompt twice).
        effort: "quick", "normal" or "thorough", or an `Effort` of your own.
        stages: which stages search, of "layers" and "structure".
        timed: measure the time of a token in the proof.
        out: folder for records, study, plan and page; a fit that was killed goes on there, and until it has ended the
            best plan so far stands in its `best-so-far.toml`. None: nothing is kept.
        state: random state of the search.
        executor: of a cluster; None: here. resources: what a cell takes of it.
        workers: so many plans are measured side by side, each in one thread (Linux, on the CPU); None: as many as there
            are threads, or as free memory allows. Times are measured with all threads and nothing beside. What `out`
            has of another number of threads is measured anew.
        share: a piece of text goes through the model once for all plans; the numbers are the same without.
        progress: told how far it is.

    Raises:
        QuestionError: limits that contradict each other, or that make no sense; all at once.
        UnknownName: a family, a method, a stage or an effort that there is not.
        KvtailorError: no plan has so few bytes, or loses so little; the texts are too short; the model cannot be
            compressed.
    """
    begun = time.monotonic()
    asked = effort_of(effort)
    for stage in stages:
        if stage not in _STAGES:
            raise UnknownName("stage of a fit", stage, _STAGES)
    if not stages:
        raise KvtailorError("asked for a fit without a stage that searches: give layers, structure, or both")
    for name in without:
        if registry.preset_of(name) is None:
            registry.stage_of(name)
    subject = Subject.of(model, tokenizer, "a fit")
    # Pieces are few and plans come in many runs, so that a piece is kept from one run to the next.
    kept = KeptPrompts(lasting=True) if share else KeptPrompts(off=NOT_SHARED)
    subject = replace(subject, kept=kept)
    faults = load_faults(context, batch)
    if faults:
        raise QuestionError(faults)
    sizer = Sizer.of(subject.model, context=context, batch=batch)
    question = Question.of(
        full=sizer.full,
        context=context,
        batch=batch,
        memory=memory,
        bytes_per_token=bytes_per_token,
        keep_bytes=keep_bytes,
        loss=loss,
        points=points,
        tpot=tpot,
    )
    faults = _asked_in_vain(question, tasks=tasks, proof_tasks=proof_tasks, timed=timed)
    if faults:
        raise QuestionError(faults)
    if "layers" in stages and (lacking := sorted(_MADE_OF & set(without))):
        raise KvtailorError(
            f"asked for a fit without {', '.join(lacking)}, of which stage 1 makes its plans: give stages=['structure']"
        )
    # A cluster's machines have workers of their own.
    asked_workers = 1 if workers is None and executor is not None else workers
    workers = chosen_workers(subject, asked_workers, cache=sizer.full // batch)
    kinds = None if tasks is None else [str(each) for each in tasks if not _is_answers(each)]
    subject.answer_for("fit")
    reachable(sizer, question, without)
    material = material_of(
        subject,
        named_texts(texts),
        context=context,
        kinds=kinds,
        unseen=proof_tasks if proof_tasks is not None else ([] if tasks is not None and not list(tasks) else None),
        answers=[Path(each).expanduser() for each in tasks or () if _is_answers(each)],
        search_texts=asked.first[0] + asked.rest[0],
        search_documents=asked.first[1] + asked.rest[1],
    )
    named = named_texts(texts)
    asked_for = {
        "texts": sorted(named),
        "text_hashes": {name: text_hash(text) for name, text in sorted(named.items())},
        "dtype": str(subject.dtype).removeprefix("torch."),
        "device": subject.device.type,
        "tasks": None if tasks is None else [str(each) for each in tasks],
        "proof_tasks": None if proof_tasks is None else list(proof_tasks),
        "without": sorted(without),
        "stages": list(stages),
    }
    with _folder(out) as folder:
        if out is not None and (folder / RESULT_FILE).exists():
            # Until this fit has ended there is no result here that another question could be answered from.
            os.replace(folder / RESULT_FILE, folder / f"before-{RESULT_FILE}")
        work = Fitting(
            subject=subject,
            sizer=sizer,
            question=question,
            material=material,
            effort=asked,
            folder=folder,
            state=state,
            without=tuple(without),
            stages=tuple(stages),
            timed=timed,
            executor=executor,
            resources=resources,
            workers=workers,
            progress=progress or Silent(),
            asked=asked_for,
            kept=out is not None,
        )
        found = replace(work.result(), seconds=time.monotonic() - begun)
        if out is not None:
            found.save(out)
            (folder / BEST_FILE).unlink(missing_ok=True)
    return found


def _asked_in_vain(
    question: Question, *, tasks: Sequence[str | Path] | None, proof_tasks: Sequence[str] | None, timed: bool
) -> list[str]:
    """Limits that nothing would be held against, whole sentences."""
    faults = []
    if question.points is not None and tasks is not None and not list(tasks) and not proof_tasks:
        faults.append("points limits right answers, and no tasks are asked: leave out one of the two")
    if question.seconds is not None and not timed:
        faults.append("tpot limits the time of a token, and no times are measured: leave out one of the two")
    if question.aim == "time" and not timed:
        faults.append(
            "with limits on memory and on loss the time is made small, and no times are measured: leave out one limit, "
            "or measure times"
        )
    return faults


def reachable(sizer: Sizer, question: Question, without: Sequence[str] = ()) -> None:
    """Raise where no plan has as few bytes as the memory, or where none is needed.

    Raises:
        KvtailorError: with the fewest that a plan can have, or with what the uncompressed cache takes.
    """
    if question.memory is None:
        return
    from kvtailor.ops.sizes import byte_text

    uncompressed = sizer.most(Plan())
    if question.aim == "loss" and uncompressed is not None and uncompressed <= question.memory:
        raise KvtailorError(
            f"the uncompressed cache takes {byte_text(uncompressed)} at {question.context} tokens and {question.batch} "
            f"row(s), which fits {byte_text(question.memory)}: no plan is needed. Give the memory that you have at a "
            "longer context or more rows"
        )
    left = set(without)
    smallest = [
        f"{score} + kivi(bits=1, recent=0) @ tokens=1" for score in ("position(sinks=0)", "snapkv(window=1)", "knorm")
    ] + ["position(sinks=0) @ tokens=1", "kivi(bits=1)"]
    known = [(sizer.most(Plan.parse(text)), text) for text in smallest if not any(name in text for name in left)]
    sizes = [(size, text) for size, text in known if size is not None]
    if sizes and min(sizes)[0] > question.memory:
        raise KvtailorError(
            f"asked for a cache of {byte_text(question.memory)} ({question.memory} bytes) at {question.context} tokens "
            f"and {question.batch} row(s), but the least that any plan can reach on this model is "
            f"{byte_text(min(sizes)[0])} ({min(sizes)[0]} bytes): give more memory, a shorter context or fewer rows"
        )


def _is_answers(task: object) -> bool:
    return isinstance(task, Path) or (isinstance(task, str) and task.endswith((".jsonl", ".json")))


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        where = Path(out)
        try:
            (where / "records").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KvtailorError(f"asked to write to {out}, which cannot be a folder: {error}") from error
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="kvtailor-fit-") as name:
        (Path(name) / "records").mkdir()
        yield Path(name)
