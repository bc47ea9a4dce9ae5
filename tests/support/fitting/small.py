"""A tiny random model with pieces of random tokens, for searches that take seconds."""

from __future__ import annotations

import torch
from tests.support.seam.zoo import VOCABULARY, build

from kvtailor.bench.subject import Subject
from kvtailor.fitting.pieces import TEXT, Piece

CONTEXT = 96


def subject(layers: int = 3, matters: int | None = None) -> Subject:
    """A sharpened random Llama; with `matters`, that of the others hardly reaches the output."""
    model = build("llama", layers=layers)
    if matters is not None:
        with torch.no_grad():
            for number, layer in enumerate(model.model.layers):
                if number != matters:
                    layer.self_attn.o_proj.weight.mul_(0.003)
    return Subject(name="tiny", model=model)


def pieces(texts: int, documents: int = 0, *, context: int = CONTEXT, targets: int = 12, state: int = 0) -> list[Piece]:
    """So many pieces of text, then so many with an answer; the tokens are random."""
    generator = torch.Generator().manual_seed(state)

    def made(group: str, length: int) -> Piece:
        ids = torch.randint(2, VOCABULARY, (context + length,), generator=generator)
        return Piece(context=ids[:context], targets=ids[context:], group=group, source=group, text="")

    return [made(TEXT, targets) for _ in range(texts)] + [made("needle", 3) for _ in range(documents)]
