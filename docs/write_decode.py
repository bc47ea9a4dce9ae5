"""Writes what a decoded token and a prompt take into docs/measured.md, from records in docs/records alone.

    python docs/write_decode.py

What stands between `<!-- decode: NAME -->` and `<!-- /decode -->` is made anew: NAME is `presets` for every preset over
the model's own cache, `pairs` for pairs of a choosing method and a codec over it, `prompts` for a prompt of every
preset; `parts`, `parts by codec` and `parts above` are pairs over the slower of their own parts. The first three are
what `benchmarks/plans.py --out` wrote (`decode-*.jsonl`, one file for each kind of processor, and `prompt-*.jsonl`, one
for each length too), the last three what `benchmarks/pairs.py --out` did (`pairs*.jsonl`). A plan above 1.1 that has no
reason here is an error.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtailor.plan import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured.md"
RECORDS = ROOT / "docs" / "records"
PARTS = {
    "slack as it is": RECORDS / "pairs.jsonl",
    "`slack=0`": RECORDS / "pairs-slack-0.jsonl",
    "`streaming`, `streamingllm`, `slack=0`": RECORDS / "pairs-streaming.jsonl",
}
"""The files of `benchmarks/pairs.py`, by what the columns are called."""
OVER_OWN, OVER_PARTS = 1.1, 2.0
"""Above these a plan is listed with a reason: over the model's own cache, and over the slower of its parts."""
DISTURBED, SLOW = 1.25, 0.75
"""Quartiles are shown that lie so far apart; methods are listed of which a pair takes more than so much."""
LONG = 8192
"""From so many tokens on a pair that is above the model's own cache has a reason."""
SIDES = {
    "DynamicCache": "transformers' `DynamicCache`, its default",
    "full after one token": "the rest of the model: `full` after one token",
}
"""What was timed and is no plan."""
# By a plan's name, its method or its codec.
WHY_OVER_OWN: dict[str, str] = {
    "attend reference": "what the others are tested against: it decodes all, and goes through heads in float32",
    "attend rocket + orthogonal": "heads share what is stored, so each token decodes all that is held to choose of it",
    "attend rocket + by_age": "codes of each age are a part, of which the tokens that are read are moved one by one",
    "attend rocket + unrotated": "its keys are mapped back and turned at each token; the quartiles hold 1.10",
    "attend rocket + nuq": "the numbers that it keeps aside are looked up and moved for the tokens that are read",
    "kvtc": "its codes, of other bits for each eight components, become numbers in torch at each token",
    "palu": "its keys are mapped back and turned one by one at each token: 262,144 products for each that is held",
    "palu_int4": "as `palu`",
    "preset rocketkv": "an eighth is held, too few for bounds, so each token decodes all their keys to choose of them",
}
WHY_OVER_PROMPT: dict[str, str] = {
    "rkv": "it compares keys until one is alike, and of keys of random weights it compares all pairs",
    "kvquant4": "its quartiles hold 1.10; levels are fitted to each channel of its keys",
    "asymkv": "it weighs each key by the window's queries, one head at a time, and prices pairs in rounds on the host",
}
WHY_OVER_PARTS: dict[str, str] = {
    "by_age": "what has grown old is encoded anew at each token, so each takes the slow path, by scores",
    "fp8": "no kernel read it where it lies then, so each token took the slow path, where codes move too",
    "score noncausal + channels": "mended since: each decoded token joined its samples, though no eviction follows",
    "indexed": "it is no code, so nothing waits to be a block: each token takes the slow path, by scores",
}
_BLOCK = re.compile(r"(<!-- decode: ([\w ]+) -->\n).*?(<!-- /decode -->)", re.DOTALL)

Run = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
Runs = Mapping[str, Run]


