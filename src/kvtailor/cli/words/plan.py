"""The PLAN that a verb gets, in shell words, a TOML file or a folder, and the calibration files that it reads.

What is printed about these files, and which of them a plan reads, is known before any model is loaded.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtailor.calibration_file import Calibration
    from kvtailor.fitting.layers import LayerMap
    from kvtailor.plan import Plan

__all__ = ["about", "lines_of", "read_by", "read_plan", "read_plan_and_layers"]


def read_plan(words: tuple[str, ...]) -> Plan:
    """The plan.

    Raises:
        PlanError: with all faults at once.
        KvtailorError: the TOML file cannot be read, or the folder has no plan.
    """
    from kvtailor.plan import Plan

    return Plan.named(" ".join(words))


def read_plan_and_layers(words: tuple[str, ...]) -> tuple[Plan, LayerMap | None]:
    """The plan, and what a fit measured of each layer where the words name its folder.

    Raises:
        PlanError: with all faults at once.
        KvtailorError: the TOML file or the fit cannot be read.
    """
    from kvtailor.fitting.result import RESULT_FILE, Fit

    plan, folder = read_plan(words), Path(" ".join(words).strip()).expanduser()
    fitted = len(words) == 1 and (folder / RESULT_FILE).is_file()
    return plan, Fit.load(folder).layers if fitted else None


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
