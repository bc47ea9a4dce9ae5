"""The PLAN that a verb gets, in one or several shell words or a TOML file, and the calibration files that it reads.

What is printed about these files, and which of them a plan reads, is known before any model is loaded.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from kvtailor.calibration_file import Calibration
    from kvtailor.plan import Plan

__all__ = ["about", "lines_of", "read_by", "read_plan"]


def read_plan(words: tuple[str, ...]) -> Plan:
    """The plan.

    Raises:
        PlanError: with all faults at once.
        KvtailorError: the TOML file cannot be read.
    """
    from kvtailor.ops.files import read_toml
    from kvtailor.plan import Plan

    text = " ".join(words)
    if not text.strip().endswith(".toml"):
        return Plan.parse(text)
    try:
        return Plan.from_toml(read_toml(Path(text.strip()).expanduser()))
    except OSError as error:
        raise KvtailorError(f"the plan file {text.strip()} cannot be read: {error}") from error


def about(made: Calibration) -> dict[str, Any]:
    """All but its tensors and what the check for overlap keeps, JSON-able."""
    return {
        "file": made.name,
        "kind": made.kind,
        "hash": made.hash,
        "model": made.model,
        "fingerprints": sorted(made.fingerprints),
        "shapes": asdict(made.shapes),
        "texts": list(made.texts),
        "made": made.made,
        "facts": made.facts,
    }


def lines_of(made: Calibration) -> list[str]:
    """Model, texts and verdict of a file, a line for each."""
    how, shapes = made.made, made.shapes
    heads = f"{shapes.layers} layers, {shapes.kv_heads} kv heads of size {shapes.head_size}"
    source = f"{how['tokens']:,} tokens of {', '.join(made.texts) or 'random ids'}"
    if "imported" in how:
        source = f"{how['imported']}, which another project released"
    said = [
        f"{made.kind} of {made.model} ({heads}), sha256 {made.hash[:12]}",
        f"from {source}, in {how['dtype']}, on {how['date'][:10]} by kvtailor {how['kvtailor']}",
    ]
    if "verdict" in made.facts:
        said.append(str(made.facts["verdict"]))
    return [*said, f"made by: {how['command']}"]


def read_by(plan: Plan, model: str | None) -> dict[str, list[Calibration]]:
    """For each method of a plan that is calibrated, by the word that names it, the files that it may read.

    The file that its arguments name; else the shipped ones, of a model by this name alone where there is one. Which of
    them fits, the weights decide when a cache is made. The untrained model needs none.
    """
    from kvtailor.calibration_file import calibrated, shipped
    from kvtailor.hf.model.config import RANDOM_SHAPES
    from kvtailor.plan.arguments import with_nested, word_of

    found: dict[str, list[Calibration]] = {}
    for method in (each for part in plan.parts.values() for each in calibrated(with_nested(part))):
        own, known = method.calibration, list(shipped(method.calibrates))
        named = [each for each in known if model is not None and each.model == Path(model).name]
        fit = [] if model in RANDOM_SHAPES else named or known
        found[str(word_of(method))] = [own] if own is not None else fit
    return found