def written(page: str, records: Mapping[str, Runs]) -> str:
    """Return a page with all of its blocks made anew.

    Args:
        page: as it is.
        records: what `read` gives.

    Raises:
        ValueError: a plan is above, and nothing says why.
    """
    makers: dict[str, Callable[[], list[str]]] = {
        "presets": lambda: _presets(records["presets"]),
        "pairs": lambda: _pairs(records["pairs"], records["short"]),
        "prompts": lambda: _prompts(records["prompts"]),
        "parts": lambda: _parts(records["parts"]),
        "parts by codec": lambda: _by("codec", records["parts"]),
        "parts above": lambda: _parts_above(records["parts"]),
    }
    return _BLOCK.sub(lambda hit: f"{hit[1]}{chr(10).join(makers[hit[2]]())}\n{hit[3]}", page)


def read(folder: Path = RECORDS) -> dict[str, dict[str, Run]]:
    """Return how each record was measured, and its rows, by the name of its columns, for what `written` writes."""
    found: dict[str, dict[str, Run]] = {"presets": {}, "pairs": {}, "short": {}, "prompts": {}, "parts": {}}
    for path in sorted(folder.glob("decode-*.jsonl")):
        how, rows = _lines(path)
        kernels = how["cpu"].rpartition("kernels ")[2]
        rows = [{**row, **_halves(row["plan"])} for row in rows]
        if how["plans"] == "presets":
            found["presets"][f"`{kernels}`"] = how, rows
            continue
        for tokens in sorted({row["context"] for row in rows}):
            here = [row for row in rows if row["context"] == tokens]
            found["pairs" if tokens >= LONG else "short"][f"`{kernels}`: {tokens:,}"] = how, here
    for path in folder.glob("prompt-*.jsonl"):
        how, rows = _lines(path)
        kernels, tokens = how["cpu"].rpartition("kernels ")[2], rows[0]["prompt"]
        found["prompts"][f"`{kernels}`: {tokens:,}"] = how, rows
    for name, tokens in (("pairs", "context"), ("prompts", "prompt")):
        found[name] = dict(sorted(found[name].items(), key=lambda each: each[1][1][0][tokens]))
    for name, path in PARTS.items():
        how, rows = _lines(path)
        found["parts"][name] = how, [{"plan": f"{row['method']} + {row['codec']}", **row} for row in rows]
    return found


def _lines(path: Path) -> Run:
    how, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return how, rows


def _halves(plan: str) -> dict[str, str]:
    """Return the method and the codec of a pair; nothing for another plan."""
    method, _, codec = plan.rpartition(" + ")
    return {"method": method, "codec": codec} if method else {}


def _timed(run: Run) -> list[Mapping[str, Any]]:
    """Return the rows of plans that have times."""
    return [row for row in run[1] if "ratio" in row and row.get("plan") not in SIDES]


def _presets(runs: Runs) -> list[str]:
    contexts = sorted({row["context"] for _, rows in runs.values() for row in rows})
    rows_of = {name: {(row["plan"], row["context"]): row for row in run[1]} for name, run in runs.items()}
    timed = {row["plan"] for run in runs.values() for row in _timed(run)}
    heads = [f"{name}: {' | '.join(f'{tokens:,}' for tokens in contexts)}" for name in runs]
    table = [
        f"| preset | bytes over `full` after {contexts[-1]:,} tokens | {' | '.join(heads)} |",
        "|---" * (2 + len(runs) * len(contexts)) + "|",
    ]
    for plan in (*SIDES, *sorted(timed)):
        shares = {_share(rows, plan, contexts[-1]) for rows in rows_of.values()}
        cells = [_cell(rows.get((plan, tokens))) for rows in rows_of.values() for tokens in contexts]
        table.append(f"| {SIDES.get(plan, f'`{plan}`')} | {', '.join(sorted(shares))} | {' | '.join(cells)} |")
    return [*_how(runs), "", *table, "", *_left_out(runs), *_not_run(rows_of, contexts), "", *_above(runs)]


def _share(rows: Mapping[tuple[str, int], Mapping[str, Any]], plan: str, tokens: int) -> str:
    """Return a plan's bytes as a share of those of `full`."""
    mine, whole = (rows.get((name, tokens), {}).get("bytes") for name in (plan, "full"))
    return f"{100 * mine / whole:.0f} %" if mine and whole else "-"


