"""Every plan on a device that is not the CPU, in which tensors of two devices never meet: the same as on the CPU.

The arithmetic below the device is the CPU's, so tokens, logits, held sets and bytes must be equal bit for bit. What
fails here fails on a GPU: a tensor that was made without `device=`, or a fast form of the CPU that was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import pytest
import torch

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.ops.dispatch import using
from kvtailor.plan import Plan, registry
from kvtailor.plan.arguments import with_nested
from tests.seam.test_modes import PLANS
from tests.support.every_plan import every_plan, first_of_each_method
from tests.support.other_device.backend import move_model
from tests.support.other_device.decoding import decoded
from tests.support.other_device.ready import GRADED, device_and_calibrations
from tests.support.seam.zoo import build

FAMILIES = ("llama", "gpt_neox", "gemma3")
# Long enough that codecs with their defaults encode some of it; others are cut to budgets of 48 tokens or less.
ALONE, BATCH = (270,), (270, 61, 190)


def pairs() -> dict[str, str]:
    """Each score with an allocator, for the default run; those that do not go together stay as they are."""
    alone = {case: plan for case, plan in first_of_each_method().items() if GRADED not in plan}
    both = [[case for case in alone if case.startswith(stage)] for stage in ("score: ", "allocate: ")]
    found: dict[str, str] = {}
    for score, allocate in zip_longest(*both):
        if score and allocate:
            text = f"{score.partition(': ')[2]} + {allocate.partition(': ')[2]} @ tokens=48, slack=2"
            try:
                found[f"pair: {text}"] = str(Plan.parse(text))
                continue
            except PlanError:
                pass
        found |= {case: alone[case] for case in (score, allocate) if case}
    return found | {case: plan for case, plan in alone.items() if case not in (*both[0], *both[1])}


# What takes gradients is in test_device.py, in a process of its own.
DEFAULT = pairs()
CASES = {
    **DEFAULT,
    **{case: plan for case, plan in every_plan().items() if GRADED not in plan},
    **{f"together: {plan}": plan for plan in PLANS},
}


def refused(family: str, plan: str) -> str | None:
    """Why a model is refused, on any device: the tiny gemma3 has two layers that see all, where a table has three."""
    try:
        kvtailor.cache_for(build(family), plan)
    except PlanError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", autouse=True)
def _device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with device_and_calibrations(FAMILIES, tmp_path_factory.mktemp("calibrations")):
        yield


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.long) for case in CASES]
)
def test_a_padded_batch_is_that_of_the_cpu(case: str) -> None:
    check("llama", CASES[case], BATCH, None, steps=5 if case in DEFAULT else 9)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("family", "lengths", "chunk"),
    [("llama", ALONE, 64), ("gpt_neox", ALONE, None), ("gemma3", BATCH, 64)],
    ids=["llama alone in chunks", "gpt_neox alone", "gemma3 batch in chunks"],
)
def test_other_families_alone_and_in_chunks(
    family: str, lengths: tuple[int, ...], chunk: int | None, case: str
) -> None:
    if refused(family, CASES[case]):
        pytest.skip(f"{family}: {refused(family, CASES[case])}")
    check(family, CASES[case], lengths, chunk, steps=9)


@pytest.mark.parametrize(
    ("family", "lengths"), [pytest.param("gpt_neox", ALONE, marks=pytest.mark.long), ("gemma3", BATCH)]
)
def test_in_chunks(family: str, lengths: tuple[int, ...]) -> None:
    """One of the above for the default run: evictions between chunks, ragged heads, codes, a window of the model."""
    plan = "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=4"
    check(family, plan, lengths, 64, steps=9)


def check(family: str, plan: str, lengths: tuple[int, ...], chunk: int | None, steps: int) -> None:
    """A prompt and some tokens, on the CPU in the forms that a GPU has too: decoded parts, and torch."""
    options = {"chunk": chunk, "steps": steps, "masked": len(lengths) > 1}
    with using("reference"):
        expected = decoded(build(family), plan, lengths, **options)
    found = decoded(move_model(build(family), "gpu:1"), plan, lengths, **options)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logits, expected.logits), float((found.logits - expected.logits).abs().max())
    assert found.held.keys() == expected.held.keys()
    assert all(torch.equal(found.held[layer], columns) for layer, columns in expected.held.items())
    assert found.ledger == expected.ledger and found.ledger.total > 0


def test_no_method_is_left_out() -> None:
    """Neither of all cases nor of those of the default run, but for the one that another file has."""
    names = {(stage, name) for stage in registry.stages() for name in registry.methods(stage)} - {("score", GRADED)}
    for cases in (CASES, DEFAULT):
        used = {method for plan in cases.values() for method in methods_in(Plan.parse(plan))}
        assert names - used == set()
    assert {f"preset: {name}" for name in registry.presets()} - {f"preset: {GRADED}"} <= set(CASES)


def methods_in(plan: Plan) -> set[tuple[str, str]]:
    """Stage and name of each method of a plan, those inside others too."""
    found = set()
    for stage in registry.stages():
        for method in with_nested(getattr(plan, stage)):
            name = registry.name_of(method)
            if name in registry.methods(stage):
                found.add((stage, name))
    return found
