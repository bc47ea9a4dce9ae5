"""Registers the devices `gpu:0`, `gpu:1` ... with torch, once in a process, and moves models to them.

Nothing happens when this module is imported: tests are collected in every worker process, and only those that call
`register` change it. What remains in the process then is a name (`torch.device("gpu")`, `torch.gpu`) and a fallback
for operations on such tensors. torch is told that no accelerator is available: its optimisers would otherwise ask this
one whether a graph is being captured.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tests.support.other_device.tensors import KIND, run
from torch import Tensor, nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["DEVICES", "move_model", "register"]

DEVICES = 4


class _Module:
    """What torch looks for under `torch.gpu`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return DEVICES

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing: random numbers of the device come from the CPU's generator, which `torch.manual_seed` sets."""

    def synchronize(self, device: object = None) -> None:
        """Nothing is ever under way."""


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


_KEPT: list[Any] = []  # a library's registrations end with the object


@cache
def register() -> None:
    """Make `torch.device("gpu")` exist in this process; a second call does nothing."""
    _setup_privateuseone_for_python_backend(KIND, backend_module=_Module(), hook=_Hook())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    # `torch.tensor(..., device=...)` copies below the key on which tensors with a class of their own are dispatched.
    copies = torch.library.Library("aten", "IMPL")
    copies.impl("copy_", lambda *args, **kwargs: run(torch.ops.aten.copy_.default, args, kwargs), "PrivateUse1")
    _KEPT.extend((library, copies))


def move_model(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Move parameters and buffers of a model, or of a part of one, in place, as `model.to("cuda")` does.

    Parameters that are tied stay tied. `model.to(device)` would untie them: torch makes a new parameter for each name
    where the new device's tensors are of another class.
    """
    moved: dict[int, Tensor] = {}

    def to(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            made = tensor.detach().to(device)
            moved[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return moved[id(tensor)]

    for part in model.modules():
        for names in (part._parameters, part._buffers):
            names.update({name: to(tensor) for name, tensor in names.items() if tensor is not None})
    return model
