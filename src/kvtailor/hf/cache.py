"""The cache that a user hands to `model.generate()`: transformers' `Cache`, made of our layers.

To transformers it reports tokens *seen* (positions, slicing of inputs, mask sizes); its layers hold the tokens that
the plan keeps.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from kvtailor.calibration_file import Calibration
from kvtailor.engine import rollback
from kvtailor.engine.engine import Engine
from kvtailor.engine.phase import Compressing, Recording
from kvtailor.errors import CacheMisuse, PlanError
from kvtailor.hf.assisted import ids_of_caller, longest_of_caller, prompt_of_caller, refusal
from kvtailor.hf.callers import GenerateCall, Positioning, Preparing, read_asker, read_ids
from kvtailor.hf.conversation import Conversation, check_longer, right_call
from kvtailor.hf.graphs.counts import ReplayCounts
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.handed import check_mode
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.of_cache import EmptyLayer, layers_of, plan_misfits
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.layers.states import StateLayer, StatesMixin
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.rope_border import check_border, crossing, feed_all
from kvtailor.hf.model.tensor_parallel import RankHeads, gather_objects
from kvtailor.hf.saving import save
from kvtailor.hf.switch import Lease
from kvtailor.hf.versions import CACHE_ARGUMENT
from kvtailor.ledger import Entry, Ledger
from kvtailor.ops.notebook_html import html_block
from kvtailor.plan import Plan
from kvtailor.store.contract import Traffic
from kvtailor.types import ALL_HEADS, HeadShare

__all__ = ["KvCache"]


class KvCache(Cache):
    """A cache that compresses by a plan. `kvtailor.cache_for` makes it, one for each conversation or batch.

    Attributes:
        plan: how it compresses.
        geometry: of the model that it was made for.
        share: which of the model's kv heads this process holds; all of them without tensor parallelism.
        guard: the checks that this cache and its layers share.
        engine: the engine and the state of the compressed layers.
        calibrations: the files whose tensors the plan's methods read.
        lease: keeps the model's attention ours while this cache or a copy of it is alive; see `hf.switch`.
    """

    lease: Lease | None = None
    _conversation: Conversation

    def __init__(
        self,
        plan: Plan,
        geometry: Geometry,
        config: Any,
        *,
        share: HeadShare = ALL_HEADS,
        stored_dtype: torch.dtype | None = None,
    ):
        misfits = plan_misfits(plan, geometry)
        if misfits:
            raise PlanError(str(plan), misfits)
        self.plan, self.geometry, self.share = plan, geometry, share
        self.guard = CacheGuard(plan, geometry, config, share=share, stored_dtype=stored_dtype)
        # By name: the class of some models is between this one and `Cache`, and keeps layers in its own way.
        Cache.__init__(self, layers=layers_of(self.guard))
        self._first_keys = next(index for index, shape in enumerate(geometry.shapes) if shape.kv_heads)
        self.calibrations: tuple[Calibration, ...] = ()
        self.conversation = Conversation()
        if not geometry.compressed and (plan.evicts or plan.encode.block):
            warnings.warn(
                f"no layer of this {geometry.model_type} keeps the keys of all tokens (they have a sliding window of "
                f"the model's own, or keep a state), so the plan {plan} has nothing to compress",
                stacklevel=3,
            )

    @property
    def conversation(self) -> Conversation:
        """Return the token ids that it has seen, as far as kvtailor knows them."""
        self._conversation.take_notes(seen=self.seen, real=self.guard.real)
        return self._conversation

    @conversation.setter
    def conversation(self, value: Conversation) -> None:
        self._conversation = value

    def take_ids(self, ids: Tensor, mask: Tensor | None, at: int) -> None:
        """Record ids (b, t) that it has seen from column `at` on; see `Conversation.append`."""
        self._conversation.append(ids, mask, at=at)
        if self._conversation.columns == self.seen:
            # Whatever else was noted was taken back, as the passes of a plan that reads a context twice.
            self._conversation.notes = []

    @property
    def engine(self) -> Engine:
        """The engine and the state of the compressed layers."""
        return self.guard.engine

    @property
    def own_geometry(self) -> Geometry:
        """The geometry of the model with the heads of this process alone."""
        return self.geometry.of_rank(self.share.ranks)

    @property
    def seen(self) -> int:
        """Return how many tokens were seen, padding included."""
        return int(self.layers[self._first_keys].get_seq_length())

    @property
    def rows(self) -> int:
        """Return b; 0 before the first token."""
        if self.engine.states:
            return self.engine.states[0].rows
        windows = [layer for layer in self.layers if isinstance(layer, WindowLayer) and layer.is_initialized]
        return windows[0].keys.shape[0] if windows else 0

    @property
    def replays(self) -> ReplayCounts | None:
        """Return how many forwards were replayed, and why the others were not; None without `graphs=True`."""
        return None

    def check_ids(self, input_ids: Tensor) -> None:
        """Raise unless a conversation begins with what this cache has seen.

        `generate()` and sessions call this themselves. Of tokens whose ids were not shown, such as embeddings, the
        cache knows only how many there were.

        Args:
            input_ids: (b, n) token ids of the whole conversation, the tokens seen included.

        Raises:
            CacheMisuse: the conversation is no longer than what was seen, has other rows, or begins otherwise.
        """
        self.conversation.check(input_ids, seen=self.seen, rows=self.rows)

    def __repr__(self) -> str:
        plan = f"KvCache({str(self.plan)!r}, seen={self.seen}"
        if not self.seen:
            return f"{plan})"
        ledger = self.ledger()
        held = "" if ledger.held is None else f", held={ledger.held:.1f}"
        return f"{plan}{held}, bytes={ledger.total} of {ledger.full})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what the cache holds now, and under which plan."""
        parts = [self.ledger()._repr_html_()] if self.seen else []
        return html_block(repr(self), *parts, self.plan._repr_html_())

    def held(self) -> Tensor:
        """Return how many tokens each row, compressed layer and kv head holds, (b, l, h) int64, without padding.

        b is 0 before the first token. Under tensor parallelism the heads are those of this process.
        """
        if not self.engine.states or self.engine.states[0].rows == 0:
            return torch.zeros((0, len(self.engine.states), self.own_geometry.kv_heads), dtype=torch.int64)
        return torch.stack([state.counts(self.guard.real) for state in self.engine.states], 1)

    def whole_ledger(self) -> Ledger:
        """Return the sum of the ledgers of all processes that hold this cache; with one process the same as `ledger()`.

        If the kv heads lie on several processes, all of them must call it: each waits for the others.
        """
        own = self.ledger()
        return Ledger.joined(gather_objects(self.share, own)) if isinstance(self.share, RankHeads) else own

    def ledger(self) -> Ledger:
        """Return the bytes that this cache takes now, read from its storages.

        If the kv heads lie on several processes, it covers this process alone, and so does the uncompressed cache that
        `ratio` compares with. No other process needs to call it; `whole_ledger()` covers all of them.
        """
        entries: list[Entry] = []
        states = iter(self.engine.states)
        rows = element = own_element = in_states = 0
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                state = next(states)
                entries += state.entries(index)
                if state.stored.tail is not None and layer.is_initialized:
                    rows, element = state.rows, layer.dtype.itemsize
                    own_element = own_element or layer.model_dtype.itemsize
            elif isinstance(layer, WindowLayer) and layer.is_initialized:
                held = {"keys": layer.keys, "values": layer.values}
                form = sum(t.numel() * t.element_size() for t in held.values())
                entries.append(Entry(layer=index, stage="window", tensors=held, closed_form=form))
                rows, own_element = layer.keys.shape[0], layer.keys.element_size()
            if isinstance(layer, StatesMixin) and (named := layer.states()):
                form = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
                entries.append(Entry(layer=index, stage="state", tensors=named, closed_form=form))
                in_states += form
        real = self.guard.real
        if real is not None:
            entries.append(Entry(layer=0, stage="observe", tensors={"real": real}, closed_form=real.numel()))
        counts = self.held()
        return Ledger.of(
            entries,
            layers=len(self.layers),
            full=self.own_geometry.full_bytes(rows, self.seen, element, own_element) + in_states,
            seen=self.seen,
            held=float(counts.double().mean()) if counts.numel() else None,
        )

    def traffic(self) -> Traffic:
        """Return counts of what has moved between tiers since this cache was made."""
        return self.engine.offload.traffic()

    def save(self, path: Any) -> None:
        """Write the compressed cache to one safetensors file; see `kvtailor.load_cache`.

        If the kv heads lie on several processes, all of them must call it, and `path` becomes a folder.
        """
        self.guard.check_settled()
        save(path, self.layers, self.guard, self.conversation)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: a pickle would have no checksums, and nothing that identifies the model."""
        raise CacheMisuse(
            "a cache cannot be pickled; write it with cache.save(path), and read it with "
            "kvtailor.load_cache(model, path), which other processes can do as well"
        )

    # What copies would otherwise get from `__reduce_ex__`.
    def __copy__(self) -> KvCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> KvCache:
        other = object.__new__(type(self))
        memo[id(self)] = other
        # How often a tensor was written to is not copied.
        self._conversation.join_notes()
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def reset(self) -> None:
        """Forget everything; the cache may then serve another batch of the same model."""
        # Refused until the end, should this be interrupted.
        self.guard.break_off("cache.reset() did not come to its end")
        for layer in self.layers:
            layer.reset()
        self.engine.reset()
        self.conversation = Conversation()
        self.guard.reset()

    def activate_past_recording(self) -> None:
        """Let each forward from now on wait for `crop`; transformers' assisted decoding calls this before it begins.

        On an empty cache the first forward is the prompt. All tokens after it count as decoded, however many come in
        one forward.

        Raises:
            CacheMisuse: transformers' assisted decoding would generate another text than plain decoding.
        """
        obstacle = self.geometry.taking_back_refusal()
        if obstacle is not None:
            raise CacheMisuse(
                "asked to record forwards that a crop may take back (prompt lookup, assisted decoding), and "
                f"{obstacle}: decode without it"
            )
        prompt = prompt_of_caller()
        if prompt is not None:
            why = refusal(
                self.plan,
                layers_wait=self.plan.evicts and self.plan.scope != "layer",
                encodes_groups=any(len(state.group) > 1 for state in self.engine.states),
                seen=self.seen,
                prompt=prompt,
            )
            if why is not None:
                raise CacheMisuse(why)
            what, why = "this text, with as many tokens as it may get,", "one forward verifies a draft on either side"
            check_border(self.guard.border, seen=prompt, after=longest_of_caller() or prompt, what=what, why=why)
        self.engine.switch.record(prompt)
        super().activate_past_recording()
        ids = ids_of_caller()
        if ids is not None:
            self.take_ids(*ids, at=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row beam_idx[i] (beam search)."""
        self._check_rows_may_change()
        with self.guard.changing("a reordering of the rows"):
            super().reorder_cache(beam_idx)
            if self.guard.real is not None:
                self.guard.real = self.guard.real.index_select(0, beam_idx.to(self.guard.real.device))
            self.guard.rope.select_rows(beam_idx)
            self._conversation.select_rows(beam_idx.tolist(), seen=self.seen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        self._check_rows_may_change()
        rows = self.rows
        with self.guard.changing("a repetition of the rows"):
            Cache.batch_repeat_interleave(self, repeats)
            self.guard.rope.select_rows(torch.arange(rows).repeat_interleave(repeats))
            self.conversation.select_rows([row for row in range(rows) for _ in range(repeats)])
            if self.guard.real is not None:
                self.guard.real = self.guard.real.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows given as indices or as a boolean mask."""
        self._check_rows_may_change()
        chosen = torch.arange(self.rows)[indices.cpu()].tolist()
        with self.guard.changing("a choice of rows"):
            self.conversation.select_rows(chosen)
            self.guard.rope.select_rows(torch.tensor(chosen))
            Cache.batch_select_indices(self, indices)
            if self.guard.real is not None:
                self.guard.real = self.guard.real[indices.to(self.guard.real.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; `tokens_to_remove` is minus their number."""
        count = -int(tokens_to_remove)
        if count < 0:
            raise CacheMisuse(f"crop takes minus the number of tokens to remove, and got {-count}")
        for state in self.engine.states:
            rollback.check_crop(self.engine, state, count)
        for layer in self.layers:
            if isinstance(layer, WindowLayer):
                layer.check_crop(count)
            elif isinstance(layer, StatesMixin):
                layer.check_states_crop(count)
        with self.guard.changing("a crop"):
            Cache.crop(self, tokens_to_remove)
            if self.guard.real is not None:
                self.guard.real = self.guard.real[:, : self.seen].clone()
            self._conversation.crop(self.seen)

    @property
    def is_croppable(self) -> bool:
        """Whether a crop can undo any forward from now on, which is so while forwards are recorded.

        transformers reads this in assisted decoding, and elsewhere before it feeds tokens that it may remove again.
        """
        return isinstance(self.engine.phase, Recording)

    @property
    def is_linear(self) -> list[bool]:
        """Return for each layer whether it keeps states and no keys."""
        return [isinstance(layer, StateLayer) for layer in self.layers]

    @property
    def is_dummy(self) -> list[bool]:
        """Return for each layer whether it keeps nothing."""
        return [isinstance(layer, EmptyLayer) for layer in self.layers]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a layer's convolution; None before the first token."""
        self._touch(layer_idx, f"conv.{state_idx}")
        found: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return found

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state of a layer; None before the first token."""
        self._touch(layer_idx, f"recurrent.{state_idx}")
        found: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return found

    def _touch(self, layer_idx: int, state: str) -> None:
        layer = self.layers[layer_idx]
        if isinstance(layer, StatesMixin):
            layer.touched(state)

    @run_eagerly
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen."""
        self.guard.check_whole()
        length, asker = int(super().get_seq_length(layer_idx)), read_asker()
        if isinstance(asker, Positioning):
            self.guard.rope.put_for(asker, length)
        elif isinstance(asker, Preparing) and crossing(self.guard.border, asker, length):
            return self._read_anew(asker, length)
        elif isinstance(asker, GenerateCall):
            self._generate_begins(asker)
        return length

    def _read_anew(self, asker: Preparing, seen: int) -> int:
        """Empty the cache so that the whole text is fed again, and return a length with which transformers keeps it."""
        border = self.guard.border
        assert border is not None
        if seen and border.turns:
            self._check_reads_anew(seen=seen, after=seen + 1, what="the text")
            feed_all(border, asker, seen)
            self.reset()
        return border.tokens + 1

    def _generate_begins(self, call: GenerateCall) -> None:
        """Raise if `generate()` continues another conversation; else remember what it will feed."""
        if not call.uses_cache:
            raise CacheMisuse(
                "use_cache=False, of this call or of the model's generation config (generation_config.json), feeds the "
                "whole text again at every token, and this cache would take all of it as new: give use_cache=True, or "
                f"call generate() without {CACHE_ARGUMENT}"
            )
        # What an error has left says so itself, before the count of its tokens is taken for another conversation.
        self.guard.check_ended()
        seen = self.seen
        self._conversation.check_rows(seen=seen)
        alone = call.columns == seen + call.tokens
        if not alone:
            if call.columns != call.tokens:
                if call.heals:
                    raise CacheMisuse(
                        f"token_healing=True made {call.tokens} tokens of a prompt of {call.columns}, which the mask "
                        "does not follow: leave it out, and give input_ids=model.heal_tokens(input_ids, tokenizer)"
                    )
                other = f", if all of these tokens are new, or of {call.tokens}, if they are the whole conversation"
                raise CacheMisuse(
                    f"attention_mask has {call.columns} columns, and generate() got {call.tokens} tokens for a cache "
                    f"that has seen {seen}: pass one of {seen + call.tokens} columns{other if seen else ''}"
                )
            if call.ids is None:
                check_longer(call.tokens, seen=seen)
            else:
                self.check_ids(call.ids)
        if call.chunk is not None:
            first = seen or min(call.chunk, call.columns)
            what = "this text, fed so many tokens at a time,"
            check_border(self.guard.border, seen=first, after=call.columns, what=what)
        if call.most is not None:
            what = "this text, with as many tokens as generate() may write,"
            why = "generate() got embeddings" if call.ids is None else ""
            if seen and alone:
                why = "generate() got the new tokens alone"
            self._check_reads_anew(seen=seen or call.columns, after=call.most, what=what, why=why)
        self._conversation.crop(seen)
        if call.ids is not None:
            self._conversation.append(call.ids if alone else call.ids[:, seen:], call.real, at=seen)

    def _check_reads_anew(self, *, seen: int, after: int, what: str, why: str = "") -> None:
        """Raise if a text crosses the border of its model's long rope and cannot be read again from the start."""
        if self.engine.needs.reconstruction:
            why = f"{self.plan} reads its context twice, which generate() does not"
        elif not isinstance(self.engine.phase, Compressing):
            why = f"this cache {self.engine.phase.meaning}"
        if why:
            check_border(self.guard.border, seen=seen, after=after, what=what, why=why)

    @run_eagerly
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return length and offset of a layer's mask; a forward calls this before its layers.

        Raises:
            CacheMisuse: `generate()` got no new tokens, or the model would read this cache wrongly.
        """
        if not query_length and self.seen:
            raise CacheMisuse(
                f"this cache has seen {self.seen} tokens, and generate() got so few that it has cut off all of them: "
                f"{right_call()}"
            )
        guard = self.guard
        model = None if guard.model is None else guard.model()
        if model is not None and model.training:
            check_mode(model)
        if guard.border is not None:
            check_border(guard.border, seen=self.seen, after=self.seen + query_length, what="this forward")
        if query_length > 1 and self.seen and self.geometry.restarts:
            raise CacheMisuse(
                f"this cache has seen {self.seen} tokens, and {query_length} come at once: transformers' "
                f"{self.geometry.model_type} begins its recurrent state anew then, so they would not know what came "
                "before. Give the whole text to a new cache, or feed one token at a time"
            )
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        ids = read_ids(query_length)
        if ids is not None:
            self._conversation.note_forward(ids, at=sum(sizes) - query_length)
        return sizes

    def _check_rows_may_change(self) -> None:
        if any(state.pending is not None for state in self.engine.states):
            raise CacheMisuse("the rows of a cache cannot change between a recorded forward and its crop")
