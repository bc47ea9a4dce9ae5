"""`kvtailor.check_engine`: what the cache types of a serving engine would cost a model, measured on it.

Each type is measured as the plan of ours whose arithmetic is nearest (`plan/engines.py`), by the same check as any
plan (`check_model`). The engine itself is not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtailor.bench.safety.check import MARGIN, check_model
from kvtailor.bench.safety.plans import candidates_of
from kvtailor.bench.safety.result import ModelCheck, filled, left_out
from kvtailor.bench.safety.verdict import Verdict
from kvtailor.bench.stages import Progress
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError, PlanError, UnknownName
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call
from kvtailor.plan.engines import ENGINES, Engine

__all__ = ["EngineCheck", "TypeCost", "check_engine"]


@dataclass(frozen=True, kw_only=True)
class TypeCost:
    """What one cache type of an engine costs.

    Attributes:
        option: what chooses it.
        limits: what the engine documents of it, the rest of a sentence that begins with "It"; may be empty.
        verdict: of the plan of ours that stands for it.
    """

    option: str
    limits: str
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """What was measured, and by which plan."""
        told = self.verdict.sentence.removeprefix(f"{self.verdict.plan}: ")
        return f"{self.option}: {told} (as {self.verdict.plan})"


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """What an engine's cache types would cost a model.

    Attributes:
        engine: its name.
        version: whose options were read.
        types: what was measured, the fewest bytes first.
        others: why other cache types of the engine were not, by name.
        check: the check that measured the plans.
    """

    engine: str
    version: str
    types: tuple[TypeCost, ...]
    others: Mapping[str, str] = field(default_factory=dict)
    check: ModelCheck

    def lines(self) -> list[str]:
        """Return the whole of it as lines, each for a terminal of 80 columns."""
        windows = max((each.verdict.windows for each in self.types), default=0)
        fewer = any(each.verdict.windows < windows for each in self.types)
        alone = "; types that are shown to be harmful on the first of them on those alone" if fewer else ""
        found = filled(
            f"{self.engine} {self.version} on {self.check.model}: its cache types as plans of kvtailor with the same "
            f"arithmetic, measured on {windows} windows of {self.check.context} + {self.check.continuation} tokens "
            f"({self.check.text}) against the uncompressed cache{alone}. {self.engine} itself was not run. Under "
            "on_write each token is read from its code, those of a prompt among them, as engines read them; under the "
            "other plans a prompt is read whole first, so that an engine can lose several times more."
        )
        found += ["", "  bytes of 16 bits, nats a token lost, 95 % interval, verdict"]
        for each in self.types:
            found += ["", *filled(f"  {each.option}", hang=4)]
            if each.verdict.loss is None:
                found += filled(f"    not measured: {each.verdict.error}", hang=6)
            else:
                loss = each.verdict.loss
                ends = loss.interval(4, signed=True)
                between = f" ({ends})" if ends else ""
                found += [f"    {100 * each.verdict.bytes:3.0f} % {loss.value:+.4f}{between}  {each.verdict.word}"]
            found += filled(f"    as {each.verdict.plan}", hang=6)
            if each.limits:
                found += filled(f"    it {each.limits}", hang=6)
        return found + left_out(self.others)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the records."""
        types = [
            {"option": each.option, "limits": each.limits, "sentence": each.sentence, **asdict(each.verdict)}
            for each in self.types
        ]
        return {
            "engine": self.engine,
            "version": self.version,
            "types": types,
            "others": dict(self.others),
            "check": self.check.as_dict(),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


@check_call
def check_engine(
    model: str | Path | Subject | Any,
    engine: str,
    texts: str | Path | Sequence[str | Path] | None = None,
    *,
    tokenizer: Any = None,
    context: int | None = None,
    margin: float = MARGIN,
    out: str | Path | None = None,
    again: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> EngineCheck:
    """Return what the cache types of a serving engine would cost a model, measured on it.

    ```python
    print(kvtailor.check_engine("demo", "llama.cpp"))
    ```

    Args:
        model: a transformers model (then with `tokenizer`), or the name or folder of one.
        engine: "vllm", "sglang", "tensorrt-llm" or "llama.cpp", in any case.
        texts: see `check_model`.
        tokenizer: of a model that is given as an object.
        context: see `check_model`.
        margin: nats a token that a safe type loses at most.
        out: folder for the records; what it has already is not measured again.
        again: measure anew what `out` has.
        workers: see `check_model`.
        progress: what is told meanwhile; None: nothing.

    Raises:
        UnknownName: there is no such engine here.
        KvtailorError: as of `check_model`; or no type of the engine has a plan that the model can have.
    """
    found = _engine_of(engine)
    subject = Subject.of(model, tokenizer, "a check")
    plans, others = _plans_of(found, subject)
    if not plans:
        raise KvtailorError(
            f"asked what the cache types of {found.name} cost {subject.name}: no plan of kvtailor stands for one of "
            f"them there ({'; '.join(f'{name}: {why}' for name, why in others.items())})"
        )
    check = check_model(
        subject,
        texts,
        plans=list(dict.fromkeys(plans.values())),
        context=context,
        margin=margin,
        out=out,
        again=again,
        workers=workers,
        progress=progress,
    )
    limits = {each.option: each.limits for each in found.types}
    types = [
        TypeCost(option=option, limits=limits[option], verdict=check.verdict(plan)) for option, plan in plans.items()
    ]
    return EngineCheck(
        engine=found.name,
        version=found.version,
        types=tuple(sorted(types, key=lambda each: each.verdict.bytes)),
        others=others,
        check=check,
    )


def _engine_of(name: str) -> Engine:
    known = {each.name.lower(): each for each in ENGINES if any(kind.neighbours for kind in each.types)}
    if name.lower() not in known:
        raise UnknownName("engine whose cache types are known as plans", name, known)
    return known[name.lower()]


def _plans_of(engine: Engine, subject: Subject) -> tuple[dict[str, str], dict[str, str]]:
    """The plan of ours that stands for each cache type, by its option; and why others have none."""
    layers = len(Geometry.of(subject.model.config).compressed)
    plans: dict[str, str] = {}
    others = dict.fromkeys(engine.others, "no codec of kvtailor is known to have its arithmetic")
    for each in engine.types:
        if not each.checked or Plan.parse(each.neighbours[0] if each.neighbours else "full") == Plan():
            continue
        near = each.counterparts([False] * layers)
        if not near:
            others[each.option] = "it leaves all layers of this model whole"
            continue
        try:
            candidates_of(subject, near[:1])
        except PlanError as error:
            others[each.option] = error.faults[0]
            continue
        plans[each.option] = near[0]
    return plans, others
