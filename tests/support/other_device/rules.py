"""What a GPU allows: which tensors may meet in one operation, and which operations make the host wait.

The rules are those of PyTorch's CUDA backend as we know them. They were not compared with a GPU: there was none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tests.support.other_device import syncs
from torch import Tensor

__all__ = ["check_devices", "check_generator", "leaves", "note_waiting", "written_arguments"]

# The output's size depends on numbers that only the device knows.
_SIZES = (
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
)
_CHECKED = ("_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_check_errors")
# `multinomial` reads whether its probabilities are finite, `allclose` and `equal` a truth value.
_KINDS = {
    **dict.fromkeys(("_local_scalar_dense", "allclose", "multinomial"), syncs.ITEM),
    **dict.fromkeys(_SIZES, syncs.SIZE),
    **dict.fromkeys(_CHECKED, syncs.CHECK),
    "equal": syncs.EQUAL,
}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
# Operations that take a number of the CPU as an argument of their kernel, though they are not marked as pointwise.
_TAKE_NUMBERS = {"fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "where"}


def leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an operation, and what lists among them hold; `tree_leaves` of torch takes ten times as long."""
    found: list[Any] = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, (list, tuple)):
            found.extend(each)
        else:
            found.append(each)
    return found


@cache
def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes into, `out=` included."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _takes_numbers(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or _name(op) in _TAKE_NUMBERS | _INDEXING


def _name(op: Any) -> str:
    return op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else op.__name__


def check_devices(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> torch.device | None:
    """The device on which an operation runs, which all of its tensors share; None: none is on such a device.

    Numbers of the CPU (tensors without dimensions) may be operands where CUDA passes them to its kernel, and index
    tensors of the CPU may index a tensor of the device; they are copied to it.

    Raises:
        RuntimeError: the tensors are on different devices.
    """
    # Only this backend's tensors and the CPU's reach here, and `device` of the former is a lookup.
    devices = {each.device for each in tensors if each.device.type != "cpu"}
    if not devices:
        return None
    device = next(iter(devices))
    here = [each for each in tensors if each.device.type == "cpu"]
    if len(devices) == 1 and not here:
        return device
    if len(devices) > 1 or not _may_join(op, args, kwargs, here):
        found = ", ".join(f"{each.device} {tuple(each.shape)}" for each in tensors)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted({str(each.device) for each in tensors}))}: {op} was given {found}"
        )
    return device


def _may_join(op: Any, args: Sequence[Any], kwargs: dict[str, Any], here: Sequence[Tensor]) -> bool:
    """Whether an operation on a device takes these tensors of the CPU."""
    name = _name(op)
    if name in _INDEXING:
        if args[0].device.type == "cpu":
            return False
        indices = [each for each in args[1] if each is not None and each.device.type == "cpu"]
        if all(each.dim() == 0 for each in here if all(each is not index for index in indices)):
            syncs.note(syncs.FROM_HOST, len(indices))
            return True
        return False
    if any(each.dim() for each in here) or not _takes_numbers(op):
        return False
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(op)]
    return not any(each is target for target in written for each in here)


def check_generator(op: Any, device: torch.device, arguments: Sequence[Any]) -> None:
    """Refuses a generator of another device, as CUDA does."""
    for each in arguments:
        if isinstance(each, torch.Generator) and torch.device(each.device) != device:
            raise RuntimeError(f"Expected a '{device}' device type for generator but found '{each.device}' in {op}")


def note_waiting(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Counts an operation on a device that makes the host wait for it."""
    name = _name(op)
    kind = _KINDS.get(name)
    if kind is not None:
        syncs.note(kind)
    elif name == "repeat_interleave":
        given = [each for each in args[1:] if isinstance(each, int)] or [kwargs.get("output_size")]
        if given[-1] is None:
            syncs.note(syncs.SIZE)
    elif name in _INDEXING:
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        masks = [each for each in masks if each.device.type != "cpu"]
        # Writing one number of the CPU through one mask is `masked_fill`, which need not know how many are set.
        value = args[2] if len(args) > 2 else None
        filled = value is not None and value.numel() == 1 and value.device.type == "cpu" and len(masks) == 1
        if masks and not (filled and sum(each is not None for each in args[1]) == 1):
            syncs.note(syncs.SIZE, len(masks))
