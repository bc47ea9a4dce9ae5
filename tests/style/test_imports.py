"""Who may import whom: the tree keeps the law, and the law refuses a tree that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.style.levels import breaches, write_tree

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
        ("types.py", "from kvtailor.ops.topk import topk", "ops is level 1"),
        ("ops/bad.py", "from kvtailor.score.contract import Scorer", "score is level 2"),
        ("plan.py", "from kvtailor.score.snapkv import SnapKV", "only find and route"),
        ("budget.py", "from kvtailor import select", "only find and route"),
        ("hf/bad.py", "from kvtailor.bench.runner import run", "bench is level 5"),
        ("route.py", "from kvtailor.hf.cache import KvCache", "hf is level 4"),
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
            "from kvtailor.score.contract import Scorer\nfrom kvtailor.ops.topk import topk\nimport torch",
        ),
        ("find.py", "from kvtailor.score.contract import Scorer"),
        ("hf/good.py", "import transformers\nfrom kvtailor.plan import Plan"),
        ("cli/good.py", "def f():\n    from kvtailor.bench.runner import run"),
    ],
)
def test_the_law_allows(file: str, text: str, tmp_path: Path) -> None:
    assert breaches(write_tree(tmp_path, {file: text})) == []
