"""The prompts of a sample, each prefilled once for all plans, and what became of each plan's prefill.

The caches that are filled from a kept prompt are those that would have read it, bit for bit (`hf.run.kept_prompt`). For
each kind of pass that is shared, the first prompt of the first plan is read both ways, and all that the caches hold is
compared. Nothing that is timed or whose peak is measured comes here: such a task gets one that is `off`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.checks.fraud import Fraud
from kvtailor.bench.measure.machine import free_bytes
from kvtailor.bench.measure.memory_gauge import is_out_of_memory
from kvtailor.errors import KvtailorError
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs.replayed_cache import ReplayedCache
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.cache_dtype import dtype_of_caches
from kvtailor.hf.model.processes import started
from kvtailor.hf.model.vocabulary import token_rows
from kvtailor.hf.run.kept_prompt import CannotKeep, KeptPrompt, difference, fill, keep, why_own
from kvtailor.hf.run.later_layers import answering_layers, begin_later, first_change, hidden_states, record
from kvtailor.hf.run.prefill import read
from kvtailor.ledger import storage_bytes
from kvtailor.ops import dispatch
from kvtailor.plan import Plan
from kvtailor.types import Needs

__all__ = ["NOT_SHARED", "TIMED", "Findings", "KeptPrompts"]

NOT_SHARED = "it was asked for so (share=False, --share off)"
TIMED = "the task times or weighs what a prefill takes"

_MOST = 2 << 30
"""Bytes of kept prompts in host memory at most; no more than a quarter of what is free, as on an accelerator."""


@dataclass
class _Note:
    """What became of one plan's prompts since the last record."""

    why: str | None = None
    compared: bool | None = None


@dataclass(frozen=True)
class Findings:
    """What has been found of sharing: kinds of pass that were compared, and `off`, `later` and `begun_later`."""

    compared: frozenset[tuple[str, bool] | None]
    off: str | None
    later: bool
    begun_later: int


@dataclass
class _Entry:
    kept: KeptPrompt
    bytes: int
    used: int


