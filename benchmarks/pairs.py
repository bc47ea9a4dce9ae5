"""What does a decoded token cost where a method that chooses tokens meets a codec?

    python -m benchmarks.pairs [--model demo] [--layers 2] [--only streamingllm] [--codec kivi] [--slack 0] [--every 6]
        [--out FILE]

Each method was timed alone when it was written, and most codecs too. Together they share one machinery: what an
eviction keeps is encoded, and moves as codes from then on. A pair can be slow though both of its parts are fast: where
a plan evicts at every token, every token of it was once encoded alone, and the layer lay in hundreds of pieces. Nobody
had timed that pair. So here is every pair, found from the registry, so that a method that is added is timed too.

A choosing method is a scorer, an allocator, a selector, a merger or an attention, with whatever it must have beside it,
and each preset that evicts. Each is combined with each codec. The scorer beside an allocator, a selector and a merger
is `h2o`, since that one evicts while the cache decodes. A pair that no plan allows, or that the model cannot have, is
named with the reason.

Times are of the processor, of all its threads, so that other work on the machine disturbs them little.

Three caches take turns: the method alone, the codec alone, and both. A turn is a stretch of tokens, as long as the
longest distance between two evictions or two blocks of a codec, divided by their number: an eviction each 32 tokens
costs what it costs, spread over these. Which of the three begins is another one in each round, and the first round is
not counted. The figure is the median of the rounds, with the smallest and the largest; the ratio is that of the pair's
median to the larger median of its two parts. Above 2 something is wrong with the pair.

With `--slack 0` each method evicts at every token. All pairs take hours: `--every 6` times every sixth codec of each
method, beginning with another one for each, so that every method and every codec is there several times. A run that was
cut off goes on where `--out` ends; the first line of that file says how the others were measured, and on what.

The last line is one JSON object: rows of method, codec, milliseconds a token and ratio, and what was left out.
`docs/write_decode.py` makes the tables of docs/measured.md from such files in docs/records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kvtailor
from kvtailor.bench.measure.machine import describe
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan, registry
from kvtailor.plan.arguments import samples_of

PROMPT, BUDGET, WIDEST = 256, 128, 2.0
STRETCH, ROUNDS = 66, 3
BESIDE = "h2o"
"""The scorer beside a method that is none."""


def choosers(slack: int | None) -> dict[str, str | dict[str, Any]]:
    """Return what makes the plan of each choosing method, by the name that the table shows: a line, or parts.

    `slack` is that of all of them; None: each has its own.
    """
    often: dict[str, Any] = {} if slack is None else {"slack": slack}
    scorer = registry.load("score", BESIDE)()
    found: dict[str, str | dict[str, Any]] = {}
    for stage in ("score", "allocate", "select", "merge", "attend"):
        for name in registry.methods(stage):
            if name == registry.null(stage):
                continue
            parts = {stage: _sample(stage, name), "tokens": BUDGET, **often}
            if stage in ("allocate", "select", "merge"):
                parts["score"] = scorer
            elif stage == "attend":
                parts = {stage: parts[stage]}
            found[f"{stage} {name}"] = parts
    for name, preset in registry.presets().items():
        if preset.plan.get("score") and Plan.parse(f"{name} @ tokens={BUDGET}").encode.exact:
            found[f"preset {name}"] = f"{name} @ tokens={BUDGET}" + "".join(f", slack={n}" for n in often.values())
    return found


def plan_of(made: str | dict[str, Any], encode: Any = None) -> Plan:
    """Return the plan of a choosing method, with a codec or without; a line is written as a user would write it."""
    if isinstance(made, dict):
        return Plan(**made) if encode is None else Plan(**made | {"encode": encode})
    return Plan.parse(made if encode is None else made.replace(" @", f" + {Plan(encode=encode)} @"))


def codecs() -> dict[str, Any]:
    """Return each codec but the one that leaves tokens as they are."""
    return {name: _sample("encode", name) for name in registry.methods("encode") if name != registry.null("encode")}


def _sample(stage: str, name: str) -> Any:
    """A method with its defaults; where it has none, the first sample that its class gives."""
    kind = registry.load(stage, name)
    try:
        return kind()
    except (TypeError, ValueError, KvtailorError):
        return samples_of(kind)[0]


class Decoded:
    """A cache that has read the prompt, and decodes."""

    def __init__(self, model: Any, plan: Plan, prompt: torch.Tensor):
        self.model, self.token = model, prompt[:, :1]
        self.cache = kvtailor.prefill(model, prompt, plan=plan)
        self.take(2)

    def take(self, tokens: int) -> float:
        """Decode so many tokens; return milliseconds for each."""
        begin = time.process_time()
        for _ in range(tokens):
            self.model(self.token, **hand_cache(self.cache), logits_to_keep=1)
        return 1000 * (time.process_time() - begin) / tokens


def measured(sides: list[Decoded], rounds: int, stretch: int) -> list[list[float]]:
    """Return milliseconds a token of each side in each round; they take turns."""
    times: list[list[float]] = [[] for _ in sides]
    for index in range(-1, rounds):
        for turn in range(len(sides)):
            side = (turn + index) % len(sides)
            taken = sides[side].take(stretch if index >= 0 else stretch // 2)
            if index >= 0:
                times[side].append(taken)
    return times


def pairs(model: Any, asked: argparse.Namespace, done: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair that is not done: its times and ratio, or why it is left out."""
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(4, model.config.vocab_size, (1, PROMPT), generator=generator)
    for row_of, (method, made) in enumerate(choosers(asked.slack).items()):
        for column, (codec, encode) in enumerate(codecs().items()):
            if (
                (row_of + column) % asked.every
                or (asked.only and asked.only not in method)
                or (asked.codec and asked.codec != codec)
            ):
                continue
            if (method, codec) in done:
                continue
            row: dict[str, Any] = {"method": method, "codec": codec}
            try:
                plans = [plan_of(made), Plan(encode=encode), plan_of(made, encode)]
                sides = [Decoded(model, plan, prompt) for plan in plans]
                times = measured(sides, asked.rounds, asked.stretch)
            except KvtailorError as refusal:
                yield row | {"left_out": " ".join(str(refusal).split())}
                continue
            alone, coded, both = map(statistics.median, times)
            row |= {"ms": {"method": round(alone, 3), "codec": round(coded, 3), "pair": round(both, 3)}}
            spread = [round(min(times[2]), 3), round(max(times[2]), 3)]
            yield row | {"spread": spread, "ratio": round(both / max(alone, coded), 3)}


