"""A decoded token or a prompt of every preset, or of every pair of a choosing method and a codec, over the model's own.

    python -m benchmarks.plans --out FILE [--plans presets|pairs|"LINE; LINE"] [--every 8]
                               [--contexts 384,8192,32768] [--prompts 2048,8192] [--shape llama|smollm2|qwen2]
                               [--dtype float32] [--cache-dtype bfloat16] [--layers 4] [--threads 1]
                               [--clock processor] [--rounds 9] [--seconds 600] [--turn 32]
                               [--model FOLDER --text FILE]

Is a plan slower than no plan? transformers' `StaticCache` with sdpa, which writes in place and folds grouped heads, is
the fastest cache of the model's own; `DynamicCache`, its default, copies everything at each token, and is a row of the
table. A plan and `StaticCache` take turns in one process, a token each. The ratio is that of the medians; beside it
stand the ratios of the quartiles that lie farthest apart. States of the context are random and are put into the caches;
a plan chooses or encodes when 64 more tokens come through the model. One that evicts keeps an eighth.

With `--turn`, what is timed is a turn of a chat: so many tokens at once behind the context.

With `--prompts`, what is timed is a prompt of so many tokens into an empty cache, choosing and encoding included, over
one into `DynamicCache`, which joins nothing as long as there is one piece. Give `--contexts ''` to time prompts alone.
`--model FOLDER --text FILE` takes the first `--layers` layers of a trained model, and the beginning of a text: what
some methods compute depends on keys (`rkv` compares them until two are alike, which random ones never are).

Models are untrained, with the widths of Llama 3.1 8B's attention (32 query heads on 8 of 128) in a model that is small
beside it, of SmolLM2-135M (9 on 3 of 64) and of Qwen2.5-0.5B (14 on 2 of 64); a vocabulary of 512 leaves the output
head out. Where the model computes in float32, `--cache-dtype` is that of our caches, and transformers' hold float32.

Rows go into FILE as they come, JSON lines; the first says how they were measured, and at which commit. A run that was
cut off, by `--seconds` too, goes on where FILE ends. What a plan refuses stands there with its reason.
`docs/write_decode.py` makes the tables of docs/measured.md from such files in docs/records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.micro.cases import model_states
from benchmarks.pairs import add_row, choosers, codecs, plan_of, rows_there
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.bench.measure.machine import describe
from kvtailor.bench.measure.turns import rounds_in_turns
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.calibrated import UNTRAINED
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.hf.model.loading import new_model
from kvtailor.hf.run.stock import dynamic_cache, fill, static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import huge_pages
from kvtailor.ops.cpu.library import library
from kvtailor.plan import Plan, registry
from kvtailor.presets import FULL

QUESTION, WARMUP, SHARE, WIDEST, VOCABULARY = 64, 2, 0.125, 1.1, 512
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
# A cache of fewer bytes may lie in the processor's own, where a plain read of memory is no floor.
LEAST_READ = 64 << 20
_SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
_QWEN2 = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": RANDOM_SHAPES["random-llama-gqa"],
    "smollm2": {**_SMOLLM2, "head_dim": 64, "max_position_embeddings": 131_072},
    "qwen2": {**_QWEN2, "head_dim": 64, "max_position_embeddings": 131_072},
}
DYNAMIC, REST = "DynamicCache", "full after one token"
"""Sides that are no plans; the last is what no cache can save."""


# Yields plans for a context: names, and what makes each or raises a refusal.
Plans = Callable[[int], Iterator[tuple[str, Callable[[], Plan]]]]


def presets(context: int) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield each preset by its name; one that chooses by scores with an eighth of the context as its budget."""
    for name, preset in registry.presets().items():
        chooses = preset.plan.get("score")
        yield name, partial(Plan.parse, f"{name} @ tokens={int(SHARE * context)}" if chooses else name)


