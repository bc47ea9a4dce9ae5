"""The lazy mask: what transformers would have built as a (b, 1, t, n) tensor, kept as a rule and evaluated where it is
needed.

The model builds one for each forward and layer type and hands it to every layer. A compressed layer evaluates it at the
columns that it still holds, so each row, layer and head may hold other tokens. A layer of the model's own kind takes
the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.handed import check_fed
from kvtailor.types.late_checks import read_flag

__all__ = ["LazyMask", "TensorMask", "lazy_mask"]

# What transformers and users put where a token may not be seen is below this.
_HIDDEN = -1e4


@dataclass(kw_only=True)
class LazyMask:
    """A `Visibility` made of transformers' mask function and the caller's 2-D padding mask.

    Attributes:
        batch_size, new_tokens, kv_length, first_column, kv_offset: as transformers sizes its masks.
        mask_function: (row, head, query column, key column) -> bool, on tensors that broadcast.
        padding: (b, columns) bool, False for padding; None where nothing is padded.
        local_size: window or chunk of the layer type; None on layers that see all.
        options: further arguments of transformers' own mask maker, for `dense`.
        config: of the model whose forward made it; None where that is not known.
        began: when the forward began that made it, by `hf.handed.CLOCK`; 0 where that is not known.
        continues: it hides what the forward before hid, and no new token; False where that was not looked at.
    """

    batch_size: int
    new_tokens: int
    kv_length: int
    first_column: int
    kv_offset: int
    mask_function: Callable[..., Tensor]
    padding: Tensor | None
    local_size: int | None
    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)
    config: Any = None
    began: int = 0
    continues: bool = False
    # transformers reads a mask's number of dimensions before it hands it on; this one is no 4-D tensor.
    shape: tuple[int, ...] = ()
    ndim: int = 0
    _dense: Tensor | None = None
    _is_dense: bool = False

    def __getattr__(self, name: str) -> Any:
        """Raise an error with the reason why a model that computes with its mask cannot use this one."""
        raise AttributeError(
            f"this model reads {name!r} of its attention mask, so it computes with the mask itself; kvtailor's mask is "
            "a rule and no tensor, and kvtailor does not support such a model"
        )

    @classmethod
    def causal(cls, batch_size: int, new_tokens: int, first_column: int, device: torch.device) -> LazyMask:
        """Plain causality, for a model that hands on no mask."""
        return lazy_mask(batch_size, new_tokens, first_column + new_tokens, first_column, device=device)

    @property
    def causal_only(self) -> bool:
        """Nothing but causality restricts the queries."""
        return self.padding is None and self.local_size is None and self.mask_function is causal_mask_function

    @property
    def only_padding(self) -> bool:
        """Nothing but causality and padding restricts the queries."""
        return self.local_size is None and self.mask_function is causal_mask_function

    @property
    def real(self) -> Tensor | None:
        """(b, first_column + t) bool, see `Visibility.real`."""
        if self.padding is None:
            return None
        self.check_length()
        return self.padding[:, : self.first_column + self.new_tokens]

    def check_length(self) -> None:
        """Raise where the 2-D mask does not cover the tokens seen and the new ones."""
        assert self.padding is not None
        needed = self.first_column + self.new_tokens
        if self.padding.shape[1] != needed:
            raise CacheMisuse(
                f"attention_mask has {self.padding.shape[1]} columns, but the cache has seen {self.first_column} "
                f"tokens and {self.new_tokens} are new: pass a mask of {needed} columns that covers both"
            )

    def without_last(self, count: int) -> LazyMask:
        """See `Visibility.without_last`."""
        if count == 0:
            return self
        new = self.new_tokens - count
        padding = None if self.padding is None else self.padding[:, : self.first_column + new]
        return replace(
            self, new_tokens=new, kv_length=self.kv_length - count, padding=padding, _dense=None, _is_dense=False
        )

    def without_first(self, count: int) -> LazyMask:
        """See `Visibility.without_first`."""
        return self if count == 0 else self.with_earlier(-count)

    def with_earlier(self, count: int) -> LazyMask:
        """See `Visibility.with_earlier`."""
        new, first = self.new_tokens + count, self.first_column - count
        return replace(self, new_tokens=new, first_column=first, _dense=None, _is_dense=False)

    def at(self, rows: Tensor, columns: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """See `Visibility.at`: (m, t', s) bool."""
        device = columns.device
        queries = torch.arange(self.new_tokens, device=device)[first:last] + self.first_column
        row = rows.to(device)[:, None, None]
        key, query = columns[:, None, :], queries[None, :, None]
        head = torch.zeros((1, 1, 1), dtype=torch.int64, device=device)
        seen = self.mask_function(row, head, query, key)
        real = self.real
        if real is not None:
            seen = seen & real.to(device)[row, key]
        return seen

    def dense(self, device: torch.device) -> Tensor | None:
        """The mask that transformers' own sdpa would have got, on this device; None where it would have got none."""
        if not self._is_dense:
            self._dense = sdpa_mask(
                self.batch_size,
                self.new_tokens,
                self.kv_length,
                self.first_column,
                self.kv_offset,
                self.mask_function,
                self.padding,
                self.local_size,
                device=self.device,
                **self.options,
            )
            self._is_dense = True
        # A model's layers may lie on several devices, by turns or in runs.
        if self._dense is not None and self._dense.device != device:
            self._dense = self._dense.to(device)
        return self._dense

    def __getitem__(self, index: Any) -> LazyMask:
        """The mask of the newest queries alone: `mask[:, :, -count:, :]`, which some models take for their last layers.

        Raises:
            UnsupportedModel: another part of it is asked for, which needs the mask as a tensor.
        """
        if isinstance(index, tuple) and len(index) == 4 and all(index[i] == slice(None) for i in (0, 1, 3)):
            part = index[2]
            if isinstance(part, slice):
                first, last, step = part.indices(self.new_tokens)
                if last == self.new_tokens and step == 1 and first < last:
                    return self.without_first(first)
        raise UnsupportedModel(
            f"this model takes {index} of its attention mask, so it computes with the mask itself; kvtailor's mask is "
            "a rule and no tensor, and kvtailor supports the newest queries alone"
        )

    def size(self) -> tuple[int, int, int, int]:
        """The size of the tensor that it stands for; some models check it."""
        return self.batch_size, 1, self.new_tokens, self.kv_length

    def to(self, *_: Any, **__: Any) -> LazyMask:
        """It has no device and no dtype of its own."""
        return self

    def __radd__(self, logits: Any) -> Any:
        """Logits of a model that adds its mask itself, (b, q, t, n), with what may not be seen at the lowest number."""
        if not isinstance(logits, Tensor):
            return NotImplemented
        masked = getattr(logits, "masked", None)
        if masked is not None:
            return masked(self)
        if logits.shape[-1] == self.new_tokens:
            check_fed(self, self)
        allowed = self.dense(logits.device)
        if allowed is None:
            rows, columns = torch.arange(self.batch_size), torch.arange(self.kv_length)
            allowed = self.at(rows.to(logits.device), columns.to(logits.device)[None])[:, None]
        return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)

    def contiguous(self) -> LazyMask:
        """Some models call this before they hand the mask on."""
        return self

    def view(self, *_: int) -> LazyMask:
        """Some models lay out a mask that is not 4-D before they hand it on."""
        return self


