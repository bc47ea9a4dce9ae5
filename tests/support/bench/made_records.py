"""Made-up records of a whole run for tests of pages: no number in here was measured."""

from __future__ import annotations

import math
import random

from kvtailor.bench.schema import Record

PLANS = {
    "full": (1.0, 0.0),
    "snapkv @ keep=0.25": (0.27, 0.09),
    "snapkv + adakv + kivi(bits=4) @ keep=0.25": (0.11, 0.12),
    "kivi(bits=4)": (0.31, 0.0),
}
"""Share of the bytes and loss in nats by plan."""

MACHINE = {"kvtailor": "0.1", "torch": "2", "transformers": "5", "processor": "one", "threads": 2, "commit": "a" * 40}
LAYERS, HEADS = 5, 3


def record(label: str, task: str, **fields: object) -> Record:
    common: dict[str, object] = {
        "run": "made-up",
        "started": "2026-01-02T00:00:00.000+00:00",
        "model": "made-up",
        "plan": label,
        "plan_hash": "own" if label == "own" else f"#{label}",
        "task_version": 1,
        "dtype": "float32",
        "device": "cpu",
        "machine": MACHINE,
    }
    return Record(**common | {"label": label, "task": task} | fields)  # type: ignore[arg-type]


def whole_run(state: int = 0, plans: int = len(PLANS)) -> list[Record]:
    """Two contexts, two texts, three batches, needles of two kinds, sets, fidelity, capacity, and a missing plan.

    Args:
        state: of the random numbers.
        plans: how many; beyond the named ones they are variants of them.
    """
    chance = random.Random(state)
    named = list(PLANS.items())
    some = named[:plans] + [(f"tova @ keep=0.{i:03}", (0.3 + 0.01 * i, 0.05)) for i in range(plans - len(named))]
    found: list[Record] = []
    hard = [chance.uniform(1.5, 2.5) for _ in range(12)]
    for label, (share, loss) in some:
        found += _text_records(label, share, loss, hard, chance)
        found += _cost_records(label, share, chance)
        found += _set_records(label, loss, chance)
    found.append(
        record(
            "own",
            "speed",
            point={"context": 256, "tokens": 16, "batch": 1, "rounds": 5},
            timings=_timings(0.006),
            samples=5,
        )
    )
    found.append(record("rankkv @ keep=0.25", "perplexity", missing=("the score method 'rankkv'",), error="not there"))
    return found


def _held(share: float, context: int, batch: int = 1) -> dict[str, object]:
    full = 3072 * context * batch
    kept = context if share in (1.0, 0.31) else context // 4
    heads = tuple(
        tuple(float(kept + (0 if kept == context else 2 * head - layer)) for head in range(HEADS))
        for layer in range(LAYERS)
    )
    return {
        "tokens_seen": context,
        "tokens_held": float(kept),
        "bytes_held": int(full * share),
        "bytes_full": full,
        "tokens_by_head": heads,
    }


def _text_records(label: str, share: float, loss: float, hard: list[float], chance: random.Random) -> list[Record]:
    found = []
    for text, context in (("wikitext2", 256), ("c4", 256), ("wikitext2", 512)):
        values = tuple(a + loss + (chance.gauss(0, 0.02) if label != "full" else 0.0) for a in hard)
        nll = sum(values) / len(values)
        found.append(
            record(
                label,
                "perplexity",
                point={"context": context, "continuation": 64, "chunk": None},
                text=text,
                text_hash=f"{text}{context}",
                samples=12,
                tokens_scored=768,
                values={"nll": values},
                metrics={"nll": nll, "perplexity": math.exp(nll), "bits_per_byte": nll / 3},
                **_held(share, context),
            )
        )
    for kind in ("needle", "multi_value"):
        for length in (128, 256):
            for depth in (0.1, 0.5, 0.9):
                hits = tuple(float(chance.random() > 3 * loss) for _ in range(4))
                values = {"hit": hits, "nll": tuple(0.2 + loss for _ in hits)}
                if kind == "multi_value":
                    values["recall"] = tuple(chance.choice((0.5, 0.75, 1.0)) for _ in hits)
                found.append(
                    record(
                        label,
                        "needle",
                        values=values,
                        samples=4,
                        state=1,
                        point={"length": length, "depth": depth, "kind": kind, "question_outside": False},
                        **_held(share, length),
                    )
                )
    layers = {f"output_error_{i}": loss * (1 + 0.2 * i) for i in range(LAYERS)}
    layers |= {f"attention_cosine_{i}": 1 - loss * (1 + 0.1 * i) for i in range(LAYERS)}
    found.append(
        record(
            label,
            "fidelity",
            point={"context": 256, "continuation": 64},
            text="wikitext2",
            samples=12,
            tokens_scored=768,
            values={"kl": (loss,) * 12, "top1": (1 - loss,) * 12},
            metrics={"kl": loss, "kl_p99": 9 * loss, "top1": 1 - loss, "ece": 0.04, "output_error": loss} | layers,
            **_held(share, 256),
        )
    )
    return found