def pairs(context: int, every: int) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield each choosing method with each `every`-th codec, in the arguments that `benchmarks.pairs` gives them."""
    for row, (method, made) in enumerate(choosers(None).items()):
        made = made.replace("tokens=128", f"tokens={int(SHARE * context)}") if isinstance(made, str) else dict(made)
        if isinstance(made, dict) and "tokens" in made:
            made["tokens"] = int(SHARE * context)
        for column, (codec, encode) in enumerate(codecs().items()):
            if (row + column) % every == 0:
                yield f"{method} + {codec}", partial(plan_of, made, encode)


def lines(text: str) -> Plans:
    """Return what yields the plans of a text, with ';' between them; `{budget}` is an eighth of the context."""

    def each(context: int) -> Iterator[tuple[str, Callable[[], Plan]]]:
        for line in text.split(";"):
            yield line.strip(), partial(Plan.parse, line.strip().replace("{budget}", str(int(SHARE * context))))

    return each


def model_of(shape: str, layers: int, dtype: torch.dtype) -> Any:
    """Return an untrained model, the same at every call."""
    torch.manual_seed(0)
    made = {**SHAPES[shape], "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    model = new_model("llama", dtype=dtype, **made).eval()
    # Methods that read a file made for a model get random numbers of its shapes in place of one.
    setattr(model, UNTRAINED, True)
    return model


def trained_model(folder: Path, layers: int, dtype: torch.dtype) -> Any:
    """Return the first layers of a model, without a report of those that are left out."""
    transformers.logging.set_verbosity_error()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, num_hidden_layers=layers).eval()


def beginning(folder: Path, text: Path, tokens: int) -> torch.Tensor:
    """Return the first tokens (1, n) of a text.

    Raises:
        ValueError: it has fewer.
    """
    found = AutoTokenizer.from_pretrained(folder)(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    if found.shape[1] < tokens:
        raise ValueError(f"asked for a prompt of {tokens} tokens, but {text} has {found.shape[1]}: give a longer text")
    return found[:, :tokens]


class Context:
    """A model with its own cache, and one with the same weights for caches of ours, after one context."""

    def __init__(self, asked: argparse.Namespace, tokens: int):
        self.asked, self.tokens = asked, tokens
        dtype = getattr(torch, asked.dtype)
        # Two, since ours has its attention switched as long as it has a cache of ours.
        self.model, self.stock = (model_of(asked.shape, asked.layers, dtype) for _ in range(2))
        self.states = model_states(self.model, tokens)
        self.stored = getattr(torch, asked.cache_dtype or asked.dtype)
        generator = torch.Generator().manual_seed(2)
        self.question = torch.randint(0, VOCABULARY, (1, QUESTION), generator=generator)
        self.token = torch.full((1, asked.turn), 7)

    def cache_of(self, plan: Plan) -> Any:
        """Return a cache that holds the context as a plan has it."""
        cache = cache_for(self.model, plan, cache_dtype=self.stored)
        fill(cache, self.states)
        self.model(self.question, **hand_cache(cache), logits_to_keep=1)
        return cache

    def own(self) -> Any:
        """Return the model's own cache, which reads all of its slots at each token: it has no more than are needed."""
        cache = static_cache(self.stock, self.tokens + (self.asked.rounds + WARMUP) * self.asked.turn)
        fill(cache, self.states)
        return cache

    def timed(self, cache: Any, on: Any = None) -> dict[str, Any]:
        """Return what a token takes on a cache and on the model's own, in turns; `on` is the model, where not ours."""
        model, own = on or self.model, self.own()
        return in_turns(
            self.asked,
            lambda: model(self.token, **hand_cache(cache), use_cache=True, logits_to_keep=1),
            lambda: self.stock(self.token, **hand_cache(own), use_cache=True, logits_to_keep=1),
            warmup=WARMUP,
        ) | {"bytes": bytes_of(cache)}


