"""Another question to a fit that is there: answered from what it measured, in seconds, without measuring anew."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtailor.errors import KvtailorError
from kvtailor.fitting.answer import FrontPoint
from kvtailor.fitting.layers import solved_plan
from kvtailor.fitting.question import Question
from kvtailor.fitting.result import Fit
from kvtailor.fitting.sizing import Sizer
from kvtailor.ops.files import seal_toml, write_whole
from kvtailor.ops.sizes import byte_text
from kvtailor.plan import Plan

__all__ = ["Again", "another_memory"]

AGAIN_FILE = "fitted-again.toml"


@dataclass(frozen=True, kw_only=True)
class Again:
    """What a finished fit knows of another memory.

    Attributes:
        question: the new one.
        full: bytes of the uncompressed cache.
        measured: of the plans that the fit measured, the one with the least loss that fits, or without a memory the one
            with the fewest bytes; None where none fits.
        resized: its plan with the budget that fills the memory, and the bytes that it will have; nothing of it was
            measured. None where the plan has no budget, or fills the memory already; or where the fit measured the one
            that would, which then lost more than `measured`.
        resized_bytes: see `resized`.
        solved: stage 1's optimum under the new memory; nothing of it was measured but its layers one by one. None
            where a loss was asked, which it cannot be held against.
        solved_loss: the sum of its layers' losses.
        solved_bytes: by closed forms.
        path: the file that the measured plan was written to.
    """

    question: Question
    full: int
    measured: FrontPoint | None
    resized: str | None
    resized_bytes: int | None
    solved: str | None
    solved_loss: float | None
    solved_bytes: int | None
    path: str | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "question": self.question.as_dict()}

    def __str__(self) -> str:
        lines = []
        if self.measured is not None:
            each, loss, limit = self.measured, self.measured.loss, self.question.loss
            interval = f" ({ends})" if (ends := loss.interval(4)) else ""
            first = "the least that fits" if self.question.memory is not None else "the fewest bytes that do"
            lines.append(each.plan)
            lines.append(
                f"  measured by the search: {byte_text(each.bytes)} ({100 * each.bytes / self.full:.1f} %), loses "
                f"{loss.value:.4f}{interval} nats (KL on text, and on answers on top), {first}"
            )
            if limit is not None and each.text is not None:
                lines.append(
                    f"  on text alone {each.text:.4f}, of the {limit:g} that were asked: a mean, where a fit holds the "
                    "upper end of its proof's loss against them"
                )
        if self.resized is not None and self.resized_bytes is not None:
            lines.append(self.resized)
            lines.append(
                f"  the same with the budget that fills the memory: {byte_text(self.resized_bytes)} by closed forms; "
                "its loss was not measured"
            )
        if self.solved is not None and self.solved_bytes is not None:
            lines.append(self.solved)
            lines.append(
                f"  stage 1 solved again: {byte_text(self.solved_bytes)} by closed forms; its layers lose "
                f"{self.solved_loss:.4f} nats one by one, together it was not measured"
            )
        if self.path is not None:
            what = "loss" if self.question.memory is None else "memory" if self.question.loss is None else "question"
            lines.append(f"  the first is written to {self.path}; `fit --again` measures and proves for this {what}")
        return "\n".join(lines)


def another_memory(
    found: Fit,
    *,
    memory: int | str | None = None,
    bytes_per_token: float | None = None,
    keep_bytes: float | str | None = None,
    loss: float | None = None,
    model: str | None = None,
    folder: Path | None = None,
) -> Again:
    """Return what a finished fit knows of another memory, of another loss, or of both.

    Args:
        found: the finished fit.
        memory, bytes_per_token, keep_bytes: the new limit, one of them; see `Question.of`.
        loss: the most nats per token to lose (KL, the search's mean on text); without a memory the fewest bytes are
            looked for.
        model: its name or folder, for the sizes; None: the one that was fitted.
        folder: where the plan is written to; None: nowhere.

    Raises:
        QuestionError: limits that contradict each other.
        KvtailorError: nothing that was measured or that stage 1 can make fits; or the model is another one.
    """
    name = model or found.model
    if name != found.model:
        raise KvtailorError(f"the fit that is there is of {found.model}, not of {name}: give another --out")
    question = Question.of(
        full=found.full,
        context=found.question.context,
        batch=found.question.batch,
        memory=memory,
        bytes_per_token=bytes_per_token,
        keep_bytes=keep_bytes,
        loss=loss,
    )
    meeting = [each for each in found.front if loss is None or (each.text is not None and each.text <= loss)]
    if not meeting:
        least = min(found.front, key=lambda each: each.loss.value if each.text is None else each.text)
        raise KvtailorError(
            f"no plan that this fit measured loses at most {loss} nats (KL) on the text of the search: the least "
            f"is {least.text or 0.0:.4f}, by {least.plan}. Give a larger loss, or fit anew (--again)"
        )
    if question.memory is None:
        best = min(meeting, key=lambda each: (each.bytes, each.loss.value))
        return Again(
            question=question,
            full=found.full,
            measured=best,
            resized=None,
            resized_bytes=None,
            solved=None,
            solved_loss=None,
            solved_bytes=None,
            path=_written(best.plan, folder),
        )
    limit = question.memory
    sizer = Sizer.named(name, found.dtype, context=question.context, batch=question.batch)
    fitting = [each for each in meeting if each.bytes <= limit]
    if loss is not None and not fitting:
        fewest = min(meeting, key=lambda each: each.bytes)
        raise KvtailorError(
            f"no plan that this fit measured has at most {byte_text(limit)} and loses at most {loss} nats (KL) on the "
            f"text of the search: of those that lose so little {fewest.plan} has the fewest bytes, "
            f"{byte_text(fewest.bytes)}. Give a larger loss or more memory, or fit anew (--again)"
        )
    best_of = min(fitting, key=lambda each: (each.loss.value, each.bytes)) if fitting else None
    resized = None
    if best_of is not None and best_of.bytes < 0.98 * limit:
        plan = sizer.filled(Plan.parse(best_of.plan), limit)
        resized = plan if plan is not None and str(plan) not in {each.plan for each in found.front} else None
    solved = None
    # What its layers lose one by one is no loss of the plan that could be held against one that is asked.
    if found.layers is not None and loss is None:
        solved = solved_plan(
            found.layers,
            sizer.geometry,
            context=question.context,
            batch=question.batch,
            element=sizer.element,
            memory=limit,
            size=sizer.most,
        )
    if best_of is None and solved is None:
        least_bytes = min(found.front, key=lambda each: each.bytes)
        raise KvtailorError(
            f"asked for {byte_text(limit)}, but the fewest bytes that this fit measured are "
            f"{byte_text(least_bytes.bytes)}, and stage 1 reaches no less: fit anew (--again)"
        )
    return Again(
        question=question,
        full=found.full,
        measured=best_of,
        resized=None if resized is None else str(resized),
        resized_bytes=None if resized is None else sizer.most(resized),
        solved=None if solved is None else str(solved.plan),
        solved_loss=None if solved is None else solved.loss,
        solved_bytes=None if solved is None else sizer.most(solved.plan),
        path=None if best_of is None else _written(best_of.plan, folder),
    )


def _written(plan: str, folder: Path | None) -> str | None:
    if folder is None:
        return None
    path = folder / AGAIN_FILE
    write_whole(path, seal_toml(Plan.parse(plan).to_toml()))
    return str(path)
