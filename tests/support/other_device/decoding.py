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
from kvtailor.hf.versions import hand_cache
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
        prefill: host synchronisations of the prompt.
        by_token: those of each decoded token.
    """

    tokens: Tensor
    logits: Tensor
    held: dict[int, Tensor]
    ledger: Ledger
    prefill: Syncs
    by_token: list[Syncs]


@torch.no_grad()
def decode(
    model: nn.Module, cache: KvCache, mask: Tensor, steps: int, *, masked: bool = True
) -> tuple[Tensor, Tensor, list[Syncs]]:
    """Greedy tokens (b, steps) of a cache that goes on, their logits, and the host synchronisations of each.

    Args:
        model, cache: on one device.
        mask: (b, n) of what the cache has seen.
        steps: tokens to decode.
        masked: whether the model is given the mask, as `generate` always does.
    """
    device = mask.device
    token, logits, by_token = prompts((1,) * len(mask), state=11)[0].to(device), [], []
    tokens = [token[:, :0]]
    for _ in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = mask.sum(-1, keepdim=True) - 1
        options = {"attention_mask": mask} if masked else {}
        with count_syncs() as syncs:
            logits.append(model(token, position_ids=positions, **hand_cache(cache), **options).logits)
        by_token.append(syncs)
        token = logits[-1].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, 1), torch.cat(logits, 1) if logits else torch.empty(len(mask), 0), by_token


def decoded(
    model: nn.Module,
    plan: str,
    lengths: tuple[int, ...],
    *,
    steps: int = 8,
    chunk: int | None = None,
    save: Path | None = None,
    masked: bool = True,
) -> Decoded:
    """Reads a left-padded random prompt under a plan on the model's own device, then decodes.

    Args:
        model: token ids go to the device of its embeddings.
        plan: any plan.
        lengths: tokens of each row.
        steps: tokens to decode.
        chunk: of the prefill, in tokens.
        save: where to save the cache as it is after the prompt.
        masked: whether the model is given a mask; without one there must be no padding.
    """
    device = input_device(model)
    ids, mask = (each.to(device) for each in prompts(lengths))
    with count_syncs() as prefill:
        cache = kvtailor.prefill(model, ids, mask if masked else None, plan=plan, chunk=chunk)
    if save is not None:
        cache.save(save)
    tokens, logits, by_token = decode(model, cache, mask, steps, masked=masked)
    return Decoded(
        tokens=tokens.cpu(),
        logits=logits.cpu(),
        held=held_columns(cache),
        ledger=cache.ledger(),
        prefill=prefill,
        by_token=by_token,
    )
