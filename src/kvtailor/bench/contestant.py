"""The sides of a comparison: plans, and the model's own cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtailor.bench.data.overlap import Calibrated
from kvtailor.errors import PlanError
from kvtailor.presets import FULL

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["OTHER_ATTENTION", "OWN", "OWN_ROUNDED", "Contestant"]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a comparison.

    Attributes:
        label: the plan as the user wrote it.
        text: the plan's canonical form in one line; None for the model's own cache, without kvtailor.
        hash: content hash.
        plan: the plan, parsed once; None for the model's own cache, for a plan that is missing, and for one that only
            `Subject.make_cache` can read.
        missing: why this kvtailor cannot run the plan: what it names that is not there. Nothing is measured then, and
            every record of it says so.
        calibration: what its artefacts were made from; a task refuses to score it on that. A run adds what the plan's
            own files say, see `Subject.provenance`.
        unfit: why this model cannot have the plan, where that was found out before a run; like `missing`.
    """

    label: str
    text: str | None
    hash: str
    plan: Plan | None = None
    missing: tuple[str, ...] = ()
    calibration: tuple[Calibrated, ...] = ()
    unfit: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the model's own cache, without kvtailor."""
        return self.text is None

    @property
    def is_full(self) -> bool:
        """Whether it is the null plan, which everything is compared with."""
        return self.text == FULL

    @classmethod
    def of(cls, text: str, *, may_be_missing: bool = False) -> Contestant:
        """The contestant that a one-line plan describes.

        Args:
            text: the plan.
            may_be_missing: a plan with faults becomes a contestant that is reported as missing.

        Raises:
            PlanError: the plan has faults, and it may not be missing.
        """
        from kvtailor.plan import Plan

        label = " ".join(text.split())
        try:
            plan = Plan.parse(text)
        except PlanError as error:
            if not may_be_missing:
                raise
            digest = hashlib.sha256(label.encode()).hexdigest()[:12]
            return cls(label=label, text=label, hash=f"missing-{digest}", missing=tuple(error.faults))
        return cls(label=label, text=str(plan), hash=plan.hash, plan=plan)

    @classmethod
    def named(cls, text: str, *, may_be_missing: bool = False) -> Contestant:
        """The contestant of what a user named: a plan in one line, or the path of a TOML file or a folder with one.

        Args:
            text: of the user.
            may_be_missing: see `of`; a file is there or is an error.

        Raises:
            PlanError: the plan has faults.
            KvtailorError: there is no such file.
        """
        from kvtailor.plan import Plan

        in_line = None if text.strip().endswith(".toml") else cls.of(text, may_be_missing=True)
        if in_line is not None and not in_line.missing:
            return in_line
        try:
            plan = Plan.named(text)
        except PlanError:
            if in_line is not None and may_be_missing:
                return in_line
            raise
        return cls(label=str(plan), text=str(plan), hash=plan.hash, plan=plan)


OWN = Contestant(label="the model's own cache", text=None, hash="own")
OWN_ROUNDED = Contestant(label="the model's own cache, rounded as ours is", text=None, hash="own, rounded")
"""What a plan that drops nothing must give; of a model whose caches hold its own dtype the same as `OWN`."""
OTHER_ATTENTION = Contestant(label="the model's own cache under its other attention", text=None, hash="own, eager")
"""The same, whose products round elsewhere: a yardstick for what rounding does, see `bench.checks.reference`."""
