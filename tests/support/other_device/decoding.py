"""A prompt and some tokens on any device: what a test compares between devices, copied to the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tests.support.other_device.syncs import Syncs, count_syncs
from tests.support.seam.zoo import held_columns, prompts
from torch import Tensor, nn

import kvtailor
from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.devices import input_device
from kvtailor.ledger import Ledger

__all__ = ["Decoded", "decode", "decoded"]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What came of it.

    Attributes:
        tokens: (b, t) greedy ones.
        logits: (b, t, v).
        held: for each compressed layer (b, h, seen), which columns it holds.
        ledger: bytes at the end.
        prefill, decoding: host synchronisations.
    """

    tokens: Tensor
    logits: Tensor
    held: dict[int, Tensor]
    ledger: Ledger
    prefill: Syncs
    decoding: Syncs


@torch.no_grad()
def decode(
    model: nn.Module, cache: KvCache, mask: Tensor, steps: int, state: int = 11
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy tokens (b, steps) of a cache that goes on, their logits, and the mask as it is then.

    Args:
        model, cache: on one device.
        mask: (b, n) of what the cache has seen.
        steps: tokens to decode.
        state: of the random first token.
    """
    device = mask.device
    token, tokens, logits = prompts((1,) * len(mask), state=state)[0].to(device), [], []
    for _ in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = mask.sum(-1, keepdim=True) - 1
        logits.append(model(token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits)
        token = logits[-1].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, 1), torch.cat(logits, 1), mask


def decoded(
    model: nn.Module, plan: str, lengths: tuple[int, ...], *, steps: int = 8, chunk: int | None = None,
    save: Path | None = None,
) -> Decoded:  # fmt: skip
    """Reads a left-padded random prompt under a plan on the model's own device, then decodes.

    Args:
        model: token ids go to the device of its embeddings.
        plan: any plan.
        lengths: tokens of each row.
        steps: tokens to decode.
        chunk: of the prefill, in tokens.
        save: where to save the cache as it is after the prompt.
    """
    device = input_device(model)
    ids, mask = (each.to(device) for each in prompts(lengths))
    # One row without padding has no mask, as `generate` gives none.
    with count_syncs() as prefill:
        cache = kvtailor.prefill(model, plan, ids, mask if len(lengths) > 1 else None, chunk=chunk)
    if save is not None:
        cache.save(save)
    with count_syncs() as decoding:
        tokens, logits, _ = decode(model, cache, mask, steps)
    return Decoded(
        tokens=tokens.cpu(), logits=logits.cpu(), held=held_columns(cache), ledger=cache.ledger(), prefill=prefill,
        decoding=decoding,
    )  # fmt: skip
