"""Plans: three forms that say the same, settings, presets."""

from __future__ import annotations

import dataclasses
import functools
import typing

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.discover import samples_of
from torch import Tensor

from kvtailor.allocate.adakv import AdaKV
from kvtailor.errors import PlanError
from kvtailor.plan import Plan, parse, registry
from kvtailor.plan.arguments import fit
from kvtailor.score.contract import Scorer
from kvtailor.score.h2o import H2O
from kvtailor.score.position import Position
from kvtailor.score.random import Random
from kvtailor.score.snapkv import SnapKV
from kvtailor.types import Held

CLASSES = {
    kind.__name__: kind
    for stage in registry.stages()
    for name in registry.methods(stage)
    for kind in [registry.load(stage, name)]
}


# What has to be escaped somewhere, and other lengths in bytes; all of Unicode takes hypothesis seconds to list.
LETTERS = "aZ_09 .,;=@+-#%'\"`\\/()[]{}\n\r\t\0\x1b\x7f\x85\xa0é\u0301\u2028\ufeff漢😀"


@functools.cache
def values_of(hint: object) -> st.SearchStrategy[object]:
    """Values of an annotation, near those that methods accept."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(0, 300) | st.sampled_from([1, 2, 4, 8, 16, 32, 64])
    if hint is float:
        return st.floats(0, 1) | st.integers(0, 3)
    if hint is str:
        return st.text(LETTERS, max_size=8)
    if hint is type(None):
        return st.none()
    stage = next((stage for stage in registry.stages() if registry.contract(stage) is hint), None)
    if stage is not None:
        return methods(stage)
    if origin is tuple:
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    return st.one_of([values_of(each) for each in inner])


@functools.cache
def hints_of(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


@st.composite
def methods(draw: st.DrawFn, stage: str) -> object:
    """A method of a stage with some of its arguments given."""
    kind = registry.load(stage, draw(st.sampled_from(sorted(registry.methods(stage)))))
    hints = hints_of(kind)
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    chosen = draw(st.lists(st.sampled_from(fields), unique=True)) if fields else []
    try:
        return kind(**{name: draw(values_of(hints[name])) for name in chosen})
    except (ValueError, TypeError):
        return draw(st.sampled_from(samples_of(kind)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    parts = {stage: draw(methods(stage)) for stage in registry.stages()}
    settings: dict[str, object] = {}
    if draw(st.booleans()):
        budget = draw(st.sampled_from(["tokens", "keep", "bytes"]))
        amount = st.floats(1e-9, 1) if budget == "keep" else st.integers(1, 2**40)
        settings = {budget: draw(amount), "slack": draw(st.none() | st.just("never") | st.integers(0, 100))}
    else:
        for stage in ("score", "allocate", "select", "merge"):
            parts[stage] = registry.method_of(stage, registry.null(stage))
    try:
        return Plan(**parts, **settings)  # type: ignore[arg-type]
    except PlanError:
        assume(False)
        raise


@settings(max_examples=100, deadline=None)
@given(plans())
def test_the_three_forms_round_trip(plan: Plan) -> None:
    again = [eval(repr(plan), {"Plan": Plan, **CLASSES}), Plan.from_toml(plan.to_toml()), Plan.parse(str(plan))]
    for each in again:
        assert each == plan
        assert each.hash == plan.hash
        assert str(each) == str(plan) and each.to_toml() == plan.to_toml() and repr(each) == repr(plan)


def test_the_strategy_meets_every_stage_and_many_methods() -> None:
    """Else the round trip above could be one over defaults."""
    seen: set[str] = set()

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(plans())
    def look(plan: Plan) -> None:
        seen.update(registry.name_of(part) for part in plan.parts.values() if part is not None)
        seen.update(name for name in ("tokens", "keep", "bytes") if getattr(plan, name) is not None)

    look()
    # Which ones are drawn is chance, and any single one may be missed; one method more may change what is drawn.
    for stage in registry.stages():
        names = set(registry.methods(stage))
        assert len(names & seen) >= 0.4 * len(names), f"{stage}: {sorted(names - seen)} never came"
    assert {"tokens", "keep", "bytes"} <= seen


def test_the_forms_of_one_plan() -> None:
    plan = Plan(score=SnapKV(window=16), allocate=AdaKV(), tokens=1024, slack=64)
    assert str(plan) == "snapkv(window=16) + adakv @ tokens=1024, slack=64"
    assert repr(plan) == "Plan(score=SnapKV(window=16), allocate=AdaKV(), tokens=1024, slack=64)"
    assert plan.to_toml() == (
        'tokens = 1024\nslack = 64\n\n[score]\nmethod = "snapkv"\nwindow = 16\n\n[allocate]\nmethod = "adakv"\n'
    )


@pytest.mark.parametrize(
    "text",
    [
        "snapkv(window=16)+adakv@tokens=1024,slack=64",
        "  adakv  +  snapkv( window = 16 , )  @  slack = 64 , tokens = 1_024 ",
        'adakv() + snapkv(window=16, pooling="average") @ tokens=1024, slack=64',
        "plain + uniform + snapkv(window=16) + device @ tokens=1024, slack=64",
    ],
)
def test_order_and_space_do_not_matter(text: str) -> None:
    if "uniform" in text:
        assert parse(text) == Plan(score=SnapKV(window=16), tokens=1024, slack=64)
    elif "window = 16 ," in text:
        with pytest.raises(PlanError, match="stands '', which has no name"):
            parse(text)
        assert parse(text.replace(" , )", ")")) == parse("snapkv(window=16) + adakv @ tokens=1024, slack=64")
    else:
        assert parse(text) == parse("snapkv(window=16) + adakv @ tokens=1024, slack=64")


def test_an_int_may_stand_for_a_float_in_every_form() -> None:
    plans = [
        Plan(score=Random(), allocate=AdaKV(floor=1), keep=1),
        parse("random + adakv(floor=1) @ keep=1"),
        Plan.from_toml('score = "random"\nkeep = 1\n[allocate]\nmethod = "adakv"\nfloor = 1'),
    ]
    assert {str(plan) for plan in plans} == {"random + adakv(floor=1.0) @ keep=1.0"}
    assert len({plan.hash for plan in plans}) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("64MiB", 64 << 20), ("1.5G", 1_500_000_000), ("4096", 4096), ("3k", 3000), ("2KiB", 2048), ("1GB", 10**9)],
)
def test_bytes_are_read_with_units(text: str, count: int) -> None:
    plan = parse(f"snapkv @ bytes={text}")
    assert plan.bytes == count == parse(str(plan)).bytes
    assert Plan.from_toml(f'score = "snapkv"\nbytes = "{text}"').bytes == count


def test_bytes_are_written_exactly() -> None:
    assert str(parse("snapkv @ bytes=67108864")) == "snapkv @ bytes=64MiB"
    assert str(parse("snapkv @ bytes=67108865")) == "snapkv @ bytes=67108865"


def test_the_null_plan() -> None:
    assert str(Plan()) == "full" and repr(Plan()) == "Plan()"
    assert parse("full") == Plan() == Plan.from_toml("") == parse("plain + topk")
    assert not Plan().evicts and Plan().slack_tokens is None and Plan().scope == "layer"


def test_slack_falls_back_to_the_scorers_own() -> None:
    assert Position.slack is not None and SnapKV().slack is None
    assert parse("position @ tokens=64").slack_tokens == Position.slack
    assert parse("position @ tokens=64, slack=never").slack_tokens is None
    assert parse("position @ tokens=64, slack=0").slack_tokens == 0
    assert parse("snapkv @ tokens=64").slack_tokens is None
    assert parse("snapkv @ tokens=64, slack=7").slack_tokens == 7


def test_the_scope_is_that_of_the_slowest() -> None:
    assert parse("snapkv + adakv @ keep=0.5").scope == "layer"
    assert parse("snapkv + pooled @ keep=0.5").scope == "prompt"
    assert parse("snapkv + inverse(of=uniform) @ keep=0.5").scope == "prompt"


def test_the_hash_is_over_what_happens() -> None:
    base = parse("snapkv @ tokens=64")
    assert base.hash == parse("snapkv(window=32) + uniform @ tokens=64").hash
    others = ["snapkv(window=31) @ tokens=64", "snapkv @ tokens=65", "snapkv + adakv @ tokens=64", "full"]
    others += ["snapkv @ tokens=64, slack=3", "snapkv @ bytes=64"]
    assert len({parse(text).hash for text in others} | {base.hash}) == len(others) + 1
    assert parse(f"position @ tokens=64, slack={Position.slack}").hash == parse("position @ tokens=64").hash
    assert len(base.hash) == 12 and int(base.hash, 16) >= 0


def scorer_with_default(default: int) -> Scorer:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Local(Scorer):
        width: int = default

        def score(self, held: Held) -> Tensor:
            raise AssertionError("no plan is run here")

    return Local()


def test_a_changed_default_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    three, four = (Plan(score=scorer_with_default(default), tokens=64) for default in (3, 4))
    assert str(three) == str(four) and three.hash != four.hash
    before = parse("position @ tokens=64").hash
    monkeypatch.setattr(Position, "slack", 31)
    assert parse("position @ tokens=64").hash != before


def test_a_preset_brings_methods_and_settings() -> None:
    assert parse("streaming @ keep=0.25") == Plan(score=Position(sinks=4), keep=0.25, slack=32)
    assert parse("sliding_window @ tokens=9").score == Position(sinks=0)
    pyramid = parse("pyramidkv @ tokens=128")
    assert pyramid.score == SnapKV(window=8, kernel=7, pooling="max")
    assert registry.name_of(pyramid.allocate) == "pyramid"
    assert Plan.from_toml('preset = "pyramidkv"\ntokens = 128') == pyramid


def test_what_is_written_goes_before_a_preset() -> None:
    assert parse("pyramidkv + uniform @ tokens=99") == parse("snapkv(window=8, kernel=7, pooling=max) @ tokens=99")
    assert parse("snapkv + streaming @ tokens=99") == Plan(score=SnapKV(), tokens=99, slack=32)
    assert parse("streaming @ tokens=99, slack=never").slack == "never"
    assert parse("full + snapkv @ tokens=99") == parse("snapkv @ tokens=99")
    assert parse("pyramidkv + streaming + h2o @ tokens=99").score == H2O()


@pytest.mark.parametrize("name", sorted(registry.presets()))
def test_every_preset_makes_a_plan_that_round_trips(name: str) -> None:
    preset = registry.presets()[name]
    plan = parse(f"{name} @ {preset.budget}" if preset.budget else name)
    assert parse(str(plan)) == plan == Plan.from_toml(plan.to_toml())


def test_arguments_of_a_preset_with_a_methods_name_go_to_that_method(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"score": {"method": "snapkv", "kernel": 7}, "allocate": {"method": "adakv"}}
    made_up = registry.Preset(name="snapkv", plan=table, paper="", note="", budget="")
    monkeypatch.setattr(registry, "presets", lambda: {"snapkv": made_up})
    assert parse("snapkv(window=9) @ keep=1.0") == Plan(score=SnapKV(window=9, kernel=7), allocate=AdaKV(), keep=1.0)
    text = 'preset = "snapkv"\nkeep = 1.0\n[score]\nmethod = "snapkv"\nwindow = 9'
    assert Plan.from_toml(text) == Plan(score=SnapKV(window=9), allocate=AdaKV(), keep=1.0)


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (1, float, 1.0),
        ((1, 2), tuple[float, ...], (1.0, 2.0)),
        ([[1], [2, 3]], tuple[tuple[int, ...], ...], ((1,), (2, 3))),
        (None, int | None, None),
        (3, int | float, 3),
        (3, float | None, 3.0),
        ("a", typing.Literal["a", "b"], "a"),
        ((1, "x"), tuple[int, str], (1, "x")),
    ],
)
def test_values_fit_annotations(value: object, hint: object, wanted: object) -> None:
    found = fit(value, hint)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (1, bool),
        (1.5, int),
        ("1", int),
        (None, int),
        (1, str),
        ("c", typing.Literal["a", "b"]),
        ((1, 2), tuple[int]),
        (("a",), tuple[int, ...]),
        (True, float),
        (1, typing.Literal[True]),
        (3, tuple[int, ...]),
    ],
)
def test_values_that_do_not_fit_are_refused(value: object, hint: object) -> None:
    with pytest.raises(TypeError):
        fit(value, hint)


@pytest.mark.parametrize(
    ("line", "slack"),
    [
        ("streamingllm @ tokens=64", 0),
        ("streamingllm + indexed @ tokens=64", 32),
        ("kivi4 + streamingllm @ tokens=64", 32),
        ("streamingllm + vector(bits=8) @ tokens=64", 32),
        ("streamingllm + vector(bits=8) @ tokens=64, slack=0", 0),
        ("streamingllm + vector(bits=8) @ tokens=64, slack=7", 7),
    ],
)
def test_a_preset_that_evicts_at_each_token_does_so_in_blocks_beside_a_codec(line: str, slack: int) -> None:
    """What leaves the tail would be encoded token by token; what the line itself says is done."""
    plan = parse(line)
    assert plan.slack_tokens == slack and parse(str(plan)) == plan and Plan.from_toml(plan.to_toml()) == plan
