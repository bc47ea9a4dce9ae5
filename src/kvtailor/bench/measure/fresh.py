"""A fresh process that loads the model and measures its own memory: how it is started, asked and answered.

Whatever the main process did before (other plans, other models, a warm allocator) is not in its counters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.measure.memory_gauge import Gauge, gauge_of, is_out_of_memory, out_of_memory
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError

__all__ = ["STATE", "answer", "ask", "measured", "prefill", "random_tokens", "why_not"]

STATE = 7


def why_not(subject: Subject) -> str | None:
    """Why a fresh process cannot measure this model, one sentence; None where it can."""
    if not subject.loadable:
        return f"A fresh process cannot load {subject.name!r} by its name."
    try:
        gauge_of(subject.device)
    except KvtailorError as error:
        return str(error)
    return None


def ask(
    module: str, subject: Subject, contestant: Contestant, settings: Mapping[str, object], limit: float
) -> dict[str, Any]:
    """What the module's job answers in a fresh process; {"error": sentence} where it has no answer.

    Args:
        module: dotted name of a module that calls `answer` when it is run.
        subject: model, dtypes and device to load.
        contestant: the plan.
        settings: JSON values for the job.
        limit: seconds after which the process is ended.
    """
    request = {
        "model": subject.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "cache_dtype": str(subject.cache_dtype).removeprefix("torch."),
        "device": str(subject.device),
        "plan": contestant.text,
        "settings": dict(settings),
    }
    source = str(Path(__file__).resolve().parents[3])
    environment = {
        **os.environ,
        # Every block of some size gets its own mapping, so that what is freed leaves the resident memory at once.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"The measuring process took longer than {limit:.0f} seconds and was ended."}
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        expected = subject.weights()
        if "error" not in found and expected is not None and found.pop("weight_bytes") != expected[1]:
            return {"error": "The measuring process loaded weights of another size than this one: is the name unique?"}
        return found
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"The measuring process ended with status {done.returncode}: {last}"}


def measured(
    module: str, subject: Subject, contestant: Contestant, settings: Mapping[str, object], limit: float
) -> dict[str, Any]:
    """Return what `ask` finds, for the same arguments.

    Raises:
        KvtailorError: the process has no answer.
    """
    found = ask(module, subject, contestant, settings, limit)
    if found.get("error") is not None:
        raise KvtailorError(str(found["error"]))
    return found


def answer(job: Callable[[Subject, Contestant, Gauge, Mapping[str, Any]], dict[str, Any]]) -> None:
    """What the fresh process does: reads the request, loads the model, does the job, and prints what it found."""
    from kvtailor.hf.model.loading import load

    request = json.load(sys.stdin)
    device = torch.device(request["device"])
    gauge = gauge_of(device)
    try:
        dtypes = {name: getattr(torch, request[name]) for name in ("dtype", "cache_dtype")}
        model, tokenizer = load(request["model"], **dtypes, device=device)
        subject = Subject(name=request["model"], model=model, tokenizer=tokenizer)
        plan = request["plan"]
        contestant = OWN if plan is None else Contestant.of(plan)
        weights = subject.weights()
        found = {
            **job(subject, contestant, gauge, request["settings"]),
            "weight_bytes": weights[1] if weights else None,
        }
    except (KvtailorError, ValueError) as error:
        found = {"error": str(error)}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = {"error": out_of_memory(error)}
    spilled = gauge.spilled()
    print(json.dumps({"error": spilled} if spilled else found))


def random_tokens(subject: Subject, context: int, batch: int = 1) -> Tensor:
    """(batch, context) int64, the same in every process."""
    vocabulary = int(subject.model.config.get_text_config().vocab_size)
    return torch.randint(vocabulary, (batch, context), generator=torch.Generator().manual_seed(STATE))


def prefill(subject: Subject, contestant: Contestant, ids: Tensor) -> tuple[Tensor, Any]:
    """The most likely next tokens (b, 1), which are nearly nothing, and the cache; logits would count as cache."""
    logits, cache = subject.prefill(ids, subject.new_cache(contestant), last_only=True)
    subject.wait()
    return logits[:, -1:].argmax(-1), cache
