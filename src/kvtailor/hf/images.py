"""Images in a prompt: the tokens that stand for them, and the shift of positions that they leave behind (M-RoPE).

Without the pixels of an image, video or sound a model would read the tokens as text, without a word.

The shift is kept by transformers on the model and not in the cache. An image of 6 tokens may take 3 positions, so the
text behind it stands at `column + rope_deltas`. transformers has one such tensor for each model: that of the prompt it
read last. A second conversation, or another process, would read its next turn at wrong positions. So a cache remembers
its own, and puts it on the model when transformers asks the cache how long it is in order to compute positions. That is
the one place where kvtailor writes to a model's state, and it is a value that every prompt replaces.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse, UnknownName
from kvtailor.hf.callers import Positioning, is_generating
from kvtailor.hf.versions import CACHE_ARGUMENTS

__all__ = ["RopeDeltas", "check_inputs", "check_text", "placeholders"]

_MEDIA = ("image", "video", "audio")


def placeholders(config: Any) -> dict[str, int]:
    """By kind ("image", "video", "audio"), the token id that a model's processor puts where its features go."""
    found = {}
    for kind in _MEDIA:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                found[kind] = token
    return found


def check_text(model: Any, ids: Tensor, what: str, instead: str) -> None:
    """Raise where token ids have placeholders, and nothing of what they stand for came with them.

    Args:
        model: of transformers.
        ids: (b, n) token ids.
        what: takes them, in words.
        instead: what to do, in words.
    """
    for kind, token in placeholders(model.config).items():
        count = int((ids == token).sum())
        if count:
            raise CacheMisuse(
                f"{what} got {count} {kind} tokens (id {token}) and not the {kind} that they stand for, so the model "
                f"would read them as text: {instead}"
            )


def check_inputs(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise where one of these inputs of a processor is none that the model's forward takes."""
    known = list(inspect.signature(model.forward).parameters)
    for name in inputs:
        if name in CACHE_ARGUMENTS:
            raise CacheMisuse(
                f"got a cache as {name} among the inputs: kvtailor.prefill takes it as cache=, in place of the plan"
            )
        if name not in known or name in ("self", "kwargs"):
            raise UnknownName(f"input of {type(model).__name__}", name, known)


class RopeDeltas:
    """What one cache knows of the positions of its rows.

    Args:
        model: of transformers; None: one without such a state.
        turned_by: the plan, where it turns queries or keys by their columns, which images would not stand for.

    Attributes:
        values: (b, 1) int64, to be added to the number of real tokens before a text token; None: 0 in all rows.
    """

    def __init__(self, model: Any = None, turned_by: str | None = None):
        self._turned_by = turned_by
        # transformers has it on the part that joins images and text, wherever that is; most models have none.
        parts = () if model is None else model.modules()
        owner = next((part for part in parts if "rope_deltas" in vars(part)), None)
        self._owner: weakref.ref[Any] | None = None if owner is None else weakref.ref(owner)
        self.reset()

    @property
    def kept(self) -> bool:
        """Whether the model has such a state at all."""
        return self._owner is not None

    @property
    def known(self) -> bool:
        """Whether `values` are those behind all that was seen, and not unknown since positions came by hand."""
        return not self._by_hand

    def reset(self) -> None:
        """Forget what was seen."""
        self.values: Tensor | None = None
        self._asked = self._by_hand = False

    def put_for(self, asker: Positioning, seen: int) -> None:
        """Put this cache's shift on the model, where positions are about to be computed.

        Args:
            asker: who computes them.
            seen: tokens that the cache has seen.
        """
        if self._owner is None:
            return
        types = asker.types
        if asker.in_forward:
            if types is not None and bool(types.any()):
                self._check_turning()
                if seen:
                    self._warn_of_images()
        else:
            images = types is not None and bool(types[:, seen:].any())
            if images:
                self._check_turning()
            if images or (types is not None and self._by_hand):
                # New images: without a shift, transformers computes the positions of the whole conversation.
                self._put(None)
                return
        self.put(asker.rows if seen else None)

    def put(self, rows: int | None = None) -> None:
        """Put this cache's shift on the model, for so many rows; None: those of the cache."""
        values = self.values
        if self._by_hand:
            self._warn_of_positions()
        if values is not None and rows and values.shape[0] > rows and values.shape[0] % rows == 0:
            # Before beams are expanded: rows of the cache that belong together have one shift.
            values = values[:: values.shape[0] // rows]
        self._put(values)

    def forward_began(self, rows: int, seen: int, new: int) -> None:
        """Remember the shift behind a forward that has begun to change the cache.

        Args:
            rows: of the cache.
            seen: tokens before the new ones.
            new: tokens of the forward.
        """
        owner = None if self._owner is None else self._owner()
        if owner is None:
            return
        if not self._asked:
            # A new token is text, and generate() counts on by itself. Other tokens came with the caller's positions.
            self._by_hand = self._by_hand or not seen or (new > 1 and not is_generating())
            return
        found, self._asked, self._by_hand = owner.rope_deltas, False, False
        if found is not None and found.shape[0] != rows and rows % found.shape[0] == 0:
            found = found.repeat_interleave(rows // found.shape[0], 0)
        self.values = found

    def forward_never_was(self) -> None:
        """Take note that the forward for which positions were computed was refused."""
        self._asked = False

    def copy_from(self, other: RopeDeltas) -> None:
        """Know what another cache of the same model knows, which has read the same text."""
        self.values, self._by_hand = other.values, other._by_hand

    def select_rows(self, index: Tensor) -> None:
        """Become the shift of a batch made of the rows `index` of this one."""
        if self.values is not None:
            self.values = self.values[index.to(self.values.device)]

    def shift(self, positions: Tensor) -> Tensor:
        """Return positions (b, t) of text tokens, counted without images, as the model counts them."""
        return positions if self.values is None else positions + self.values.to(positions.device)

    def restore(self, values: Tensor | None, *, rows: int, known: bool) -> None:
        """Become what a saved cache of so many rows has, (b, 1) int64, or None; `known`: see `known`."""
        if values is not None and (values.dtype != torch.int64 or tuple(values.shape) != (rows, 1)):
            raise ValueError(f"its shift of positions is {values.dtype} of shape {tuple(values.shape)}")
        self.values, self._by_hand = values, not known

    def _put(self, values: Tensor | None) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.rope_deltas, self._asked = values, True

    def _check_turning(self) -> None:
        if self._turned_by is not None:
            raise CacheMisuse(
                f"the plan {self._turned_by} turns queries or keys by the number of tokens before them, and an image "
                "token of this model stands at a position of three axes (M-RoPE): choose a plan that turns nothing, "
                "such as snapkv or kivi4"
            )

    def _warn_of_images(self) -> None:
        warnings.warn(
            "this forward brings images to a used cache without position_ids, and transformers counts their tokens as "
            "text, which generate() on the whole conversation does not: pass position_ids, as get_rope_index of the "
            "model makes them of the whole conversation, or call generate()",
            stacklevel=3,
        )

    def _warn_of_positions(self) -> None:
        warnings.warn(
            "tokens of this cache came with position_ids of the caller's, so by how much their images shift what "
            "follows is not known, and they are counted as text: if there were images, pass position_ids again, or "
            "the token types and grids of the whole conversation to generate()",
            stacklevel=3,
        )
        self._by_hand = False
