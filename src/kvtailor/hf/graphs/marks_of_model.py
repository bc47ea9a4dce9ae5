"""By which it is seen that a model is no longer the one whose step was recorded.

A recorded step holds the addresses of weights and what Python did at the time: which modules ran, in which mode, with
which hooks. So before each replay these are compared, by identity; no number of a device is read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

__all__ = ["MarksOfModel", "autocast_modes", "has_hooks"]

_PARTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OWN_ADDRESS = (Tensor, nn.Parameter, nn.Buffer)


class MarksOfModel:
    """What a recorded step takes for granted of a model.

    Args:
        model: a module, now.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._hooks = [getattr(module, name) for module in modules for name in _HOOKS]
        self._dicts = [getattr(module, name) for module in modules for name in _PARTS]
        self._names = [(names, name) for names in self._dicts for name in names]
        # A part whose forward is replaced, by a kernel or by a hook of accelerate.
        self._names += [(vars(module), "forward") for module in modules]
        self._sizes = [len(names) for names in self._dicts]
        self._found = [names.get(name) for names, name in self._names]
        # Tensors of other classes, as quantised weights are, have no address of their own, and are replaced whole.
        self._tensors = [each for each in self._found if type(each) in _OWN_ADDRESS]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._modules = modules
        self._modes = self._modes_now()

    def hold(self) -> bool:
        """Whether the model is as it was, and runs in the same modes."""
        return (
            not any(self._hooks)
            and not has_hooks_of_all()
            and [len(names) for names in self._dicts] == self._sizes
            and all(names.get(name) is found for (names, name), found in zip(self._names, self._found, strict=True))
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and self._modes_now() == self._modes
        )

    def _modes_now(self) -> tuple[object, ...]:
        return [module.training for module in self._modules], autocast_modes(), torch.is_inference_mode_enabled()


def has_hooks(model: nn.Module) -> bool:
    """Whether hooks of forwards are registered on a model or a part of it, or on all modules."""
    return has_hooks_of_all() or any(getattr(module, name) for module in model.modules() for name in _HOOKS)


def has_hooks_of_all() -> bool:
    """Whether hooks of forwards are registered on all modules."""
    return bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)


def autocast_modes() -> tuple[bool, ...]:
    """Whether autocast is on, for the CPU and for CUDA."""
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