def _timings(tpot: float) -> dict[str, dict[str, float | None]]:
    return {
        name: {"median": t, "q1": 0.97 * t, "q3": 1.04 * t, "p10": 0.95 * t, "count": 5, "left_out": 0}
        for name, t in (("ttft", 9 * tpot), ("tpot", tpot))
    }


def _cost_records(label: str, share: float, chance: random.Random) -> list[Record]:
    found = []
    for context in (256, 512):
        for batch in (1, 4):
            tpot = (0.004 + 0.001 * batch + 1e-6 * context) * chance.uniform(0.9, 1.3)
            metrics: dict[str, float | None] = {
                "tokens_per_second": batch / tpot,
                "flops_prefill": 2.1e9,
                "flops_token": 5.6e6,
                "flops_method_prefill": 1.2e7,
                "flops_method_token": 3100.0,
                "achieved_gflops_prefill": 34.2,
                "achieved_gflops_token": 5.6e-3 / tpot,
                "floor_ttft_seconds": 0.003,
            }
            found.append(
                record(
                    label,
                    "speed",
                    point={"context": context, "tokens": 16, "batch": batch, "rounds": 5},
                    text="wikitext2",
                    text_hash=f"s{context}",
                    samples=5,
                    timings=_timings(tpot),
                    metrics=metrics,
                    floor_seconds=0.0004,
                    **_held(share, context, batch),
                )
            )
        held = _held(share, context)
        found.append(
            record(
                label,
                "memory",
                point={"context": context, "batch": 1},
                text="random tokens",
                text_hash=f"m{context}",
                state=7,
                bytes_resident=int(str(held["bytes_held"])) + 9000,
                bytes_peak=4_000_000,
                bytes_peak_decode=2_500_000,
                **held,
            )
        )
    fits = {
        "largest_batch": float(int(90 / share)),
        "longest_context": float(int(9000 / share)),
        "largest_batch_verified": 1.0,
        "longest_context_verified": 0.0,
        "memory_bytes": float(2**30),
    }
    found.append(
        record(
            label,
            "capacity",
            point={"memory_bytes": None, "context": 256, "tokens": 8},
            metrics=fits | {"bytes_per_token": 3072 * share},
        )
    )
    return found


def _set_records(label: str, loss: float, chance: random.Random) -> list[Record]:
    found = []
    for subset in ("qasper", "lcc"):
        scores = tuple(100 * min(1.0, max(0.0, chance.betavariate(2, 3) - loss)) for _ in range(20))
        found.append(
            record(
                label,
                "longcontext",
                text=subset,
                samples=20,
                values={"score": scores},
                point={"benchmark": "longbench", "subset": subset, "max_tokens": 384, "metric": "f1"},
                metrics={"score": sum(scores) / 20},
            )
        )
    hits = tuple(float(chance.random() > 0.4 + loss) for _ in range(40))
    found.append(
        record(
            label,
            "harness",
            point={"task": "arc_challenge", "fewshot": 0, "limit": 40},
            text="arc_challenge",
            samples=40,
            values={"score": hits},
            metrics={"acc": sum(hits) / 40},
        )
    )
    return found
