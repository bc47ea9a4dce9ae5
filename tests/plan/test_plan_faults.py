"""Faulty plans: every fault is said, all at once, with what to write instead; and nothing that is not one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvtailor.attend.contract import Attended, Attention
from kvtailor.encode.plain import Plain
from kvtailor.errors import PlanError
from kvtailor.plan import Plan, parse
from kvtailor.score.h2o import H2O
from kvtailor.score.snapkv import SnapKV


def faults_of(text: str) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        parse(text)
    for fault in caught.value.faults:
        assert fault in str(caught.value)
    assert text in str(caught.value) or repr(text) in str(caught.value)
    return caught.value.faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("snapk @ tokens=99", "there is no method named 'snapk'; did you mean 'snapkv' or 'capkv'?"),
        (
            "streamin @ tokens=99",
            "there is no method named 'streamin'; did you mean 'streaming' or 'streamingllm' or 'pyramid'?",
        ),
        ("snapkv(windw=3) @ tokens=99", "snapkv has no argument 'windw'; did you mean 'window'?"),
        ("topk(k=3)", "topk has no argument 'k'; it takes none"),
        ("snapkv(window=3.5) @ tokens=99", "snapkv: window is 3.5, but it must be int; the default is 32"),
        ("h2o(normalise=1) @ tokens=99", "h2o: normalise is 1, but it must be bool; the default is False"),
        (
            "snapkv(pooling=mean) @ tokens=99",
            "snapkv: pooling is 'mean', but it must be one of 'average', 'max'; the default is 'average'",
        ),
        ("snapkv(kernel=4) @ tokens=99", "snapkv: kernel must be odd and at least 1, found 4; the paper uses 5 or 7"),
        ("snapkv + h2o @ tokens=99", "score is named twice, snapkv and h2o: keep one"),
        ("snapkv @ tokns=99, keep=1.0", "there is no setting named 'tokns'; did you mean 'tokens'?"),
        ("snapkv @ tokens=99, keep=0.5", "there are 2 budgets, tokens and keep: keep one"),
        ("SNAPKV @ tokens=99", "there is no method named 'SNAPKV'; did you mean 'snapkv' or 'capkv' or 'lagkv'?"),
        ("snapkv", "a scorer needs a budget, and there is none: add tokens=1024, keep=0.25 or bytes=64MiB"),
        (
            "pyramidkv(window=3) @ tokens=99",
            "the preset 'pyramidkv' takes no arguments (it is snapkv, pyramid): write the method beside it",
        ),
        (
            "pyramidkv + streaming @ tokens=99",
            "score comes from pyramidkv and from streaming: keep one preset, or write your own",
        ),
        (
            "full @ tokens=99",
            "there is a budget (tokens) but no scorer, so nothing would be evicted: add a scorer such as snapkv, or "
            "leave the budget out",
        ),
        (
            "full @ slack=3",
            "there is slack but no scorer, so nothing would be evicted: add a scorer, or leave slack out",
        ),
        (
            "adakv",
            "adakv works on scores, but there is no scorer, so nothing would be evicted: add a scorer such as snapkv, "
            "or leave it out",
        ),
        ("snapkv @ tokens=0", "tokens is 0: give a whole number of tokens from 1 up, per kv head on average"),
        ("snapkv @ tokens=64.0", "tokens is 64.0: give a whole number of tokens from 1 up, per kv head on average"),
        ("snapkv @ keep=0", "keep is 0: give the fraction of tokens to keep, above 0 and at most 1, such as 0.25"),
        ("snapkv @ keep=25", "keep is 25: give the fraction of tokens to keep, above 0 and at most 1, such as 0.25"),
        (
            "snapkv @ keep=25%",
            "keep is '25%': give the fraction of tokens to keep, above 0 and at most 1, such as 0.25",
        ),
        (
            "snapkv @ keep=true",
            "keep is True: give the fraction of tokens to keep, above 0 and at most 1, such as 0.25",
        ),
        (
            "snapkv @ bytes=12Q",
            "bytes is not a size: '12Q' is not a whole number of bytes: write for example 64MiB, 1.5G or 4096",
        ),
        ("snapkv @ bytes=0", "bytes is 0: give a whole number of bytes from 1 up, or text such as 64MiB"),
        ("snapkv @ tokens=99, slack=always", "slack is 'always': give a whole number of tokens from 0 up, or never"),
        ("snapkv @ tokens=99, slack=-1", "slack is -1: give a whole number of tokens from 0 up, or never"),
    ],
)
def test_a_plan_with_one_fault_says_it_and_nothing_else(text: str, fault: str) -> None:
    assert faults_of(text) == (fault,)


def test_all_faults_are_said_at_once() -> None:
    faults = faults_of(
        "snapk + adakv(flor=0.1, floor=2) + random(state=x) + h2o(recent=-1) + + streaming(sinks=2) "
        "@ slak=3, tokens=2, keep=7, slack=-1"
    )
    for part in (
        "a '+' has nothing on one side",
        "no method named 'snapk'",
        "score is named twice, random and h2o",
        "h2o: recent must be 0 or more",
        "'streaming' takes no arguments",
        "no setting named 'slak'",
        "adakv has no argument 'flor'",
        "adakv: floor must be a fraction",
        "random: state is 'x'",
        "keep is 7",
        "there are 2 budgets, tokens and keep",
        "slack is -1",
    ):
        assert sum(part in fault for fault in faults) == 1, (part, faults)
    assert len(faults) == 12


def test_a_budget_of_just_the_window_is_no_fault() -> None:
    assert parse("snapkv @ tokens=32").tokens == 32


def test_a_word_that_is_not_understood_may_have_been_the_scorer() -> None:
    """Then nothing is said about what a missing scorer would mean."""
    assert len(faults_of("snapk + adakv @ tokens=99")) == 1
    assert len(faults_of("snapk")) == 1
    assert len(faults_of("snapkv(window=x) + adakv @ tokens=3")) == 1


def test_the_same_faults_in_toml() -> None:
    text = (
        'tokens = 4\nkeep = 2\nslak = 1\nselect = 3\n[score]\nmethod = "snapkv"\nwindw = 8\n[encode]\nmethod = "h2o"\n'
    )
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    faults = "\n".join(caught.value.faults)
    for part in (
        "no key named 'slak'; did you mean 'slack'",
        "select is 3: write a method's name",
        "no argument 'windw'",
        "no method of encode named 'h2o'",
        "keep is 2",
        "2 budgets",
    ):
        assert part in faults
    with pytest.raises(PlanError, match="this is not TOML"):
        Plan.from_toml("score = ")
    with pytest.raises(PlanError, match="no preset named 'streamin'; did you mean 'streaming'"):
        Plan.from_toml('preset = "streamin"\ntokens = 9')


def test_python_plans_are_checked_too() -> None:
    with pytest.raises(PlanError, match="score is 'snapkv', a str: give a Scorer"):
        Plan(score="snapkv", tokens=64)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="encode is SnapKV.*give a Codec"):
        Plan(encode=SnapKV())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="snapkv: window is 16.5, but it must be int"):
        Plan(score=SnapKV(window=16.5), tokens=64)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="needs a budget"):
        Plan(score=SnapKV())
    with pytest.raises(PlanError, match="bytes is 'lots'"):
        Plan(score=SnapKV(), bytes="lots")  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Choosy(Attention):
    """An attention that reads what one codec stores, and gives no mass."""

    needs_codec: ClassVar[str | None] = "indexed"

    def attend(self, *args: object, **kwargs: object) -> Attended:  # type: ignore[override]
        raise AssertionError("no plan is run here")


def test_an_attention_gets_its_codec_or_the_plan_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(attend=Choosy(), encode=Plain(), score=H2O(), tokens=64)
    codec, mass = caught.value.faults
    assert "Choosy reads what the codec 'indexed' stores, but the codec is 'plain': name indexed as the codec" in codec
    assert "h2o needs the attention mass of every held token, which Choosy does not give" in mass


def test_a_scorer_without_mass_goes_with_any_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choosy, "needs_codec", None)
    assert Plan(attend=Choosy(), score=SnapKV(), tokens=64).evicts


@pytest.mark.parametrize("setting", ["tokens", "bytes", "slack"])
def test_numbers_that_no_machine_counts_are_refused(setting: str) -> None:
    budget = "" if setting != "slack" else "tokens=8, "
    with pytest.raises(PlanError, match=f"{setting} is 99999999999999999999999: give at most 281474976710656"):
        Plan.parse(f"snapkv(window=4) @ {budget}{setting}=99999999999999999999999")


@pytest.mark.parametrize("text", ["snapkv @ bytes=2 GiB", "snapkv @ keep=½", "snapkv( @ keep=0.25"])
def test_a_budget_that_cannot_be_read_is_not_missing(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert len(caught.value.faults) == 1
