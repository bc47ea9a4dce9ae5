"""Workflows, forms and hooks: they parse, and name only what exists here."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Folders and files that a step makes, or that a marker of make's stands for.
MADE = ("dist", "wheelhouse", "oldest.txt", "build/site")
# Extras for people who work on kvtailor.
OWN_EXTRAS = {"dev", "docs"}


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def triggers(workflow: dict[Any, Any]) -> dict[str, Any]:
    """What stands under `on`, which YAML 1.1 reads as the truth value."""
    found = workflow[True]
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands(workflow: dict[str, Any]) -> Iterator[list[str]]:
    """Each command line of each step, in words; what GitHub fills in is one word."""
    for step in steps(workflow):
        for line in re.sub(r"\$\{\{.*?\}\}", "FILLED", step.get("run", "")).splitlines():
            yield shlex.split(line)


def targets() -> set[str]:
    """The names that `make` knows."""
    found = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return set(" ".join(found).split())


def unknown(words: list[str]) -> list[str]:
    """The make targets and the files of a command line that do not exist."""
    if words[:1] == ["make"]:
        return [word for word in words[1:] if "=" not in word and word not in targets()]
    paths = [word for word in words if re.fullmatch(r"[\w.-]+(/[\w.-]+)+|[\w-]+\.(txt|toml|py)", word)]
    return [path for path in paths if not path.startswith((*MADE, ".venv")) and not (ROOT / path).exists()]


def test_there_are_the_workflows_that_are_promised() -> None:
    assert {path.stem for path in WORKFLOWS} == {"checks", "docs", "transformers-main", "wheels", "whole"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_exists(path: Path) -> None:
    workflow = read(path)
    assert [bad for words in commands(workflow) for bad in unknown(words)] == []
    assert any(words[:1] == ["make"] for words in commands(workflow))
    for event in triggers(workflow).values():
        for pattern in (event or {}).get("paths", ()) if isinstance(event, dict) else ():
            assert list(ROOT.glob(pattern)), f"{pattern} matches no file"
    for step in steps(workflow):
        given = step.get("with", {})
        named = [given[key] for key in ("cache-dependency-path",) if key in given]
        assert all((ROOT / name).is_file() for name in named), named


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_an_end(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= workflow["jobs"].keys()
        if job.get("permissions", {}).get("id-token") == "write":
            assert "if" in job and "environment" in job, f"{name} may publish: it needs a condition and an environment"
    for step in steps(workflow):
        assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1")), step


def test_the_tests_run_on_every_python_and_on_both_ends_of_transformers() -> None:
    promised = {
        name.rsplit(" ", 1)[1]
        for name in PYPROJECT["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
    }
    matrix = read(ROOT / ".github" / "workflows" / "checks.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert set(matrix["python"]) == promised and set(matrix["transformers"]) == {"oldest", "newest"}
    wheels = read(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]
    assert set(wheels["package"]["strategy"]["matrix"]["python"]) == promised
    built = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert set(built) == {f"cp{version.replace('.', '')}-*" for version in promised}
    assert min(promised, key=lambda v: int(v.split(".")[1])) == PYPROJECT["project"]["requires-python"].strip(">=")


def test_every_extra_is_tried() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]["extras"]["strategy"]["matrix"]
    assert set(matrix["extra"]) == PYPROJECT["project"]["optional-dependencies"].keys() - OWN_EXTRAS


def test_one_tag_of_linux_everywhere() -> None:
    image = runpy.run_path(str(ROOT / "release" / "make_package.py"))["MANYLINUX"]
    linux = PYPROJECT["tool"]["cibuildwheel"]["linux"]
    assert linux["manylinux-x86_64-image"] == linux["manylinux-aarch64-image"] == image
    assert image in (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")


def test_the_oldest_transformers_is_the_bound_of_the_project() -> None:
    module = runpy.run_path(str(ROOT / "release" / "oldest_constraints.py"))
    assert module["oldest"](["torch>=2", "transformers >= 5.17"]) == "5.17.0"
    assert module["oldest"](PYPROJECT["project"]["dependencies"]).startswith("5.17.")
    pinned = "a==1\nhuggingface_hub==2.4.0\ntransformers==5.23.0\ntransformers-extra==1\n"
    assert module["constraints"](pinned, "5.17.0") == "a==1\ntransformers==5.17.0\ntransformers-extra==1\n"
    with pytest.raises(ValueError, match="no dependency is of the form transformers>=VERSION"):
        module["oldest"](["transformers==5.17"])


def test_every_pin_is_a_version_and_stands_once() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split("==")[0].lower() for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+]+", line) for line in lines if not line.startswith("#"))
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("path", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem)
def test_a_form_is_one_that_github_shows(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in asked} <= {"textarea", "input", "dropdown", "checkboxes"}
    names = [part["id"] for part in asked]
    assert len(set(names)) == len(names) and all(part["attributes"]["label"] for part in asked)
    text = path.read_text(encoding="utf-8")
    files = re.findall(r"\b[\w/]+\.md\b", text)
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_hooks_run_what_make_check_runs() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    entries = {hook["id"]: hook["entry"].split() for hook in local["hooks"]}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(entry[0].startswith(".venv/bin/") for entry in entries.values())
    for name in ("ruff", "mypy"):
        assert f"\t{entries[name][0]}" in makefile
    folders = [word for word in entries["style"] if word.startswith("tests/")]
    assert folders and all((ROOT / word).is_dir() for word in folders)
    assert all(re.compile(hook["files"]) for hook in local["hooks"] if "files" in hook)


def test_what_does_not_exist_is_seen() -> None:
    assert unknown(["make", "test", "PYTHON=python"]) == []
    assert unknown(["make", "fly"]) == ["fly"]
    assert unknown(["python", "release/check_tag.py", "v1"]) == []
    assert unknown(["python", "release/nothing.py", "nothing.txt", ">", "oldest.txt"]) == [
        "release/nothing.py",
        "nothing.txt",
    ]


def test_the_weekly_run_names_what_is_read_and_gone() -> None:
    said = [each.get("run", "") for each in steps(read(ROOT / ".github" / "workflows" / "transformers-main.yml"))]
    assert any("kvtailor.hf.versions import broken_assumptions" in each for each in said)
