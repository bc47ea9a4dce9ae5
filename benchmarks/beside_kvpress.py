"""kvpress and kvtailor on the same tokens: what each method loses there and here, and how many needles it finds.

    pip install --no-deps --target PEER kvpress==0.5.5 transformers==5.2.0 "tokenizers>=0.22,<=0.23" ...
    python -m benchmarks.beside_kvpress tokens OUT --model MODEL --texts FOLDER
    PYTHONPATH=PEER python -m benchmarks.beside_kvpress theirs OUT --model MODEL
    python -m benchmarks.beside_kvpress ours OUT --model MODEL
    python -m benchmarks.beside_kvpress write OUT

kvpress 0.5.5 (Apache-2.0) is used as it was published, with the release of transformers that it asks for, in a process
of its own that imports nothing of kvtailor. Both sides read the token ids that `tokens` wrote: windows of texts and
documents with a hidden fact. Each method is asked to keep a quarter of the context. A window is a context that is
compressed and a continuation that is scored on it, in one forward; a needle is right where greedy decoding gives all
tokens of its answer. It is asked inside the compressed text, at its end, and after it.

`theirs` and `ours` write one file for each method and go on where they stopped; `--only` names some. A press that ends
with an error has it as its result. `write` makes `docs/peers/kvpress.json` and the table in
`docs/coming-from-kvpress.md` from these files.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "peers" / "kvpress.json"
PAGE = ROOT / "docs" / "coming-from-kvpress.md"
BEGIN, END = "<!-- measured: made by benchmarks/beside_kvpress.py -->", "<!-- /measured -->"
KEPT = 0.25
CONTEXT, CONTINUATION, DOCUMENT = 1024, 256, 512
DEPTHS = (0.1, 0.5, 0.9)
HEAD = "| press | plan | loss there | loss here | needles there | needles here | bytes here | why they differ |"


@dataclass(frozen=True)
class Pair:
    """A press and the plan that stands for it.

    Attributes:
        press: an expression of kvpress's classes, with C for `compression_ratio`.
        plan: ours, without its budget.
        cause: why the two differ, as far as it is known; empty where they agree.
        eager: the press needs eager attention.
    """

    press: str
    plan: str
    cause: str = ""
    eager: bool = False


_SNAP = "SnapKVPress(C, window_size=32)"
_SHARE = "its safeguard counts the window in, our floor lies above it"
PAIRS = (
    Pair("KnormPress(C)", "knorm"),
    Pair("KeyDiffPress(C)", "keydiff"),
    Pair("LagKVPress(C)", "lagkv", "ties of ranks: sinks and the newest outrank all here, there they tie"),
    Pair("StreamingLLMPress(C)", "position(sinks=4)"),
    Pair(_SNAP, "snapkv(kernel=5)"),
    Pair("TOVAPress(C)", "tova"),
    Pair("ObservedAttentionPress(C)", "h2o(recent=0, normalise=true)", eager=True),
    Pair("ExpectedAttentionPress(C, epsilon=0.02)", "expected(epsilon=0.02)"),
    Pair(f"CriticalKVPress({_SNAP})", "critical(of=snapkv(kernel=5))"),
    Pair("KVzipPress(C)", "kvzip", "words of the instruction are each side's own"),
    Pair("KVzipPress(C, layerwise=True)", "kvzip + adakv(floor=0)", "words of the instruction are each side's own"),
    Pair("KVzipPress(C, kvzip_plus_normalization=True)", "kvzip_plus", "words of the instruction are each side's own"),
    Pair("KVComposePress(C)", "kvcompose", "there the context is repeated without an instruction, which ours has"),
    Pair("LeverageScorePress(C)", "leverage", "the sketch is random: each side draws its own"),
    Pair("NonCausalAttnPress(C)", "noncausal", "a last chunk of fewer than 256 tokens: there missing ones take part"),
    Pair("CompactorPress(C)", "compactor", "the sketch is random: each side draws its own"),
    Pair("CURPress(C)", "cur"),
    Pair("CapPress(C)", "capkv"),
    Pair(f"AdaKVPress({_SNAP})", "snapkv(kernel=5) + adakv", _SHARE),
    Pair("AdaKVPress(ExpectedAttentionPress(C, epsilon=0.02))", "expected_attention"),
    Pair(f"CriticalAdaKVPress({_SNAP})", "critical(of=snapkv(kernel=5)) + adakv", _SHARE),
    Pair(
        "PyramidKVPress(C, window_size=32)",
        "snapkv(kernel=5) + pyramid",
        "its line has the window inside, ours adds it",
    ),
    Pair(
        f"ChunkKVPress({_SNAP}, chunk_length=20)",
        "snapkv(kernel=5) + chunks(size=20, heads=all)",
        "there the window lifts the chunks that it touches, and the count is not exact",
    ),
    Pair(
        f"EntropyGatedChunkKVPress({_SNAP})",
        "snapkv(kernel=5) + gatedchunks(size=10, heads=all)",
        "there the window lifts the chunks that it touches",
    ),
)
OUTSIDE = (
    "kvzip + uniform",
    "snapkv",
    "snapkv + adakv",
    "snapkv + pyramid",
    "h2o(recent=128)",
    "kivi(bits=4)",
    "kivi(bits=2)",
)
"""Plans of ours without a press, on the same tokens."""


def tokens(out: Path, args: argparse.Namespace) -> None:
    """Write the token ids of windows and documents."""
    from benchmarks.peers.losses import windows_of
    from kvtailor.bench.data.synthetic.documents import make_document
    from kvtailor.bench.subject import Subject
    from kvtailor.bench.tasks.contract import hash_of
    from kvtailor.bench.tasks.needle import code_document

    subject = Subject.load(args.model, dtype="float32")
    files = sorted(Path(args.texts).glob("*.txt"))[: args.windows]
    windows = windows_of(subject, files, context=CONTEXT, continuation=CONTINUATION, each=1)
    coded = []
    for number in range(args.needles):
        length = DOCUMENT - subject.start().numel()
        document = make_document(
            "needle", state=number, length=length, depth=DEPTHS[number % len(DEPTHS)], count_tokens=subject.count
        )
        coded.append([part.tolist() for part in code_document(subject, document)])
    found = {
        "model": Path(args.model).name,
        "weights": subject.fingerprint(),
        "texts": [file.name for file in files],
        "hash": hash_of(*(torch.cat([window.context, window.targets]) for window in windows)),
        "windows": [[window.context.tolist(), window.targets.tolist()] for window in windows],
        "needles": coded,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokens.json").write_text(json.dumps(found), encoding="utf-8")


def kept_or_measured(
    out: Path, side: str, names: list[str], only: str, measure: Callable[[str], dict[str, Any]]
) -> None:
    """Measure what has no file yet, and say each."""
    for number, name in enumerate(names):
        path = out / f"{side}-{number:02}.json"
        if only not in name or (path.exists() and json.loads(path.read_text(encoding="utf-8"))["name"] == name):
            continue
        try:
            found = measure(name)
        except Exception as error:  # noqa: BLE001 the other side's errors are of any kind, and are its result
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
        path.write_text(json.dumps({"name": name, **found}), encoding="utf-8")
        print(name, {key: value for key, value in found.items() if key != "nll"}, flush=True)


def theirs(out: Path, args: argparse.Namespace) -> None:
    """Measure every press; runs without kvtailor."""
    import kvpress
    import transformers

    given = json.loads((out / "tokens.json").read_text(encoding="utf-8"))
    # KVzipPress takes the length of a chat template for that of a system prompt, which these texts have not.
    folder = Path(tempfile.mkdtemp())
    for file in Path(args.model).resolve().iterdir():
        if "chat_template" not in file.name:
            (folder / file.name).symlink_to(file)
    models: dict[str, Any] = {}

    def model_of(eager: bool) -> Any:
        kind = "eager" if eager else "sdpa"
        if kind not in models:
            models[kind] = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=kind
            ).eval()
        return models[kind]

    def measured(name: str) -> dict[str, Any]:
        pair = next((each for each in PAIRS if each.press == name), None)
        names = {**vars(kvpress), "C": 1 - KEPT}
        model = model_of(pair is not None and pair.eager)

        def after(ids: list[int]) -> tuple[Tensor, Any]:
            """The last logits and the compressed cache of a text. A press serves one text."""
            cache = transformers.DynamicCache()
            if pair is None:
                return model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0], cache
            press = eval(name.replace("(C", "(compression_ratio=C"), names)  # noqa: S307 of this file's own table
            with press(model):
                logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0]
            return logits, cache

        def feed(ids: list[int], start: int, cache: Any) -> Tensor:
            """The logits (t, v) behind each token. One by one where layers differ: transformers makes one mask."""
            lengths = {layer.keys.shape[2] for layer in cache.layers}
            steps = [ids] if len(lengths) == 1 else [[each] for each in ids]
            rows, at = [], start
            for step in steps:
                places = torch.arange(at, at + len(step))[None]
                rows.append(model(torch.tensor([step]), past_key_values=cache, position_ids=places).logits[0])
                at += len(step)
            return torch.cat(rows)

        nll = []
        for context, targets in given["windows"]:
            first, cache = after(context)
            rows = torch.cat([first[-1:], feed(targets[:-1], len(context), cache)]).float().log_softmax(-1)
            nll.append(-float(rows.gather(1, torch.tensor(targets)[:, None]).mean()))

        def right(prompt: list[int], later: list[int], answer: list[int]) -> bool:
            logits, cache = after(prompt)
            at = len(prompt)
            if later:
                logits, at = feed(later, at, cache), at + len(later)
            for target in answer:
                if int(logits[-1].argmax()) != target:
                    return False
                logits, at = feed([target], at, cache), at + 1
            return True

        inside = sum(right(context + question, [], answer) for context, question, answer in given["needles"])
        later = sum(right(context, question, answer) for context, question, answer in given["needles"])
        return {"nll": nll, "inside": inside, "after": later}

    about = {"kvpress": _version("kvpress"), "transformers": transformers.__version__, "torch": torch.__version__}
    (out / "theirs.json").write_text(json.dumps(about), encoding="utf-8")

    @torch.no_grad()
    def measure(name: str) -> dict[str, Any]:
        return measured(name)

    kept_or_measured(out, "theirs", ["full", *(pair.press for pair in PAIRS)], args.only, measure)


def ours(out: Path, args: argparse.Namespace) -> None:
    """Measure every plan."""
    from dataclasses import replace

    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.measure.kept_prompts import KeptPrompts
    from kvtailor.bench.subject import Subject
    from kvtailor.bench.tasks.needle import answer_document
    from kvtailor.bench.tasks.perplexity import score_window

    given = json.loads((out / "tokens.json").read_text(encoding="utf-8"))
    subject = replace(Subject.load(args.model, dtype="float32"), kept=KeptPrompts(lasting=True))

    def measure(name: str) -> dict[str, Any]:
        codes = name == "full" or name.startswith("kivi")
        contestant = Contestant.of(name if codes else f"{name} @ keep={KEPT}, slack=never")
        scored = [
            score_window(subject, contestant, torch.tensor(context), torch.tensor(continuation))
            for context, continuation in given["windows"]
        ]
        documents = [tuple(map(torch.tensor, each)) for each in given["needles"]]
        hits = {
            outside: sum(
                answer_document(subject, contestant, *each, question_outside=outside).hit for each in documents
            )
            for outside in (False, True)
        }
        return {
            "nll": [-float(scores.mean()) for scores, _ in scored],
            "inside": hits[False],
            "after": hits[True],
            "bytes": max(weight["bytes_held"] for _, weight in scored),
        }

    about = {"kvtailor": _version("kvtailor"), "transformers": _version("transformers"), "torch": torch.__version__}
    about["machine"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    (out / "ours.json").write_text(json.dumps(about), encoding="utf-8")
    kept_or_measured(out, "ours", ["full", *(pair.plan for pair in PAIRS), *OUTSIDE], args.only, measure)


def write(out: Path, args: argparse.Namespace) -> None:
    """Write the record and the page's table."""
    given = json.loads((out / "tokens.json").read_text(encoding="utf-8"))

    def side(name: str) -> dict[str, Any]:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(f"{name}-*.json"))]
        return {each.pop("name"): each for each in found}

    about = {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in ("theirs", "ours")}
    record = {
        "model": given["model"],
        "weights": given["weights"],
        "dtype": "float32",
        "kept": KEPT,
        "windows": len(given["windows"]),
        "context": CONTEXT,
        "continuation": CONTINUATION,
        "texts": given["texts"],
        "hash": given["hash"],
        "needles": len(given["needles"]),
        "document": DOCUMENT,
        "versions": about,
        "theirs": side("theirs"),
        "ours": side("ours"),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def table(record: dict[str, Any]) -> str:
    """The table of a record, in Markdown."""
    return "\n".join(lines(record))


def lines(record: dict[str, Any]) -> Iterator[str]:
    """Its lines. Needles: asked inside, then after the compressed text."""
    there, here, count = record["theirs"], record["ours"], record["needles"]
    yield HEAD
    yield "|---|---|---|---|---|---|---|---|"
    full = here["full"]
    for press, plan, cause in [
        ("none", "full", ""),
        *((pair.press, pair.plan, pair.cause) for pair in PAIRS),
        *(("-", plan, "") for plan in OUTSIDE),
    ]:
        theirs_, ours_ = there.get("full" if press == "none" else press), here.get(plan)
        if ours_ is None:
            continue
        cells = [_loss(theirs_, there["full"]), _loss(ours_, full), _needles(theirs_, count), _needles(ours_, count)]
        share = f"{100 * ours_['bytes'] / full['bytes']:.1f} %" if "bytes" in ours_ else "-"
        said = press if press in ("none", "-") else f"`{press}`"
        differs = cells[0] != cells[1] or cells[2] != cells[3]
        why = cause if theirs_ is not None and "error" not in theirs_ and differs else ""
        if theirs_ is not None and "error" in theirs_:
            why = f"there: {theirs_['error']}"
        yield f"| {said} | `{plan}` | {' | '.join(cells)} | {share} | {why} |"


def _loss(found: dict[str, Any] | None, full: dict[str, Any]) -> str:
    if found is None or "error" in found:
        return "-"
    return (
        f"{fmean(found['nll']) - fmean(full['nll']):+.4f}" if found is not full else f"{fmean(found['nll']):.4f} nats"
    )


def _needles(found: dict[str, Any] | None, count: int) -> str:
    return "-" if found is None or "error" in found else f"{found['inside']}, {found['after']} of {count}"


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("tokens", "theirs", "ours", "write"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--texts", default="", help="A folder of *.txt, of which the first ones are taken.")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--needles", type=int, default=12)
    parser.add_argument("--only", default="", help="Methods whose name has this in it.")
    args = parser.parse_args()
    {"tokens": tokens, "theirs": theirs, "ours": ours, "write": write}[args.what](args.out, args)


if __name__ == "__main__":
    main()
