"""A layer that the plan compresses, as transformers' `Cache` drives it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvtailor.attend.contract import Attended
from kvtailor.engine import rollback
from kvtailor.engine.engine import Engine
from kvtailor.engine.fast_path import find_fast_path
from kvtailor.engine.phase import Reconstructing, Recording, Speculating
from kvtailor.engine.state import LayerState, ReaderQueries
from kvtailor.errors import CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.attention import HANDLE, ungraded
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.layers.fast_path import WithFastPath
from kvtailor.hf.layers.products import operands
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.mask import LazyMask, TensorMask
from kvtailor.hf.model.modules import is_part_of
from kvtailor.hf.model.projection import check_projections
from kvtailor.types import PLAIN_SOFTMAX, Softmax, Visibility

__all__ = ["CompressedLayer", "record_past_of_all"]


class CompressedLayer(WithFastPath, CacheLayerMixin):
    """One layer that the plan compresses, as transformers' `Cache` drives it.

    Attributes:
        guard: of the cache.
        state: what the layer holds.
        arriving: keys (b, h, t, d) and values of new tokens, between `update` and the attention, as the model made
            them; they join what is held, in the cache's dtype, only when nothing more can be refused.
        dtype: of what is held. model_dtype: of what the model makes.
        record_past: a forward may be rolled back by `crop` (transformers' name).
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, guard: CacheGuard, state: LayerState, layer_idx: int):
        super().__init__()
        self.guard, self.state, self.layer_idx = guard, state, layer_idx
        self.arriving: tuple[Tensor, Tensor] | None = None
        self._modules: dict[int, weakref.ref[Any]] = {}
        # The layers of the model that read what this one holds, after its own attention, and what they have read.
        self._readers = guard.geometry.readers.get(layer_idx, ())
        self._read: list[tuple[ReaderQueries, Attended]] = []
        self._repeated: tuple[Tensor, Tensor] | None = None

    @property
    def record_past(self) -> bool:
        """Forwards wait for a crop before anything is evicted or encoded."""
        return isinstance(self.guard.engine.phase, Recording | Speculating)

    @record_past.setter
    def record_past(self, on: bool) -> None:
        record_past_of_all(self.guard.engine, on)

    def activate_past_recording(self) -> None:
        """From now on each forward waits for `crop` before anything is evicted or encoded."""
        self.guard.engine.switch.go_on_recording()
        self.recorded_after = self.state.stored.seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remembers dtype and device of the first keys."""
        self.model_dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.dtype = self.guard.stored_dtype or self.model_dtype

    def initialize_as(self, held: Tensor) -> None:
        """Remembers the same from states of another cache of this model, which are as this one holds them."""
        like = held if self.guard.stored_dtype is None else held.float()
        self.lazy_initialization(like, like)

    @run_eagerly
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys (b, h, t, d) and values, and return the handle by which the attention finds this layer."""
        fast_path = self.fast_path
        if fast_path is not None and fast_path.step.takes(key_states, value_states):
            self.guard.update_begins(self.layer_idx)
            self.arriving, self.arriving_for = (key_states, value_states), fast_path
            return self._handed_on(key_states, value_states, self.state.stored.seen)
        # Under autocast rotated keys are float32 and values are not: what the projections gave is the model's dtype.
        key_states = key_states.to(value_states.dtype)
        if self.is_initialized and (key_states.dtype != self.model_dtype or key_states.device != self.device):
            of = "" if self.dtype == self.model_dtype else f" of a model in {self.model_dtype}"
            raise CacheMisuse(
                f"this cache holds {self.dtype} on {self.device}{of}, and got keys of {key_states.dtype} on "
                f"{key_states.device}; use a new cache after moving or casting the model"
            )
        self.state.check_fits(key_states)
        if not self.is_initialized:
            self._check_shape(key_states, value_states)
        self.guard.check_opened()
        self.guard.update_begins(self.layer_idx)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.state.stored.seen
        self.arriving, self.arriving_for = (key_states, value_states), None
        return self._handed_on(key_states, value_states, before)

    def _handed_on(self, keys: Tensor, values: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """What the model gets for new keys (b, h, t, d) and values (b, h, t, dv) after `before` tokens."""
        b, h, t, d = keys.shape
        one = _nan(keys.dtype, keys.device, torch.is_inference_mode_enabled())
        nan = one.expand(b, h, before + t, d)
        nan_values = nan if values.shape[-1] == d else one.expand(b, h, before + t, values.shape[-1])
        if self.guard.geometry.multiplies:
            return operands(self, nan, nan_values)
        setattr(nan, HANDLE, self)
        return nan, nan_values

    def attend_products(self, query: Tensor, mask: LazyMask | Tensor | None, scaling: float) -> Tensor:
        """`attend` for a model that multiplies queries, keys and values itself; see `hf.layers.products`."""
        try:
            config = getattr(mask, "config", None)
            if config is not None and config.get_text_config(decoder=True) is not self.guard.config:
                raise CacheMisuse(
                    f"this cache was made for another model than the {config.model_type} that is using it; make one "
                    "for this model with kvtailor.cache_for(model, plan)"
                )
            self.take_softmax(PLAIN_SOFTMAX)
        except (CacheMisuse, PlanError):
            self.refuse_forward()
            raise
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            output = self.attend(query, mask, scaling)
        return ungraded(output, query)

    def _check_shape(self, keys: Tensor, values: Tensor) -> None:
        """Raise where the first keys (b, h, t, d) and values are not of the heads and sizes that are expected."""
        guard, shape = self.guard, self.guard.geometry.shapes[self.layer_idx]
        due = shape.kv_heads // guard.share.ranks, shape.key_size, shape.value_size
        found = keys.shape[1], keys.shape[3], values.shape[3]
        if found != due:
            shared = "" if guard.share.ranks == 1 else f" of {shape.kv_heads} on {guard.share.ranks} processes"
            raise CacheMisuse(
                f"this cache was made for layers of {due[0]} kv heads{shared}, and layer {self.layer_idx} has keys of "
                f"{found[0]} (sizes of a key and a value: {due[1]} and {due[2]} expected, {found[1]} and {found[2]} "
                "found): the model is sharded or shaped otherwise than its configuration and its plan say"
            )

    def refuse_forward(self) -> None:
        """A forward is refused between this layer's update and its attention."""
        self.arriving = None
        self.guard.nothing_changed(self.layer_idx)

    def check_model(self, module: torch.nn.Module) -> None:
        """Raise where another model's attention layer calls than the one that this layer belongs to."""
        index = self._reading_layer(module)
        known = self._modules.get(index)
        bound = None if known is None else known()
        if bound is None:
            model = None if self.guard.model is None else self.guard.model()
            # Two models may share one configuration.
            mine = model is None or is_part_of(model, module)
            if getattr(module, "config", None) is not self.guard.config or not mine:
                raise CacheMisuse(
                    f"this cache was made for another model than the {type(module).__name__} that is using it; make "
                    "one for this model with kvtailor.cache_for(model, plan)"
                )
            self._modules[index] = weakref.ref(module)
        elif bound is not module:
            raise CacheMisuse(f"layer {index} of this cache is in use by another model; make a cache for each model")
        if index == self.guard.first_compressed:
            check_projections(state.model.output for state in self.guard.engine.states)

    def take_softmax(self, softmax: Softmax) -> None:
        """Take what the model's softmax has besides the factor, before the attention of each forward.

        Raises:
            PlanError: a method of the plan does not know a softmax like it.
            UnsupportedModel: other layers read these keys beside learned sinks.
        """
        model, plan = self.state.model, self.guard.engine.plan
        if softmax.sinks is not None and self._readers:
            # Scores would weigh the readers' queries with the sinks of the last one.
            raise UnsupportedModel(
                f"layers {self._readers} read the keys of layer {self.layer_idx}, and its attention has learned sinks, "
                "which differ from layer to layer; kvtailor supports shared keys without sinks"
            )
        # Checked once: what a module hands over does not change its kind.
        if not softmax.plain and model.softmax.plain and (faults := plan.softmax_faults(softmax)):
            raise PlanError(str(plan), faults)
        model.softmax = softmax

    def _reading_layer(self, module: torch.nn.Module) -> int:
        """The layer of the model to which a module that reads this layer belongs: this one, or one of its readers."""
        index = getattr(module, "layer_idx", None) if self._readers else None
        return index if index in self._readers and isinstance(index, int) else self.layer_idx

    def attend(
        self, query: Tensor, mask: LazyMask | Tensor | None, scaling: float, module: torch.nn.Module | None = None
    ) -> Tensor:
        """Attention of new tokens (b, q, t, d) over what this layer holds, then what follows it. (b, q, t, dv).

        Where other layers of the model read it as well, what follows waits for the last of them.

        Args:
            query: post-RoPE.
            mask: of the model.
            scaling: the model's own factor before the softmax.
            module: of the model, that attends; None: of this very layer.
        """
        guard, engine = self.guard, self.guard.engine
        reader = self.layer_idx if module is None else self._reading_layer(module)
        if reader != self.layer_idx:
            return self._attend_for(reader, query, mask, scaling)
        guard.attention_begins(self.layer_idx)
        assert self.arriving is not None
        # Rounded before anything reads them: what this forward attends to is what later ones find.
        keys, values = (states.to(self.dtype) for states in self.arriving)
        self.arriving = None
        try:
            visible = self._visible(query, mask)
            reconstructing = isinstance(engine.phase, Reconstructing)
            if not reconstructing:
                self._check_recorded(visible)
                rollback.check_draft(engine, self.state, query.shape[2])
                guard.check_padding(self.layer_idx, visible)
        except CacheMisuse:
            guard.nothing_changed(self.layer_idx)
            raise
        guard.layer_changes(self.layer_idx)
        keys, values = engine.written(self.state, keys, values, visible)
        if reconstructing:
            output = engine.reconstruct(self.state, keys, values, query, visible, scaling)
            self._repeated = (keys, values) if self._readers else None
        else:
            for observe in guard.observers:
                observe(self.layer_idx, keys, values, query, visible, scaling)
            output = self._attended(keys, values, query, visible, scaling)
        guard.layer_ends(self.layer_idx)
        settled = query.shape[2] == 1 and not reconstructing and not self._readers and not guard.geometry.multiplies
        self.fast_path = find_fast_path(engine, self.state, query.shape[1], visible) if settled else None
        return output

    def _attended(self, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> Tensor:
        """Attention of tokens that are a prompt, a turn or decoded, of a draft, or of a prompt and its first draft."""
        guard, engine, state = self.guard, self.guard.engine, self.state
        new = query.shape[2]
        prompt = rollback.prompt_of(engine, state, new)
        if prompt == new:
            engine.append(state, keys, values)
            guard.take_padding(self.layer_idx, visible)
            return self._attended_and_acted(query, visible, scaling)
        outputs = []
        if prompt:
            # (b, h, t, d) of the prompt and of the draft behind it are taken one after the other.
            engine.append(state, keys[:, :, :prompt], values[:, :, :prompt])
            guard.take_padding(self.layer_idx, visible)
            outputs.append(self._attended_and_acted(query[:, :, :prompt], visible.without_last(new - prompt), scaling))
            keys, values, query = keys[:, :, prompt:], values[:, :, prompt:], query[:, :, prompt:]
            visible = visible.without_first(prompt)
        guard.take_padding(self.layer_idx, visible)
        outputs.append(rollback.attend_draft(engine, state, keys, values, query, visible, scaling))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _attended_and_acted(self, query: Tensor, visible: Visibility, scaling: float) -> Tensor:
        """Return the attention (b, q, t, dv) of the tokens that were appended last, once what follows it is done."""
        engine, state = self.guard.engine, self.state
        attended = engine.attend(state, query, visible, scaling)
        if self._readers:
            self._read = [(ReaderQueries(query=query, visible=visible, mass=attended.mass), attended)]
        else:
            engine.act(state, query, visible, attended)
        return attended.output

    def _attend_for(self, reader: int, query: Tensor, mask: LazyMask | Tensor | None, scaling: float) -> Tensor:
        """Attention of another layer of the model over what this one holds; after the last of them, what follows.

        Args:
            reader: that layer.
            query: (b, q, t, d), of all new tokens of the forward or of the last of them.
            mask, scaling: see `attend`.
        """
        guard, engine, state = self.guard, self.guard.engine, self.state
        guard.reading_begins(reader, self.layer_idx)
        own = state.model.scaling
        if scaling != own:
            raise UnsupportedModel(
                f"layer {reader} reads the keys of layer {self.layer_idx} and multiplies its logits with {scaling}, "
                f"where that one has {own}; kvtailor supports shared keys for layers with one factor"
            )
        if self._repeated is not None:
            visible = self._visible(query, mask, seen=state.stored.seen + self._repeated[0].shape[2])
            output = engine.reconstruct(state, *self._repeated, query, visible, scaling)
            if reader == self._readers[-1]:
                self._repeated = None
        else:
            visible = self._visible(query, mask, seen=state.stored.seen)
            first = self._read[0][1]
            # What the attention carries along goes from one reader to the next.
            state.observed.carry = self._read[-1][1].carry
            attended = engine.attend(state, query, visible, scaling)
            output = attended.output
            self._read.append((ReaderQueries(query=query, visible=visible, mass=attended.mass), attended))
            if reader == self._readers[-1]:
                (own_reading, _), *others = self._read
                self._read = []
                last = replace(attended, output=first.output, mass=own_reading.mass)
                engine.act(state, own_reading.query, own_reading.visible, last, [each for each, _ in others])
        guard.layer_ends(reader)
        return output

    def _visible(self, query: Tensor, mask: LazyMask | Tensor | None, seen: int | None = None) -> Visibility:
        """What the new tokens may see, by the model's mask; raises where that does not fit what was seen.

        Args:
            query: of the new tokens.
            mask: of the model.
            seen: tokens seen, the new ones included; None: the new ones come on top of what the layer has seen.
        """
        new = query.shape[2]
        seen = self.state.stored.seen + new if seen is None else seen
        visible: Visibility
        if mask is None:
            visible = LazyMask.causal(query.shape[0], new, seen - new, query.device)
        elif isinstance(mask, LazyMask):
            visible = mask
        else:
            visible = TensorMask.of(mask, new, seen)
        if visible.first_column + visible.new_tokens != seen or visible.new_tokens != new:
            raise CacheMisuse(
                f"the mask is for {visible.new_tokens} tokens after {visible.first_column}, and the cache has seen "
                f"{seen - new} tokens before these {new}; was the cache used outside of the model between?"
            )
        return visible

    def _check_recorded(self, visible: Visibility) -> None:
        """Raise where assisted decoding feeds its prompt to a cache that has seen it, as transformers' does."""
        before, self.recorded_after = self.recorded_after, 0
        if 0 < before < visible.new_tokens and visible.real is None:
            raise CacheMisuse(
                f"this cache had seen {before} tokens when recording began, and {visible.new_tokens} come at "
                "once: transformers' assisted decoding and prompt lookup feed the whole prompt again, whatever a cache "
                "has seen. Start them with an empty cache, or draft with kvtailor.generate; if all of these tokens are "
                "new, feed them before recording begins"
            )

    def get_seq_length(self) -> int:
        """Tokens seen, padding included, whatever is held."""
        if self.arriving is None or not self.guard.awaits_attention(self.layer_idx):
            return self.state.stored.seen
        return self.state.stored.seen + self.arriving[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers makes: all tokens seen and the new ones."""
        self.guard.check_opened()
        return self.state.stored.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything; the layer may then serve another batch."""
        self._read, self._repeated, self.fast_path, self.arriving_for = [], None, None, None
        self.arriving, self.is_initialized = None, False
        self.state.reset()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the newest tokens; a recorded forward is then compressed.

        Args:
            tokens_to_remove: minus the number of tokens, 0 to take back none.
        """
        if (count := -int(tokens_to_remove)) < 0:
            raise CacheMisuse(f"crop takes minus the number of tokens to remove, and got {-count}")
        if isinstance(self.guard.engine.phase, Speculating):
            rollback.take_back(self.guard.engine, self.state, count)
        else:
            rollback.crop(self.guard.engine, self.state, count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.state.select_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to itself."""
        self.state.select_rows(torch.arange(self.state.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, given as indices or as a boolean mask."""
        self.state.select_rows(torch.arange(self.state.rows)[indices.cpu()])


@cache
def _nan(dtype: torch.dtype, device: torch.device, inference: bool) -> Tensor:
    return torch.full((1, 1, 1, 1), float("nan"), dtype=dtype, device=device)


def record_past_of_all(engine: Engine, on: bool) -> None:
    """Do what setting transformers' `record_past` of one layer means: all layers of a cache record, or none does."""
    engine.switch.go_on_recording() if on else engine.switch.end_recording()
