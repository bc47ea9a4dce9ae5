"""Writes `docs/methods/`: what there is to choose from, from the methods' own docstrings, fields and declarations.

    make docs        (or: python docs/write_methods.py, in any checkout)

`README.md` lists the stages, their methods and the presets; every method has a page of its own, so that two methods
that arrive at once touch two files. The pages say nothing that the sources do not say: change the docstring, or the
formula in `formulas.md`, and not the page. A test compares the committed pages with what this file makes of the
sources.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

from bibliography import Paper, bibliography  # noqa: E402
from write_real_models import of_plan  # noqa: E402

from kvtailor.plan import Plan, registry  # noqa: E402
from kvtailor.plan.arguments import samples_of  # noqa: E402
from kvtailor.plan.grammar import write_value  # noqa: E402
from kvtailor.presets import FULL  # noqa: E402

__all__ = ["FOLDER", "formulas", "heads_of", "pages", "stale", "write"]

FOLDER = ROOT / "docs" / "methods"
# What stands in the folder and is not made here.
WRITTEN = ("cost.md", "formulas.md")
FORMULAS = FOLDER / "formulas.md"
HEADS = ("Idea", "Paper", "Source", "Departs", "Cost")
MADE = "<!-- Made by `make docs` from {}: change that, not this page. -->"


def heads_of(docstring: str) -> dict[str, str]:
    """What stands behind each docstring head, paragraphs kept; empty where there is nothing."""
    parts = re.split(rf"^\*({'|'.join(HEADS)})\*[ :.]*", docstring, flags=re.MULTILINE)
    return {head: body.strip() for head, body in zip(parts[1::2], parts[2::2], strict=True)}


def formulas() -> dict[str, str]:
    """What `formulas.md` says of each method, by name."""
    text = FORMULAS.read_text(encoding="utf-8")
    parts = re.split(r"^###? (.*)$", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def pages() -> dict[str, str]:
    """The text of every page by its path in `docs/methods/`."""
    papers = bibliography((ROOT / "docs" / "papers.bib").read_text(encoding="utf-8"))
    # What other packages bring is not ours to document, and differs from machine to machine.
    stages = {stage: [i for i in registry.methods(stage).values() if i.by == "kvtailor"] for stage in registry.stages()}
    written = formulas()
    for info in (info for infos in stages.values() for info in infos if info.name not in written):
        raise SystemExit(f"docs/methods/formulas.md has no formula of {info.name}: write it below '### {info.name}'")
    found = {
        f"{i.stage}/{i.name}.md": "\n".join(_page(i, papers, written[i.name]))
        for infos in stages.values()
        for i in infos
    }
    return {"README.md": "\n".join(_index(stages, papers)), **found}


def stale(folder: Path = FOLDER) -> list[str]:
    """Pages of a folder that are missing, differ from the sources, or belong to no method, by their paths in it."""
    wanted = pages()
    there = {str(path.relative_to(folder)): path for path in folder.rglob("*.md")}
    differ = [n for n, text in wanted.items() if n not in there or there[n].read_text(encoding="utf-8") != text]
    return sorted([*differ, *(name for name in there if name not in wanted and name not in WRITTEN)])


def write(folder: Path = FOLDER) -> list[str]:
    """Makes the folder what the sources say; the paths in it that were written or removed."""
    wanted, changed = pages(), stale(folder)
    for name in changed:
        path = folder / name
        if name in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[name], encoding="utf-8")
        else:
            path.unlink()
    return changed


def _index(stages: Mapping[str, list[registry.MethodInfo]], papers: tuple[Paper, ...]) -> Iterator[str]:
    yield MADE.format("the docstrings of all methods, the presets and `docs/papers.bib`")
    yield "# What there is to choose from\n"
    yield "A plan names at most one method of each stage, with `+` between, in any order; a preset brings several at"
    yield "once. What a plan does not name is what stands as *default* below. `kvtailor ls` lists the same in a"
    measured = " What choosing costs is in [cost.md](cost.md)." if (FOLDER / "cost.md").is_file() else ""
    yield f"terminal.{measured} All formulas stand in [formulas.md](formulas.md), in one notation.\n"
    yield "Of what kvpress 0.5.5 has, RestoreKV is not here: it puts entries that are no text into the cache, which"
    yield "adapters trained for one model make, and a plan works on any model without weights of its own."
    yield "`kvzip`, on which it is built, is here."
    yield "`docs/coming-from-kvpress.md` has every press.\n"
    for stage, infos in stages.items():
        yield f"## {stage}\n\n{_sentence(stage)}\n"
        yield "| method | what it does | paper | arguments |\n|---|---|---|---|"
        for info in infos:
            standing = " *(default)*" if info.name == registry.null(stage) else ""
            cited = ", ".join(paper.short for paper in _cited(info.paper, papers)) or "–"
            given = ", ".join(f"{name}={default or '…'}" for name, (_, default) in _fields(info).items())
            link = f"[{info.name}]({stage}/{info.name}.md){standing}"
            yield _row([link, info.summary, cited, f"`{given}`" if given else ""])
        yield ""
        if declarations := _declarations(stage):
            yield "What each of them declares:\n"
            yield "\n".join(f"- {name}: {_prose(meaning)}" for name, meaning in declarations.items())
            yield ""
    yield "## Layers that hold latents\n"
    yield "On models of multi-head latent attention (DeepSeek, Kimi, GLM-4-MoE-Lite, LongCat-Flash, MiniCPM3 ...) a"
    yield "plan with one of these methods is refused when its cache is made, and all others work.\n"
    for stage, infos in stages.items():
        for info in infos:
            if (why := _sample(info).capabilities.latents) is not True:
                yield f"- [{info.name}]({stage}/{info.name}.md): {why}"
    yield ""
    yield "## Evidence\n\nWhat can be needed; nothing else is gathered.\n"
    needs = typing.get_type_hints(vars(registry.contract("score"))["needs"].fget)["return"]
    yield "\n".join(f"- {name}: {_prose(meaning)}" for name, meaning in _attributes(needs).items()) + "\n"
    yield "## Presets\n"
    yield "Each line is the preset with the budget that is suggested to begin with, written out; then what it lost on"
    yield "real models, in nats a token over the whole cache, at whatever budgets were measured, with 95 % intervals"
    yield "([records](../records/README.md)). A check has windows of 384 + 128 tokens of prose.\n"
    for preset in registry.presets().values():
        line = str(Plan.parse(f"{preset.name} @ {preset.budget}" if preset.budget else preset.name))
        where = preset.paper.partition(",")[2].strip()
        source = ", ".join(filter(None, [*(p.short for p in _cited(preset.paper, papers)), where]))
        yield f"- **{preset.name}**: `{line}`"
        yield f"  - {' '.join(preset.note.split())}"
        yield f"  - Paper: {source or 'none'}. Suggested budget: {f'`{preset.budget}`' if preset.budget else 'none'}."
        plan = Plan.parse(line)
        lost = " ".join(of_plan(plan)) or "Not measured on a real model."
        yield f"  - {'What the others are held against.' if str(plan) == FULL else lost}"
    yield ""


def _page(info: registry.MethodInfo, papers: tuple[Paper, ...], formula: str) -> Iterator[str]:
    path = f"src/{info.module.replace('.', '/')}.py"
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    yield MADE.format(f"`{path}`")
    yield f"# {info.name}\n\n{_prose(info.summary)}\n"
    standing = " It stands in every plan that names no other." if info.name == registry.null(info.stage) else ""
    yield f"`{info.module}.{info.class_name}`, of the stage [{info.stage}](../README.md#{info.stage}).{standing}\n"
    for head, body in heads_of(docstring).items():
        yield f"**{head}**: {_prose(body)}\n"
        if head == "Idea":
            yield f"**Formula** ([notation](../formulas.md)):\n\n{formula}\n"
        if head == "Paper" and (cited := _cited(body, papers)):
            yield "\n".join(f"- {paper.long}" for paper in cited) + "\n"
    fields = _fields(info)
    if fields:
        meanings = _attributes(registry.load(info.stage, info.name))
        yield "| argument | type | default | meaning |\n|---|---|---|---|"
        for name, (kind, default) in fields.items():
            yield _row([f"`{name}`", kind, f"`{default}`" if default else "must be given", meanings.get(name, "")])
        yield ""
    if examples := registry.load(info.stage, info.name).examples:
        yield f"In a plan: {', '.join(f'`{each}`' for each in examples)}.\n"
    if declared := list(_declared(info)):
        yield f"So it [declares](../README.md#{info.stage}): {'; '.join(declared)}.\n"


def _fields(info: registry.MethodInfo) -> dict[str, tuple[str, str | None]]:
    """Type and default (None: it must be given) of each argument, as a plan has them."""
    kind: Any = registry.load(info.stage, info.name)
    hints, found = typing.get_type_hints(kind), {}
    for field in (field for field in dataclasses.fields(kind) if field.init):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = _type(hints[field.name]), None if made is dataclasses.MISSING else _written(made)
    return found


def _sample(info: registry.MethodInfo) -> Any:
    """The method with its defaults, or its first example where its name alone is not enough."""
    return samples_of(registry.load(info.stage, info.name))[0]


def _type(hint: Any) -> str:
    """A type as a reader of plans knows it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{write_value(each)}`" for each in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("`none`" if each is type(None) else _type(each) for each in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    for stage in registry.stages():
        if hint is registry.contract(stage):
            return f"a method of {stage}"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}.get(hint, str(hint))


def _written(value: Any) -> str:
    """A value as a plan writes it; a method that is an argument of another is its name."""
    if isinstance(value, tuple(map(registry.contract, registry.stages()))):
        return registry.name_of(value)
    return f"({_settings(value)})" if dataclasses.is_dataclass(value) else write_value(value)


def _settings(value: Any) -> str:
    """What differs from a dataclass's own defaults."""
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return ", ".join(f"{name}={_written(each)}" for name, each in given.items() if each != defaults[name])


def _declared(info: registry.MethodInfo) -> Iterator[str]:
    """Name and value of what the stage's contract lets a method say about itself."""
    method = _sample(info)
    for name in _declarations(info.stage):
        value = getattr(method, name)
        if dataclasses.is_dataclass(value):
            asked = _settings(value)
            yield f"{name}: {f'`{asked}`' if asked else 'nothing'}"
        elif name == "slack":
            yield f"{name}: `{write_value(value)}` ({'does not evict' if value is None else 'evicts'} while decoding)"
        else:
            yield f"{name}: `{write_value(value)}`"


def _declarations(stage: str) -> dict[str, str]:
    """What a method of a stage may say about itself, and what it means."""
    contract = registry.contract(stage)
    read = {name: member for name, member in vars(contract).items() if isinstance(member, property)}
    told = {name: " ".join((inspect.getdoc(member) or "").split()) for name, member in read.items()}
    return {**_attributes(contract), **told}


def _attributes(kind: type) -> dict[str, str]:
    """What the section `Attributes` (or `Args`) of a class docstring says of each name."""
    section = re.search(r"^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", inspect.getdoc(kind) or "", re.MULTILINE | re.DOTALL)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else ():
        if hit := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            names = hit[1].split(", ")
            found |= dict.fromkeys(names, hit[2].strip())
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _cited(text: str, papers: tuple[Paper, ...]) -> list[Paper]:
    """The papers that a text names, by their numbers on arXiv or their keys."""
    words = set(re.findall(r"\d{4}\.\d{5}|\w+", text))
    return [paper for paper in papers if words & {paper.key, paper.number or paper.key}]


def _sentence(stage: str) -> str:
    """What the stage's contract says of the stage, without its name."""
    text = inspect.getdoc(sys.modules[registry.contract(stage).__module__]) or ""
    return _prose(re.sub(r"^The stage `\w+`: ", "", text.partition("\n\n")[0]))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(" ".join(_prose(cell).split()).replace("|", r"\|") for cell in cells) + " |"


def _prose(text: str) -> str:
    """A docstring's text, in which `n**2` is a power and no bold type."""
    return re.sub(r"(?<=\w)\*\*(?=\w)", r"\\*\\*", text)


if __name__ == "__main__":
    print("\n".join(f"docs/methods/{name}" for name in write()) or "docs/methods is as the sources say")
