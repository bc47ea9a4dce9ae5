"""Counts the bytes of the tensors that code makes and still holds: exact, the same on every machine, and fast.

Every operation that torch dispatches is seen, and every storage that one of them made counts for as long as anything
keeps it alive. What was there before counts for nothing, and neither do views of it. What a kernel takes and gives
back inside of one operation is not seen; tests/contract/test_evidence_memory.py holds the count against the kernel's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context in which new storages are counted.

    Attributes:
        now: bytes of the storages made in here that are still alive.
        peak: the most that `now` has been after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # Weak references also keep an address from being given to another storage while it is known here.
        self._given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref.cdata not in self._made:
                self._given[ref.cdata] = ref
        found = func(*args, **kwargs)
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            if ref.cdata not in self._given:
                self._made[ref.cdata] = ref, storage.nbytes()
        self._made = {at: (ref, size) for at, (ref, size) in self._made.items() if not ref.expired()}
        self.now = sum(size for _, size in self._made.values())
        self.peak = max(self.peak, self.now)
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
