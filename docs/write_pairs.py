"""Writes what pairs of a choosing method and a codec take into docs/measured.md, from docs/records/pairs*.jsonl alone.

    python docs/write_pairs.py

What stands between `<!-- pairs: NAME -->` and `<!-- /pairs -->` is made anew: NAME is `how` for what was run, `codecs`
for a row for each codec, `above` for each pair above 2 times the slower of its parts, with the reason. A record is what
`benchmarks/pairs.py --out` writes.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured.md"
RECORDS = {
    "slack as it is": ROOT / "docs" / "records" / "pairs.jsonl",
    "`slack=0`": ROOT / "docs" / "records" / "pairs-slack-0.jsonl",
    "`streaming`, `streamingllm`, `slack=0`": ROOT / "docs" / "records" / "pairs-streaming.jsonl",
}
"""The files of `benchmarks/pairs.py`, by what the columns are called."""
WIDEST = 2.0
WHY: dict[str, str] = {
    "by_age": "what has grown old is encoded anew at each token, so each takes the slow path, by scores",
    "fp8": "no kernel read it where it lies then, so each token took the slow path, where codes move too",
    "score noncausal + channels": "mended since: each decoded token joined its samples, though no eviction follows",
    "indexed": "it is no code, so nothing waits to be a block: each token takes the slow path, by scores",
}
"""Why a pair is above, by its codec, or by "METHOD + CODEC"."""
_BLOCK = re.compile(r"(<!-- pairs: (how|codecs|above) -->\n).*?(<!-- /pairs -->)", re.DOTALL)

Run = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]


def written(page: str, runs: Mapping[str, Run]) -> str:
    """Return a page with all of its blocks made anew.

    Args:
        page: as it is.
        runs: what `read` gives.
    """
    makers = {"how": _how, "codecs": _codecs, "above": _above}
    return _BLOCK.sub(lambda hit: f"{hit[1]}{chr(10).join(makers[hit[2]](runs))}\n{hit[3]}", page)


def read() -> dict[str, Run]:
    """Return how each record was measured, and its rows, by the name of its columns."""
    found: dict[str, Run] = {}
    for name, path in RECORDS.items():
        how, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[name] = how, rows
    return found


def _timed(run: Run) -> list[Mapping[str, Any]]:
    return [row for row in run[1] if "ratio" in row]


def _how(runs: Mapping[str, Run]) -> list[str]:
    lines = []
    for name, run in runs.items():
        how, timed = run[0], _timed(run)
        above = sum(row["ratio"] > WIDEST for row in timed)
        ratio = statistics.median(row["ratio"] for row in timed)
        methods, codecs = (len({row[side] for row in timed}) for side in ("method", "codec"))
        lines += [
            f"- {name[:1].upper()}{name[1:]}: {len(timed)} pairs of {methods} methods and {codecs} codecs,",
            f"  {len(run[1]) - len(timed)} left out by refusals, {above} above {WIDEST:g}, median {ratio:.2f}",
            f"  ({how['cpu']}, torch {how['torch']}, model `{how['model']}` with {how['layers']} layers,",
            f"  {how['threads']} thread, {how['rounds']} rounds of {how['stretch']} tokens, `--every {how['every']}`).",
        ]
    return lines


def _codecs(runs: Mapping[str, Run]) -> list[str]:
    heads = [f"{name}: pairs | median | most" for name in runs]
    lines = [f"| codec | {' | '.join(heads)} |", "|---" * (1 + 3 * len(runs)) + "|"]
    for codec in sorted({row["codec"] for run in runs.values() for row in _timed(run)}):
        cells = []
        for run in runs.values():
            mine = [row for row in _timed(run) if row["codec"] == codec]
            if not mine:
                cells.append("0 | - | -")
                continue
            most = max(mine, key=lambda row: row["ratio"])
            median = statistics.median(row["ratio"] for row in mine)
            cells.append(f"{len(mine)} | {median:.2f} | {most['ratio']:.2f} ({most['method']})")
        lines.append(f"| `{codec}` | {' | '.join(cells)} |")
    return lines


def _above(runs: Mapping[str, Run]) -> list[str]:
    lines = [
        "| pair | | ms a token: method, codec, both (of the rounds) | ratio | why |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        for row in sorted(_timed(run), key=lambda row: -row["ratio"]):
            if row["ratio"] <= WIDEST:
                break
            pair, ms, (low, high) = f"{row['method']} + {row['codec']}", row["ms"], row["spread"]
            why = WHY.get(pair, WHY.get(row["codec"], ""))
            lines.append(
                f"| {pair} | {name} | {ms['method']:.1f}, {ms['codec']:.1f}, {ms['pair']:.1f} ({low:.1f} to {high:.1f})"
                f" | {row['ratio']:.2f} | {why} |"
            )
    return lines


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
