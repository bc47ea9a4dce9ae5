"""Telling models apart: the same architecture trained twice, replaced or edited weights, other rotary frequencies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtailor.hf.model.devices import named_values, uncompiled, whole
from kvtailor.types.late_checks import send

__all__ = ["config_values", "fingerprint", "remembered_fingerprint", "rotary_frequencies", "weight_fingerprint"]

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "_attn_implementation_internal")
# Entries of a config about how a model was trained, how it is called and what it returns. States do not depend on them.
_NOT_THE_STATES = frozenset(
    {*_NOT_THE_MODEL, "architectures", "bos_token_id", "chunk_size_feed_forward", "eos_token_id", "id2label"}
    | {"initializer_range", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states"}
    | {"pad_token_id", "pretraining_tp", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype"}
    | {"use_cache"}
)
_TRAINING = ("dropout", "pdrop")
# Words of a row: rows and columns of so many are summed, whatever the shape of a parameter is.
_WIDTH = 1024
_REMEMBERED: WeakKeyDictionary[Any, tuple[str, str | None]] = WeakKeyDictionary()


def fingerprint(model: Any) -> str | None:
    """Return the SHA-256 of the config and of `weight_fingerprint`.

    Returns:
        64 hex digits; None for a model without parameters or without a config, or whose weights cannot be read.
    """
    if not hasattr(model, "named_parameters") or not hasattr(model, "config"):
        return None
    weights = weight_fingerprint(model)
    if weights is None:
        return None
    config = model.config.to_diff_dict() if hasattr(model.config, "to_diff_dict") else {}
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    return _digest(iter([json.dumps(kept, sort_keys=True, default=str).encode(), weights.encode()]))


def weight_fingerprint(model: Any, dtype: torch.dtype | None = None) -> str | None:
    """Return the SHA-256 over all bytes of every parameter and stored buffer, as sums, and of the state of adapters.

    One changed bit gives another fingerprint, as does a tensor of another name, shape or dtype (such as those of an
    adapter), an adapter that is switched on or off, or another strength of one. Of the config there is nothing in it,
    since its form follows the library. All bytes are read twice, and nothing is copied. Measured: 7 GB/s on one core of
    an AMD EPYC, so 2 s for 14 GB of weights. On an accelerator the sums are taken there; that was not measured.

    Args:
        model: of torch.
        dtype: that floating-point parameters are rounded to first, one at a time; None: as they are. So a file can also
            name the same weights as they are loaded elsewhere.

    Returns:
        64 hex digits; None where a parameter's values are nowhere to be found: on the device "meta", and not among
        those that accelerate keeps on the CPU or a disk; or where bitsandbytes has packed them for a CPU, which gives a
        model other bytes before its first forward than after it.
    """
    if _packed(model) or any(values.device.type == "meta" for _, _, values in named_values(model)):
        return None
    return _digest(_on_host(list(_exact(model, dtype))))


def remembered_fingerprint(model: Any) -> str | None:
    """Return `weight_fingerprint`, taken again only where the weights have changed since the last call.

    For what is asked at every cache. A change shows by a tensor's place in memory, by torch's count of changes in
    place, or by 64 of its values. What is written past torch (`parameter.data`, a view of another library) and touches
    none of these values does not show.
    """
    marks = _digest(_marks(model))
    known = _REMEMBERED.get(model)
    if known is None or known[0] != marks:
        known = _REMEMBERED[model] = marks, weight_fingerprint(model)
    return known[1]


def config_values(config: Any) -> dict[str, Any]:
    """The JSON-able entries of a model's configuration that its keys and values can depend on.

    Args:
        config: of transformers; of one with several parts, the text decoder's part is read.
    """
    values = config.get_text_config(decoder=True).to_dict()
    kept = {
        name: value
        for name, value in values.items()
        if name not in _NOT_THE_STATES and not name.startswith(("_", "summary_")) and not name.endswith(_TRAINING)
    }
    return dict(json.loads(json.dumps(kept, sort_keys=True, default=str)))


def rotary_frequencies(model: Any) -> dict[str, list[float]]:
    """By name, the frequencies with which the model turns queries and keys; of those that a context changes, the first.

    Empty where the model has no rotary embedding.
    """
    found = {}
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", "")
        changing = any("dynamic" in str(kind) or str(kind) == "longrope" for kind in _values(kinds))
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and (not changing or "original" in name) and buffer.device.type != "meta":
                found[f"{uncompiled(path)}.{name}"] = [float(each) for each in buffer.detach().double().cpu().flatten()]
    return found


def turns_of(model: Any) -> list[tuple[float, ...]]:
    """Return the different rotary frequencies of a model, whatever its modules are called."""
    return sorted({tuple(each) for each in rotary_frequencies(model).values()})


def _values(one_or_by_name: Any) -> list[Any]:
    return list(one_or_by_name.values()) if isinstance(one_or_by_name, dict) else [one_or_by_name]


def _exact(model: Any, dtype: torch.dtype | None) -> Iterator[bytes | Tensor]:
    for name, parameter, own in named_values(model):
        values = whole(own)
        if dtype is not None and values.is_floating_point() and not is_traceable_wrapper_subclass(values):
            values = values.to(dtype)
        yield f"{name} {values.dtype} {tuple(values.shape)}".encode()
        yield from _sums(values)
        for scale in _scales_beside(parameter):
            yield from _sums(scale.detach())
    for name, module in model.named_modules():
        # The layers of the peft package; a transformers model has methods of these names.
        if isinstance(getattr(module, "disable_adapters", None), bool):
            told = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
            yield f"{uncompiled(name)} {[getattr(module, each, None) for each in told]}".encode()
        # quanto's layers quantise inputs, and weights that are not frozen, in their forward.
        inputs = getattr(module, "activation_qtype", None)
        if inputs is not None or (hasattr(module, "weight_qtype") and not module.frozen):
            scales = [float(each.detach().float().sum()) for _, each in module.named_buffers(recurse=False)]
            yield f"{uncompiled(name)} {module.weight_qtype} {inputs} {scales}".encode()


def _packed(model: Any) -> bool:
    """Whether weights stand in an order of bitsandbytes' own for this CPU, into which a first forward packs them."""
    states = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    return any(getattr(state, "packing_format_for_cpu", False) for state in states)