def _not_run(rows_of: Mapping[str, Mapping[tuple[str, int], Any]], contexts: Sequence[int]) -> list[str]:
    """Return which presets a record lacks: they are newer."""
    lines = []
    for name, rows in rows_of.items():
        missing = sorted(plan for plan in registry.presets() if any((plan, each) not in rows for each in contexts))
        if missing:
            lines += _folded(f"Not run yet, {name}: {', '.join(f'`{plan}`' for plan in missing)}.")
    return lines


def _pairs(runs: Runs, short: Runs) -> list[str]:
    """Return the tables of pairs; of those after few tokens no more than how many are above."""
    slow = sorted({row["codec"] for run in runs.values() for row in _timed(run)} & WHY_OVER_OWN.keys())
    others = {name: (how, [row for row in rows if row.get("codec") not in slow]) for name, (how, rows) in runs.items()}
    beside = f"By method, without pairs with {', '.join(f'`{codec}`' for codec in slow)}:" if slow else "By method:"
    tables = [*_by("codec", {**short, **runs}), "", beside, "", *_by("method", others, SLOW)]
    how = _how({**short, **runs})
    return [*how, "", *tables, "", *_left_out(runs), "", *_above(runs), "", *_above_where_short(short)]


def _above_where_short(runs: Runs) -> list[str]:
    """Return how many pairs are above after so few tokens that reading them is next to nothing of a token, by codec."""
    lines = []
    for name, run in runs.items():
        above = [row for row in _timed(run) if row["ratio"] > OVER_OWN]
        most = max(above, key=lambda row: row["ratio"])
        told = _named(Counter(row["codec"] for row in above))
        lines += _folded(
            f"{name} tokens, where reading is next to nothing of a token's time: above {OVER_OWN:g} are {len(above)}, "
            f"by their codecs {told}; the most is {most['ratio']:.2f} (`{most['plan']}`)."
        )
    return lines


def _how(runs: Runs) -> list[str]:
    lines = []
    for name, run in runs.items():
        how, rows = run
        counts = []
        for tokens in sorted({row["context"] for row in rows}):
            here = [row for row in rows if row["context"] == tokens and "ratio" in row]
            plans = [row["ratio"] for row in here if row["plan"] not in SIDES]
            own = statistics.median(row["own_ms"] for row in here)
            counts.append(
                f"after {tokens:,} tokens {len(plans)} {how['plans']}, {sum(each > OVER_OWN for each in plans)} above "
                f"{OVER_OWN:g}, median {statistics.median(plans):.2f} of {own:.0f} ms"
            )
        machine = _machine(name, how, "StaticCache")
        every = f" (`--every {how['every']}`)" if how["every"] > 1 else ""
        lines += _folded(f"{machine}{every}: {'; '.join(counts)}.", bullet=True)
    return lines


def _machine(name: str, how: Mapping[str, Any], own: str) -> str:
    cached = f" and caches in {how['cache_dtype']}" if how["cache_dtype"] else ""
    layers, model = how["layers"], f"a model of the shape `{how['shape']}` with {how['layers']} layers"
    if "model" in how:
        model = f"the first {layers} layers of `{how['model']}`, the first tokens of `{how['text']}`,"
    return (
        f"{name}: {how['cpu'].partition(',')[0]}, torch {how['torch']}, {model} in {how['dtype']}{cached}, threads: "
        f"{how['threads']}, {how['clock']} time, medians of {how['rounds']} in turns with `{own}`"
    )


