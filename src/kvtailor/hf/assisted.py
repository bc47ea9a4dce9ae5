"""Where the prompt ends under transformers' prompt lookup and assisted decoding.

Their first forward brings the prompt and the first draft at once, and nothing that reaches a cache tells where one ends
and the other begins. A plan needs that place: the prompt is compressed, and a drafted token is judged on the compressed
prompt, as it would be in plain decoding. The loop's own frame has it (`hf.callers`). Where it cannot be read, plans for
which it matters are refused. docs/decisions/0013-assisted-decoding.md has the alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.hf.callers import assisted_loop

__all__ = ["ids_of_caller", "longest_of_caller", "prompt_of_caller", "refusal"]


def prompt_of_caller() -> int | None:
    """Columns of the ids that transformers' assisted decoding, now running in this thread, has so far; None outside it.

    Asked before its first forward, these are the prompt.
    """
    found = assisted_loop()
    if found is None:
        return None
    ids = found.get("input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else 0


def ids_of_caller() -> tuple[Tensor, Tensor | None] | None:
    """Those ids (b, n), and (b, n) bool, False for padding (None: no padding); None outside of assisted decoding."""
    found = assisted_loop()
    if found is None or not isinstance(found.get("input_ids"), Tensor):
        return None
    more = found.get("model_kwargs")
    mask = more.get("attention_mask") if isinstance(more, dict) else None
    ids = found["input_ids"]
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return ids, None
    return ids, mask.to(torch.bool)


def longest_of_caller() -> int | None:
    """Columns that transformers' assisted decoding will have fed when it ends, at most; None outside it."""
    longest = getattr((assisted_loop() or {}).get("generation_config"), "max_length", None)
    # The last token is never fed.
    return None if longest is None else int(longest) - 1


def refusal(plan: object, *, layers_wait: bool, encodes_groups: bool, seen: int, prompt: int) -> str | None:
    """Why transformers' assisted decoding cannot run on a cache, a sentence; None where it can.

    Args:
        plan: of the cache.
        layers_wait: layers share a budget, so that the first is only cut when the last has read the prompt.
        encodes_groups: the codec encodes several layers at once.
        seen: tokens that the cache has seen.
        prompt: see `prompt_of_caller`.
    """
    what = "transformers' prompt lookup and assisted decoding"
    if seen:
        return (
            f"{what} feed the whole prompt again, whatever a cache has seen, and this one has seen {seen} tokens. "
            "Start them with an empty cache, or draft with kvtailor.generate"
        )
    if not prompt:
        return (
            f"{what} show no token ids here (a prompt of embeddings alone, or another version), so it is not known "
            "where the prompt ends: give input_ids, or draft with kvtailor.generate"
        )
    why = ""
    if layers_wait:
        why = "layers share a budget, which is only known once the last layer has read the prompt"
    elif encodes_groups:
        why = "several layers are encoded at once, when the last of them has read the prompt"
    if not why:
        return None
    return (
        f"{what} feed the prompt and the first draft in one forward, and under {plan} {why}: the draft would be judged "
        "on another cache than in plain decoding. Draft with kvtailor.generate, which reads the prompt first"
    )
