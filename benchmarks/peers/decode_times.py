"""A decoded token of one Llama on kvtailor, on transformers and on llama.cpp, taking turns in one process.

The model is that of `python -m benchmarks.micro decode`: 4 layers of 32 query and 8 kv heads of 128, hidden size 1024,
untrained, which llama.cpp gets from a GGUF file in the dtype that the others compute in. Or it is that of a GGUF file:
llama.cpp reads its weights as they are, and transformers in float32. The context is written into all caches, the same
keys and values in the form of each (`LlamaCache.fill`), and 16 tokens go through every model behind it, after which a
plan cuts or encodes what it holds. So all of them decode the same token at the same position, and how far each one's
logits are from those of float32 stands beside its time.

Threads of torch and of llama.cpp are as many; a pause before each sample lets the threads of the other library go to
sleep. The bytes of a cache are read: from kvtailor's ledger, from the storages of transformers' tensors, and from what
llama.cpp itself saves of the sequence. What llama.cpp has allocated is in its log; it has room for the tokens to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.micro.cases import MODEL, VOCABULARY, model_states, random_of
from benchmarks.micro.tables import Advance
from benchmarks.micro.timer import CPU, Measured, Side, time_in_turns
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.llama_runner import LlamaCache, LlamaModel
from kvtailor.bench.measure.cache_fields import bytes_of
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.loading import load
from kvtailor.hf.run.stock import dynamic_cache, fill, static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.presets import FULL

__all__ = ["BASE", "KINDS", "PLANS", "WARMUP", "WITHOUT_ONEDNN", "Prepared", "prepare", "prepare_file", "timed"]

BASE = "StaticCache + sdpa"
KINDS = ("f16", "q8_0", "q4_0")
PLANS = (
    FULL,
    "vector(bits=8)",
    "vector(bits=4)",
    "kivi(bits=4, group=64, recent=128)",
    "snapkv @ tokens={budget}",
)
PLANS_OF_FILES = (*PLANS, "turboquant4", "ggml(type=q8_0)", "ggml(type=q4_0)")
WARMUP = 2
"""Tokens that each side decodes before those that count."""
_QUESTION, _TOKEN = 16, 7
_PAUSE = 0.02
_DYNAMIC, _EMPTY = "DynamicCache + sdpa", f"{FULL}, after one token"
WITHOUT_ONEDNN = ", without oneDNN"
_ALSO_WITHOUT_ONEDNN = (BASE, FULL, "vector(bits=8)", "vector(bits=4)", _EMPTY)


@dataclass(kw_only=True)
class Prepared:
    """Everything that is timed together.

    Attributes:
        sides: in the order of the table.
        peers: llama.cpp's caches among them.
        error: of each side's logits, relative to float32 weights and states: |x - reference| / |reference|. Sides after
            one token have none.
        allocated: bytes that llama.cpp logged for its caches, by side.
    """

    sides: list[Side] = field(default_factory=list)
    peers: list[LlamaCache] = field(default_factory=list)
    error: dict[str, float] = field(default_factory=dict)
    allocated: dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        """Free what torch does not."""
        for cache in self.peers:
            cache.close()


def prepare(
    dtype: torch.dtype,
    context: int,
    *,
    samples: int,
    folder: Path,
    weights: Sequence[torch.dtype],
    name: str = MODEL,
) -> Prepared:
    """Return all sides after a context, ready to be timed.

    Args:
        dtype: of the model and the caches of kvtailor and transformers.
        context: tokens that are written into the caches.
        samples: tokens that each side will decode at most.
        folder: where GGUF files are written.
        weights: dtypes of llama.cpp's matrices: all caches for `dtype`, and one for each of the others.
        name: of the model, in `hf.model.config.RANDOM_SHAPES`.
    """
    # Two models: ours has its attention switched as long as it has a cache of ours.
    model, stock = random_of(name, dtype, CPU), random_of(name, dtype, CPU)
    files = {
        each: write_gguf(stock, folder / f"{name}-{_short(each)}.gguf", each)
        for each in dict.fromkeys([dtype, *weights])
    }
    return _prepare(model, stock, context, samples=samples, file=files.pop(dtype), others=files, plans=PLANS)


def prepare_file(file: Path, context: int, *, samples: int, cache_dtype: torch.dtype) -> Prepared:
    """Return all sides of the model in a GGUF file, ready to be timed.

    Args:
        file: of the model.
        context: tokens that are written into the caches.
        samples: tokens that each side will decode at most.
        cache_dtype: of kvtailor's caches; the models of torch, and transformers' caches, are in float32.
    """
    model, stock = (load(file, dtype=torch.float32, cache_dtype=cache_dtype)[0] for _ in range(2))
    return _prepare(model, stock, context, samples=samples, file=file, others={}, plans=PLANS_OF_FILES)


@torch.no_grad()
def _prepare(
    model: Any,
    stock: Any,
    context: int,
    *,
    samples: int,
    file: Path,
    others: Mapping[torch.dtype, Path],
    plans: Sequence[str],
) -> Prepared:
    """All sides: `file` has the model for llama.cpp, and `others` have it with weights of other dtypes."""
    dtype = model.dtype
    states = model_states(model, context)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, _QUESTION), generator=generator)
    token, slots = torch.tensor([[_TOKEN]]), context + _QUESTION + 2 * samples + 16
    weighed = sum(parameter.nbytes for parameter in model.parameters())
    ready = Prepared()
    reference = _reference(stock, states, ids, token)

    def add(name: str, run: Callable[[], object], held: int | None, logits: Tensor | None, read: int) -> None:
        side = Side(name=name, run=lambda _: run(), cache_bytes=held, bytes_read=None if held is None else read + held)
        ready.sides.append(side)
        if logits is not None:
            off = (logits.flatten().double() - reference).norm() / reference.norm()
            ready.error[name] = float(off)

    def torch_side(name: str, on: Any, cache: Any, *, filled: bool) -> None:
        if filled:
            fill(cache, states)
            on(ids, **hand_cache(cache), use_cache=True, logits_to_keep=1)
        logits = on(token, **hand_cache(cache), use_cache=True).logits
        run = lambda: on(token, **hand_cache(cache), use_cache=True)  # noqa: E731
        add(name, run, bytes_of(cache), logits if filled else None, weighed)

    torch_side(BASE, stock, static_cache(stock, slots), filled=True)
    torch_side(_DYNAMIC, stock, dynamic_cache(stock), filled=True)
    for line in plans:
        plan = line.format(budget=context // 8)
        torch_side(plan, model, cache_for(model, plan), filled=True)
    torch_side(_EMPTY, model, cache_for(model, FULL), filled=False)

    if dtype == torch.bfloat16:
        # The same caches once more: only the products of the model's weights are made in another way.
        for side in [each for each in ready.sides if each.name in _ALSO_WITHOUT_ONEDNN]:
            add(side.name + WITHOUT_ONEDNN, partial(_without_onednn, side.run), side.cache_bytes, None, weighed)

    def peer_side(name: str, of: Path, kind: str, cells: int, *, filled: bool = True, flash: bool = True) -> None:
        if of not in loaded:
            loaded[of] = LlamaModel(of)
        on = loaded[of]
        cache = LlamaCache(on, kind, cells, threads=torch.get_num_threads(), batch=_QUESTION, flash=flash)
        if filled:
            cache.fill(states)
            cache.feed(ids[0])
        logits = cache.feed(token[0])
        add(name, lambda: cache.step(_TOKEN), cache.state().held_bytes, logits if filled else None, of.stat().st_size)
        ready.peers.append(cache)
        ready.allocated[name] = cache.allocated_bytes

    loaded: dict[Path, LlamaModel] = {}
    for kind in KINDS:
        peer_side(f"llama.cpp {kind}", file, kind, slots)
    peer_side("llama.cpp f16, no flash attention", file, "f16", slots, flash=False)
    peer_side("llama.cpp f16, after one token", file, "f16", samples + 16, filled=False)
    for of_file, path in others.items():
        # Weights of another dtype change the part of a token that no cache changes, so one cache shows it.
        behind = f", {_short(of_file)} weights"
        peer_side(f"llama.cpp f16{behind}", path, "f16", slots)
        peer_side(f"llama.cpp f16, after one token{behind}", path, "f16", samples + 16, filled=False)
    return ready


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_onednn(run: Callable[[int], object]) -> None:
    """One step whose products of bfloat16 are torch's own, and not those of oneDNN, which reads more slowly here."""
    # `flags` would set TensorFloat-32 too, which warns on a CPU.
    before = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)[0]
    try:
        run(0)
    finally:
        torch.backends.mkldnn.set_flags(before, _fp32_precision=None)


