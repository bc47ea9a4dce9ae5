"""Attention of models that compute it themselves, as two matrix products with a softmax between.

Some families never ask transformers' `AttentionInterface`: they multiply queries with what the cache gave as keys,
scale, add the mask, take the softmax, and multiply with what the cache gave as values. For these, a layer's `update`
gives `Operand`s in place of keys and values. Torch hands every function that meets one to `__torch_function__`, its
documented protocol. So the queries, the factor and the mask are noted as they come, and the second product is the
attention of the layer. What is not understood is refused in a sentence; the numbers in an operand are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse, UnsupportedModel

__all__ = ["Operand", "operands"]

# Functions by what they do to an operand, by their names in torch.
_SAME_CONTENT = frozenset({"contiguous", "dropout", "float", "half", "bfloat16", "permute", "reshape", "to"})
_SAME_CONTENT |= {"transpose", "type", "unflatten", "view", "detach", "clone", "flatten", "type_as"}
_PRODUCT = frozenset({"matmul", "__matmul__", "bmm"})
_TIMES = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__"})
_DIVIDED = frozenset({"div", "__truediv__", "true_divide", "div_", "__itruediv__"})
_ABOUT = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "__len__", "__repr__", "element_size"}
)


@dataclass(frozen=True)
class _Note:
    """What is known of an operand.

    Attributes:
        layer: of the cache.
        kind: "keys", "values", "logits" or "weights".
        query: (b, q, t, d) that the keys were multiplied with.
        factor: of the logits.
        mask: that was added to the logits.
    """

    layer: Any
    kind: str
    query: Tensor | None = None
    factor: float = 1.0
    mask: Any = None


class Operand(Tensor):
    """Stands for keys, values, logits or attention weights of one layer; see the module."""

    note: _Note

    def masked(self, mask: Any) -> Operand:
        """Return these logits with a mask added."""
        if self.note.kind != "logits" or self.note.mask is not None:
            raise _not_understood("adds a mask twice, or to something that is not logits", self)
        return _wrapped(self.as_subclass(Tensor), replace(self.note, mask=mask))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ABOUT:
                found = func(*args, **kwargs)
                # `mT` and its like are views of an operand.
                return _wrapped(_plain(found), args[0].note) if isinstance(found, Tensor) else found
        return _applied(name, func, args, kwargs)


def operands(layer: Any, keys: Tensor, values: Tensor) -> tuple[Operand, Operand]:
    """Return what stands for the keys (b, h, n, d) and values of a layer of the cache."""
    return _wrapped(keys, _Note(layer, "keys")), _wrapped(values, _Note(layer, "values"))


def _wrapped(tensor: Tensor, note: _Note) -> Operand:
    made: Operand = tensor.as_subclass(Operand)
    made.note = note
    return made


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Operand) else value


def _applied(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    first = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        if name in _PRODUCT:
            return _product(args[0], args[1])
        if name == "baddbmm" and isinstance(args[2], Operand):
            if kwargs.get("beta", 1) != 0 and bool(args[0].any()):
                raise _not_understood("adds numbers of its own to its attention logits (baddbmm)", args[2])
            logits = _product(args[1], args[2])
            return _wrapped(_plain(logits), replace(logits.note, factor=float(kwargs.get("alpha", 1))))
        note = first.note if isinstance(first, Operand) else None
        if note is not None and name in _SAME_CONTENT:
            if name == "dropout" and kwargs.get("training", args[2] if len(args) > 2 else True) and _rate(args, kwargs):
                note.layer.refuse_forward()
                raise CacheMisuse(
                    "a compressed cache is for inference: the model asks for dropout; call model.eval() first"
                )
            return _wrapped(_plain(first) if name == "dropout" else func(_plain(first), *args[1:], **kwargs), note)
        if note is not None and note.kind == "logits":
            if name in _TIMES | _DIVIDED and _is_number(args[1]):
                by = float(args[1])
                return _wrapped(_plain(first), replace(note, factor=note.factor * (by if name in _TIMES else 1 / by)))
            if name in ("add", "__add__", "__radd__", "add_", "__iadd__") and getattr(args[1], "ndim", 0) == 4:
                return first.masked(args[1])
            if name in ("max", "maximum") and float(args[1]) == torch.finfo(first.dtype).min:
                return first
            if name == "softmax" and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, first.dim() - 1):
                return _wrapped(_plain(first), replace(note, kind="weights"))
    inner = [
        part for each in (*args, *kwargs.values()) for part in (each if isinstance(each, list | tuple) else [each])
    ]
    given = [each for each in inner if isinstance(each, Operand)]
    what = f"its {given[0].note.kind}" if given else "its states"
    raise _not_understood(f"calls torch's {name} on {what}", *given)


def _product(left: Any, right: Any) -> Any:
    """The first product of an attention, or its second."""
    kinds = [each.note.kind if isinstance(each, Operand) else None for each in (left, right)]
    if kinds == [None, "keys"]:
        layer = right.note.layer
        b, h, _, size = layer.arriving[0].shape
        seen = right.shape[-1]
        if tuple(right.shape) not in ((b, h, size, seen), (b * h, size, seen)):
            raise _not_understood(f"multiplies queries with keys that it has made {tuple(right.shape)} of", right)
        # (b * q, t, d) of a product of batches, or (b, q, t, d) already.
        query = left.reshape(b, -1, *left.shape[-2:]) if left.ndim == 3 else left
        logits = left.new_full((1,), float("nan")).expand(*left.shape[:-1], seen)
        return _wrapped(logits, _Note(layer, "logits", query=query))
    if kinds == ["weights", "values"]:
        note = left.note
        if right.note.layer is not note.layer:
            raise _not_understood("multiplies the weights of one layer with the values of another", left)
        b, h, _, size = note.layer.arriving[1].shape
        seen = left.shape[-1]
        if tuple(right.shape) not in ((b, h, seen, size), (b * h, seen, size)):
            raise _not_understood(f"multiplies weights with values that it has made {tuple(right.shape)} of", right)
        output = note.layer.attend_products(note.query.to(note.layer.model_dtype), note.mask, note.factor)
        return output.to(note.query.dtype).reshape(*left.shape[:-1], output.shape[-1])
    given = [each for each in (left, right) if isinstance(each, Operand)]
    raise _not_understood("multiplies its states in another order than an attention does", *given)


def _rate(args: Any, kwargs: dict[str, Any]) -> float:
    return float(kwargs.get("p", args[1] if len(args) > 1 else 0.5))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _not_understood(what: str, *given: Operand) -> UnsupportedModel:
    for each in given[:1]:
        each.note.layer.refuse_forward()
    return UnsupportedModel(
        f"this model computes its attention itself and {what}, which kvtailor does not understand; its attention would "
        "have to be the softmax of one factor times queries times keys, plus the mask, times the values"
    )