class Prompt:
    """A model with its own cache, and one with the same weights for caches of ours, before one prompt."""

    def __init__(self, asked: argparse.Namespace, tokens: int):
        self.asked = asked
        dtype = getattr(torch, asked.dtype)
        self.stored = getattr(torch, asked.cache_dtype or asked.dtype)
        if asked.model is None:
            self.model, self.stock = (model_of(asked.shape, asked.layers, dtype) for _ in range(2))
            self.prompt = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(2))
        else:
            self.model, self.stock = (trained_model(asked.model, asked.layers, dtype) for _ in range(2))
            self.prompt = beginning(asked.model, asked.text, tokens)

    def read(self, model: Any, cache: Any) -> Any:
        """Read the prompt into an empty cache, and return the cache."""
        model(self.prompt, **hand_cache(cache), use_cache=True, logits_to_keep=1)
        return cache

    def timed(self, plan: Plan) -> dict[str, Any]:
        """Return what the prompt takes under a plan and into the model's own cache, in turns, caches new each time."""

        def ours() -> Any:
            return self.read(self.model, cache_for(self.model, plan, cache_dtype=self.stored))

        # Both sides are warmed up; what a first prompt makes once, such as levels, is made here.
        held = bytes_of(ours())
        self.read(self.stock, dynamic_cache(self.stock))
        return in_turns(self.asked, ours, lambda: self.read(self.stock, dynamic_cache(self.stock)), warmup=0) | {
            "bytes": held
        }


def in_turns(asked: argparse.Namespace, ours: Callable[[], Any], own: Callable[[], Any], warmup: int) -> dict[str, Any]:
    """Time two sides in turns; return medians in ms, their ratio, and that of the quartiles farthest apart."""
    sides, clock = {"ms": ours, "own_ms": own}, CLOCKS[asked.clock]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_, name in rounds_in_turns(list(sides), asked.rounds, warmup=warmup):
        begin = clock()
        sides[name]()
        if round_ >= 0:
            times[name].append(1e3 * (clock() - begin))
    (low, median, high), (least, base, most) = (statistics.quantiles(each, n=4) for each in times.values())
    return {
        "ms": round(median, 3),
        "own_ms": round(base, 3),
        "ratio": round(median / base, 3),
        "spread": [round(low / most, 3), round(high / least, 3)],
    }