def setting(asked: argparse.Namespace) -> dict[str, Any]:
    """Return how pairs are measured, and on what."""
    names = ("model", "layers", "threads", "slack", "rounds", "stretch", "every")
    return {name: getattr(asked, name) for name in names} | {
        "cpu": f"{describe(bandwidth=False)['processor']}, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
    }


def rows_there(parser: argparse.ArgumentParser, out: Path | None, how: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that a file has from an earlier run that measured so; a file that is not there is begun.

    Args:
        parser: ends the run where the file was measured otherwise.
        out: the file; None: there is none.
        how: how rows are measured, and on what.
    """
    if out is None:
        return []
    if not out.exists():
        out.write_text(json.dumps(how) + "\n", encoding="utf-8")
    before, *rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    if before != how:
        parser.error(f"{out} was measured with {before}, and this is {how}; name another file")
    return rows


def add_row(out: Path | None, row: dict[str, Any]) -> None:
    """Write a row behind the others of a file; None: there is none."""
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main() -> int:
    """Time all pairs and print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", help="methods whose name has this in it")
    parser.add_argument("--codec", help="this codec alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--stretch", type=int, default=STRETCH, help="tokens of a turn")
    parser.add_argument("--slack", type=int, help="of every method that evicts, in the place of its own")
    parser.add_argument("--layers", type=int, help="only so many layers of the model, which takes less time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="of each method only every so many-th codec")
    parser.add_argument("--out", type=Path, help="write the rows to this file as well, as JSON lines, as they come")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    model, _ = kvtailor.load_model(asked.model, dtype=torch.float32)
    if asked.layers is not None:
        model.model.layers = model.model.layers[: asked.layers]
        model.config.num_hidden_layers = asked.layers
    how = setting(asked)
    rows = rows_there(parser, asked.out, how)
    done = {(row["method"], row["codec"]) for row in rows}
    for row in pairs(model, asked, done):
        rows.append(row)
        if "left_out" in row:
            print(f"{row['method']:<26} {row['codec']:<11} left out: {row['left_out'][:160]}", flush=True)
        else:
            ms, (low, high) = row["ms"], row["spread"]
            print(
                f"{row['method']:<26} {row['codec']:<11} {ms['method']:6.1f} {ms['codec']:6.1f} {ms['pair']:6.1f} ms "
                f"({low:.1f} to {high:.1f})  {row['ratio']:5.2f}{'  !' if row['ratio'] > WIDEST else ''}",
                flush=True,
            )
        add_row(asked.out, row)
    timed = [row for row in rows if "ratio" in row]
    above = [row for row in timed if row["ratio"] > WIDEST]
    print(f"{len(timed)} pairs timed, {len(rows) - len(timed)} left out, {len(above)} above {WIDEST:g}")
    print(json.dumps(how | {"above": len(above), "rows": rows}))
    # A table that timed nothing shows nothing.
    return 1 if above or not timed else 0


if __name__ == "__main__":
    sys.exit(main())
