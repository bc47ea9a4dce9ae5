"""The first logits behind a prompt: where they are NaN, whatever text follows means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvtailor.errors import KvtailorError
from kvtailor.hf.model.devices import local_part

__all__ = ["check_logits", "not_a_number", "with_first_checked"]


def _broken(model: Any) -> list[str]:
    """The names of weights in which NaN or infinity stands."""
    return [
        name
        for name, each in model.named_parameters()
        if each.is_floating_point() and not bool(local_part(each).isfinite().all())
    ]


def not_a_number(model: Any, what: str) -> str:
    """Return the sentence on a model whose own logits are NaN.

    Args:
        model: the model.
        what: whose logits they are, such as "of a text".
    """
    return _told(model, what, _broken(model))


def _told(model: Any, what: str, broken: Sequence[str]) -> str:
    named = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
    dtype = str(model.dtype).removeprefix("torch.")
    why = (
        f"NaN or infinity stands in its weights ({named}): load them anew, from where they were whole"
        if broken
        else f"its weights are numbers, so {dtype} is too narrow for what it computes: ask for another dtype"
    )
    return f"the model's own logits {what} are NaN, whatever cache it has: {why}"


def check_logits(model: Any, logits: Tensor, *, new: bool) -> None:
    """Raise where the first logits (b, V) behind a prompt are NaN.

    Args:
        model: the model.
        logits: of the first new token.
        new: the cache had seen nothing but this prompt, which is read exactly whatever the plan.

    Raises:
        KvtailorError: any of them is NaN.
    """
    if bool(logits.isnan().any()):
        broken = _broken(model)
        if new or broken:
            raise KvtailorError(_told(model, "after this prompt", broken))
        raise KvtailorError(
            "the logits after this prompt are NaN, on a cache that had seen other tokens: what it holds is no number, "
            "or the model's dtype is too narrow for what it computes; go on with a new cache, or ask for another dtype"
        )


class _FirstLogits(LogitsProcessor):
    """Looks at the logits of the first new token alone: `generate` waits for each token's device anyway."""

    def __init__(self, model: Any, new: bool):
        self.model, self.new, self.looked = model, new, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.looked:
            self.looked = True
            check_logits(self.model, scores, new=self.new)
        return scores


def with_first_checked(model: Any, given: Any, *, new: bool) -> LogitsProcessorList:
    """Return the `logits_processor` of a call of `generate`, which also raises where the first logits are NaN.

    Args:
        model: the model.
        given: what the call has as `logits_processor`, or None.
        new: see `check_logits`.
    """
    return LogitsProcessorList([_FirstLogits(model, new), *(given or ())])
