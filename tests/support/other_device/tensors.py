"""Tensors of a device that is not the CPU, whose numbers lie in memory of the CPU all the same.

A `DeviceTensor` is a shell with a device, a shape and strides; its numbers are those of `inner`, an ordinary tensor of
the CPU. Every operation on shells is checked as a GPU would check it, counted if it makes the host wait, and then done
on the inner tensors: the arithmetic is the CPU's, so results are the same bit for bit. Views share memory because their
inner tensors do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tests.support.other_device import syncs
from tests.support.other_device.rules import check_devices, check_generator, leaves, note_waiting, written_arguments
from torch import Tensor

__all__ = ["KIND", "DeviceTensor", "run"]

KIND = "gpu"
_CPU = torch.device("cpu")
_aten = torch.ops.aten


class DeviceTensor(Tensor):
    """A tensor of one of these devices.

    Attributes:
        inner: the CPU's tensor that has its numbers.
    """

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            storage_size=_ANY_SIZE,
        )
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.inner!r}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _METHODS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            return (func if own is None else own)(*args, **(kwargs or {}))


# A shell's own storage is never read; a shape that grows in place must lie within it.
_ANY_SIZE = 2**62


def run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Does an operation of which a tensor or the argument `device` is on one of these devices."""
    if _is_composite(op):
        # In inference mode these come whole, elsewhere in the parts that they are made of.
        return op.decompose(*args, **kwargs)
    if op.overloadpacket.__name__ in ("_to_copy", "_copy_from", "_copy_from_and_resize", "copy_"):
        return _copy(op, args, kwargs)
    arguments = leaves(args, kwargs)
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    device = check_devices(op, args, kwargs, tensors)
    asked = kwargs.get("device")
    # Factories; `zeros_like` and its kin may name another device than that of the tensor they are like.
    target = _indexed(torch.device(asked)) if asked is not None else device
    if target is not None and target.type == KIND:
        check_generator(op, target, arguments)
    if device is not None:
        note_waiting(op, args, kwargs)
    on_cpu = {name: _CPU if name == "device" and value is not None else _inner(value) for name, value in kwargs.items()}
    out = op(*map(_inner, args), **on_cpu)
    written = written_arguments(op)
    for place, name in written:
        _take_shape(args[place] if place < len(args) else kwargs.get(name))
    if target is None or target.type != KIND:
        return out
    # What an operation writes into comes back as the tensor that was given.
    shells = {id(each.inner): each for each in tensors if isinstance(each, DeviceTensor)} if written else {}
    if _is_view(op) and torch.is_inference_mode_enabled() and not all(each.is_inference() for each in tensors):
        # A view of a tensor that was made outside of inference mode is such a tensor too.
        with torch.inference_mode(False):
            return _outer(out, target, shells)
    return _outer(out, target, shells)


@cache
def _is_composite(op: Any) -> bool:
    """Whether an operation is other operations on every device, such as `item`, `to` and `matmul`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@cache
def _is_view(op: Any) -> bool:
    """Whether an operation returns a view of what it was given."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)


def _outer(value: Any, device: torch.device, shells: dict[int, DeviceTensor]) -> Any:
    """What an operation on inner tensors returned, as tensors of the device."""
    if isinstance(value, Tensor):
        shell = shells.get(id(value))
        return DeviceTensor(value, device) if shell is None else shell
    if isinstance(value, (list, tuple)):
        return type(value)([_outer(each, device, shells) for each in value])
    return value


def _inner(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_inner(each) for each in value]
    return value.inner if isinstance(value, DeviceTensor) else value


def _indexed(device: torch.device) -> torch.device:
    return torch.device(KIND, 0) if device.type == KIND and device.index is None else device


