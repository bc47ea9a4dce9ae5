"""Who may import whom: the tree keeps the law, and the law refuses a tree that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.style.levels import breaches, circles, graph, write_tree

import kvtailor

ROOT = Path(kvtailor.__file__).parent


def test_the_tree_keeps_the_law() -> None:
    assert breaches(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("score/bad.py", "from kvtailor.encode.plain import Plain", "never import each other"),
        ("score/bad.py", "import kvtailor.attend.contract", "never import each other"),
        ("score/bad.py", "from ..encode import plain", "never import each other"),
        ("score/bad.py", "def f():\n    from kvtailor.plan import Plan", "plan is level 3"),
        ("score/bad.py", "from kvtailor import plan", "plan is level 3"),
        ("encode/bad.py", "import transformers.cache_utils", "only hf"),
        ("bench/bad.py", "def f():\n    from transformers import AutoModel", "only hf"),
        ("cli/bad.py", "import transformers", "only hf"),
        ("types/bad.py", "from kvtailor.ops.lanes.topk import topk", "ops is level 1"),
        ("ops/bad.py", "from kvtailor.score.contract import Scorer", "score is level 2"),
        ("ops/bad.py", "if TYPE_CHECKING:\n    from kvtailor.plan import Plan", "plan is level 3"),
        ("calibration_file.py", "from kvtailor import select", "select is level 2"),
        ("hf/bad.py", "from kvtailor.bench.runner import run", "bench is level 5"),
        ("engine/bad.py", "from kvtailor.hf.cache import KvCache", "hf is level 4"),
        ("bench/report/bad.py", "from kvtailor.hf.cache import KvCache", "reads records only"),
        ("helpers.py", "", "belongs to no level"),
    ],
)
def test_the_law_refuses(file: str, text: str, reason: str, tmp_path: Path) -> None:
    found = breaches(write_tree(tmp_path, {file: text}))
    assert found and all(reason in sentence for sentence in found)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "score/good.py",
            "from kvtailor.score.contract import Scorer\nfrom kvtailor.ops.lanes.topk import topk\nimport torch",
        ),
        ("plan/good.py", "from kvtailor.score.contract import Scorer"),
        ("hf/good.py", "import transformers\nfrom kvtailor.plan import Plan"),
        ("cli/good.py", "def f():\n    from kvtailor.bench.runner import run"),
    ],
)
def test_the_law_allows(file: str, text: str, tmp_path: Path) -> None:
    assert breaches(write_tree(tmp_path, {file: text})) == []


def test_no_module_imports_itself_through_others() -> None:
    assert circles(graph(ROOT)) == []


@pytest.mark.parametrize(
    "back",
    [
        "from kvtailor.hf.a import f",
        "def g():\n    from kvtailor.hf import a",
        "if TYPE_CHECKING:\n    from . import a",
    ],
)
def test_a_circle_is_seen_wherever_its_imports_stand(back: str, tmp_path: Path) -> None:
    files = {
        "hf/__init__.py": "",
        "hf/a.py": "from kvtailor.hf.b import g",
        "hf/b.py": "import kvtailor.hf.c",
        "hf/c.py": back,
        "hf/d.py": "from kvtailor.hf import a",
    }
    assert circles(graph(write_tree(tmp_path, files))) == [["hf.a", "hf.b", "hf.c"]]