def rows(asked: argparse.Namespace, done: set[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan that is not done: its times and ratio, or why it is left out."""
    named: dict[str, Plans] = {"presets": presets, "pairs": partial(pairs, every=asked.every)}
    plans = named.get(asked.plans) or lines(asked.plans)
    end = time.monotonic() + asked.seconds
    for kind, tokens in (
        *(("context", each) for each in asked.contexts),
        *(("prompt", each) for each in asked.prompts),
    ):
        made: Any = None
        sides = ((DYNAMIC, None), (REST, None)) if kind == "context" else ()
        for name, plan in (*sides, *plans(tokens)):
            if (name, kind, tokens) in done:
                continue
            if time.monotonic() > end:
                return
            made = made or (Context if kind == "context" else Prompt)(asked, tokens)
            try:
                timed = made.timed(plan()) if kind == "prompt" else _token(made, name, plan)
            except KvtailorError as refusal:
                timed = {"left_out": " ".join(str(refusal).split())}
            yield {"plan": name, kind: tokens} | timed


def _token(made: Context, name: str, plan: Callable[[], Plan] | None) -> dict[str, Any]:
    """Return what a token takes after a context, of a plan or of one of the sides that are none."""
    if name == DYNAMIC:
        cache = dynamic_cache(made.stock)
        fill(cache, made.states)
        return made.timed(cache, made.stock)
    if plan is None:
        cache = cache_for(made.model, FULL)
        made.model(made.token, **hand_cache(cache))
        return made.timed(cache)
    return made.timed(made.cache_of(plan()))


def place(row: dict[str, Any]) -> tuple[str, str, int]:
    """Return what a row is of: the plan, a token after a context or a prompt, and of how many tokens."""
    kind = "prompt" if "prompt" in row else "context"
    return row["plan"], kind, row[kind]


def setting(asked: argparse.Namespace) -> dict[str, Any]:
    """Return how plans are measured, and on what."""
    names = ("plans", "every", "shape", "dtype", "cache_dtype", "layers", "threads", "clock", "rounds")
    kernels, machine = library(), describe(bandwidth=False)
    found = {name: getattr(asked, name) for name in names}
    if asked.turn > 1:
        found["turn"] = asked.turn
    if asked.model is not None:
        found |= {"model": asked.model.name, "text": asked.text.name}
    return found | {
        "cpu": f"{machine['processor']}, kernels {kernels.variant if kernels else 'none'}",
        "torch": torch.__version__,
        "commit": machine["commit"],
    }


def read_bandwidth(clock: Callable[[], float]) -> float:
    """Return bytes per second of the fastest of five plain reads of 256 MiB, by the clock of the tokens."""
    probe = huge_pages.empty((64 << 20,), torch.float32).fill_(1.0)
    seconds = []
    for _ in range(5):
        begin = clock()
        probe.sum().item()
        seconds.append(clock() - begin)
    return probe.nbytes / min(seconds)


def told(row: dict[str, Any], bandwidth: float, rest: float | None) -> str:
    """Return a row as a line: the cache's part is what is more than the rest of the model, over a read of its bytes."""
    plan, kind, tokens = place(row)
    name = f"{kind} {tokens:>6} {plan:<44}"
    if "left_out" in row:
        return f"{name} left out: {row['left_out'][:120]}"
    low, high = row["spread"]
    line = f"{name} {row['ms']:8.2f} of {row['own_ms']:8.2f} ms  {row['ratio']:5.2f} [{low:.2f}, {high:.2f}]"
    if rest is not None and row["bytes"] and row["bytes"] > LEAST_READ:
        line += f"  part over read {(row['ms'] - rest) / 1e3 / (row['bytes'] / bandwidth):5.2f}"
    return line + ("  !" if row["ratio"] > WIDEST else "")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> int:
    """Time all plans and print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plans", default="presets", help="presets, pairs, or plans with ';' between them")
    parser.add_argument("--contexts", type=_numbers, default=[384, 8192], help="tokens held when a token is timed")
    parser.add_argument("--turn", type=int, default=1, help="tokens of a turn that is timed behind a context")
    parser.add_argument("--prompts", type=_numbers, default=[], help="tokens of prompts that are timed")
    parser.add_argument("--every", type=int, default=1, help="of each method of a pair only every so many-th codec")
    parser.add_argument("--shape", default="llama", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", help="of the model, and of transformers' caches")
    parser.add_argument("--cache-dtype", help="of our caches, where the model computes in float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="processor", choices=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=600, help="after which no plan is begun")
    parser.add_argument("--out", type=Path, help="write the rows to this file as well, as JSON lines, as they come")
    parser.add_argument("--model", type=Path, help="folder of a trained model in place of --shape, for --prompts")
    parser.add_argument("--text", type=Path, help="a text file whose beginning is the prompt of --model")
    asked = parser.parse_args()
    if (asked.model is None) != (asked.text is None) or (asked.model is not None and asked.contexts):
        parser.error("--model and --text go together, with --prompts and --contexts ''")
    if asked.turn < 1:
        parser.error(f"asked for --turn {asked.turn}: give 1 for a decoded token, or more")
    if asked.every < 1:
        parser.error(f"asked for --every {asked.every}: give 1 for every codec, or more")
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    how = setting(asked)
    found = rows_there(parser, asked.out, how)
    bandwidth = read_bandwidth(CLOCKS[asked.clock])
    print(f"{how['cpu']}; a plain read gives {bandwidth / 1e9:.1f} GB/s", flush=True)
    rest = {row["context"]: row["ms"] for row in found if row["plan"] == REST}
    for row in rows(asked, {place(row) for row in found}):
        found.append(row)
        if row["plan"] == REST:
            rest[row["context"]] = row["ms"]
        print(told(row, bandwidth, rest.get(row.get("context"))), flush=True)
        add_row(asked.out, row)
    timed = [row for row in found if "ratio" in row]
    above = [row for row in timed if row["ratio"] > WIDEST and row["plan"] != DYNAMIC]
    print(f"{len(timed)} timed, {len(found) - len(timed)} left out, {len(above)} above {WIDEST:g}")
    print(json.dumps(how | {"read_bandwidth": bandwidth, "above": len(above), "rows": found}))
    # A table that timed nothing shows nothing.
    return 0 if timed else 1


if __name__ == "__main__":
    sys.exit(main())
