"""What `find` lists, and that it lists it without importing anything."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests.support.discover import sample_of

from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.plan import registry

METHOD = '''"""{name}: a method.

*Paper*: one that
goes on, arXiv 1.

*Source*: our own.
"""
from dataclasses import dataclass
from kvtailor.score.contract import Scorer

@dataclass(frozen=True, kw_only=True)
class {name}(Scorer):
    def score(self, held): ...
'''


@pytest.fixture
def fresh() -> None:
    """Forget what was read before, and after."""
    caches = (registry._own, registry._of_others, registry.presets)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> Path:
    """An empty house whose stages a test fills."""
    for stage in registry.stages():
        (tmp_path / stage).mkdir()
    (tmp_path / "presets").mkdir()
    monkeypatch.setattr(registry, "_HOME", tmp_path)
    return tmp_path


def test_stages_are_in_the_order_in_which_they_work() -> None:
    assert registry.stages() == ("score", "allocate", "select", "merge", "encode", "store", "attend")


def test_listing_imports_no_method() -> None:
    code = (
        "import sys; from kvtailor.plan import registry; before = set(sys.modules)\n"
        "for stage in registry.stages(): registry.methods(stage)\n"
        "registry.presets(); assert set(sys.modules) == before, set(sys.modules) - before\n"
        "registry.load('score', 'snapkv'); new = {m for m in sys.modules if m.startswith('kvtailor.score.')}\n"
        "assert new == {'kvtailor.score.contract', 'kvtailor.score.snapkv'}, new\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_known_of_a_method() -> None:
    info = registry.methods("score")["snapkv"]
    assert (info.name, info.stage, info.class_name, info.by) == ("snapkv", "score", "SnapKV", "kvtailor")
    assert info.summary.startswith("SnapKV") and "2404.14469" in info.paper and "*" not in info.paper
    assert registry.describe("snapkv") == info
    assert registry.stage_of("adakv") == "allocate"


@pytest.mark.parametrize("stage", registry.stages())
def test_every_method_loads_and_is_named_back(stage: str) -> None:
    for name in registry.methods(stage):
        assert registry.name_of(sample_of(registry.load(stage, name))) == name


@pytest.mark.parametrize("stage", registry.stages())
def test_null_methods_exist(stage: str) -> None:
    null = registry.null(stage)
    assert (null is None) == (stage == "score")
    assert null is None or null in registry.methods(stage)


def test_unknown_names_say_near_ones() -> None:
    with pytest.raises(UnknownName, match="no method named 'snapk'; did you mean 'snapkv'"):
        registry.stage_of("snapk")
    with pytest.raises(UnknownName, match="no method named 'pyramid_kv'; did you mean 'pyramidkv'"):
        registry.stage_of("pyramid_kv")
    with pytest.raises(UnknownName, match="no stage named 'scoer'; did you mean 'score'"):
        registry.methods("scoer")
    with pytest.raises(UnknownName, match="no method of encode named 'snapkv'; .*plain"):
        registry.load("encode", "snapkv")


def test_reads_files_and_skips_what_is_no_method(house: Path) -> None:
    (house / "score" / "mine.py").write_text(METHOD.format(name="Mine"))
    (house / "score" / "__init__.py").write_text("raise RuntimeError")
    (house / "score" / "contract.py").write_text(METHOD.format(name="Contract"))
    (house / "score" / "pages.py").write_text("class Page: ...")
    (house / "score" / "plain_class.py").write_text("class NoDataclass(Scorer): ...")
    (house / "score" / "hidden.py").write_text(METHOD.format(name="_Hidden"))
    assert list(registry.methods("score")) == ["mine"]
    assert registry.methods("score")["mine"].paper == "one that goes on, arXiv 1."
    assert registry.methods("score")["mine"].summary == "Mine: a method."


def test_two_methods_in_one_file_are_refused(house: Path) -> None:
    (house / "score" / "two.py").write_text(METHOD.format(name="One") + METHOD.format(name="Two"))
    with pytest.raises(KvtailorError, match="One and Two: one method is one file"):
        registry.methods("score")


def test_one_name_in_two_stages_is_refused_when_asked(house: Path) -> None:
    (house / "score" / "same.py").write_text(METHOD.format(name="Same"))
    (house / "encode" / "same.py").write_text(METHOD.format(name="Same").replace("Scorer", "Codec"))
    with pytest.raises(KvtailorError, match=r"'same' is a method of score .* and encode"):
        registry.stage_of("same")


def third_party(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    def points(group: str) -> list[EntryPoint]:
        return [EntryPoint(name=name, value=value, group=group)] if group == "kvtailor.score" else []

    monkeypatch.setattr(registry, "entry_points", points)


def test_entry_points_bring_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    (tmp_path / "their_scores.py").write_text(METHOD.format(name="Theirs"))
    monkeypatch.syspath_prepend(str(tmp_path))
    third_party(monkeypatch, "theirs", "their_scores:Theirs")
    assert registry.stage_of("theirs") == "score" and "their_scores" not in sys.modules
    kind = registry.load("score", "theirs")
    assert kind.__name__ == "Theirs" and registry.name_of(kind()) == "theirs"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:X", "cannot be imported: No module named 'no_such_module'"),
        ("kvtailor.errors:Nothing", "cannot be imported"),
        ("kvtailor.errors:KvtailorError", "is not a Scorer: derive it from kvtailor.score.contract.Scorer"),
    ],
)
def test_bad_entry_points_say_whose_they_are(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    third_party(monkeypatch, "theirs", value)
    with pytest.raises(KvtailorError, match=message):
        registry.load("score", "theirs")


def test_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    third_party(monkeypatch, "snapkv", "their_scores:SnapKV")
    with pytest.raises(KvtailorError, match="two methods are named 'snapkv' in score"):
        registry.methods("score")


# Their attention splits a budget of its own, see `Attention.held_tokens`.
BRINGS_A_BUDGET = {"rocketkv"}


def test_presets_hold_known_methods_no_budget_and_a_note() -> None:
    found = registry.presets()
    assert {"full", "streaming", "sliding_window", "pyramidkv", "kivi2", "kivi4", "quest"} <= set(found)
    for name, preset in found.items():
        assert preset.note, name
        assert preset.plan.keys().isdisjoint({"tokens", "keep", "bytes"})
        assert bool(preset.budget) == ("score" in preset.plan and name not in BRINGS_A_BUDGET), name


def test_a_preset_with_a_methods_name_holds_it_and_what_it_cannot_do_without() -> None:
    methods = {name: info for stage in registry.stages() for name, info in registry.methods(stage).items()}
    for name in methods.keys() & registry.presets().keys():
        plan = dict(registry.presets()[name].plan)
        stage = methods[name].stage
        assert plan.pop(stage)["method"] == name
        if stage in ("allocate", "merge"):  # Both are of what is scored.
            assert set(plan) == {"score"}
        elif stage == "score":  # Whose paper may have budgets of its own.
            assert set(plan) <= {"allocate"}
        else:
            needed = getattr(registry.load(stage, name), "needs_codec", None)
            assert plan == ({} if needed is None else {"encode": {"method": needed}})