def _scales_beside(parameter: Any) -> Iterator[Tensor]:
    """What the codes of bitsandbytes' parameters are multiplied with, which stands in attributes of them."""
    state = getattr(parameter, "quant_state", None)
    found = [getattr(parameter, "SCB", None)]
    while state is not None:
        found += [state.absmax, state.code, state.offset]
        state = state.state2
    yield from (each for each in found if isinstance(each, Tensor))


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Sum of the 8-byte words of a tensor, along rows and along columns, and what is left of it as it is; as bytes."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _sums(getattr(tensor, name))
        return
    data = tensor.contiguous().reshape(-1)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    data = data.view(torch.uint8)
    whole = data.numel() // (8 * _WIDTH) * (8 * _WIDTH)
    if whole:
        words = data[:whole].view(torch.int64).view(-1, _WIDTH)
        for axis in (0, 1):
            yield words.sum(axis).view(torch.uint8)
    # A view would keep all of a rounded parameter.
    yield data[whole:].clone()


def _marks(model: Any) -> Iterator[bytes]:
    """Where each tensor lies, how often torch has changed it in place, and up to 64 of its values."""
    found: list[bytes | Tensor] = []
    for name, parameter, own in named_values(model):
        version = None if parameter.is_inference() else parameter._version
        place = None if is_traceable_wrapper_subclass(own) else own.data_ptr()
        found.append(f"{name} {parameter.dtype} {tuple(parameter.shape)} {place} {version}".encode())
        for part in _parts(whole(own)):
            flat = part.flatten()
            at = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).to(torch.int64)
            found.append(flat[send(at, flat.device)].double().view(torch.uint8))
    yield from _on_host(found)


def _on_host(found: list[bytes | Tensor]) -> Iterator[bytes]:
    """The same in one transfer for each device; tensors (n,) are uint8."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in found:
        if isinstance(each, Tensor):
            by_device.setdefault(each.device, []).append(each)
    on_host = {
        device: iter(torch.cat(each).cpu().split([part.numel() for part in each])) for device, each in by_device.items()
    }
    for each in found:
        yield each if isinstance(each, bytes) else next(on_host[each.device]).numpy().tobytes()


def _parts(parameter: Tensor) -> Iterator[Tensor]:
    """A parameter, or the tensors of codes and scales that it is made of: torchao's weights know few operations."""
    if is_traceable_wrapper_subclass(parameter) and type(parameter).__module__.startswith("torchao."):
        for name in parameter.__tensor_flatten__()[0]:
            yield from _parts(getattr(parameter, name))
    else:
        yield parameter


def _digest(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
