"""A model's forward goes by its caches while one with `graphs=True` is alive, and is its own again afterwards.

No hook of torch can leave a forward out, so the instance gets a `forward` of ours; its class is never changed. A call
with a cache of another kind goes to the model's own forward, untouched. Each such cache holds the same `ForwardLease`;
when the last one is gone, so is the lease, and with it our forward.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from kvtailor.hf.graphs.obstacles import obstacle_of_parts
from kvtailor.hf.graphs.replayed_cache import ReplayedCache
from kvtailor.hf.layers.run_eagerly import run_eagerly
from kvtailor.hf.versions import CACHE_ARGUMENTS

__all__ = ["ForwardLease", "lend_forward", "obstacle_of_forward"]


class ForwardLease:
    """What every cache of a model with `graphs=True` holds, and its copies with it."""

    def __copy__(self) -> ForwardLease:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardLease:
        return self


class _LentForward:
    """The forward of one model, while it is lent.

    Args:
        model: refers to it weakly: a model that refers to itself would outlive its last user.
    """

    def __init__(self, model: Any):
        own = type(model).forward
        self._model = weakref.ref(model)
        self.lease: weakref.ref[ForwardLease] | None = None
        # transformers reads which arguments a forward takes.
        self.__signature__ = inspect.signature(model.forward)
        self.__name__, self.__doc__ = own.__name__, own.__doc__

    def __call__(self, *args: Any, **given: Any) -> Any:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this forward is gone")
        among = (*(given.get(name) for name in CACHE_ARGUMENTS), *args)
        cache = next((each for each in among if isinstance(each, ReplayedCache)), None)
        if cache is None:
            return type(model).forward(model, *args, **given)
        if torch.compiler.is_compiling():
            _ran_compiled(cache)
            return type(model).forward(model, *args, **given)
        return cache.open_steps.forward(cache, model, type(model).forward.__get__(model), args, given)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a copy of the model, or in a file: that model's own forward."""
        return getattr, (self._model(), "forward")


@run_eagerly
def _ran_compiled(cache: ReplayedCache) -> None:
    cache.open_steps.land()
    cache.open_steps.ran_plainly("the call was compiled")


def lend_forward(model: Any) -> ForwardLease:
    """Let a model's forward go by its caches until the lease that this gives is gone.

    Args:
        model: a transformers decoder-only model, in whose way `obstacle_of_forward` finds nothing.
    """
    lent = vars(model).get("forward")
    lease = lent.lease() if isinstance(lent, _LentForward) and lent.lease is not None else None
    if lease is None:
        lease, lent = ForwardLease(), _LentForward(model)
        weakref.finalize(lease, _give_back, weakref.ref(model), weakref.ref(lent)).atexit = False
        lent.lease = weakref.ref(lease)
        model.forward = lent
    return lease


def _give_back(model: weakref.ref[Any], lent: weakref.ref[_LentForward]) -> None:
    """Take our forward away, unless it was replaced since."""
    found = model()
    if found is not None and (mine := lent()) is not None and vars(found).get("forward") is mine:
        del found.forward


def obstacle_of_forward(model: Any) -> str | None:
    """Why plain forwards of a model cannot be answered by replayed steps, a sentence; None where they can.

    What is refused here would leave a recorded step behind what the model does now, or could not be given back.
    """
    kind, found, own = type(model).__name__, vars(model).get("forward"), type(model).forward
    # A copy of a model whose forward was lent has its own one as an attribute.
    if not (found is None or isinstance(found, _LentForward) or getattr(found, "__func__", None) is own):
        return f"the forward of this {kind} was replaced, as accelerate and torch.compile do, and ours would hide it"
    return obstacle_of_parts(model)
