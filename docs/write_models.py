"""Writes `docs/models.md`: which of transformers' models kvtailor works with, and why the others are refused.

    python docs/write_models.py             judges every pair under the installed transformers, then writes
    python docs/write_models.py gptj mpt    judges these types of models alone, then writes
    python docs/write_models.py --page      writes from what was judged before (so does `make docs`)
    python docs/write_models.py --changes   judges every pair, writes nothing, and names what is not as recorded last

The verdicts lie in `docs/models.json`, a column for each version of transformers; a run replaces the column of the
installed version. A run takes five minutes of one core. `tests/support/every_model/` has the builder and the judge.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

__all__ = [
    "DATA",
    "PAGE",
    "README",
    "changes",
    "column_of",
    "page",
    "readme_block",
    "recorded",
    "stale",
    "unjudged",
    "write",
]

DATA, PAGE, README = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md", ROOT / "README.md"
BEGIN, END = "<!-- models: made by `make docs` from docs/models.json -->", "<!-- /models -->"
VERDICTS = ("works", "refused", "refused late", "differs", "crash", "not built")
MAPPINGS = {"causal": "MODEL_FOR_CAUSAL_LM_MAPPING", "image": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"}
# Families that many people run, by the types of their configurations; README names them.
KNOWN = {
    "Llama 2 to 3": ("llama",),
    "Llama 4 (text)": ("llama4_text",),
    "Mistral": ("mistral",),
    "Mixtral": ("mixtral",),
    "Ministral": ("ministral", "ministral3"),
    "Mistral 3": ("mistral3",),
    "Qwen2": ("qwen2", "qwen2_moe"),
    "Qwen3": ("qwen3", "qwen3_moe"),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5", "qwen3_5_moe"),
    "Gemma": ("gemma",),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3_text", "gemma3"),
    "Gemma 3n": ("gemma3n_text",),
    "Gemma 4": ("gemma4_text", "gemma4"),
    "gpt-oss": ("gpt_oss",),
    "DeepSeek V2 and V3": ("deepseek_v2", "deepseek_v3"),
    "DeepSeek V3.2": ("deepseek_v32",),
    "Kimi-Linear": ("kimi_linear",),
    "GLM-4": ("glm4", "glm4_moe"),
    "GLM-4-MoE-Lite": ("glm4_moe_lite",),
    "GLM-DSA": ("glm_moe_dsa",),
    "Phi-3": ("phi3",),
    "Phi-4 multimodal": ("phi4_multimodal",),
    "Granite": ("granite", "granitemoe"),
    "Granite 4 hybrid": ("granitemoehybrid",),
    "Falcon": ("falcon",),
    "Falcon-H1": ("falcon_h1",),
    "LFM2": ("lfm2", "lfm2_moe"),
    "Nemotron-H": ("nemotron_h",),
    "Jamba": ("jamba",),
    "Bamba": ("bamba",),
    "Zamba2": ("zamba2",),
    "OLMo 2 and 3": ("olmo2", "olmo3"),
    "OLMo hybrid": ("olmo_hybrid",),
    "MiniMax-01": ("minimax",),
    "MiniMax M2": ("minimax_m2",),
    "MiMo-V2-Flash": ("mimo_v2_flash",),
    "Command R": ("cohere", "cohere2"),
    "SmolLM3": ("smollm3",),
    "GPT-NeoX": ("gpt_neox",),
    "GPT-2": ("gpt2",),
    "GPT-J": ("gptj",),
    "OPT": ("opt",),
    "BLOOM": ("bloom",),
    "MPT": ("mpt",),
    "StableLM": ("stablelm",),
    "Mamba": ("mamba", "mamba2"),
    "Qwen2-VL and 2.5-VL": ("qwen2_vl", "qwen2_5_vl"),
    "Qwen3-VL": ("qwen3_vl", "qwen3_vl_moe"),
    "Llava": ("llava", "llava_next", "llava_onevision"),
    "SmolVLM": ("smolvlm",),
    "InternVL": ("internvl",),
    "PaliGemma": ("paligemma",),
    "Llama 3.2 Vision (Mllama)": ("mllama",),
}

Rows = list[dict[str, Any]]
Key = tuple[str, str, str]


def recorded() -> dict[str, Any]:
    """Return what was judged: `versions`, and `pairs` with a verdict for each version that has the pair."""
    if not DATA.is_file():
        return {"versions": {}, "pairs": []}
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def column_of(version: str) -> str:
    """Return the name of a version's column: patch releases share one."""
    return ".".join(version.split(".")[:2])