class KeptPrompts:
    """See the module.

    Args:
        most: bytes that kept prompts may take together; None: 2 GiB, or a quarter of the device's free memory where
            that is less.
        lasting: prompts stay beyond their sample, until there is no room for those of another one.
        off: why nothing is kept, as the end of a sentence; None: prompts are kept.

    Attributes:
        off: see above; also what has been found since.
        forwards: prompts that went through the model to be kept.
        later: forwards behind a prompt may begin at a later layer of the model.
        begun_later: how many did.
        peak: most bytes that were kept at once.
    """

    def __init__(self, *, most: int | None = None, lasting: bool = False, off: str | None = None):
        self._most, self._lasting, self.off = most, lasting, off
        self._kept: dict[tuple[object, ...], list[_Entry]] = {}
        self._expected: list[Plan] = []
        self._notes: dict[str, _Note] = {}
        self._compared: set[tuple[str, bool] | None] = set()
        # What differs in two caches of a plan that have read the same prompt.
        self._unlike: dict[str, str] = {}
        self._sample = 0
        self._of: object = None
        self._model: str | None = None
        self._ahead: list[Plan] = []
        self.later = True
        self.forwards = self.peak = self.begun_later = 0

    def begin_run(self, model_hash: str | None) -> None:
        """Forget the prompts of another model, or of one whose weights have changed since."""
        if model_hash is None or model_hash != self._model:
            self.forget()
            self._compared.clear()
            self._unlike.clear()
        self._model = model_hash

    def begin(self, plans: Sequence[Plan], of: object = None) -> None:
        """Begin a sample, which these plans are going to read; or go on with one, by what it is `of`."""
        if of is None or of != self._of:
            self._sample += 1
        self._of = of
        self._expected = _sharing(plans)

    def gather_for(self, plans: Sequence[Plan]) -> None:
        """Gather from now on, beside what a sample's plans need, what these do, which later samples of it have."""
        self._ahead = _sharing(plans)

    def end(self) -> None:
        """End a sample."""
        self._expected = []
        if not self._lasting:
            self.forget()

    def forget(self) -> None:
        """Keep no prompt any more."""
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """Of all that is kept now."""
        return sum(entry.bytes for entries in self._kept.values() for entry in entries)

    def findings(self) -> Findings:
        """What has been found of sharing, such as by a fork of this process."""
        return Findings(frozenset(self._compared), self.off, self.later, self.begun_later)

    def learn(self, found: Findings) -> None:
        """Take what a fork has found, so that the next one need not look again."""
        self._compared |= found.compared
        self.off, self.later = self.off or found.off, self.later and found.later
        self.begun_later = max(self.begun_later, found.begun_later)

    def begin_record(self) -> None:
        """Begin to take note of what becomes of prompts."""
        self._notes.clear()

    def told(self, plan: Plan | None) -> dict[str, Any]:
        """Return `prefill`, `prefill_own` and `prefill_compared` of a plan's record; nothing where it has read none."""
        note = None if plan is None else self._notes.get(plan.hash)
        if note is None:
            return {}
        shared = note.why is None
        return {"prefill": "shared" if shared else "own", "prefill_own": note.why, "prefill_compared": note.compared}

    def notes_on(self, plan: Plan | None) -> tuple[str, ...]:
        """Return what a plan's record must say of its prompts."""
        parts = None if plan is None else self._unlike.get(plan.hash)
        if parts is None:
            return ()
        return (
            f"It keeps something else of the same prompt each time (two caches differ in {parts}), by a method that "
            "draws at random without a state or by a device's sums: these numbers need not come again.",
        )

    def not_filled(self, cache: Any, why: str) -> None:
        """Take note of a cache that reads a prompt itself, and why, as the end of a sentence."""
        if isinstance(cache, KvCache):
            note = self._notes.setdefault(cache.plan.hash, _Note())
            note.why = note.why or self.off or why

    def filled(
        self, model: Any, ids: Tensor, cache: Any, *, last_only: bool, instruction: Tensor | None = None
    ) -> Tensor | None:
        """Fill an empty cache with a prompt, which goes through the model where it has not yet.

        Args:
            model: of transformers.
            ids: (b, n) of the prompt, without padding.
            cache: that its plan compresses. It is empty still where None is returned.
            last_only: the last token's logits alone.
            instruction: for plans that read the prompt twice.

        Returns:
            Logits (b, n, V) or (b, 1, V); None where the cache has to read the prompt itself.

        Raises:
            Fraud: the filled cache is not what it is when it reads the prompt itself.
            KvtailorError: whatever the plan raises in a prefill.
        """
        if not isinstance(cache, KvCache):
            return None
        note = self._notes.setdefault(cache.plan.hash, _Note())
        entry, why = self._ready(model, ids, cache, last_only)
        if entry is None:
            note.why = note.why or why
            return None
        kept, before = entry.kept, len(entry.kept.repeated)
        try:
            logits = self._fill(model, ids, cache, kept, last_only, instruction)
            if len(kept.repeated) > before:
                self._weigh(entry)
            equal = self._compared_once(model, ids, cache.plan, kept, last_only, instruction)
            note.compared = note.compared if equal is None else equal
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # Nothing more is tried: what is kept in the midst of a measurement would be taken for the cache's.
            self.off = "the device's memory did not hold a kept prompt beside the cache"
            self.forget()
            cache.reset()
            note.why = note.why or self.off
            return None
        if self.off is not None:
            # Found by the comparison.
            cache.reset()
            note.why, note.compared = note.why or self.off, False
            return None
        return logits

    def followed(
        self, model: Any, ids: Tensor, following: Tensor, cache: Any, forward: Callable[[Any], Tensor]
    ) -> Tensor:
        """Return the logits of tokens behind a prompt; the cache is not to be used afterwards.

        Layers below the first in which the cache differs from the uncompressed one are not computed again: what they
        gave was taken down when the null plan read the same tokens. The first time both ways are gone, and where the
        model's logits differ by a bit, every forward is a whole one from then on.

        Args:
            model: of transformers.
            ids: (1, n) of the prompt.
            following: (1, t) of the tokens behind it.
            cache: has seen the prompt.
            forward: feeds `following` to the model on a cache, and returns logits (1, t, V).
        """
        entry = self._entry_without_plan(model, ids)
        if not isinstance(cache, KvCache) or entry is None or not self.later:
            return forward(cache)
        layers = answering_layers(model, cache)
        if layers is None:
            self.later = False
            return forward(cache)
        kept, name = entry.kept, tuple(following.flatten().tolist())
        answers = kept.answers.get(name)
        if cache.plan == Plan():
            if answers is not None:
                return forward(cache)
            with record(layers) as found:
                logits = forward(cache)
            if len(found) == len(layers) and not self._room_for(storage_bytes(hidden_states(found)), ids.device):
                kept.answers[name] = found
                self._weigh(entry)
            return logits
        first = 0 if answers is None else min(first_change(cache, kept.cache), len(layers) - 1)
        if answers is None or first < 1:
            return forward(cache)
        self.begun_later += 1
        with begin_later(cache, layers, answers, first):
            logits = forward(cache)
        if self.begun_later == 1:
            again = cache_for(model, cache.plan)
            fill(again, kept)
            plain = forward(again)
            if not _alike(plain, logits):
                self.later = False
                return plain
        return logits

    def _entry_without_plan(self, model: Any, ids: Tensor) -> _Entry | None:
        """The kept prompt of these ids that the null plan's cache is filled from; None where there is none now."""
        entries = self._kept.get(self._name(model, ids, Plan(), True), [])
        return next((entry for entry in entries if entry.kept.is_of(model)), None)

    def _ready(self, model: Any, ids: Tensor, cache: KvCache, last_only: bool) -> tuple[_Entry | None, str | None]:
        """The kept prompt from which a cache is filled, or why there is none."""
        plan = cache.plan
        why = self.off or why_own(plan)
        if why is None and (isinstance(cache, ReplayedCache) or cache.seen):
            why = "its cache is none that a prompt begins"
        if why is None and ids.shape[1] < 2:
            why = "a prompt of one token counts as decoded"
        if why is None and started().size > 1:
            why = "several processes share the model"
        if why is not None:
            return None, why
        name = self._name(model, ids, plan, last_only)
        for entry in self._kept.get(name, []):
            if entry.kept.serves(plan) and entry.kept.is_of(model):
                entry.used = self._sample
                return entry, None
        return self._keep(model, ids, cache, last_only, name)

    def _keep(
        self, model: Any, ids: Tensor, cache: KvCache, last_only: bool, name: tuple[object, ...]
    ) -> tuple[_Entry | None, str | None]:
        own = cache.plan.needs.of_prompt
        for needs in dict.fromkeys([self._together(cache.plan), own]):
            why = self._room_for(_estimate(model, cache, ids, needs, last_only), ids.device)
            if why is not None:
                continue
            try:
                kept = keep(model, ids, needs, last_only=last_only)
            except CannotKeep as error:
                self.off = why = str(error)
                break
            except (KvtailorError, ValueError) as error:
                # Where the plan itself is at fault, its own prefill says so.
                why = str(error)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self.off = why = "the device's memory did not hold a prompt that is kept"
                self.forget()
                break
            else:
                self.forwards += 1
                entry = _Entry(kept, 0, self._sample)
                self._kept.setdefault(name, []).append(entry)
                self._weigh(entry)
                return entry, None
        return None, why

    def _fill(
        self, model: Any, ids: Tensor, cache: KvCache, kept: KeptPrompt, last_only: bool, instruction: Tensor | None
    ) -> Tensor:
        if cache.engine.needs.reconstruction:
            return read(model, cache, ids, instruction=instruction, last_only=last_only, kept=kept)
        fill(cache, kept)
        # As a forward shows them.
        cache.conversation.append(ids.cpu(), None, at=0)
        return kept.logits.clone()

    def _compared_once(
        self, model: Any, ids: Tensor, plan: Plan, kept: KeptPrompt, last_only: bool, instruction: Tensor | None
    ) -> bool | None:
        """Read the prompt both ways once more; None where it is not this plan's turn.

        Once for each kind of pass, for a plan that gets a record, which says so. Nothing is kept any more where the
        model itself does not give the same twice.

        Raises:
            Fraud: it does, and the filled cache is another one.
        """
        kind = plan.prompt_pass
        looked_at = kind in self._compared or plan.hash in self._unlike
        if looked_at or plan == Plan() or plan not in self._expected:
            return None
        self._compared.add(kind)

        def plainly() -> tuple[Tensor, KvCache]:
            cache = cache_for(model, plan)
            return read(model, cache, ids, instruction=instruction, last_only=last_only), cache

        mine = cache_for(model, plan)
        logits, (expected, own) = self._fill(model, ids, mine, kept, last_only, instruction), plainly()
        what = "its logits" if not _alike(logits, expected) else difference(mine, own)
        if what is None:
            return True
        again, other = plainly()
        if not _alike(again, expected):
            self.off = "this model does not give the same numbers for a prompt twice"
            self.forget()
            return False
        if (parts := difference(other, own)) is not None:
            # The model does: it is the plan's own doing, and another one's caches are still to be looked at.
            self._compared.remove(kind)
            self._unlike[plan.hash] = parts
            return False
        raise Fraud(
            "shared prefill",
            f"a cache of {plan} that was filled from a kept prompt of {ids.shape[1]} tokens differs from one that read "
            f"the prompt itself in {what}: go on with --share off, and report it",
        )

    def _together(self, plan: Plan) -> Needs:
        """The needs of a plan and of those that are expected and can share one forward with it."""
        found = plan.needs.of_prompt
        for other in (*self._expected, *self._ahead):
            more = other.needs.of_prompt
            apart = found.moments and more.moments and found.moments_skip != more.moments_skip
            if other.prompt_pass == plan.prompt_pass and not apart:
                found |= more
        return found

    def _room_for(self, wanted: int, device: torch.device) -> str | None:
        """Make room for so many bytes by giving up prompts of earlier samples; the reason where there is none."""
        most = self._limit(device)
        for name in sorted(self._kept, key=lambda each: max(entry.used for entry in self._kept[each])):
            if self.bytes + wanted <= most or max(entry.used for entry in self._kept[name]) == self._sample:
                break
            del self._kept[name]
        if self.bytes + wanted <= most:
            return None
        return f"kept prompts may take {most >> 20} MiB, of which {max(0, most - self.bytes) >> 20} are left"

    def _limit(self, device: torch.device) -> int:
        if self._most is None:
            free = free_bytes(device)
            room = _MOST if free is None else free // 4
            self._most = room if device.type != "cpu" else min(_MOST, room)
        return self._most

    def _weigh(self, entry: _Entry) -> None:
        entry.bytes = entry.kept.bytes
        self.peak = max(self.peak, self.bytes)

    def _name(self, model: Any, ids: Tensor, plan: Plan, last_only: bool) -> tuple[object, ...]:
        """What must be the same for a prompt to be the same."""
        text = ids.to(torch.int64).cpu().contiguous().view(torch.uint8).numpy().tobytes()
        here = dispatch.forced(), torch.get_num_threads(), torch.is_inference_mode_enabled()
        return text, tuple(ids.shape), last_only, plan.prompt_pass, str(getattr(model, "dtype", "")), *here


