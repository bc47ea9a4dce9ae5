"""What kvtailor reads from the frames of those who call it: the one place where it looks at its callers.

*Why.* A cache of transformers gets keys, values and questions about its length. It is never handed token ids, the
arguments of `generate()`, nor the place where a prompt ends and a draft begins. Some of that decides what is right: a
conversation that begins otherwise than what a cache has seen must be refused, and a prompt must be compressed before
its draft is judged. No argument, hook or public state of transformers 5.17 to 5.24 brings it to a cache.

*What.* Each function here returns a value: it reads frames, and records and changes nothing. `hf.versions` lists the
functions of transformers and the names in them that are read, and `broken_assumptions` says which of them a new release
has not. Where a frame is not there, or has another form:

- `read_ids` (`forward` of a model; at its mask): no ids of the forward are known;
- `assisted_loop` (`_assisted_decoding`; before its first forward): plans for which it matters are refused;
- `read_asker` (who asks for a length: `_prefill`, who computes positions of images, who would drop a cache of long
  rope): the length alone is told, and what `generate()` was given is not compared with what was seen;
- `is_generating` (`generate`): positions that were not computed with this cache's shift count as the caller's own;
- `givers` (`forward` of a model, `generate`'s loop; at prompts): a cache that never comes to the layers is not noticed;
- `calling_module` (any module's): the error says "its attention".

*Where.* At the mask of a forward, at prompts, where an error is told, and in `get_seq_length`. That getter does more
than tell a number for three callers, each of which touches nothing else of a cache before it computes: `_prefill` is
refused another conversation before any forward begins, who computes positions of images finds this cache's shift on the
model (`hf.images`), and who would drop the cache of a model with long rope is made to feed the whole text
(`hf.model.rope_border`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import utils

from kvtailor.hf.versions import (
    ASSISTED_LOOP,
    FED,
    POSITIONS_IN_FORWARD,
    POSITIONS_IN_GENERATE,
    PREFILL,
    PREPARE,
)

__all__ = [
    "GenerateCall",
    "Positioning",
    "Preparing",
    "assisted_loop",
    "calling_module",
    "givers",
    "is_generating",
    "read_asker",
    "read_ids",
]

# What stands between a call and the layers, beside forwards: wrappers of these packages.
_BETWEEN = ("torch", "transformers", "accelerate", "peft", "kvtailor.hf", "contextlib")
# Loops of transformers, which feed what they make.
_GENERATES = "transformers.generation"
# What torch.compile and caches put between a method of a cache and who called it.
_WRAPS = ("torch._dynamo", "kvtailor.hf.graphs.replayed_cache", "kvtailor.hf.layers.run_eagerly")
# A recorded step is given a stand-in of the cache, on purpose.
_RECORDS = "kvtailor.hf.graphs.replay"


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """What transformers' `generate()` was given, read before its first forward.

    Attributes:
        ids: (b, n) token ids; None where it was given embeddings.
        tokens: n, of the ids or the embeddings.
        columns: of the 2-D attention mask; n where there is none.
        real: (b, columns) bool of that mask, False for padding; None: nothing is padding.
        uses_cache: it will feed only what the cache has not seen.
        most: columns that the cache will have seen when it ends, at most; None where that is not known.
        chunk: feed so many tokens of the prompt at a time; None: all at once.
        heals: it has written the prompt's last token anew, whatever its mask was made for.
    """

    ids: Tensor | None
    tokens: int
    columns: int
    real: Tensor | None
    uses_cache: bool = True
    most: int | None = None
    chunk: int | None = None
    heals: bool = False


@dataclass(frozen=True, kw_only=True)
class Positioning:
    """Who asks for the length of a cache in order to compute the positions of images.

    Attributes:
        in_forward: in a forward, for its own tokens; else in `generate()`, for the whole conversation.
        rows: of the batch; None where it is not known.
        types: (b, n) int64 which tokens stand for images (above 0); None: not given.
    """

    in_forward: bool
    rows: int | None
    types: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """A model's own function that prepares inputs, and may drop a cache by its length.

    Attributes:
        columns: of the whole text; None where it shows no ids.
        more: its further arguments, by name, the very dict that it goes on with.
    """

    columns: int | None
    more: dict[str, Any]

    @property
    def fed(self) -> int | None:
        """How many tokens it will feed; None: the whole text, or not known."""
        return self.more.get(FED)


def read_ids(length: int) -> Tensor | None:
    """Return the ids (b, t) of the forward that asks a cache for its mask, as the outermost forward was given them.

    Args:
        length: t, new tokens.
    """
    # A decoded token pays for each call of a function.
    frame: FrameType | None = sys._getframe(1)
    ids: Tensor | None = None
    while frame is not None:
        module: str = frame.f_globals.get("__name__") or ""
        if module.startswith(_GENERATES) or not module.startswith(_BETWEEN):
            break
        if frame.f_code.co_name == "forward":
            given = frame.f_locals.get("input_ids")
            ids = given if isinstance(given, Tensor) and given.shape[1:] == (length,) else ids
        frame = frame.f_back
    return ids


def read_asker() -> GenerateCall | Positioning | Preparing | None:
    """Return who calls the function that calls this one, a cache's length; None where the number is all he needs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_WRAPS):
        frame = frame.f_back
    if frame is None:
        return None
    name, of_generate = frame.f_code.co_name, frame.f_globals.get("__name__") == utils.__name__
    if name == PREFILL:
        return _generate_call(frame.f_locals) if of_generate else None
    if name == PREPARE:
        # transformers' general form computes positions of the length.
        if of_generate:
            return None
        ids, more = frame.f_locals.get("input_ids"), frame.f_locals.get("kwargs")
        columns = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else None
        return Preparing(columns=columns, more=more if isinstance(more, dict) else {})
    if name == POSITIONS_IN_FORWARD:
        given = frame.f_locals
        types = given.get("mm_token_type_ids")
        return Positioning(in_forward=True, rows=_rows(given.get("inputs_embeds")), types=types)
    if name == POSITIONS_IN_GENERATE:
        found: Mapping[str, Any] = frame.f_locals.get("model_kwargs") or {}
        ids = found["input_ids"] if "input_ids" in found else frame.f_locals.get("inputs_tensor")
        return Positioning(in_forward=False, rows=_rows(ids), types=found.get("mm_token_type_ids"))
    return None


