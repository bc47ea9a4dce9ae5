"""A cache whose decoded tokens are replayed steps behind plain `model.generate()`.

What it holds can be reached by three attributes alone: `layers`, `guard` and `conversation`. Each of them lands the
open steps first, so that nothing reads or changes a cache that is behind. `seen` and `get_seq_length` count instead:
`generate()` asks for them between tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtailor.hf.cache import KvCache
from kvtailor.hf.callers import GenerateCall, Positioning, Preparing, read_asker
from kvtailor.hf.conversation import Conversation
from kvtailor.hf.graphs.counts import ReplayCounts
from kvtailor.hf.graphs.open_steps import OpenSteps
from kvtailor.hf.guard import CacheGuard
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.rope_border import crossing
from kvtailor.plan import Plan

__all__ = ["ReplayedCache"]


class ReplayedCache(KvCache):
    """See the module. Made by `kvtailor.cache_for(model, plan, graphs=True)`.

    Attributes:
        open_steps: the steps of which the cache does not know yet.
        forward_lease: keeps the model's forward ours while this cache or a copy is alive; see `hf.graphs.forward`.
    """

    forward_lease: object = None
    _layers: Any
    _guard: CacheGuard
    _conversation: Conversation

    def __init__(self, plan: Plan, geometry: Geometry, config: Any, **more: Any):
        self.open_steps = OpenSteps()
        super().__init__(plan, geometry, config, **more)

    @property
    def layers(self) -> Any:
        """The layers, one for each of the model, once the open steps have landed."""
        self.open_steps.land(looked_at=True)
        return self._layers

    @layers.setter
    def layers(self, value: Any) -> None:
        self._layers = value

    def __len__(self) -> int:
        """How many layers there are, which no token changes: a model may look at a cache's truth at every token."""
        return len(self._layers)

    @property
    def guard(self) -> CacheGuard:
        """What this cache and its layers check together, once the open steps have landed."""
        self.open_steps.land(looked_at=True)
        return self._guard

    @guard.setter
    def guard(self, value: CacheGuard) -> None:
        self._guard = value

    @property
    def conversation(self) -> Conversation:
        """Which token ids it has seen, once the open steps have landed."""
        self.open_steps.land(looked_at=True)
        self._conversation.take_notes(seen=self.seen, real=self._guard.real)
        return self._conversation

    @conversation.setter
    def conversation(self, value: Conversation) -> None:
        self._conversation = value

    @property
    def replays(self) -> ReplayCounts:
        """How many forwards were replayed, and why the others were not."""
        return self.open_steps.counts

    @property
    def seen(self) -> int:
        """Tokens seen, padding and replayed steps included."""
        return int(self._layers[self._first_keys].get_seq_length()) + self.open_steps.done

    @property
    def is_compileable(self) -> bool:
        """False: `generate()` asks at every token whether to compile."""
        return False

    @run_eagerly
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen by a layer, replayed steps included."""
        asker = read_asker()
        begins = isinstance(asker, GenerateCall)
        if isinstance(asker, GenerateCall):
            self.open_steps.most = asker.most
        crosses = isinstance(asker, Preparing) and crossing(self._guard.border, asker, self.seen)
        if begins or not self.open_steps.done or crosses:
            return super().get_seq_length(layer_idx)
        if isinstance(asker, Positioning):
            self._guard.rope.put_for(asker, self.seen)
        return self.seen

    def take_ids(self, ids: Tensor, mask: Tensor | None, at: int) -> None:
        """Take note of ids (b, t) that it has seen from column `at` on."""
        self.open_steps.land(looked_at=True)
        super().take_ids(ids, mask, at)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (beam search)."""
        super().reorder_cache(beam_idx)
        self.open_steps.rows_changed()

    def reset(self) -> None:
        """Forget everything; the cache may then serve another batch of the same model."""
        self.open_steps.drop()
        super().reset()

    def __repr__(self) -> str:
        plain = super().__repr__()
        counts = self.replays
        return f"{plain[:-1]}, replayed={counts.replayed}, plain={counts.plain})"

    # A shallow copy shares layers and open steps, so that each use of either lands them.
    def __deepcopy__(self, memo: dict[int, Any]) -> KvCache:
        self.open_steps.land(looked_at=True)
        return super().__deepcopy__(memo)
