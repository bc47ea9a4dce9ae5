"""Recipe, step 3: train. ``python -m recipes.demo.train``; run it again to continue.

Contexts grow by phases, so that copying is learnt where it is cheap. Hidden matrices learn by Muon, the rest by AdamW.
The learning rate warms up, stays, and falls linearly to zero over the last steps, so that a run can be ended early by
asking for fewer steps in the last phase. Every step's data is a function of its number alone.

``--minutes 10`` ends a piece of a run with a checkpoint; ``--device cuda`` trains on a GPU. ``--model demo-draft``
trains the small GPT-NeoX, with ``--teacher demo`` to agree with the finished model instead of with the text alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from kvtailor.hf.model.loading import load, new_model
from recipes import demo
from recipes.demo.architecture import ARCHITECTURES
from recipes.demo.checkpoint import load_checkpoint, save_checkpoint
from recipes.demo.induction import start_with_copying
from recipes.demo.mixture import ANSWER_WEIGHT, Mixture
from recipes.demo.schedule import PHASES, Phase, parse_phases, phase_at, rate_at

__all__ = [
    "backward",
    "batch_at",
    "keep_freed_memory",
    "main",
    "means",
    "optimizers_of",
    "train",
]

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h

MICRO_TOKENS = {"cpu": 2048, "cuda": 65536}  # tokens that go through the model at once; 2,048 keep a CPU's caches warm


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


def backward(
    model: nn.Module,
    tokens: torch.Tensor,
    weights: torch.Tensor,
    teacher: nn.Module | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Accumulate the gradients of one step, a few rows at a time.

    Args:
        model: whose gradients are added to.
        tokens: (rows, length + 1) int64, on the model's device.
        weights: (rows, length) float32, the weight of each target.
        teacher: a model whose distribution is the target in place of the next token, with the same weights.
        total: the sum of the whole step's weights, where these rows are only a part of it.

    Returns:
        (5,) float64 sums: the weighted loss over ``total``; nats and number of natural tokens; nats and number of
        answer tokens. See `means`.
    """
    kind = tokens.device.type
    total = (weights.sum() if total is None else total).clamp_min(1e-6)
    at_once = max(1, MICRO_TOKENS[kind] // weights.shape[1])
    sums = torch.zeros(5, dtype=torch.float64)
    for start in range(0, len(tokens), at_once):
        rows, flat = tokens[start : start + at_once], weights[start : start + at_once].flatten()
        targets = rows[:, 1:].flatten()
        with torch.autocast(kind, dtype=torch.bfloat16):
            logits = model(rows[:, :-1], use_cache=False).logits.flatten(0, 1).float()
            with torch.no_grad():
                wanted = targets
                if teacher is not None:
                    wanted = teacher(rows[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        each = nn.functional.cross_entropy(logits, wanted, reduction="none")
        loss = (each * flat).sum() / total
        loss.backward()
        with torch.no_grad():
            sums[0] += loss.item()
            plain = each if teacher is None else nn.functional.cross_entropy(logits, targets, reduction="none")
            for place, weight in ((1, 1.0), (3, ANSWER_WEIGHT)):
                chosen = flat == weight
                sums[place] += plain[chosen].sum().item()
                sums[place + 1] += int(chosen.sum())
    return sums


def means(sums: torch.Tensor) -> dict[str, float]:
    """``loss`` in nats per weighted token, and ``natural`` and ``answer`` in nats per token where there were some."""
    loss, natural, natural_count, answer, answer_count = sums.tolist()
    found = {"loss": loss}
    if natural_count:
        found["natural"] = natural / natural_count
    if answer_count:
        found["answer"] = answer / answer_count
    return found


def keep_freed_memory() -> None:
    """Ask glibc to reuse freed memory, where it is the allocator: clearing fresh pages took 20 % of a step."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {f"model.{name}": value for name, value in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{i}.{parameter}.{name}": value for name, value in state.items()}
    return found


def _restore(model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                number, field = name.split(".")[2:]
                state.setdefault(int(number), {})[field] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(ARCHITECTURES), default="demo")
    parser.add_argument("--work", type=Path, default=demo.work_folder(), help="folder of steps 1 and 2")
    parser.add_argument("--run", help="name of the checkpoint and log in the work folder; default: the model's name")
    parser.add_argument("--phases", help="length:tokens per step:steps:natural share, joined by commas")
    parser.add_argument("--state", type=int, default=0, help="random state of the fresh weights")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate of embeddings and norms")
    parser.add_argument("--muon-rate", type=float, default=0.015, help="peak learning rate of the matrices")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps over which the rate falls to 0")
    parser.add_argument("--teacher", help="'demo' or a folder: learn this model's distribution")
    parser.add_argument("--device", choices=list(MICRO_TOKENS), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--minutes", type=float, help="end with a checkpoint after this time")
    parser.add_argument(
        "--processes", type=int, default=1, help="that share each step's rows; two of one thread beat one of two"
    )
    given = parser.parse_args()
    fewest = min(phase.tokens // phase.length for phase in parse_phases(given.phases or PHASES[given.model]))
    if not 1 <= given.processes <= fewest:
        parser.error(f"--processes is {given.processes}, but a step has as few as {fewest} rows: give 1 to {fewest}")
    if given.processes == 1:
        train(given)
    else:
        with tempfile.TemporaryDirectory() as meeting:
            spawn(_train_together, args=(given, f"{meeting}/meet"), nprocs=given.processes)


def _train_together(rank: int, given: argparse.Namespace, meeting: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=given.processes)
    train(given, rank)
    torch.distributed.destroy_process_group()


def _sum_over_processes(model: nn.Module, *others: torch.Tensor) -> None:
    """Gradients, and other tensors, become their sums over all processes, in place."""
    tensors = [*others, *(p.grad for p in model.parameters() if p.grad is not None)]
    flat = torch.cat([tensor.detach().flatten().cpu().float() for tensor in tensors])
    torch.distributed.all_reduce(flat)
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def train(given: argparse.Namespace, rank: int = 0) -> None:
    """One process of a run with the options of `main`; that of rank 0 writes log and checkpoints."""
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    torch.manual_seed(given.state)
    run = given.run or given.model
    phases = parse_phases(given.phases or PHASES[given.model])
    steps = sum(phase.steps for phase in phases)
    mixture = Mixture(given.work)
    model = new_model(**ARCHITECTURES[given.model], vocab_size=mixture.tokenizer.get_vocab_size()).train()
    if given.model == "demo":
        start_with_copying(model)
    model.to(given.device)
    teacher = load(given.teacher, dtype=torch.float32)[0].to(given.device) if given.teacher else None
    optimizers = optimizers_of(model, given.rate, given.muon_rate)
    first, tokens_seen, seconds = 0, 0, 0.0
    if (saved := load_checkpoint(given.work / run)) is not None:
        tensors, facts = saved
        _restore(model, optimizers, tensors)
        for optimizer, peak in zip(optimizers, (given.muon_rate, given.rate), strict=True):
            for group in optimizer.param_groups:
                group["peak"] = peak
        first, tokens_seen, seconds = facts["step"], facts["tokens"], facts["seconds"]
    log = given.work / f"{run}.jsonl"
    if rank == 0:
        if log.is_file():
            kept = [line for line in log.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= first]
            log.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, steps {first} to {steps}", flush=True)
    begun = time.perf_counter()
    started = begun - seconds
    parent, done = os.getppid(), first
    for step in range(first, steps):
        if given.processes > 1 and os.getppid() != parent:
            raise SystemExit("the process that started this one was killed")
        phase = phase_at(step, phases)
        share = rate_at(step, steps, 60, given.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
        tokens, weights = batch_at(mixture, step, phase)
        mine = slice(rank, None, given.processes)
        sums = backward(
            model, tokens[mine].to(given.device), weights[mine].to(given.device), teacher, total=weights.sum()
        )
        # Every process must end at the same step, so that its clock is exchanged together with the sums.
        late = torch.tensor([float(given.minutes is not None and time.perf_counter() - begun > 60 * given.minutes)])
        if given.processes > 1:
            _sum_over_processes(model, sums, late)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens_seen, done = tokens_seen + phase.tokens, step + 1
        seconds = time.perf_counter() - started
        ends = done == steps or bool(late > 0)
        if rank == 0:
            record = {"step": done, "length": phase.length, "tokens": tokens_seen, "seconds": round(seconds, 1)}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record | {name: round(value, 4) for name, value in means(sums).items()}) + "\n")
            if done % given.save_every == 0 or ends:
                facts = {"step": done, "tokens": tokens_seen, "seconds": seconds, "arguments": _plain(vars(given))}
                save_checkpoint(given.work / run, _tensors(model, optimizers), facts)
        if ends:
            break
    if rank == 0:
        print(f"{tokens_seen:,} tokens in {seconds:,.0f} s, at step {done} of {steps}", flush=True)


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}


if __name__ == "__main__":
    main()