def _judged(types: Sequence[str] = ()) -> dict[Key, list[str]]:
    """The verdict and its reason, where it has one, of each pair of these types, or of every pair."""
    pairs = import_module("tests.support.every_model.pairs").every_pair()
    pairs = [pair for pair in pairs if not types or pair.model_type in types]
    judged = import_module("tests.support.every_model.run").judged
    began, found = time.perf_counter(), {}
    for number, verdict in enumerate(judged(pairs), 1):
        said = [verdict.verdict, verdict.reason] if verdict.reason else [verdict.verdict]
        found[verdict.mapping, verdict.model_type, verdict.model_class] = said
        what = f"{verdict.verdict} {verdict.reason}".strip()[:150]
        print(f"{number}/{len(pairs)} {verdict.mapping} {verdict.model_type}: {what}", flush=True)
    print(f"{len(pairs)} pairs in {time.perf_counter() - began:.0f} s")
    return found


def judge_all(types: Sequence[str] = ()) -> dict[str, Any]:
    """Judge pairs under the installed transformers; return the recorded verdicts with its column replaced.

    Args:
        types: of the models that are judged; empty: all.
    """
    torch, transformers = import_module("torch"), import_module("transformers")
    column, found, data = column_of(transformers.__version__), _judged(types), recorded()
    rows = {(row["mapping"], row["type"], row["class"]): row for row in data["pairs"]}
    for key, row in rows.items():
        if key not in found and not types:
            row.pop(column, None)
    for key, said in found.items():
        row = rows.setdefault(key, dict(zip(("mapping", "type", "class"), key, strict=True)))
        row[column] = said
    versions = data["versions"] | {
        column: {"transformers": transformers.__version__, "torch": torch.__version__, "date": str(date.today())}
    }
    kept = [rows[key] for key in sorted(rows) if any(column in rows[key] for column in versions)]
    return {"versions": dict(sorted(versions.items(), key=lambda each: _order(each[0]))), "pairs": kept}