@dataclass(frozen=True, kw_only=True)
class TensorMask:
    """A `Visibility` made of a user's own (b or 1, 1, t, columns) mask, boolean or additive."""

    allowed: Tensor
    new_tokens: int
    first_column: int
    causal_only: bool = False
    real: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor, new_tokens: int, seen: int) -> TensorMask:
        """Check a user's mask.

        Args:
            mask: 4-D, bool (True: may see) or additive (0 or above: may see).
            new_tokens: t.
            seen: tokens seen, the new ones included.
        """
        if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != new_tokens or mask.shape[3] != seen:
            raise CacheMisuse(
                f"a 4-D attention_mask must have the shape (batch or 1, 1, {new_tokens}, {seen}) for {new_tokens} new "
                f"tokens of {seen} seen, and has {tuple(mask.shape)}; a mask for each head is not supported"
            )
        allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
        if mask.dtype != torch.bool and bool(((mask[:, 0] != 0) & (mask[:, 0] > _HIDDEN)).any()):
            raise CacheMisuse(
                "a 4-D attention_mask of numbers may have 0 where a token is seen, and the dtype's least number or "
                "-inf where it is not; this one adds other numbers to logits, which kvtailor does not support"
            )
        return cls(allowed=allowed, new_tokens=new_tokens, first_column=seen - new_tokens)

    def at(self, rows: Tensor, columns: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """See `Visibility.at`."""
        allowed = self.allowed[:, first:last]
        row = (
            rows.to(columns.device)[:, None, None] if allowed.shape[0] > 1 else torch.zeros_like(columns[:1, :1, None])
        )
        query = torch.arange(allowed.shape[1], device=columns.device)[None, :, None]
        return allowed[row, query, columns[:, None, :]]

    def without_last(self, count: int) -> TensorMask:
        """See `Visibility.without_last`."""
        end = self.new_tokens - count
        return replace(self, allowed=self.allowed[:, :end], new_tokens=end)

    def without_first(self, count: int) -> TensorMask:
        """See `Visibility.without_first`."""
        first, new = self.first_column + count, self.new_tokens - count
        return replace(self, allowed=self.allowed[:, count:], new_tokens=new, first_column=first)

    def with_earlier(self, count: int) -> TensorMask:
        """Refused: this mask does not cover the forward before it."""
        raise CacheMisuse(
            f"a 4-D attention_mask is for one forward, and {count} tokens of the one before it may still be taken "
            "back; pass a 2-D mask"
        )


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | LazyMask | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **_: Any,
) -> LazyMask:
    """The mask function that is registered with transformers' `AttentionMaskInterface`."""
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    padding = None if attention_mask is None else attention_mask.to(torch.bool)
    # An all-ones mask hides nothing; without it, decoding needs no mask at all. (transformers' own sdpa does the same.)
    if padding is not None and padding.shape[1] == kv_length + kv_offset and read_flag(padding.all()):
        padding = None
    return LazyMask(
        batch_size=batch_size,
        new_tokens=q_length,
        kv_length=kv_length,
        first_column=int(q_offset),
        kv_offset=kv_offset,
        mask_function=mask_function,
        padding=padding,
        local_size=local_size,
        device=torch.device(device),
        options={"allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap},
    )