def _generate_call(given: Mapping[str, Any]) -> GenerateCall | None:
    """What the frame of `_prefill` shows. Of a transformers in which it has another form nothing is read."""
    ids, more = given.get("input_ids"), given.get("model_kwargs")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not isinstance(more, dict):
        return None
    embedded, mask = more.get("inputs_embeds"), more.get("attention_mask")
    tokens = ids.shape[1] if embedded is None else embedded.shape[1]
    # From 5.23 on a mask that hides nothing is dropped, and its length kept.
    config = given.get("generation_config")
    columns = getattr(config, "_mask_length", tokens) if mask is None else mask.shape[-1]
    longest = getattr(config, "max_length", None)
    return GenerateCall(
        ids=ids if embedded is None else None,
        tokens=tokens,
        columns=int(columns),
        real=None if mask is None else mask.to(torch.bool),
        uses_cache=more.get("use_cache") is not False,
        # The last token is never fed. Of embeddings the longest text does not count the prompt.
        most=None if longest is None else int(columns) + longest - ids.shape[1] - 1,
        chunk=getattr(config, "prefill_chunk_size", None),
        heals=bool(getattr(config, "token_healing", False)),
    )


def assisted_loop() -> Mapping[str, Any] | None:
    """Return the facts of transformers' assisted decoding that now runs in this thread, by name; None outside of it."""
    frame = _running(ASSISTED_LOOP)
    return None if frame is None else dict(frame.f_locals)


def is_generating() -> bool:
    """Return whether transformers' generate() now runs in this thread."""
    return _running("generate") is not None


def _running(function: str) -> FrameType | None:
    """The innermost frame of a function of transformers' generation in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == utils.__name__:
            return frame
        frame = frame.f_back
    return None


def givers() -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of what hands on a cache, from the inside: forwards of models, and `generate`'s loop."""
    # Of a generator, the frame above is who goes through it.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module == utils.__name__:
            more = frame.f_locals.get("model_kwargs")
            if isinstance(more, dict):
                yield more
            return
        if module.startswith((_RECORDS, _GENERATES)):
            return
        if frame.f_code.co_name == "forward":
            given = frame.f_locals
            if isinstance(given.get("self"), PreTrainedModel):
                more = given.get("kwargs")
                yield {**more, **given} if isinstance(more, dict) else given
        elif not module.startswith(_BETWEEN):
            return
        frame = frame.f_back


def calling_module() -> str:
    """Return the class of the module in whose forward a cache is asked, for an error."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return "its attention"


def _rows(given: Any) -> int | None:
    return given.shape[0] if isinstance(given, Tensor) else None