def _prompts(runs: Runs) -> list[str]:
    rows_of = {name: {row["plan"]: row for row in run[1]} for name, run in runs.items()}
    lines = []
    for name, run in runs.items():
        timed = _timed(run)
        ratios, own = [row["ratio"] for row in timed], statistics.median(row["own_ms"] for row in timed)
        told = f"{len(timed)} presets, {sum(each > OVER_OWN for each in ratios)} above {OVER_OWN:g}, median "
        told += f"{statistics.median(ratios):.2f} of {own / 1e3:.1f} s"
        lines += _folded(f"{_machine(f'{name} tokens', run[0], 'DynamicCache')}: {told}.", bullet=True)
    table = [f"| preset | {' | '.join(runs)} |", "|---" * (1 + len(runs)) + "|"]
    for plan in sorted({row["plan"] for run in runs.values() for row in _timed(run)}):
        table.append(f"| `{plan}` | {' | '.join(_cell(rows.get(plan)) for rows in rows_of.values())} |")
    return [*lines, "", *table, "", *_left_out(runs), "", *_above(runs, "prompt", "DynamicCache", WHY_OVER_PROMPT)]


def _cell(row: Mapping[str, Any] | None) -> str:
    """Return a ratio, with the ratios of its quartiles where they lie far apart."""
    if row is None or "ratio" not in row:
        return "-"
    low, high = row["spread"]
    return f"{row['ratio']:.2f}" + (f" [{low:.2f} to {high:.2f}]" if high > DISTURBED * low else "")


def _left_out(runs: Runs) -> list[str]:
    """Return which plans have no times, by what their refusals say."""
    refused = {row["plan"]: row["left_out"] for _, rows in runs.values() for row in rows if "left_out" in row}
    uncalibrated = {plan: text for plan, text in refused.items() if "no file is named" in text}
    twice = [plan for plan, text in refused.items() if "reads its context twice" in text]
    faults = Counter(_fault(text) for plan, text in refused.items() if plan not in (*uncalibrated, *twice))
    said = []
    if uncalibrated:
        wanting = Counter(text.partition(":")[0] for text in uncalibrated.values())
        whose = wanting if any("+" in plan for plan in uncalibrated) else dict.fromkeys(uncalibrated, 1)
        said.append(
            f"{len(uncalibrated)} want a file made for the model's weights, and none is there ({_named(whose)})"
        )
    if twice:
        said.append(f"{len(twice)} read a context twice ({_named(dict.fromkeys(twice, 1))})")
    if faults:
        said.append(f"{sum(faults.values())} are refused as plans, by what these say ({_named(faults)})")
    return _folded(f"Left out: {'; '.join(said) or 'none'}.")


def _fault(text: str) -> str:
    """Return which method the first fault of a plan is of."""
    return text.partition(": - ")[2].split()[0].rstrip(":")


def _named(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"`{name}`" + (f" {count}" if count > 1 else "") for name, count in ranked)


