"""What runs for each operation on a device, in words: what `kvtailor check` tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtailor.ops.attention.cpu.prompt import MASS_VARIANTS
from kvtailor.ops.cpu.library import library, why_none
from kvtailor.ops.dispatch import MOST_OVER_CODES, MOST_QUERIES, TRITON_OPERATIONS, forced, on_triton
from kvtailor.ops.triton_launch import missing

__all__ = ["RunningForm", "explained"]


@dataclass(frozen=True, kw_only=True)
class RunningForm:
    """What runs for one operation.

    Attributes:
        operation: what is done.
        implementation: the form that does it.
        why: why that one, a clause.
    """

    operation: str
    implementation: str
    why: str


def explained(device: torch.device, dtype: torch.dtype) -> list[RunningForm]:
    """What runs on a device for a cache of this dtype, operation by operation."""
    asked = forced()
    few = f"attention of up to {MOST_QUERIES} new tokens"
    many = "attention of a prompt"
    if asked == "reference":
        return [RunningForm(operation=few, implementation="torch, decoded parts", why="the reference is forced")]
    prompt = RunningForm(operation=many, implementation="torch's fused attention", why="its tiles are filled")
    if ours := [each for each in TRITON_OPERATIONS if on_triton(device, each)]:
        return _of_triton(ours, few, prompt, interpreted=device.type != "cuda")
    if device.type == "cuda":
        why = (
            missing()
            or "Triton's kernels are there, but not timed on a GPU yet: KVTAILOR_IMPLEMENTATION=triton selects them"
        )
        return [RunningForm(operation=few, implementation="torch, decoded parts", why=why), prompt]
    if device.type != "cpu":
        why = f"there are no kernels for {device.type}"
        return [RunningForm(operation=few, implementation="torch, decoded parts", why=why), prompt]
    built = library()
    if built is None:
        return [RunningForm(operation=few, implementation="torch, heads and scales folded", why=why_none()), prompt]
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return [
            RunningForm(operation=few, implementation="torch, decoded parts", why=f"no kernel reads {dtype}"),
            prompt,
        ]
    threads = "torch's threads" if built.parallel_for else "one thread: torch older than 2.10"
    mass = RunningForm(
        operation="attention of a prompt and its mass",
        implementation=f"C++, {built.variant}",
        why="gives both in one pass",
    )
    return [
        RunningForm(
            operation=f"{few}, {MOST_OVER_CODES} over codes",
            implementation=f"C++, {built.variant}",
            why=f"built, and runs on this machine; {threads}",
        ),
        prompt,
        *([mass] if built.variant in MASS_VARIANTS else []),
        RunningForm(
            operation="making codes of states",
            implementation=f"C++, {built.variant}",
            why="gives the bytes torch gives",
        ),
    ]


def _of_triton(operations: Sequence[str], few: str, prompt: RunningForm, *, interpreted: bool) -> list[RunningForm]:
    """What runs where Triton's kernels do some operations; torch has the others."""
    why = "it was measured to be faster" if forced() == "auto" else "it was asked for"
    why += ", in its interpreter" if interpreted else ""
    told = {
        "attention": (few, "Triton"),
        "levels": ("the same over codes of levels and grids", "Triton"),
        "small floats": ("the same over small floats in blocks", "Triton"),
        "pages": ("attention over chosen pages", "Triton, in place"),
        "prompt mass": ("attention mass of a prompt", "torch's fused attention, then Triton"),
        "codes": ("making codes of states", "Triton"),
    }
    found = [RunningForm(operation=told[each][0], implementation=told[each][1], why=why) for each in operations]
    if "attention" not in operations:
        not_won = "Triton's kernel was not measured to be faster"
        found.insert(0, RunningForm(operation=few, implementation="torch, decoded parts", why=not_won))
    return [*found[:2], prompt, *found[2:]]
