"""The sides of a comparison: plans, and the model's own cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvtailor.bench.data.overlap import Calibrated
from kvtailor.errors import KvtailorError, PlanError

__all__ = ["OTHER_ATTENTION", "OWN", "Contestant"]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a comparison.

    Attributes:
        label: the plan as the user wrote it.
        plan: canonical form; None for the model's own cache, without kvtailor.
        hash: content hash.
        missing: why this kvtailor cannot run the plan: what it names that is not there. Nothing is measured then, and
            every record of it says so.
        calibration: what its artefacts were made from; a task refuses to score it on that. A run adds what the plan's
            own files say, see `Subject.provenance`.
    """

    label: str
    plan: str | None
    hash: str
    missing: tuple[str, ...] = ()
    calibration: tuple[Calibrated, ...] = ()

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
            return cls(label=label, plan=label, hash=f"missing-{digest}", missing=tuple(error.faults))
        return cls(label=label, plan=str(plan), hash=plan.hash)

    @classmethod
    def named(cls, text: str) -> Contestant:
        """The contestant of what a user named: a plan in one line, or the path of a TOML file with one.

        Raises:
            PlanError: the plan has faults.
            KvtailorError: there is no such file.
        """
        if not text.endswith(".toml"):
            return cls.of(text)
        from kvtailor.plan import Plan

        try:
            return cls.of(str(Plan.from_toml(Path(text).expanduser().read_text(encoding="utf-8"))))
        except OSError as error:
            raise KvtailorError(f"asked for the plan in {text}, which cannot be read: {error}") from error


OWN = Contestant(label="the model's own cache", plan=None, hash="own")
OTHER_ATTENTION = Contestant(label="the model's own cache under its other attention", plan=None, hash="own, eager")
"""Exact as well, and rounded elsewhere: a yardstick for what rounding does, see `bench.checks.rounding`."""
