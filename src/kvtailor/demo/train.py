"""Recipe, step 3: train. ``python -m kvtailor.demo.train`` (about an hour on one core); run it again to continue.

Contexts grow by phases, so that copying is learnt where it is cheap. Hidden matrices learn by Muon, the rest by AdamW.
The learning rate warms up, stays, and falls linearly to zero over the last steps, so that a run can be ended early by
asking for fewer steps in the last phase. Every step's data is a function of its number alone.

The shipped weights were made with two calls: one with the default rates, interrupted at the checkpoint of step 300, and
one with ``--rate 5e-3 --muon-rate 0.015`` (rates apply from the checkpoint on).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from kvtailor import demo
from kvtailor.demo.induction import start_with_copying
from kvtailor.demo.mixture import ANSWER_WEIGHT, Mixture
from kvtailor.hf.loading import new_llama

__all__ = [
    "ARCHITECTURE",
    "PHASES",
    "Phase",
    "batch_at",
    "losses",
    "main",
    "optimizers_of",
    "parse_phases",
    "phase_at",
    "rate_at",
]

ARCHITECTURE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_theta": 100_000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
PHASES = "256:4096:300:0.3,512:4096:500:0.6,1024:4096:500:0.6,2048:8192:300:0.6"


@dataclass(frozen=True)
class Phase:
    """Steps at one context length.

    Attributes:
        length: tokens per row.
        tokens: tokens per step, a multiple of ``length``.
        steps: number of steps.
        natural: share of rows that are windows of the corpus, 0.0 to 1.0.
    """

    length: int
    tokens: int
    steps: int
    natural: float


def parse_phases(text: str) -> list[Phase]:
    """Phases from ``length:tokens:steps:natural`` joined by commas.

    Raises:
        ValueError: a part is not of that form, or its tokens are no multiple of its length.
    """
    phases = []
    for part in text.split(","):
        numbers = part.split(":")
        if len(numbers) != 4 or int(numbers[1]) % int(numbers[0]):
            raise ValueError(f"asked for phase {part!r}: give length:tokens:steps:natural, tokens a multiple of length")
        phases.append(Phase(int(numbers[0]), int(numbers[1]), int(numbers[2]), float(numbers[3])))
    return phases


def phase_at(step: int, phases: list[Phase]) -> Phase:
    """The phase that 0-based ``step`` belongs to."""
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    return phases[-1]


def rate_at(step: int, steps: int, warmup: int, decay: float) -> float:
    """Share of the peak learning rate at 0-based ``step``: up over ``warmup`` steps, down over the last ``decay``."""
    return min(1.0, (step + 1) / warmup, (steps - step) / max(1.0, decay * steps))


def optimizers_of(model: nn.Module, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    chosen = [
        torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return chosen


def batch_at(mixture: Mixture, step: int, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, length + 1) int64 and weights (rows, length) float32 of 0-based ``step``."""
    count = phase.tokens // phase.length
    rows = [mixture.row(step * 1000 + i, phase.length, phase.natural) for i in range(count)]
    return (
        torch.from_numpy(np.stack([row.tokens for row in rows])),
        torch.from_numpy(np.stack([row.weights for row in rows])),
    )


def losses(model: nn.Module, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """The weighted loss in nats per token, and the plain losses on natural and on answer tokens if there are some."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    each = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    flat = weights.flatten()
    with torch.no_grad():
        kinds = {"natural": flat == 1.0, "answer": flat == ANSWER_WEIGHT}
        seen = {name: each[chosen].mean().item() for name, chosen in kinds.items() if chosen.any()}
    return (each * flat).sum() / flat.sum(), seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder of steps 1 and 2")
    parser.add_argument("--run", default="run", help="name of the checkpoint and log in the work folder")
    parser.add_argument("--phases", default=PHASES, help="length:tokens per step:steps:natural share, joined by commas")
    parser.add_argument("--state", type=int, default=0, help="random state of the fresh weights")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of embeddings and norms")
    parser.add_argument("--muon-rate", type=float, default=0.01, help="peak learning rate of the matrices")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rate falls to 0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.state)
    phases = parse_phases(given.phases)
    steps = sum(phase.steps for phase in phases)
    mixture = Mixture(given.work)
    model = new_llama(**ARCHITECTURE, vocab_size=mixture.tokenizer.get_vocab_size()).train()
    start_with_copying(model)
    optimizers = optimizers_of(model, given.rate, given.muon_rate)
    checkpoint, first, tokens_seen, seconds = given.work / f"{given.run}.pt", 0, 0, 0.0
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for optimizer, peak in zip(optimizers, (given.muon_rate, given.rate), strict=True):
            for group in optimizer.param_groups:
                group["peak"] = peak
        first, tokens_seen, seconds = saved["step"], saved["tokens"], saved["seconds"]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, steps {first} to {steps}", flush=True)
    started = time.perf_counter() - seconds
    for step in range(first, steps):
        phase = phase_at(step, phases)
        share = rate_at(step, steps, 60, given.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
        loss, seen = losses(model, *batch_at(mixture, step, phase))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens_seen += phase.tokens
        seconds = time.perf_counter() - started
        with (given.work / f"{given.run}.jsonl").open("a") as log:
            log.write(
                json.dumps(
                    {
                        "step": step + 1,
                        "length": phase.length,
                        "tokens": tokens_seen,
                        "seconds": round(seconds, 1),
                        "loss": round(loss.item(), 4),
                        **{name: round(value, 4) for name, value in seen.items()},
                    }
                )
                + "\n"
            )
        if (step + 1) % given.save_every == 0 or step + 1 == steps:
            whole = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step + 1,
                "tokens": tokens_seen,
                "seconds": seconds,
                "phases": [asdict(phase) for phase in phases],
            }
            torch.save(whole, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    print(f"done: {tokens_seen:,} tokens in {seconds:,.0f} s", flush=True)


if __name__ == "__main__":
    main()
