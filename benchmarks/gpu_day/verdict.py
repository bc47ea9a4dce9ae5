"""Which operations the kernels of GPUs have won, so that "auto" may take them.

Each operation that `ops.dispatch.WON_ON_CUDA` can name has conditions. An operation has won where every condition was
measured and holds. Where one was not measured, it has not won: what was not measured is not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_day.readings import Reading, Readings, ratio

__all__ = ["OPERATIONS", "Condition", "Outcome", "outcomes"]

_8B, _7B = "random-llama3-8b", "random-llama2-7b"
_GRID = "hadamard(of=higgs(bits=4), signs=0)"
_TESTS = "tests-kernels"
# A tie is no win, and medians of a GPU agree to about a hundredth.
_FASTER = 1.0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What must hold for an operation.

    Attributes:
        words: what is compared, the kernels' time over torch's.
        read: the ratio, which must be below 1.
    """

    words: str
    read: Reading


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found about one operation.

    Attributes:
        operation: its name in `WON_ON_CUDA`.
        won: True; False where a condition was measured and fails; None where something was not measured.
        lines: a sentence on each condition.
    """

    operation: str
    won: bool | None
    lines: tuple[str, ...]


def _whole(model: str, tokens: int, rows: int, plan: str) -> Condition:
    table = f"decode {model} {tokens} tokens {rows} rows"
    return Condition(
        words=f"a token of {plan}, replayed; {model}, {tokens} tokens, {rows} rows",
        read=ratio(table, f"{plan}, triton, graphs", f"{plan}, reference, graphs"),
    )


def _levels(*sides: tuple[str, str]) -> tuple[Condition, ...]:
    """For each side of the bench `kernels` and its plan: alone, and in a replayed token."""
    found = []
    for side, plan in sides:
        kernel = ratio("levels and small floats, 32768 tokens", side, f"decoded first, {side}")
        found.append(Condition(words=f"attention over {side} over decoding it first, 32k", read=kernel))
        found.append(_whole(_8B, 32768, 1, plan))
    return tuple(found)


def _prompt(plan: str) -> Condition:
    return Condition(
        words=f"a prompt of 8,192 tokens under {plan}; {_8B}",
        read=ratio(f"prompt {_8B} 8192 tokens", f"{plan}, triton", f"{plan}, reference"),
    )


_POINTS = ((_8B, 8192, 1), (_8B, 32768, 8), (_7B, 32768, 1))
_PLANS = ("full", "vector(bits=4)", "kivi(bits=4, group=64, recent=128)")
OPERATIONS: dict[str, tuple[Condition, ...]] = {
    "attention": tuple(_whole(*point, plan) for point in _POINTS for plan in _PLANS),
    "levels": _levels(("4-bit levels", "turboquant4"), ("grid of 256 points", _GRID)),
    "small floats": _levels(("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8")),
    "pages": (
        Condition(
            words="Quest with its pages read in place, 32k",
            read=ratio("Quest's pages, 32768 tokens", "quest, 2048 tokens", "quest, 2048 tokens, copied by torch"),
        ),
    ),
    "prompt mass": (_prompt("h2o @ keep=0.25"),),
    "codes": (
        Condition(
            words="codes by channel, 4 bits",
            read=ratio("packing, 32768 tokens", "4 bits by channel", "4 bits by channel, torch"),
        ),
        _prompt("kivi(bits=4, group=64, recent=128)"),
    ),
}
"""What must hold for each name in `ops.dispatch.WON_ON_CUDA`."""


def outcomes(found: Readings) -> Sequence[Outcome]:
    """Return what was found about each operation; none has won unless the kernels' tests ran here and passed."""
    tests = found.tests.get(_TESTS)
    if tests is None:
        right, about = None, "the kernels' tests did not run on this GPU"
    elif tests["failed"]:
        right, about = False, f"{len(tests['failed'])} of the kernels' tests fail on this GPU"
    else:
        right, about = True, f"the kernels' tests on this GPU: {tests['passed']} pass, {tests['skipped']} skipped"
    return [_outcome(name, conditions, found, right, about) for name, conditions in OPERATIONS.items()]


def _outcome(name: str, conditions: Sequence[Condition], found: Readings, right: bool | None, about: str) -> Outcome:
    values = [condition.read(found) for condition in conditions]
    holds = [right, *(None if value is None else value < _FASTER for value in values)]
    won = False if False in holds else None if None in holds else True
    lines = [about]
    for condition, value in zip(conditions, values, strict=True):
        lines.append(f"{condition.words}: " + ("null" if value is None else f"{value:.3f} of torch's time"))
    return Outcome(operation=name, won=won, lines=tuple(lines))
