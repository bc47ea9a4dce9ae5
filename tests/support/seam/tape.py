"""A graph without a GPU: what a step does to tensors is written down once, and done again on the same addresses.

As with a CUDA graph, numbers that Python held while the step was recorded stay what they were, memory that a step
allocates is the same at every replay, and a step that waits for the device cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh", "unique_dim", "_unique2"}
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class Tape(TorchDispatchMode):
    """Records while it is entered; kernels of Triton are recorded through `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Callable[[], None]] = []
        self.kernels = self.replays = 0
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._inside:
            return made
        name = func.overloadpacket.__name__
        if name in _WAITS:
            raise AssertionError(f"a step that is recorded calls {func}, for which a GPU would be waited for")
        outputs = [each for each in tree_flatten(made)[0] if isinstance(each, Tensor)]
        written = any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        )
        given = {
            each.untyped_storage().data_ptr() for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)
        }
        if written:
            self.done.append(lambda: func(*args, **kwargs))
        elif name in _EMPTY:
            self.done.append(lambda: [_poison(each) for each in outputs])
        # By storage and not by schema: in inference mode a reshape comes as one operation, which may copy.
        elif not all(each.untyped_storage().data_ptr() in given for each in outputs):
            self.done.append(lambda: _again(func, args, kwargs, outputs))
        return made

    def call(self, launch: Callable[[], None]) -> None:
        """Records a launch, and makes it."""
        self.done.append(launch)
        self.kernels += 1
        self._inside = True
        try:
            launch()
        finally:
            self._inside = False

    def replay(self) -> None:
        """All of it once more; the first time nothing, since recording a tape has done it already."""
        if self.replays:
            for each in self.done:
                each()
        self.replays += 1


def _poison(made: Tensor) -> None:
    if made.is_floating_point():
        made.fill_(float("nan"))


def _again(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    made = [each for each in tree_flatten(func(*args, **kwargs))[0] if isinstance(each, Tensor)]
    for old, new in zip(outputs, made, strict=True):
        old.copy_(new)


def recorder(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[Callable[[], None]], Callable[[], None]], list[Tape]]:
    """A `Recorder` of `hf.graphs.replay`, and the tapes that it has made."""
    from kvtailor.ops.triton_launch import missing

    tapes: list[Tape] = []
    now: list[Tape] = []
    if missing() is None:
        from kvtailor.ops.triton_launch import Launch

        launch = Launch.__call__

        def recorded(call: Launch) -> None:
            if now:
                now[-1].call(lambda: launch(call))
            else:
                launch(call)

        monkeypatch.setattr(Launch, "__call__", recorded)

    def record(run: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        tapes.append(tape)
        now.append(tape)
        try:
            with tape:
                run()
        finally:
            now.pop()
        return tape.replay

    return record, tapes
