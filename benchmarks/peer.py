"""kvtailor beside llama.cpp: a decoded token and its bytes, and the loss of the embedded model on the same tokens.

    python -m benchmarks.peer times OUT [--dtypes bfloat16,float32] [--contexts 8192,32768] [--threads 1,2]
                                          [--rounds 10]
    python -m benchmarks.peer times OUT --gguf FILE [--contexts 2048,8192,32768] [--threads 1,2] [--rounds 10]
    python -m benchmarks.peer losses OUT --texts FOLDER [--each 4] [--context 1024] [--continuation 256]
    python -m benchmarks.peer types OUT --gguf FILE --model FOLDER --data DATA [--windows 12]
                                          [--types q8_0,q5_1,q4_0,q8_0/q4_0]
    python -m benchmarks.peer table OUT

`times` measures random models in turns (`benchmarks.peers.decode_times`), or the model of a GGUF file, whose weights
torch computes in float32 and whose caches of kvtailor hold bfloat16; `losses` the model `demo` on the texts *.txt of a
folder (`benchmarks.peers.losses`); both write JSON into the folder OUT. `losses` writes a file for each text and goes
on where it stopped. `types` scores a GGUF file under llama.cpp's cache types, KEYS/VALUES where these
differ, on the windows of novels that docs/records are of, with the ids of the folder's tokenizer.
`table` prints the tables of docs/peers/llama-cpp.md from these files.

It needs `pip install gguf==0.19.0 llama-cpp-python==0.3.36`, which are no dependencies of kvtailor.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.micro.tables import compared
from benchmarks.peers.decode_times import BASE, WARMUP, prepare, prepare_file, timed
from benchmarks.peers.llama_runner import LlamaCache, LlamaModel
from benchmarks.peers.losses import PLANS, Losses, agreement, compared_losses, loss_behind, losses, windows_of
from kvtailor.bench.data.corpora import corpus
from kvtailor.bench.measure.machine import describe, read_bandwidth
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import hash_of
from kvtailor.bench.tasks.perplexity import Perplexity, Window

AGREEING = 512


def surroundings() -> dict[str, Any]:
    """Return the machine, and the versions of what is compared."""
    import llama_cpp

    return {
        **describe(bandwidth=False),
        "llama_cpp_python": llama_cpp.__version__,
        "llama_cpp": llama_cpp.llama_version().decode(),
        "llama_cpp_system": llama_cpp.llama_print_system_info().decode(),
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "malloc": os.environ.get("GLIBC_TUNABLES"),
    }


def times(out: Path, args: argparse.Namespace) -> None:
    """Measure all dtypes, contexts and numbers of threads, and print the tables."""
    threads = [int(each) for each in args.threads.split(",")]
    for name in [args.gguf.stem] if args.gguf else args.dtypes.split(","):
        for context in (int(each) for each in args.contexts.split(",")):
            begin = time.time()
            torch.set_num_threads(max(threads))
            samples = len(threads) * (args.rounds + WARMUP)
            if args.gguf:
                ready = prepare_file(args.gguf, context, samples=samples, cache_dtype=torch.bfloat16)
            else:
                dtype = getattr(torch, name)
                weights = [dtype, torch.float16] if dtype == torch.bfloat16 else [dtype]
                ready = prepare(dtype, context, samples=samples, folder=out, weights=weights)
            print(f"\n{name}, {context} tokens: prepared in {time.time() - begin:.0f} s", flush=True)
            for count in threads:
                torch.set_num_threads(count)
                bandwidth, load = read_bandwidth(), os.getloadavg()[0]
                found = timed(ready, args.rounds, count)
                title = f"{name}, {context} tokens, {count} threads, plain read {bandwidth / 1e9:.1f} GB/s"
                lines, rows = compared(title, found, BASE, bandwidth=bandwidth)
                print("\n".join(lines), flush=True)
                for row in rows:
                    row["error"] = ready.error.get(row["name"])
                    row["allocated_bytes"] = ready.allocated.get(row["name"])
                record = {
                    "dtype": name,
                    "context": context,
                    "threads": count,
                    "rows": rows,
                    "read_bandwidth": bandwidth,
                    "load": [load, os.getloadavg()[0]],
                    "rounds": args.rounds,
                    "machine": surroundings(),
                }
                (out / f"times-{name}-{context}-{count}.json").write_text(json.dumps(record, indent=1))
            ready.close()
            del ready


def of_texts(out: Path, args: argparse.Namespace) -> None:
    """Measure the texts that have no file yet."""
    subject = Subject.load("demo", dtype="float32")
    for document, text in enumerate(sorted(Path(args.texts).glob("*.txt"))):
        file = out / f"losses-{text.stem}.json"
        if file.is_file():
            continue
        windows = windows_of(subject, [text], context=args.context, continuation=args.continuation, each=args.each)
        found = list(losses(subject, windows, out, plans=PLANS))
        model = LlamaModel(out / "demo.gguf")
        record = {
            "text": text.name,
            "document": document,
            "context": args.context,
            "continuation": args.continuation,
            "sides": [vars(each) for each in found],
            "machine": surroundings(),
            "agreement": agreement(subject, model, windows[0].context[:AGREEING]),
        }
        file.write_text(json.dumps(record, indent=1))
        print(f"{text.name}: " + "; ".join(f"{each.name} {fmean(each.nll):.4f}" for each in found), flush=True)


def of_types(out: Path, args: argparse.Namespace) -> None:
    """Score a GGUF file under several cache types, and print what each loses over `f16`."""
    novels = corpus("pg19", data=args.data)
    task = Perplexity(text=novels.text, source="pg19", starts=novels.starts, windows=args.windows)
    windows = replace(task, context=args.context, continuation=args.continuation).cut(Subject.load(args.model))
    model = LlamaModel(args.gguf)
    cells, threads = args.context + args.continuation, torch.get_num_threads()
    nll: dict[str, list[float]] = {}
    size: dict[str, int] = {}
    documents = [float(window.document) for window in windows if window.document is not None]
    for name in ("f16", *args.types.split(",")):
        keys, _, values = name.partition("/")
        cache = LlamaCache(model, keys, cells, threads=threads, values=values or None)
        size[name], nll[name] = cache.allocated_bytes, []
        for window in windows:
            cache.clear()
            nll[name].append(loss_behind(cache, window, cache.feed(window.context)))
        cache.close()
        more = mean_difference(nll[name], nll["f16"], documents=documents)
        row = f"{size[name] / size['f16']:.3f} | {fmean(nll[name]):.4f} | {more.value:+.4f}"
        print(f"| {name} | {row} | {span(more.low, more.high)} |", flush=True)
    record = {"file": args.gguf.name, "texts": hash_of(*(torch.cat([w.context, w.targets]) for w in windows))}
    record |= {"windows": len(windows), "context": args.context, "continuation": args.continuation}
    record |= {"nll": nll, "allocated_bytes": size, "machine": surroundings()}
    (out / f"types-{args.gguf.stem}.json").write_text(json.dumps(record, indent=1))


def table(out: Path) -> None:
    """Print the tables of the page from the files in a folder."""
    for file in sorted(out.glob("times-*.json")):
        record = json.loads(file.read_text())
        print(f"\n{record['dtype']}, {record['context']} tokens, {record['threads']} threads, load {record['load']}, ")
        print(f"plain read {record['read_bandwidth'] / 1e9:.1f} GB/s, {record['machine']['when']}\n")
        print("| cache | ms a token | quartiles | MiB | its floor, ms | logits' error |\n|---|---|---|---|---|---|")
        for row in record["rows"]:
            print("| " + " | ".join(cells_of(row)) + " |")
    files = [json.loads(file.read_text()) for file in sorted(out.glob("losses-*.json"))]
    if not files:
        return
    sides: dict[str, Losses] = {}
    windows: list[Window] = []
    for record in files:
        for side in record["sides"]:
            old = sides.get(side["name"])
            nll = (*(() if old is None else old.nll), *side["nll"])
            most = max(side["token_bytes"], 0 if old is None else old.token_bytes)
            sides[side["name"]] = Losses(name=side["name"], base=side["base"], nll=nll, token_bytes=most)
        nothing = torch.zeros(0, dtype=torch.int64)
        windows += [Window(nothing, nothing, None, "", record["document"])] * len(record["sides"][0]["nll"])
    differences = compared_losses(sides, windows)
    print(f"\n{len(files)} texts, {len(windows)} windows\n")
    print("| cache | bytes a token | nats | more than its base | 95 % |\n|---|---|---|---|---|")
    for name, each in sides.items():
        d = differences.get(name)
        more = "base | " if d is None else f"{d.value:+.4f} | {span(d.low, d.high)}"
        print(f"| {name} | {each.token_bytes:.0f} | {fmean(each.nll):.4f} | {more} |")
    for kind in files[0]["agreement"]:
        print(f"largest difference of a log-probability, {kind}: {max(each['agreement'][kind] for each in files):.1e}")


def span(low: float | None, high: float | None) -> str:
    """Return an interval as text."""
    return "too few windows" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a side; a dash stands for what was not measured."""
    if row["median_ms"] is None:
        return [row["name"], f"no undisturbed sample of {row['disturbed']}", "–", "–", "–", "–"]
    floor, error, held = row["floor_ms"], row["error"], row["cache_bytes"]
    return [
        row["name"],
        f"{row['median_ms']:.1f}",
        f"{row['q1_ms']:.1f} to {row['q3_ms']:.1f}",
        "–" if held is None else f"{held / 2**20:.1f}",
        "–" if floor is None else f"{floor:.1f}",
        "–" if error is None else f"{error:.1e}",
    ]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "losses", "types", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--types", default="q8_0,q5_1,q4_1,q4_0")
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--continuation", type=int, default=256)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "times":
        times(args.out, args)
    elif args.what == "losses":
        if args.texts is None or not any(args.texts.glob("*.txt")):
            parser.error(f"asked for losses, but --texts {args.texts} holds no *.txt: give a folder of novels")
        of_texts(args.out, args)
    elif args.what == "types":
        if None in (args.gguf, args.model, args.data):
            parser.error("asked for types: give --gguf FILE, --model FOLDER with its tokenizer, and --data FOLDER")
        of_types(args.out, args)
    else:
        table(args.out)


if __name__ == "__main__":
    main()
