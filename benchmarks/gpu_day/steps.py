"""What a GPU day runs: steps, each one command of a minute or a few, in pieces of at most ten minutes.

The order is that of the questions: first whether the kernels are right and how far they are from what the memory can
give, then whole models with graphs, prompts, the host and the link; last what fills gaps. So a session with half an
hour of a GPU runs the first three pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PIECES", "Step", "estimate", "step_named", "steps"]

_INT4, _INT8, _KIVI = "vector(bits=4)", "vector(bits=8)", "kivi(bits=4, group=64, recent=128)"
_SNAPKV, _H2O, _STREAMING = "snapkv @ keep=0.25", "h2o @ keep=0.25", "streaming @ keep=0.25"
_GRID = "hadamard(of=higgs(bits=4), signs=0)"
_8B, _7B = "random-llama3-8b", "random-llama2-7b"

# The device, versions, and what a plain read gives: one JSON object.
_MACHINE = """
import json, torch
from kvtailor.bench.measure.machine import describe
device = torch.device("{device}")
print(json.dumps({{"machine": describe(device=device, dtype=torch.float16), "tables": {{}}}}))
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        name: of the step; records and the state file have it.
        piece: 1 to `PIECES`.
        seconds: how long it is thought to take on one H200, before any was measured.
        words: the command without the interpreter, such as ("-m", "kvtailor", "bench", ...).
        kind: what it leaves: "json" on the last line of its output, "tests" in a JUnit file, "records" of the bench.
        about: what it answers, a clause.
        environment: variables on top of the process's own.
    """

    name: str
    piece: int
    seconds: int
    words: tuple[str, ...]
    kind: str = "json"
    about: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def steps(*, rehearsal: bool = False) -> tuple[Step, ...]:
    """Return all steps in order.

    Args:
        rehearsal: tiny sizes on the CPU, where Triton's kernels run in its interpreter.
    """
    return _REHEARSED if rehearsal else _REAL


def step_named(name: str, *, rehearsal: bool = False) -> Step:
    """Return the step of a name.

    Raises:
        KeyError: there is none.
    """
    return {step.name: step for step in steps(rehearsal=rehearsal)}[name]


def estimate(piece: int) -> int:
    """Return how many seconds a piece is thought to take."""
    return sum(step.seconds for step in _REAL if step.piece == piece)


def _micro(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.micro", name, *words)


def _on_gpu(name: str, *words: str) -> tuple[str, ...]:
    return _micro(name, "--device", "cuda", *words)


def _kernels(contexts: str, batches: str, cases: str) -> tuple[str, ...]:
    return _on_gpu("kernels", "--contexts", contexts, "--batches", batches, "--cases", cases, "--rounds", "21")


def _whole(model: str, contexts: str, batches: str, graphs: str, plans: Sequence[str], *more: str) -> tuple[str, ...]:
    return _on_gpu(
        "whole",
        "--model",
        model,
        "--contexts",
        contexts,
        "--batches",
        batches,
        "--graphs",
        graphs,
        "--plans",
        "; ".join(plans),
        *(("--rounds", "2") if graphs == "both" else ("--rounds", "3")),
        *more,
    )


def _prompt(context: str, implementations: str, plans: Sequence[str], *more: str) -> tuple[str, ...]:
    return _on_gpu(
        "whole",
        "--model",
        _8B,
        "--contexts",
        "",
        "--prefill",
        context,
        "--implementations",
        implementations,
        "--plans",
        "; ".join(plans),
        *more,
    )


def _pytest(*paths: str, marked: str = "not long") -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *paths)


def _bench(*words: str) -> tuple[str, ...]:
    return ("-m", "kvtailor", "bench", *words)


_REAL = (
    Step(name="machine", piece=1, seconds=20, words=("-c", _MACHINE.format(device="cuda")), about="what it runs on"),
    Step(
        name="kernels-32k",
        piece=1,
        seconds=120,
        words=_kernels("32768", "1,8", "attention"),
        about="attention over stored bytes at 32k: G1 to G5",
    ),
    Step(
        name="whole-8b-8k",
        piece=1,
        seconds=200,
        words=_whole(_8B, "8192", "1", "both", (_INT4, _KIVI)),
        about="a token of the 8B shapes at 8k, launched and replayed: E1, E2",
    ),
    Step(
        name="tests-kernels",
        piece=1,
        seconds=180,
        words=_pytest("tests/ops/gpu"),
        kind="tests",
        about="the kernels against attention in float64, on this GPU",
    ),
    Step(
        name="whole-8b-32k-8-rows",
        piece=2,
        seconds=130,
        words=_whole(_8B, "32768", "8", "only", (_INT4, _KIVI), "--no-own"),
        about="8 rows at 32k: E2",
    ),
    Step(
        name="whole-7b-32k",
        piece=2,
        seconds=110,
        words=_whole(_7B, "32768", "1", "only", (_INT4, _KIVI, _SNAPKV), "--no-own"),
        about="many kv heads: E2, E3",
    ),
    Step(
        name="kernels-other-cases",
        piece=2,
        seconds=70,
        words=_kernels("32768", "1", "quest,ragged,blocks,appending,packing"),
        about="G6 to G8, E7",
    ),
    Step(
        name="kernels-4k-128k",
        piece=2,
        seconds=110,
        words=_kernels("4096,131072", "1", "attention,quest"),
        about="the same at both ends: G2, G6",
    ),
    Step(
        name="whole-8b-32k-8-rows-more",
        piece=2,
        seconds=100,
        words=_whole(_8B, "32768", "8", "only", (_INT8, _SNAPKV), "--no-own", "--implementations", "triton"),
        about="int8 and eviction at 8 rows",
    ),
    Step(
        name="prompt-8b-8k",
        piece=3,
        seconds=80,
        words=_prompt("8192", "reference,triton", (_SNAPKV, _H2O, _KIVI, _INT4, _STREAMING)),
        about="what scoring and encoding take of a prompt: E6",
    ),
    Step(
        name="prompt-8b-32k",
        piece=3,
        seconds=100,
        words=_prompt("32768", "triton", (_SNAPKV, _H2O, _KIVI, _STREAMING), "--no-own", "--prefill-rounds", "2"),
        about="the same at 32k: E6",
    ),
    Step(
        name="host",
        piece=3,
        seconds=110,
        words=_on_gpu("host", "--rounds", "30"),
        about="what the host takes for a token of each plan",
    ),
    Step(
        name="link",
        piece=3,
        seconds=100,
        words=_on_gpu("link", "--contexts", "32768"),
        about="a cache in pinned host memory: E8",
    ),
    Step(
        name="tests-graphs",
        piece=3,
        seconds=120,
        words=_pytest(
            "tests/seam/run/test_graphs_on_cuda.py",
            "tests/seam/test_triton_forms.py",
            "tests/store/test_host.py",
            "tests/benchmarks/micro/test_link.py",
            "tests/benchmarks/micro/test_gpu_kernels.py",
        ),
        kind="tests",
        about="graphs, whole models through the kernels and the pinned tier, on this GPU",
    ),
    Step(
        name="whole-8b-128k",
        piece=4,
        seconds=150,
        words=_whole(_8B, "131072", "1", "only", (_INT4, _KIVI, _SNAPKV), "--no-own"),
        about="one row at 128k: E2",
    ),
    Step(
        name="decode",
        piece=4,
        seconds=150,
        words=_on_gpu("decode", "--dtype", "bfloat16", "--contexts", "8192,32768", "--prefill", "8192"),
        about="a small model without graphs, beside transformers' caches",
    ),
    Step(
        name="decode-triton",
        piece=4,
        seconds=130,
        words=_on_gpu("decode", "--dtype", "bfloat16", "--contexts", "8192,32768", "--prefill", ""),
        environment=(("KVTAILOR_IMPLEMENTATION", "triton"),),
        about="the same through the kernels",
    ),
    Step(
        name="speculation",
        piece=4,
        seconds=90,
        kind="records",
        words=_bench(
            "--model",
            "demo",
            "--device",
            "cuda",
            "--tasks",
            "speculation",
            "--plans",
            "full",
            "--rounds",
            "3",
            "--draft-plan",
            "streaming @ tokens=64",
        ),
        about="whether a draft changes a token: E9",
    ),
    Step(
        name="memory",
        piece=5,
        seconds=240,
        kind="records",
        words=_bench(
            "--model",
            _8B,
            "--device",
            "cuda",
            "--dtype",
            "bfloat16",
            "--tasks",
            "memory",
            "--contexts",
            "32768",
            "--plans",
            f"full; {_INT4}; {_KIVI}",
        ),
        about="what the allocator takes for a cache at 32k: E4",
    ),
    Step(
        name="tests-kernels-long",
        piece=5,
        seconds=270,
        words=_pytest("tests/ops/gpu", marked="long"),
        kind="tests",
        about="the long cases of the kernels' tests",
    ),
    Step(
        name="kernels-levels",
        piece=6,
        seconds=60,
        words=_kernels("32768", "1", "levels"),
        about="codes of levels and grids, and small floats in blocks, over decoding them first",
    ),
    Step(
        name="whole-8b-32k-levels",
        piece=6,
        seconds=200,
        words=_whole(_8B, "32768", "1", "only", ("turboquant4", _GRID, "nvfp4", "mxfp4", "mxfp8"), "--no-own"),
        about="the same in a replayed token of the 8B shapes",
    ),
)
PIECES = max(step.piece for step in _REAL)
"""How many pieces there are."""


def _tiny(*words: str) -> tuple[str, ...]:
    """A whole-model step of two layers; float32, since Triton's interpreter multiplies bfloat16 wrongly."""
    return _micro(
        "whole",
        "--model",
        "random-llama",
        "--implementations",
        "reference,triton",
        "--tokens",
        "1",
        "--rounds",
        "1",
        "--prefill-rounds",
        "1",
        *words,
    )