def _by(side: str, runs: Runs, least: float = 0.0) -> list[str]:
    """Return a table with a row for each codec or method; those that never take more than `least` are one row."""
    heads = [f"{name}: pairs | median | most" for name in runs]
    lines = [f"| {side} | {' | '.join(heads)} |", "|---" * (1 + 3 * len(runs)) + "|"]
    slowest: dict[str, float] = {}
    for run in runs.values():
        for row in _timed(run):
            slowest[row[side]] = max(row["ratio"], slowest.get(row[side], 0.0))
    shown = sorted(name for name, ratio in slowest.items() if ratio > least)
    rest = slowest.keys() - set(shown)
    groups = [(f"`{name}`", {name}) for name in shown] + ([(f"{len(rest)} others", set(rest))] if rest else [])
    other = "method" if side == "codec" else "codec"
    for name, members in groups:
        cells = []
        for run in runs.values():
            mine = [row for row in _timed(run) if row[side] in members]
            if not mine:
                cells.append("0 | - | -")
                continue
            most, median = max(mine, key=lambda row: row["ratio"]), statistics.median(row["ratio"] for row in mine)
            whose = most[other] if len(members) == 1 else f"{most['method']} + {most['codec']}"
            cells.append(f"{len(mine)} | {median:.2f} | {most['ratio']:.2f} ({whose})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _above(
    runs: Runs, tokens: str = "context", own: str = "StaticCache", reasons: Mapping[str, str] = WHY_OVER_OWN
) -> list[str]:
    """Return a table of the plans that take more than the model's own cache, with the reason of each.

    Pairs of one method or codec that have its reason are one row.

    Args:
        tokens: the field of a row that says after, or for, how many tokens it was.
        own: the model's own cache.
    """
    lines = [
        f"| above {OVER_OWN:g} | | tokens | ms, of `{own}` | ratio of the medians, of the quartiles | why |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        groups: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
        for row in sorted(_timed(run), key=lambda row: (-row[tokens], -row["ratio"])):
            if row["ratio"] > OVER_OWN:
                whose, reason = why(row, reasons)
                groups.setdefault((row[tokens], whose, reason), []).append(row)
        for (count, whose, reason), rows in groups.items():
            most, least = rows[0], rows[-1]
            low, high = most["spread"]
            plan, ratio = most["plan"], f"{most['ratio']:.2f} [{low:.2f} to {high:.2f}]"
            if len(rows) > 1:
                other = "method" if whose == most["codec"] else "codec"
                several = f"{len(rows)} {other}s"
                plan = f"{several} + {whose}" if other == "method" else f"{whose} + {several}"
                plan += f", the most {most[other]}"
                ratio += f"; the least {least['ratio']:.2f} ({least[other]})"
            lines.append(
                f"| {plan} | {name} | {count:,} | {most['ms']:,.1f}, {most['own_ms']:,.1f} | {ratio} | {reason} |"
            )
    return lines if len(lines) > 2 else [f"None is above {OVER_OWN:g}."]


def why(row: Mapping[str, Any], reasons: Mapping[str, str]) -> tuple[str, str]:
    """Return by which of its names, its method or its codec a plan is above, and why.

    Raises:
        ValueError: nothing says it.
    """
    names = [row[name] for name in ("plan", "method", "codec") if name in row]
    found = next((name for name in names if name in reasons), None)
    if found is None:
        raise ValueError(
            f"{row['plan']} is above with {row['ratio']:g}, and docs/write_decode.py has no reason for it: give one "
            f"under one of {names}"
        )
    return found, reasons[found]


def _parts(runs: Runs) -> list[str]:
    lines = []
    for name, run in runs.items():
        how, timed = run[0], _timed(run)
        above = sum(row["ratio"] > OVER_PARTS for row in timed)
        ratio = statistics.median(row["ratio"] for row in timed)
        methods, codecs = (len({row[side] for row in timed}) for side in ("method", "codec"))
        lines += [
            f"- {name[:1].upper()}{name[1:]}: {len(timed)} pairs of {methods} methods and {codecs} codecs,",
            f"  {len(run[1]) - len(timed)} left out by refusals, {above} above {OVER_PARTS:g}, median {ratio:.2f}",
            f"  ({how['cpu']}, torch {how['torch']}, model `{how['model']}` with {how['layers']} layers,",
            f"  {how['threads']} thread, {how['rounds']} rounds of {how['stretch']} tokens, `--every {how['every']}`).",
        ]
    return lines


def _parts_above(runs: Runs) -> list[str]:
    lines = [
        "| pair | | ms a token: method, codec, both (of the rounds) | ratio | why |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        for row in sorted(_timed(run), key=lambda row: -row["ratio"]):
            if row["ratio"] <= OVER_PARTS:
                break
            ms, (low, high) = row["ms"], row["spread"]
            lines.append(
                f"| {row['plan']} | {name} | {ms['method']:.1f}, {ms['codec']:.1f}, {ms['pair']:.1f} "
                f"({low:.1f} to {high:.1f}) | {row['ratio']:.2f} | {why(row, WHY_OVER_PARTS)[1]} |"
            )
    return lines


def _folded(text: str, bullet: bool = False) -> list[str]:
    first, others = ("- ", "  ") if bullet else ("", "")
    return textwrap.wrap(text, 118, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