def _reference(model: Any, states: dict[int, tuple[Tensor, Tensor]], ids: Tensor, token: Tensor) -> Tensor:
    """Logits (V,) float64 of the token in float32, with the weights and states as they are."""
    exact = type(model)(model.config).float().eval()
    exact.load_state_dict({name: each.float() for name, each in model.state_dict().items()})
    cache = dynamic_cache(exact)
    fill(cache, {layer: (keys.float(), values.float()) for layer, (keys, values) in states.items()})
    exact(ids, **hand_cache(cache), use_cache=True, logits_to_keep=1)
    logits: Tensor = exact(token, **hand_cache(cache), use_cache=True).logits
    return logits.flatten().double()


@torch.no_grad()
def timed(ready: Prepared, rounds: int, threads: int, advance: Advance = lambda name: None) -> list[Measured]:
    """Return seconds of a decoded token of each side, with so many threads on all of them.

    Args:
        ready: what `prepare` made; every side decodes `rounds` tokens and `WARMUP` more.
        rounds: samples of each side.
        threads: of torch and of llama.cpp.
        advance: called with a side's name after each sample.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for cache in ready.peers:
        cache.use_threads(threads)
    try:
        return time_in_turns(ready.sides, rounds, warmup=WARMUP, pause=_PAUSE, advance=advance)
    finally:
        torch.set_num_threads(before)
