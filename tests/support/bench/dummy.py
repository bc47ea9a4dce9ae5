"""A model whose right answers are known, with caches that tell the truth and caches that do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.hf.versions import find_cache, hand_cache
from kvtailor.ledger import Entry, Ledger
from kvtailor.plan import Plan

VOCABULARY = 256


def contestant(label: str) -> Contestant:
    plan = Plan() if label == "full" else None
    return Contestant(label=label, text=label, hash=f"hash of {label}", plan=plan)


FULL = contestant("full")


@dataclass
class DummyCache:
    """Remembers the last `keep` tokens for real; `claims` is what it says it holds."""

    keep: int | None = None
    claims: int | None = None
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    seen: int = 0

    def feed(self, ids: Tensor) -> None:
        self.seen += ids.numel()
        self.memory = torch.cat([self.memory, ids])

    def cut(self) -> None:
        if self.keep is not None:
            self.memory = self.memory[-self.keep :].clone()

    def held(self) -> Tensor:
        count = self.memory.numel() if self.claims is None else min(self.claims, self.seen)
        return torch.full((1, 1, 1), count)

    def ledger(self) -> Ledger:
        kept = torch.empty(int(self.held()), dtype=torch.int64)
        entry = Entry(layer=0, stage="encode", tensors={"memory": kept}, closed_form=8 * kept.numel())
        return Ledger.of([entry], layers=1, full=8 * self.seen, seen=self.seen, held=float(kept.numel()))


class UniformModel:
    """Every token is as likely as any other: NLL is ln V."""

    config = SimpleNamespace(max_position_embeddings=None, vocab_size=VOCABULARY)

    def logits(self, cache: DummyCache, ids: Tensor) -> Tensor:
        for token in ids:
            cache.feed(token[None])
        return torch.zeros(ids.numel(), VOCABULARY)

    def __call__(
        self, *, input_ids: Tensor, logits_to_keep: int = 0, use_cache: bool, **handed: DummyCache
    ) -> SimpleNamespace:
        cache = find_cache(handed) or DummyCache()
        logits = self.logits(cache, input_ids[0])
        cache.cut()
        return SimpleNamespace(logits=logits[None, -logits_to_keep:], **hand_cache(cache))


class CountingModel(UniformModel):
    """The probability of a token is its count among the remembered ones, smoothed by one: what is dropped shows."""

    def logits(self, cache: DummyCache, ids: Tensor) -> Tensor:
        rows = []
        for token in ids:
            cache.feed(token[None])
            rows.append((torch.bincount(cache.memory, minlength=VOCABULARY) + 1.0).log())
        return torch.stack(rows)


class RecallModel(UniformModel):
    """Continues as the remembered text did after its longest earlier match of the last characters."""

    def logits(self, cache: DummyCache, ids: Tensor) -> Tensor:
        rows = torch.zeros(ids.numel(), VOCABULARY)
        for i, token in enumerate(ids):
            cache.feed(token[None])
            if i == ids.numel() - 1:
                text = bytes(cache.memory.tolist())
                for size in range(min(24, len(text) - 1), 0, -1):
                    at = text[:-1].find(text[-size:])
                    if at >= 0:
                        rows[i, text[at + size]] = 20.0
                        break
        return rows


class DummyTokenizer:
    """One token for each byte."""

    is_fast = True
    bos_token_id = eos_token_id = pad_token_id = None

    def __call__(self, text: str, **options: object) -> dict[str, list]:
        found: dict[str, list] = {"input_ids": list(text.encode())}
        if options.get("return_offsets_mapping"):
            found["offset_mapping"] = [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()]
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def subject(model: UniformModel, **caches: DummyCache) -> Subject:
    """A subject whose plans 'full' and the names in `caches` (with spaces for underscores) make such caches."""

    def make(_: UniformModel, plan: str) -> DummyCache:
        if plan == "full":
            return DummyCache()
        like = caches[plan.replace(" ", "_")]
        return DummyCache(keep=like.keep, claims=like.claims)

    return Subject(name="dummy", model=model, tokenizer=DummyTokenizer(), make_cache=make)