def _tiny_kernels(cases: str) -> tuple[str, ...]:
    return _micro("kernels", "--contexts", "64", "--rounds", "1", "--cases", cases)


# The command that stands for each; one that is not here is the real one, on the CPU.
_SMALL = {
    "machine": ("-c", _MACHINE.format(device="cpu")),
    "kernels-32k": _tiny_kernels("attention"),
    "kernels-other-cases": _tiny_kernels("ragged,appending,packing"),
    "kernels-4k-128k": _tiny_kernels("quest"),
    "kernels-levels": _tiny_kernels("levels"),
    "whole-8b-32k-levels": _tiny("--contexts", "64", "--plans", f"turboquant4; {_GRID}; nvfp4", "--no-own"),
    "whole-8b-8k": _tiny("--contexts", "64", "--plans", _INT4),
    "whole-8b-32k-8-rows": _tiny("--contexts", "64", "--batches", "2", "--plans", _INT4, "--no-own"),
    "whole-7b-32k": _tiny("--contexts", "64", "--plans", "snapkv(window=8) @ keep=0.25", "--no-own"),
    "whole-8b-32k-8-rows-more": _tiny("--contexts", "64", "--plans", _INT8, "--no-own"),
    "whole-8b-128k": _tiny("--contexts", "96", "--plans", "kivi(bits=4, group=32, recent=32)", "--no-own"),
    "prompt-8b-8k": _tiny("--contexts", "", "--prefill", "64", "--plans", "h2o @ keep=0.25"),
    "prompt-8b-32k": _tiny("--contexts", "", "--prefill", "64", "--plans", _INT4, "--no-own"),
    "host": _micro("host", "--plans", "full", "--rounds", "1"),
    "link": _micro("link", "--contexts", "1100", "--rounds", "1"),
    "decode": _micro("decode", "--dtype", "float32", "--contexts", "256", "--prefill", "", "--rounds", "1"),
    "decode-triton": _tiny("--contexts", "64", "--plans", _INT4, "--no-own"),
    "tests-kernels": _pytest("tests/ops/gpu/test_gpu_unpack.py"),
    "tests-graphs": _pytest("tests/seam/run/test_graphs_on_cuda.py"),
    "tests-kernels-long": _pytest("tests/ops/gpu/test_gpu_unpack.py"),
    "speculation": _bench(
        "--model",
        "demo",
        "--tasks",
        "speculation",
        "--plans",
        "full",
        "--rounds",
        "1",
        "--context",
        "32",
        "--new-tokens",
        "8",
        "--draft-plan",
        "streaming @ tokens=16",
    ),
    "memory": _bench("--model", "random-llama", "--tasks", "memory", "--contexts", "64", "--plans", f"full; {_INT4}"),
}
_IN_INTERPRETER = (("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", ""))
# Benches of the CPU that would otherwise time its C++ kernels.
_THROUGH_TRITON = ("kernels-32k", "kernels-other-cases", "kernels-4k-128k", "kernels-levels")


def _rehearsed(step: Step) -> Step:
    forced = (("KVTAILOR_IMPLEMENTATION", "triton"),) if step.name in _THROUGH_TRITON else ()
    return Step(
        name=step.name,
        piece=step.piece,
        seconds=step.seconds,
        words=_SMALL[step.name],
        kind=step.kind,
        about=step.about,
        environment=(*_IN_INTERPRETER, *forced),
    )


_REHEARSED = tuple(_rehearsed(step) for step in _REAL)
