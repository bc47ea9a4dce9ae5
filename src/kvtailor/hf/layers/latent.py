"""The layer of our cache for multi-head latent attention, whose module expands what `update` gives it.

An attribute on a tensor does not outlive the expansion. So the attention finds such a layer by its module, as the one
of its thread whose update has come and whose attention has not (`hf.attention.expect`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.hf.attention import expect
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.mask import LazyMask
from kvtailor.hf.model.attending.latents import LatentProjections

__all__ = ["LatentLayer"]

# Tokens of a module's first forward of which it makes true keys and values, for them to be compared.
_SHOWN = 16


class LatentLayer(CompressedLayer):
    """One layer that holds latents in the place of keys and rotated keys in that of values."""

    _shown = 0
    _ours: Tensor | None = None

    @run_eagerly
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new latents (b, 1, t, r) and rotated keys (b, 1, t, e), and return NaN for the module to expand."""
        # The module would cast the rotated keys to the latents' dtype where it joins them.
        return super().update(key_states, value_states.to(key_states.dtype), *args, **kwargs)

    def _handed_on(self, keys: Tensor, values: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """One token of NaN, so that the expansion costs nothing and no other attention gives a number for it.

        Until the module is known to hand on what it expands, some of the new tokens stand before it.
        """
        self._shown = 0 if self.projections.verified else min(_SHOWN, keys.shape[2])
        expect(self)
        return _with_nan(keys, self._shown), _with_nan(values, self._shown)

    @property
    def projections(self) -> LatentProjections:
        """Those of this layer's module."""
        found = self.state.model.latents
        if not isinstance(found, LatentProjections):
            raise CacheMisuse(
                f"layer {self.layer_idx} of this cache holds latents, and does not know the projections of its model; "
                "make the cache with kvtailor.cache_for(model, plan)"
            )
        return found

    def has_given(self, keys: Tensor) -> bool:
        """Whether keys (b, H, k, d) are made of what `update` gave, and not those of a forward without this cache.

        Such a forward may come to this layer's module after one that was broken off.
        """
        if keys.shape[2] != self._shown + 1:
            return False
        self._ours = torch.isnan(keys[:, :, -1:, :1]).any()
        # Elsewhere the answer would have to be waited for; `attend` uses it without.
        return keys.device.type != "cpu" or bool(self._ours)

    def check_states(self, module: torch.nn.Module, keys: Tensor, values: Tensor) -> None:
        """Raise where the attention got other keys (b, H, k, d) and values than this layer's module makes."""
        projections = self.projections
        if projections.module is not module:
            raise CacheMisuse(
                f"layer {self.layer_idx} of this cache is used by another {type(module).__name__} than its projections "
                "were read from; make a cache with kvtailor.cache_for once the model is as it shall be"
            )
        if self._shown:
            assert self.arriving is not None
            latents, rotated = (states[:, 0, : self._shown] for states in self.arriving)
            projections.check(keys[:, :, :-1], values[:, :, :-1], latents, rotated)

    def attend(
        self, query: Tensor, mask: LazyMask | Tensor | None, scaling: float, module: torch.nn.Module | None = None
    ) -> Tensor:
        """See `CompressedLayer.attend`; (b, H, t, dv), and NaN where the keys were not those of this cache."""
        output = super().attend(query, mask, scaling, module)
        ours, self._ours = self._ours, None
        return output if ours is None or output.device.type == "cpu" else output.masked_fill(~ours, float("nan"))


def _with_nan(states: Tensor, tokens: int) -> Tensor:
    """The first tokens of states (b, 1, t, c), and one of NaN behind them: (b, 1, tokens + 1, c)."""
    nan = states.new_full((1, 1, 1, 1), float("nan")).expand(states.shape[0], 1, 1, states.shape[-1])
    return nan if not tokens else torch.cat([states[:, :, :tokens], nan], 2)
