"""Where a model computes: its layers may lie on several devices, and weights may wait on the CPU or on a disk.

accelerate's hooks (`device_map`) move what goes into a module to the module's device, and bring weights that wait
elsewhere ("meta" until then) there for the time of its forward.

Parameters may be sharded over processes by transformers (torch's `DTensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvtailor.errors import UnsupportedModel

__all__ = ["aligned", "input_device", "local_part", "named_values", "runs_on", "uncompiled", "whole"]


def runs_on(module: nn.Module) -> torch.device:
    """Return the device on which a module computes."""
    for each in _hooks(module):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    for child in module.children():
        if next(child.parameters(), None) is not None:
            return runs_on(child)
    return torch.device("cpu")


def input_device(model: Any) -> torch.device:
    """Return the device to which token ids go."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return runs_on(model if embedding is None else embedding)


@contextmanager
def aligned(module: nn.Module) -> Iterator[bool]:
    """While it is open, the weights of a module that wait elsewhere are on the module's device; gives whether any do.

    Raises:
        UnsupportedModel: they wait elsewhere, and accelerate is not there to bring them.
    """
    if all(parameter.device.type != "meta" for parameter in module.parameters(recurse=False)):
        yield False
        return
    try:
        from accelerate.utils import align_module_device
    except ImportError as error:
        raise UnsupportedModel(
            f"the plan reads the weights of {type(module).__name__}, which are not in memory (on the device 'meta'), "
            f"and accelerate, which could bring them, cannot be imported: {error}"
        ) from error
    with align_module_device(module):
        yield True


def named_values(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each parameter and stored buffer with its name before it and its values after it, from where they wait.

    Weights that GPTQ or AWQ has quantised are buffers. A buffer that checkpoints leave out follows from the config, and
    is not yielded. Values that nothing knows stay on the device "meta". Names are those without torch.compile, which
    wraps modules.
    """
    for name, tensor in (*model.named_parameters(), *_stored_buffers(model)):
        if tensor.device.type != "meta":
            yield uncompiled(name), tensor, tensor.detach()
            continue
        path, _, own = name.rpartition(".")
        waiting = (_waiting(hook) for hook in _hooks(model.get_submodule(path)))
        found = next((each[own] for each in waiting if each is not None and own in each), None)
        values = tensor.detach() if found is None else found.detach().to(tensor.dtype)
        yield uncompiled(name), tensor, values


def _stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # torch says in no public place which buffers a state dict leaves out.
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def uncompiled(name: str) -> str:
    """Return the name that a module or parameter has where torch.compile has wrapped nothing around it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks of a module, those inside a sequence of them too."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else [hook, *getattr(hook, "hooks", ())]


def _waiting(hook: Any) -> Mapping[str, Tensor] | None:
    found: Mapping[str, Tensor] | None = getattr(hook, "weights_map", None)
    return found


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter as one process would hold it; collective where it is sharded."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def local_part(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter; all of it where it is not sharded."""
    own = getattr(parameter, "to_local", None)
    return parameter if own is None else own()
