"""The counts of a made-up package are those that can be counted by hand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.house import counts_of

ONE = '''"""A file.

Two lines of it.
"""

from kvtailor.b.two import Same


# why
class Same(Same):
    """A class."""

    def many(self, a, b, c, d, e, f, g, h, *, i):
        """A docstring."""
        return """no docstring"""


def few(a, b, c, d, e, f, g, h):
    return a  # fmt: skip
'''
TWO = "from kvtailor.b import three\n\n\nclass Same:\n    pass\n"


def test_a_package_is_counted(tmp_path: Path) -> None:
    for name, text in {"a/one.py": ONE, "b/two.py": TWO, "b/three.py": branches(13), "b/four.py": branches(12)}.items():
        path = tmp_path / "src" / "kvtailor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("\n\n\n")
    found = counts_of(tmp_path)
    assert (found["files"], found["folders"]) == (4, 2)
    assert (found["lines of docstring"], found["lines of comment"]) == (6, 1)
    assert found["lines of blank"] == 8
    assert found["lines"] == sum(found[f"lines of {kind}"] for kind in ("code", "docstring", "comment", "blank"))
    assert (found["files of tests"], found["lines of tests"]) == (1, 3)
    assert found["imports between folders"] == 1
    assert found["functions above complexity 12"] == 1
    assert found["functions with more than 8 parameters"] == 1
    assert (found["fmt: skip"], found["names that several classes have"]) == (1, 1)


def branches(complexity: int) -> str:
    """The source of a function of so much complexity."""
    return "def f(x):\n" + "    if x:\n        x = 1\n" * (complexity - 1)
