"""Methods among the arguments of methods: three forms, one hash, and faults as outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from tests.support.discover import methods_of, samples_of
from torch import Tensor

import kvtailor.allocate
from kvtailor.allocate.adakv import AdaKV
from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.allocate.inverse import Inverse
from kvtailor.allocate.pyramid import Pyramid
from kvtailor.allocate.shuffled import Shuffled
from kvtailor.allocate.uniform import Uniform
from kvtailor.errors import PlanError
from kvtailor.method import Method
from kvtailor.plan import Plan, parse, registry
from kvtailor.plan.arguments import make, with_nested, word_of
from kvtailor.plan.grammar import Word
from kvtailor.score.contract import Scorer
from kvtailor.score.snapkv import SnapKV

DEEP = Plan(score=SnapKV(), allocate=Inverse(of=Shuffled(of=Pyramid(beta=10), state=3)), tokens=256)


@dataclass(frozen=True, kw_only=True)
class Several(Allocator):
    """Takes methods of more than one stage, and more than one."""

    of: tuple[Allocator, ...]
    ranked: Scorer | Literal["as it comes"] | None = None
    note: str = ""

    def allocate(self, request: BudgetRequest) -> Tensor:
        raise AssertionError("no plan is run here")


def faults_of(text: str) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text) if "\n" in text else parse(text)
    return caught.value.faults


def test_the_three_forms() -> None:
    line = "snapkv + inverse(of=shuffled(of=pyramid(beta=10.0), state=3)) @ tokens=256"
    inner = '{ method = "shuffled", of = { method = "pyramid", beta = 10.0 }, state = 3 }'
    assert str(DEEP) == line
    assert DEEP.to_toml().endswith(f'[allocate]\nmethod = "inverse"\nof = {inner}\n')
    python = "Inverse(of=Shuffled(of=Pyramid(beta=10.0), state=3))"
    assert repr(DEEP) == f"Plan(score=SnapKV(), allocate={python}, tokens=256)"
    again = [parse(line), Plan.from_toml(DEEP.to_toml()), parse(line.replace("10.0", "10").replace(" ", ""))]
    assert all(each == DEEP and each.hash == DEEP.hash and str(each) == line for each in again)


@pytest.mark.parametrize(
    "of",
    [
        '"pyramid"',
        '{ method = "pyramid" }',
        '{ method = "pyramid", beta = 20 }',
        '\n[allocate.of]\nmethod = "pyramid"\nbeta = 20.0',
    ],
)
def test_toml_names_a_method_or_gives_its_table(of: str) -> None:
    given = of if of.startswith("\n") else f"of = {of}"
    plan = Plan.from_toml(f'score = "snapkv"\nkeep = 0.5\n[allocate]\nmethod = "inverse"\n{given}')
    assert plan == parse("snapkv + inverse(of=pyramid) @ keep=0.5")


@pytest.mark.parametrize("of", ["pyramid", "pyramid()", "'pyramid'", "pyramid(beta=20)", " pyramid ( beta = 20. ) "])
def test_a_line_names_a_method_with_and_without_arguments(of: str) -> None:
    plan = parse(f"snapkv + inverse(of={of}) @ keep=0.5")
    assert plan.allocate == Inverse(of=Pyramid())
    assert str(plan) == "snapkv + inverse(of=pyramid) @ keep=0.5"


def test_the_hash_is_over_what_is_inside() -> None:
    insides = ["pyramid", "pyramid(beta=19)", "uniform", "inverse(of=pyramid)", "shuffled(of=pyramid)"]
    insides += ["shuffled(of=pyramid, state=1)", "shuffled(of=pyramid(beta=19), state=1)"]
    hashes = {parse(f"snapkv + inverse(of={of}) @ keep=0.5").hash for of in insides}
    assert len(hashes) == len(insides)


def test_the_hash_is_over_the_files_that_were_read_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "snapkv + inverse(of=pyramid) @ keep=0.5"
    before = parse(text).hash
    monkeypatch.setattr(Pyramid, "content_hash", "of a file that it read")
    assert parse(text).hash != before


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("inverse(of=pyramd)", "there is no method of allocate named 'pyramd'; did you mean 'pyramid'?"),
        ("inverse(of=snapk)", "there is no method of allocate named 'snapk'; "),
        ("inverse(of=pyramidkw)", "there is no method of allocate named 'pyramidkw'; did you mean 'pyramid'"),
        ("inverse(of=pyramidkv)", "inverse: of is the preset pyramidkv, which brings score snapkv("),
        (
            "inverse(of=snapkv)",
            "inverse: of is snapkv, a method of score, but it must be a method of allocate, one of ",
        ),
        ("inverse(of=snapkv(window=x))", "inverse: of is snapkv, a method of score, but it must be a method of alloc"),
        ("inverse(of=pyramid(bta=2))", "pyramid has no argument 'bta'; did you mean 'beta'?"),
        ("inverse(of=pyramid(beta=x))", "pyramid: beta is 'x', but it must be float; the default is 20.0"),
        ("inverse(of=pyramid(beta=0.5))", "pyramid: beta must be at least 1"),
        ("inverse(of=3)", "inverse: of is 3, but it must be a method of allocate"),
        ("inverse(of=[pyramid])", "inverse: of is (Pyramid(beta=20.0),), but it must be a method of allocate"),
        ("inverse", "inverse needs of: write for example inverse(of=pyramid)"),
        ("inverse(of=shuffled)", "shuffled needs of: write for example shuffled(of=pyramid)"),
        ("pyramid(beta=uniform(x=1))", "pyramid: beta is uniform(x=1), but it must be float; the default is 20.0"),
    ],
)
def test_faults_inside_are_those_of_outside(text: str, fault: str) -> None:
    (found,) = faults_of(f"snapkv + {text} @ keep=0.5")
    assert found.startswith(fault)


def test_a_suggestion_names_neighbours_of_the_stage_only() -> None:
    (found,) = faults_of("snapkv + inverse(of=snapk) @ keep=0.5")
    assert "'snapkv'" not in found
    (found,) = faults_of("snapkv + inverse(of=snapkv) @ keep=0.5")
    assert set(found.split("one of ")[1].split(", ")) == set(registry.methods("allocate"))


def test_all_faults_are_said_at_once_at_every_depth() -> None:
    faults = faults_of(
        "snapkv(windw=3) + shuffled(of=inverse(off=1, of=pyramid(bta=2, beta=0)), state=x, sate=2) @ tokens=99, keep=7"
    )
    parts = (
        "snapkv has no argument 'windw'",
        "shuffled has no argument 'sate'",
        "inverse has no argument 'off'",
        "pyramid has no argument 'bta'",
        "pyramid: beta must be",
        "shuffled: state is 'x'",
        "2 budgets",
        "keep is 7",
    )
    for part in parts:
        assert sum(part in fault for fault in faults) == 1, (part, faults)
    assert len(faults) == len(parts)


def test_the_same_faults_in_toml() -> None:
    head = 'score = "snapkv"\nkeep = 0.5\n[allocate]\nmethod = "inverse"\n'
    assert faults_of(head + 'of = { method = "pyramd" }')[0].startswith("there is no method of allocate named 'pyramd'")
    assert faults_of(head + "of = { beta = 3 }") == ("inverse: of is {'beta': 3}, but it must be a method of allocate",)


def test_python_plans_are_checked_inside() -> None:
    def faults(allocator: Allocator) -> tuple[str, ...]:
        with pytest.raises(PlanError) as caught:
            Plan(score=SnapKV(), allocate=allocator, keep=0.5)
        return caught.value.faults

    assert faults(Inverse(of="pyramid")) == (  # type: ignore[arg-type]
        "inverse: of is 'pyramid', but it must be a method of allocate",
    )
    assert faults(Inverse(of=SnapKV())) == (  # type: ignore[arg-type]
        "inverse: of is snapkv, but it must be a method of allocate",
    )
    assert faults(Inverse(of=Shuffled(of=Pyramid(), state=1.5))) == (  # type: ignore[arg-type]
        "shuffled: state is 1.5, but it must be int; the default is 0",
    )


def test_an_int_may_stand_for_a_float_inside() -> None:
    assert str(Plan(score=SnapKV(), allocate=Inverse(of=AdaKV(floor=1)), keep=0.5)) == (
        "snapkv + inverse(of=adakv(floor=1.0)) @ keep=0.5"
    )


def test_several_methods_of_several_stages() -> None:
    faults: list[str] = []
    given = {"of": ("uniform", Word(name="pyramid", arguments={"beta": 3})), "ranked": "snapkv", "note": "snapkv"}
    made = make("several", Several, given, faults)
    assert not faults
    assert made == Several(of=(Uniform(), Pyramid(beta=3.0)), ranked=SnapKV(), note="snapkv")
    assert str(word_of(made)) == "Several(of=[uniform, pyramid(beta=3.0)], ranked=snapkv, note=snapkv)"
    assert [type(each) for each in with_nested(made)] == [Several, Uniform, Pyramid, SnapKV]
    plan = Plan(score=SnapKV(), allocate=made, keep=0.5)
    named = {kind.__name__: kind for kind in (Plan, SnapKV, Several, Uniform, Pyramid)}
    assert eval(repr(plan), named) == plan


def test_what_fits_as_it_is_stays_what_it_is() -> None:
    faults: list[str] = []
    assert make("several", Several, {"of": (), "ranked": "as it comes"}, faults) == Several(of=(), ranked="as it comes")
    assert make("several", Several, {"of": (), "ranked": None}, faults) == Several(of=())
    assert not faults
    make("several", Several, {"of": ("uniform", "snapkv"), "ranked": "snapk", "note": 3}, faults)
    assert [fault.split(",")[0] for fault in faults] == [
        "several: of is snapkv",
        "there is no method of score named 'snapk'; did you mean 'snapkv' or 'capkv'?",
        "several: note is 3",
    ]


@pytest.mark.parametrize(
    "kind", [k for stage in registry.stages() for n in registry.methods(stage) for k in [registry.load(stage, n)]]
)
def test_examples_are_written_as_plans_write_them(kind: type[Method]) -> None:
    assert kind.examples == tuple(str(word_of(sample)) for sample in samples_of(kind)) or not kind.examples
    assert all(type(sample) is kind for sample in samples_of(kind))


def test_a_method_that_cannot_be_made_by_its_name_has_examples() -> None:
    assert {kind.__name__ for kind in methods_of(kvtailor.allocate, Allocator) if kind.examples} >= {
        "Inverse",
        "Shuffled",
        "Table",
    }


@pytest.mark.parametrize(
    ("preset", "method"),
    [
        (
            "sides(keys=turboquant4, values=kivi4)",
            "sides(keys=centred(of=hadamard(signs=0, of=gaussian(bits=4))), values=kivi(bits=4))",
        ),
        ("by_age(of=[kivi4, kivi2], ages=[512])", "by_age(of=[kivi(bits=4), kivi(bits=2)], ages=[512])"),
        ("hadamard(of=kivi4)", "hadamard(of=kivi(bits=4))"),
    ],
)
def test_a_preset_of_one_method_stands_for_it(preset: str, method: str) -> None:
    assert Plan.parse(preset) == Plan.parse(method) and Plan.parse(preset).hash == Plan.parse(method).hash


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "switched(prompt=streamingllm, decoding=h2o) @ tokens=64",
            "prompt is the preset streamingllm, which brings .*score position.*but it must be one method of score",
        ),
        (
            "hadamard(of=kivi4(bits=2))",
            r"is the preset kivi4\(bits=2\), and a preset takes no arguments here: write "
            r"kivi\(bits=4\)",
        ),
        ("hadamard(of=snapkv)", "snapkv, a method of score, but it must be"),
        ("hadamard(of=kivi5)", "no method of encode named 'kivi5'"),
    ],
)
def test_a_preset_of_more_is_refused_with_what_to_write(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.parse(line)