def changes(found: dict[Key, list[str]], data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what is not as it was recorded for the newest version, a line for each pair.

    Args:
        found: of each pair the verdict, and the reason where it has one.
        data: as recorded.

    Returns:
        What kvtailor has to mend (it worked and does not; a late refusal, a crash, another text), and the rest.
    """
    newest = max(data["versions"], key=_order)
    known = {(row["mapping"], row["type"], row["class"]): row[newest] for row in data["pairs"] if newest in row}
    faults: list[str] = []
    others: list[str] = []
    for key in sorted(found.keys() | known.keys()):
        was, now = known.get(key), found.get(key)
        if was == now:
            continue
        before = f"was not there in {newest}" if was is None else f"{newest} has {': '.join(was)}"
        line = f"{' '.join(key)}: {'is gone' if now is None else ': '.join(now)} ({before})"
        worked = was is not None and was[0] == "works"
        broken = now is not None and (now[0] in ("refused late", "differs", "crash") or (worked and now[0] != "works"))
        (faults if broken else others).append(line)
    return faults, others


def unjudged(column: str) -> list[str]:
    """Return the pairs of the installed transformers that have no verdict in a column."""
    pairs = import_module("tests.support.every_model.pairs").every_pair()
    known = {(row["mapping"], row["type"], row["class"]) for row in recorded()["pairs"] if column in row}
    return [str(pair) for pair in pairs if tuple(pair) not in known]


def written(data: dict[str, Any]) -> str:
    """Return the text of the data file, a pair a line."""
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in data["pairs"])
    return f'{{"versions": {json.dumps(data["versions"])},\n"pairs": [\n{lines}\n]}}\n'


def page(data: dict[str, Any]) -> str:
    """Return the text of `docs/models.md`."""
    return "\n".join(_page(data))


def _page(data: dict[str, Any]) -> Iterator[str]:
    versions, rows = list(data["versions"]), data["pairs"]
    yield "<!-- Made by `make docs` from `docs/models.json`: run `python docs/write_models.py`, do not edit. -->"
    yield "# Models\n"
    yield "transformers offers a class for each type of configuration, in two mappings."
    yield f"Every pair of a type and a class is here, of {' and '.join(f'`{name}`' for name in MAPPINGS.values())}."
    yield "Each was built tiny, from its configuration class, with random weights that make its attention sharp,"
    yield "and judged on the CPU in float32 with text alone (`tests/support/every_model/`).\n"
    yield "| verdict | what was found |\n|---|---|"
    for verdict, meaning in _MEANINGS.items():
        yield f"| {verdict} | {meaning} |"
    yield ""
    for version, about in data["versions"].items():
        yield f"- {version}: transformers {about['transformers']}, torch {about['torch']}, judged on {about['date']}."
    yield "\n## Counts\n"
    yield f"| | {' | '.join(versions)} |\n|---{'|---' * len(versions)}|"
    counts = {version: _counts(rows, version) for version in versions}
    yield f"| pairs | {' | '.join(str(sum(counts[v].values())) for v in versions)} |"
    for verdict in VERDICTS:
        yield f"| {verdict} | {' | '.join(str(counts[v][verdict]) for v in versions)} |"
    yield f"| works, of those that could be built | {' | '.join(_share(counts[v]) for v in versions)} |"
    newest = max(versions, key=_order)
    yield f"\n## Why the others do not work, transformers {newest}\n"
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        found = row.get(newest)
        if found is not None and found[0] != "works":
            reasons[found[0], _general(row, found[1])].append(_name(row))
    order = sorted(reasons, key=lambda key: (VERDICTS.index(key[0]), -len(reasons[key]), key[1]))
    for verdict in dict.fromkeys(verdict for verdict, _ in order):
        yield f"**{verdict}**\n"
        for key in order:
            if key[0] == verdict:
                # No line begins with "kvtailor", which would read like a command.
                sentence = f"- {_cell(key[1])} ({len(reasons[key])})".replace(" kvtailor ", "\u00a0kvtailor ")
                for line in wrap(sentence, 120, subsequent_indent="  "):
                    yield line.replace("\u00a0", " ")
                yield from wrap(", ".join(reasons[key]), 120, initial_indent="  - ", subsequent_indent="    ")
        yield ""
    yield "## Every pair\n"
    yield "A dash: this version of transformers does not have the pair.\n"
    for mapping, name in MAPPINGS.items():
        yield f"### `{name}`\n"
        yield f"| type | class | {' | '.join(versions)} |\n|---|---{'|---' * len(versions)}|"
        for row in rows:
            if row["mapping"] == mapping:
                cells = " | ".join(_verdict(row.get(version)) for version in versions)
                yield f"| {row['type']} | `{row['class']}` | {cells} |"
        yield ""


_MEANINGS = {
    "works": "`full` gives the tokens and logits (1e-5 of the largest) of the model's own cache: a prompt, a second "
    "turn, a left-padded batch. `snapkv @ tokens=16` holds no more tokens, and gives the logits (1e-5) of a full cache "
    "in which the dropped ones are masked. `kivi(bits=4)` holds fewer bytes. Afterwards the model generates as before.",
    "refused": "`cache_for` raises a sentence before anything is changed",
    "refused late": "a sentence comes in the first forward",
    "differs": "something else is generated, without a word",
    "crash": "an error that is not kvtailor's own",
    "not built": "there is no tiny model, or it does not generate from text alone; what was in the way",
}


def readme_block(data: dict[str, Any]) -> str:
    """Return what stands between the two marks of README."""
    rows, newest = data["pairs"], max(data["versions"], key=_order)
    counts = _counts(rows, newest)
    built = sum(counts.values()) - counts["not built"]
    verdicts = defaultdict(list)
    for row in rows:
        if newest in row:
            verdicts[row["type"]].append(row[newest][0])
    known = {name: [each for kind in kinds for each in verdicts[kind]] for name, kinds in KNOWN.items()}
    works = [name for name, found in known.items() if found and set(found) == {"works"}]
    others = [name for name, found in known.items() if "refused" in found or "refused late" in found]
    lines = [
        BEGIN,
        f"Of {built} pairs of a model type and a class of transformers {newest}, built small with random weights, "
        f"{counts['works']} work; `docs/models.md` has every one, and why the others do not.",
        f"Among those that work: {', '.join(works)}.",
        f"Refused, each in one sentence before anything is changed: {', '.join(others) or 'none of the well-known'}.",
        END,
    ]
    return "\n".join(part for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> Iterator[str]:
    while len(line) > 120 and not line.startswith("<!--"):
        cut = line.rfind(" ", 0, 120)
        yield line[:cut]
        line = line[cut + 1 :]
    yield line


def _counts(rows: Rows, version: str) -> Counter[str]:
    return Counter(row[version][0] for row in rows if version in row)


def _share(counts: Counter[str]) -> str:
    built = sum(counts.values()) - counts["not built"]
    return f"{counts['works']} of {built}, {counts['works'] / built:.1%}" if built else "none"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _name(row: dict[str, Any]) -> str:
    return row["type"] if row["mapping"] == "causal" else f"{row['type']} (image)"


def _general(row: dict[str, Any], reason: str) -> str:
    """A reason without the names of the family it is about, so that families with one reason stand together."""
    stem = re.escape(row["type"].removesuffix("_text"))
    reason = re.sub(rf"\b({re.escape(row['class'])}|{stem}(_text(_model)?)?)(?![\w-])", "…", reason)
    reason = re.sub(r" \([^()]*\)", "", reason)
    return re.sub(r"\b[A-Z]\w+(Attention|Config)\b", "…", reason)


def _verdict(found: list[str] | None) -> str:
    if found is None:
        return "–"
    return found[0] if len(found) == 1 else f"{found[0]}: {_cell(found[1])}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def stale() -> list[str]:
    """Return the files that are not what the recorded verdicts say."""
    data = recorded()
    texts = {PAGE: page(data), README: _readme(data)}
    return [path.name for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def _readme(data: dict[str, Any]) -> str:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{readme_block(data)}{after}"


def write(data: dict[str, Any]) -> None:
    """Write the data file, the page and README's block."""
    DATA.write_text(written(data), encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
    README.write_text(_readme(data), encoding="utf-8")


def main() -> None:
    """Judge, unless `--page` is given, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="judge nothing, write from docs/models.json")
    parser.add_argument("--changes", action="store_true", help="judge all, write nothing, name what changed")
    parser.add_argument("types", nargs="*", help="types of models to judge; all where none is given")
    given = parser.parse_args()
    if given.changes:
        faults, others = changes(_judged(), recorded())
        for title, lines in (("No longer work, or go wrong", faults), ("Otherwise not as recorded", others)):
            print("\n".join([f"\n## {title}: {len(lines)}", *(f"- {line}" for line in lines)]))
        sys.exit(1 if faults else 0)
    write(recorded() if given.page else judge_all(given.types))


if __name__ == "__main__":
    main()
