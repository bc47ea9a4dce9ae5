"""Loss of one trained model on the same tokens, with llama.cpp's caches and with kvtailor's.

The model and its tokens are the same on both sides: its weights in float32, here and in a GGUF file. For each window of
a text the context is read, and the continuation is scored on what the cache holds. What differs is the cache, and when
it rounds:

- kvtailor reads a prompt in full precision, encodes it once, and keeps the newest tokens as they are until a block is
  full. So a continuation of up to a block (128 tokens for `vector`) is not rounded for itself.
- llama.cpp writes every token in the type of its cache, and reads it from there: within the prompt too, and each
  layer's keys and values come from states that the rounding of the layers below has already changed.

So a quantised cache of llama.cpp is measured in four ways: as it runs; without its rotation; with a prompt that was
read through its `f32` cache and rounded once behind that; and so that only the prompt is rounded, which is what
kvtailor does. For the last, an `f16` cache gets the numbers that the codes stand for, and takes the continuation. These
tell the codes from the way in which they are used.

Losses are compared in pairs, window by window: llama.cpp's types with its own `f16`, kvtailor's plans with `full`.
Intervals are those of `mean_difference`, where windows of one document are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.llama_runner import LlamaCache, LlamaModel
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.texts import read_text
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity, Window, score_window
from kvtailor.errors import KvtailorError
from kvtailor.presets import FULL

__all__ = [
    "OWN_BASE",
    "PLANS",
    "QUANTISED",
    "Losses",
    "agreement",
    "compared_losses",
    "loss_behind",
    "losses",
    "windows_of",
]

OWN_BASE = "llama.cpp f16"
QUANTISED = ("q8_0", "q4_0")
PLANS = (
    FULL,
    "vector(bits=8)",
    "vector(bits=4)",
    "hadamard(of=vector(bits=4))",
    "kivi(bits=4, group=64, recent=128)",
    "snapkv @ keep=0.125",
)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What one side loses.

    Attributes:
        name: of the side.
        base: the side that it is compared with.
        nll: nats a target token, of each window.
        token_bytes: bytes of the cache behind the context, over the tokens of the context.
    """

    name: str
    base: str
    nll: tuple[float, ...]
    token_bytes: float


def windows_of(subject: Subject, files: Sequence[Path], *, context: int, continuation: int, each: int) -> list[Window]:
    """Return windows of some texts, evenly spread over each, with the number of the text as their document.

    Raises:
        KvtailorError: a text cannot be read, or is too short for one window.
    """
    found = []
    for document, file in enumerate(files):
        task = Perplexity(
            text=read_text(file), source=file.name, context=context, continuation=continuation, windows=each
        )
        found += [replace(window, document=document) for window in task.cut(subject)]
    return found


@torch.no_grad()
def agreement(subject: Subject, model: LlamaModel, ids: Tensor) -> dict[str, float]:
    """Return how far llama.cpp's log-probabilities of tokens (n,) are from those of transformers, by its cache.

    Without flash attention an `f32` cache is read in float32, and only the order of sums differs. With it llama.cpp
    rounds keys and values to float16 whatever the cache holds.

    Returns:
        by cache, the largest difference of a token's own log-probability.
    """
    expected = _of_targets(subject.model(ids[None].to(subject.device)).logits[0], ids)
    found = {}
    for kind, flash in (("f32", False), ("f32", True), ("f16", False), ("f16", True)):
        cache = LlamaCache(model, kind, ids.numel(), threads=torch.get_num_threads(), flash=flash)
        scores = _of_targets(cache.feed(ids, logits="all"), ids)
        cache.close()
        found[f"{kind}, flash attention {'on' if flash else 'off'}"] = float((scores - expected).abs().max())
    return found


def _of_targets(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability (n - 1,) of each token but the first."""
    return logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def loss_behind(cache: LlamaCache, window: Window, logits: Tensor) -> float:
    """Return the mean nats of a window's targets, of which the context's last logits (1, V) give the first."""
    rows = torch.cat([logits, cache.feed(window.targets[:-1], logits="all")]).log_softmax(-1)
    return -float(rows.gather(1, window.targets[:, None]).mean())


def losses(
    subject: Subject,
    windows: Sequence[Window],
    folder: Path,
    *,
    plans: Sequence[str] = PLANS,
    advance: Callable[[str], None] = lambda name: None,
) -> Iterator[Losses]:
    """Yield the losses of each side, llama.cpp's first.

    Args:
        subject: a Llama in float32.
        windows: of the texts.
        folder: where the GGUF file is written.
        plans: of kvtailor, `full` among them.
        advance: called with a side's name after each window.

    Raises:
        KvtailorError: there is no window, or the model is not in float32.
    """
    if not windows or subject.dtype != torch.float32:
        raise KvtailorError(f"asked for losses on {len(windows)} windows in {subject.dtype}: give some, in float32")
    model = LlamaModel(write_gguf(subject.model, folder / f"{subject.name}.gguf", torch.float32))
    cells = windows[0].context.numel() + windows[0].targets.numel()
    config = subject.model.config

    def cache_of(kind: str, *, rotation: bool = True) -> LlamaCache:
        return LlamaCache(model, kind, cells, threads=torch.get_num_threads(), rotation=rotation)

    def side(
        name: str, cache: LlamaCache, prompt: LlamaCache | None = None, continuation: LlamaCache | None = None
    ) -> Losses:
        """Losses where the prompt is read through one cache, held in a second, and continued in a third."""
        nll, held = [], 0
        for window in windows:
            reads, takes = prompt or cache, continuation or cache
            reads.clear()
            logits = reads.feed(window.context)
            state = reads.state()
            if prompt is not None:
                state = cache.converted(state, config.head_dim)
                takes.load(state if continuation is None else cache.restored(state, config.head_dim, takes.kind))
            held = max(held, state.held_bytes)
            nll.append(loss_behind(takes, window, logits))
            advance(name)
        for each in (cache, prompt, continuation):
            if each is not None:
                each.close()
        return Losses(name=name, base=OWN_BASE, nll=tuple(nll), token_bytes=held / windows[0].context.numel())

    yield side(OWN_BASE, cache_of("f16"))
    for kind in QUANTISED:
        yield side(f"llama.cpp {kind}", cache_of(kind))
        yield side(f"llama.cpp {kind}, no rotation", cache_of(kind, rotation=False))
        yield side(f"llama.cpp {kind}, prompt read exactly", cache_of(kind), cache_of("f32"))
        yield side(f"llama.cpp {kind}, of the prompt alone", cache_of(kind), cache_of("f32"), cache_of("f16"))
    for plan in plans:
        contestant = Contestant.of(plan)
        scored = []
        for window in windows:
            scored.append(score_window(subject, contestant, window.context, window.targets))
            advance(plan)
        yield Losses(
            name=plan,
            base=FULL,
            nll=tuple(-float(scores.mean()) for scores, _ in scored),
            token_bytes=max(weight["bytes_held"] for _, weight in scored) / windows[0].context.numel(),
        )


def compared_losses(found: Mapping[str, Losses], windows: Sequence[Window]) -> dict[str, Estimate]:
    """Return the mean difference of each side to its base, with its interval; bases are left out."""
    documents = [float(window.document) for window in windows if window.document is not None]
    return {
        name: mean_difference(each.nll, found[each.base].nll, documents=documents)
        for name, each in found.items()
        if name != each.base
    }