def _sharing(plans: Sequence[Plan]) -> list[Plan]:
    """Those that do not each read a prompt themselves."""
    return [plan for plan in plans if why_own(plan) is None]


def _alike(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal, NaN among them."""
    return torch.equal(one, two) or bool(((one == two) | (one.isnan() & two.isnan())).all())


def _estimate(model: Any, cache: KvCache, ids: Tensor, needs: Needs, last_only: bool) -> int:
    """Bytes that a kept prompt is going to take, spare slots among them."""
    rows, tokens = ids.shape
    element = dtype_of_caches(model).itemsize
    geometry = cache.own_geometry
    found = geometry.full_bytes(rows, tokens + max(16, tokens // 32), element)
    for shape in geometry.compressed_shapes:
        queries = min(tokens, needs.window) + needs.rows
        found += rows * shape.q_heads * queries * shape.key_size * element
        if needs.moments:
            found += rows * shape.q_heads * shape.key_size * (shape.key_size + 1) * 4
        if needs.mass:
            found += rows * shape.kv_heads * tokens * 4
    if cache.engine.needs.reconstruction is not None:
        found += sum(rows * shape.kv_heads * tokens * 4 for shape in geometry.compressed_shapes)
    return found + rows * (1 if last_only else tokens) * (token_rows(model) or 0) * element
