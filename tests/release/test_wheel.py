"""Wheels that are built from a copy of the project: their tag, their licences, and their page on an index."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALONE = 'extern "C" int kvtailor_runs() { return 1; }\n'
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@pytest.fixture(scope="module")
def setup() -> dict:
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., zipfile.ZipFile]:
    """Build a wheel with these variables, from a copy whose weights are left out and whose kernels do nothing."""

    def make(**environment: str) -> zipfile.ZipFile:
        folder = tmp_path_factory.mktemp("wheel")
        copy = folder / "project"
        copy.mkdir()
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy / name)
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "*.safetensors")
        shutil.copytree(ROOT / "src", copy / "src", ignore=left_out)
        for source in (copy / "src" / "kvtailor" / "ops" / "cpu").glob("*.cpp"):
            # One function in the first file that is compiled: what is asked is how they are packed.
            source.write_text(ALONE if source.stem == "attention" else "\n")
        words = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, copy)
        clean = {name: value for name, value in os.environ.items() if name != "KVTAILOR_PURE"}
        subprocess.run([sys.executable, *words], check=True, env={**clean, **environment})
        (made,) = folder.glob("*.whl")
        return zipfile.ZipFile(made)

    return make


@pytest.fixture(scope="module")
def pure(build: Callable[..., zipfile.ZipFile]) -> zipfile.ZipFile:
    return build(KVTAILOR_PURE="1")


def tags(wheel: zipfile.ZipFile) -> tuple[str, str, str]:
    """The tag in the file's name, that in its metadata, and what these say of purity."""
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/WHEEL"))
    fields = message_from_bytes(wheel.read(name))
    return Path(str(wheel.filename)).stem.split("-", 2)[2], fields["Tag"], fields["Root-Is-Purelib"]


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def kernels(wheel: zipfile.ZipFile) -> list[str]:
    return sorted(Path(name).name for name in wheel.namelist() if name.endswith(".so"))


@needs_compiler
def test_kernels_are_for_a_platform_and_for_every_python(
    build: Callable[..., zipfile.ZipFile], setup: dict[str, object]
) -> None:
    made = build()
    variants = setup["VARIANTS"]
    assert isinstance(variants, dict)
    assert kernels(made) == sorted(f"kernels_{name}.so" for name in variants)
    in_name, inside, purity = tags(made)
    assert in_name == inside and purity == "false"
    assert re.fullmatch(r"py3-none-(linux|macosx)_\w+", inside)


def test_without_kernels_it_is_for_any_platform(pure: zipfile.ZipFile, build: Callable[..., zipfile.ZipFile]) -> None:
    for made in (pure, build(**NO_COMPILER)):
        assert kernels(made) == []
        assert tags(made) == ("py3-none-any", "py3-none-any", "true")
        assert "kvtailor/ops/cpu/library.py" in made.namelist()


def test_another_value_of_the_variable_is_refused(setup: dict) -> None:
    assert setup["wants_kernels"]({}) and setup["wants_kernels"]({"KVTAILOR_PURE": "0"})
    assert not setup["wants_kernels"]({"KVTAILOR_PURE": "1"})
    with pytest.raises(SystemExit, match="KVTAILOR_PURE=yes: set it to 1"):
        setup["wants_kernels"]({"KVTAILOR_PURE": "yes"})


def test_both_licence_texts_are_inside(pure: zipfile.ZipFile) -> None:
    found = metadata(pure)
    assert found["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"
    (folder,) = {name.split("/licenses/")[0] for name in pure.namelist() if "/licenses/" in name}
    texts = {name: pure.read(f"{folder}/licenses/{name}").decode() for name in found.get_all("License-File", [])}
    assert texts == {name: (ROOT / name).read_text(encoding="utf-8") for name in PROJECT["license-files"]}
    assert {Path(name).name for name in texts} == {"LICENSE", "CC-BY-SA-3.0.txt", "NOTICE"}
    assert any("Apache License" in text and "Version 2.0, January 2004" in text for text in texts.values())
    assert any(text.startswith("Creative Commons Legal Code\n\nAttribution-ShareAlike 3.0") for text in texts.values())
    assert {"kvtailor/demo/weights/NOTICE", "kvtailor/demo/weights/CC-BY-SA-3.0.txt"} <= set(pure.namelist())


def test_the_notice_names_every_folder_of_weights() -> None:
    package = ROOT / "src" / "kvtailor"
    text = (package / "demo" / "weights" / "NOTICE").read_text(encoding="utf-8")
    named = re.findall(r"^  (kvtailor/\S+)/ ", text, re.MULTILINE)
    assert named and all((ROOT / "src" / name).is_dir() for name in named)
    assert not [path for name in named for path in (ROOT / "src" / name).rglob("*.py")], "code is under Apache-2.0"
    binary = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*.safetensors")}
    assert binary and all(path.startswith(tuple(named)) for path in binary)


def test_the_version_is_that_of_the_code(pure: zipfile.ZipFile, setup: dict) -> None:
    written = (ROOT / "src" / "kvtailor" / "version.py").read_text(encoding="utf-8")
    assert metadata(pure)["Version"] == setup["version_of"](written)


def targets(text: str) -> set[str]:
    """Every address that a browser would load or follow on a page, by a Markdown parser of its own."""
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return set(re.findall(r'\b(?:href|src|srcset)="([^"]+)"', page))


def test_the_page_of_the_package_is_readme_with_absolute_links(pure: zipfile.ZipFile) -> None:
    found = metadata(pure)
    body = str(found.get_payload())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert found["Description-Content-Type"] == "text/markdown"
    assert body.splitlines()[0] == readme.splitlines()[0] and len(body.splitlines()) == len(readme.splitlines())
    relative = {link for link in targets(body) if not re.match("https?://|#|mailto:", link)}
    assert relative == set() and len(targets(body)) == len(targets(readme))


def test_links_are_made_absolute_and_code_is_left_alone(setup: dict) -> None:
    text = """# A

[docs](docs/bench.md#fit) ![picture](docs/a.png "title") [`code`](./LOG.md) [top](#a) [there](https://x.org/y)
[![badge](docs/b.svg)](docs/c.md), `d[i](docs/no.md)` and ``e[`i`](docs/no.md)``
<img alt="x" src="docs/d.svg"> <a href="docs/e.md">e</a> <source srcset="docs/f.svg">

    table[0](docs/no.md)

```python
rows[0](docs/no.md)
```

- item
  [deep](docs/g.md) [angle](</docs/i.md>)

[name]: docs/h.md
[name]
"""
    at = "https://host/o/r"
    made = setup["absolute_links"](text, at, "1.2.3")
    assert targets(made) == {
        *(f"{at}/blob/v1.2.3/{name}" for name in ("docs/bench.md#fit", "LOG.md", "docs/c.md", "docs/e.md")),
        *(f"{at}/blob/v1.2.3/{name}" for name in ("docs/g.md", "docs/h.md", "docs/i.md")),
        *(f"{at}/raw/v1.2.3/docs/{name}" for name in ("a.png", "b.svg", "d.svg", "f.svg")),
        "#a",
        "https://x.org/y",
    }
    assert made.count("(docs/no.md)") == text.count("(docs/no.md)") == 4
    assert f"({at}/blob/main/LOG.md)" in setup["absolute_links"](text, at, "1.2.3.dev0")
