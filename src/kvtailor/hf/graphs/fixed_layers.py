"""The layers of a cache while steps of one token are replayed: what is held lies still, and the newest token goes where
a counter on the device points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvtailor.attend.contract import Attention, AttentionRequest
from kvtailor.engine.state import LayerState
from kvtailor.hf.attention import HANDLE
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.types import PLAIN_SOFTMAX, Layout, PlainSegment, Segment, Softmax, Visibility

__all__ = ["FixedLayer", "Ring", "with_free_slots"]


class FixedLayer(CacheLayerMixin):
    """A layer while steps are replayed: what is held lies still, and the newest token goes where a counter points.

    Args:
        layer: the layer of the cache that this one stands for.
        attention: of the plan.
        parts: what is held; the last has free slots.
        filled: slots of the last part that are filled.
        turn: the slot after which the first comes again.
        rule: what the new token may see.
        real: (b, s) bool of a ring: the slots that are no padding, of which `rule` reads; None where nothing is.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        layer: CompressedLayer | WindowLayer,
        attention: Attention,
        parts: Sequence[Segment],
        filled: int,
        turn: int,
        rule: Visibility,
        real: Tensor | None = None,
    ):
        super().__init__()
        *self.parts, growing = parts
        assert isinstance(growing, PlainSegment)
        self.layer, self.attention, self.growing, self.filled, self.turn = layer, attention, growing, filled, turn
        self.rule, self.real = rule, real
        self.softmax = PLAIN_SOFTMAX
        self.dtype = self.model_dtype = growing.keys.dtype
        self.is_initialized = True
        self._seen = int(layer.get_seq_length())
        self._nan = growing.keys.new_full((1, 1, 1, 1), float("nan"))

    def count_by(self, lengths: Tensor, slot: Tensor) -> None:
        """On the device: `lengths` (m,) int32, how far the last part is filled; `slot` (1,), where the token goes."""
        self.slot = slot
        self.growing = replace(self.growing, layout=replace(self.growing.layout, lengths=lengths))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (b, h, 1, d) into the slot of now; gives the handle for the attention."""
        for side, states in zip(self.growing.decode(), (key_states, value_states), strict=True):
            side.index_copy_(1, self.slot, states.to(side.dtype).reshape(side.shape[0], 1, -1))
        if self.real is not None:
            self.real.index_fill_(1, self.slot, True)
        # Made for each step that runs, and not kept: a layer and a tensor that refer to each other would keep what the
        # cache held until the garbage collector comes, where a cache is dropped between two steps.
        shape = self.growing.layout.rows, self.growing.layout.heads, self._seen
        keys, values = (self._nan.expand(*shape, side.shape[-1]) for side in self.growing.decode())
        setattr(keys, HANDLE, self)
        return keys, values

    def check_model(self, module: torch.nn.Module) -> None:
        """See `CompressedLayer.check_model`."""
        if isinstance(self.layer, CompressedLayer):
            self.layer.check_model(module)

    def take_softmax(self, softmax: Softmax) -> None:
        """See `CompressedLayer.take_softmax`; sinks are read where the model keeps them, at each replay."""
        if isinstance(self.layer, CompressedLayer):
            self.layer.take_softmax(softmax)
        self.softmax = softmax

    def refuse_forward(self) -> None:
        """Nothing is to be undone: a step that is refused is never replayed."""

    def attend_on_fast_path(self, query: Tensor, mask: Any, scaling: float) -> Tensor | None:
        """None: a replayed step is prepared as a whole, see `attend`."""
        return None

    def attend(self, query: Tensor, mask: Any, scaling: float, module: torch.nn.Module) -> Tensor:
        """Attention of the new token (b, q, 1, d) over all that is held. (b, q, 1, dv)."""
        parts = [*self.parts, self.growing]
        request = AttentionRequest(query=query, parts=parts, visible=self.rule, scaling=scaling, softmax=self.softmax)
        return self.attention.attend(request).output

    def get_seq_length(self) -> int:
        """Tokens seen when the recording began."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask that is not used."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length


class Ring:
    """A layer of the model's own sliding window, whose oldest token is overwritten by the newest.

    Attributes:
        held: tokens that were in the window when the recording began.
        whole: all slots of the ring, one more than the layer keeps between steps.
    """

    def __init__(self, layer: WindowLayer):
        self.layer = layer
        b, h, self.held = layer.keys.shape[:3]
        layout = Layout(rows=b, heads=h, size=layer.sliding_window, start=0)
        sides = []
        for side in (layer.keys, layer.values):
            sides.append(side.new_zeros((b * h, layout.size, side.shape[-1])))
            sides[-1][:, : self.held] = side.flatten(0, 1)
        self.whole = PlainSegment(layout=layout, keys=sides[0], values=sides[1])

    def real(self, mask: Tensor | None) -> Tensor | None:
        """(b, w) bool: this slot is a token, and not padding by `mask` (b, n) over all columns; None: all are."""
        if mask is None or bool((real := mask[:, mask.shape[1] - self.held :].to(torch.bool)).all()):
            return None
        return torch.nn.functional.pad(real, (0, self.whole.layout.size - self.held), value=True)

    def land(self, steps: int) -> None:
        """Give the layer what is in the window after so many steps, in the order of time."""
        layer, layout = self.layer, self.whole.layout
        count = min(self.held + steps, layout.size - 1)
        newest = self.held + steps - count
        order = torch.arange(newest, newest + count, device=layer.keys.device) % layout.size
        layer.keys, layer.values = (
            side[:, order].unflatten(0, (layout.rows, layout.heads)) for side in self.whole.decode()
        )
        layer.cumulative_length += steps


def with_free_slots(state: LayerState, steps: int) -> tuple[PlainSegment, int]:
    """The tail with free slots for so many tokens, as if they were there; and how many are."""
    tail = state.stored.tail
    assert tail is not None
    tail.reserve(steps)
    tail.filled(steps, state.stored.seen)
    whole = tail.as_segment()
    tail.crop(steps)
    return whole, tail.length