def _copy(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copies may go from any device to any other."""
    name = op.overloadpacket.__name__
    if name == "_to_copy":
        source = args[0]
        device = _indexed(torch.device(kwargs["device"])) if kwargs.get("device") is not None else source.device
        _note_copy(source.device, device, kwargs.get("non_blocking", False))
        options = {name: _CPU if name == "device" and value is not None else value for name, value in kwargs.items()}
        made = op(_inner(source), **options)
        return DeviceTensor(made, device) if device.type == KIND else made
    into, source = (args[1], args[0]) if name.startswith("_copy_from") else (args[0], args[1])
    _note_copy(source.device, into.device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if name == "_copy_from_and_resize":
        _inner(into).resize_(source.shape)
    _inner(into).copy_(_inner(source))
    _take_shape(into)
    return into


def _note_copy(source: torch.device, target: torch.device, non_blocking: bool) -> None:
    if source == target:
        return
    if source.type == target.type:
        syncs.note(syncs.BETWEEN)
    elif target.type != KIND:
        # Into ordinary memory CUDA's copy is waited for, whatever was asked for.
        syncs.note(syncs.TO_HOST)
    elif not non_blocking:
        syncs.note(syncs.FROM_HOST)


def _take_shape(written: Any) -> None:
    """A shell takes the shape that its inner tensor was given in place: `resize_`, `t_`, `out=` of another size."""
    if isinstance(written, (list, tuple)):
        for each in written:
            _take_shape(each)
    if not isinstance(written, DeviceTensor):
        return
    inner = written.inner
    own = written.shape, written.stride(), written.storage_offset()
    if own != (inner.shape, inner.stride(), inner.storage_offset()):
        with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
            _aten.as_strided_.default(written, inner.shape, inner.stride(), inner.storage_offset())


# --- Methods of tensors that never become an operation, or that a GPU does in one piece.


def _to_list(tensor: Tensor) -> Any:
    return tensor.cpu().tolist()


def _to_numpy(tensor: Tensor, *, force: bool = False) -> Any:
    if not force:
        raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy it first")
    return tensor.detach().cpu().numpy(force=True)


def _set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """CUDA takes a Python number as a number of the CPU, where other backends make a tensor of the device of it."""
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value, dtype=tensor.dtype)
    Tensor.__setitem__(tensor, index, value)


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """As of a GPU's tensor: the storage is copied once, and what shared it shares the copy."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not isinstance(tensor, DeviceTensor):
        return copy.deepcopy(tensor, memo)
    with torch.no_grad():
        made: Tensor = DeviceTensor(copy.deepcopy(tensor.inner, memo), tensor.device)
    made.requires_grad_(tensor.requires_grad)
    made.__dict__.update(
        {name: copy.deepcopy(value, memo) for name, value in tensor.__dict__.items() if name != "inner"}
    )
    memo[id(tensor)] = made
    return made


def _fused_attention(*args: Any, **kwargs: Any) -> Tensor:
    """CUDA reads a prompt in one kernel; of an unknown backend torch makes a dozen operations, as where it trains."""
    op = torch.nn.functional.scaled_dot_product_attention
    if torch.is_grad_enabled() and any(each.requires_grad for each in args if isinstance(each, Tensor)):
        return op(*args, **kwargs)
    device = check_devices(op, args, kwargs, [each for each in leaves(args, kwargs) if isinstance(each, Tensor)])
    assert device is not None
    inner = op(*map(_inner, args), **{name: _inner(value) for name, value in kwargs.items()})
    return DeviceTensor(inner, device)


_METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.tolist: _to_list,
    Tensor.numpy: _to_numpy,
    Tensor.__setitem__: _set_item,
    Tensor.__deepcopy__: _deep_copy,
    # The ledger reads bytes from storages, and tells them apart by address.
    Tensor.untyped_storage: lambda tensor: tensor.inner.untyped_storage(),
    Tensor.data_ptr: lambda tensor: tensor.inner.data_ptr(),
    Tensor.is_pinned: lambda tensor, *_: False,
    torch.nn.functional.scaled_dot_product_attention: _fused_attention,
}
