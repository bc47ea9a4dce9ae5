"""Saved caches that are well formed, with right checksums, and whose header and tensors do not fit each other."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.seam.saving.test_saving import continued, saved
from tests.support.seam.flips import outcome
from torch import Tensor

import kvtailor
from kvtailor.store.cache_file import read_cache_file, write_cache_file

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_DTYPES = (*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def of_tensors(tensors: dict[str, Tensor], draw: random.Random) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each tensor of another dtype, shape or number, gone, or under another name."""
    for name, tensor in tensors.items():
        found: dict[str, Tensor | None] = {"gone": None, "empty": tensor[:0] if tensor.ndim else None}
        dtype = draw.choice([each for each in _DTYPES if each != tensor.dtype])
        found[f"as {dtype}"] = tensor.to(dtype)
        same = [each for each in _DTYPES if each != tensor.dtype and each.itemsize == tensor.dtype.itemsize]
        same = [each for each in same if each != torch.bool]
        if same:
            other = draw.choice(same)
            found[f"read as {other}"] = tensor.view(other)
        for axis in range(tensor.ndim):
            if tensor.shape[axis] > 0:
                found[f"shorter in {axis}"] = tensor.narrow(axis, 0, tensor.shape[axis] - 1).contiguous()
                found[f"longer in {axis}"] = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
        found["flat"] = tensor.reshape(-1)
        found["one axis more"] = tensor[None]
        if tensor.ndim > 1 and tensor.shape[0] != tensor.shape[1]:
            found["turned"] = tensor.transpose(0, 1).contiguous()
        for what, changed in found.items():
            rest = {each: one for each, one in tensors.items() if each != name}
            yield f"{name} {what}", rest if changed is None else {**rest, name: changed}
        rest = {each: one for each, one in tensors.items() if each != name}
        yield f"{name} renamed", {**rest, f"{name}x": tensor}
        yield f"{name} twice", {**tensors, f"{name}.2": tensor.clone()}


def of_layers(layers: list[Any], draw: random.Random) -> Iterator[tuple[str, list[Any]]]:
    """Each entry of the layers' fields gone, or another number, text, list or nothing."""
    for path in list(_paths(layers)):
        for odd in [None, True, -1, 0, 1, 3, 2**40, 1.5, "x", "float16", [], {}, "gone", "twice"]:
            changed = json.loads(json.dumps(layers))
            *way, last = path
            where = changed
            for each in way:
                where = where[each]
            if where[last] == odd and type(where[last]) is type(odd):
                continue
            if odd == "gone":
                del where[last]
            elif odd == "twice":
                if not isinstance(where[last], list) or not where[last]:
                    continue
                where[last] = where[last] * 2
            else:
                where[last] = odd
            if draw.random() < 0.5:
                yield f"{path} is {odd!r}", changed


def _paths(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for name, each in entries:
        yield (*path, name)
        yield from _paths(each, (*path, name))


def trial(plan: str, folder: Path, most: int, state: int = 0) -> tuple[Counter[str], dict[str, str]]:
    """Outcomes of at most so many variants of a saved cache, and those that should not be, by the variant."""
    draw = random.Random(f"{plan} {state}")
    good, bad = folder / "good.safetensors", folder / "bad.safetensors"
    model, _, mask = saved("llama", plan, good, lengths=(40, 40))
    expected = continued(model, kvtailor.load_cache(model, good), mask, steps=2)[1]
    file = read_cache_file(good)
    tensors, about = dict(file.tensors), dict(file.about)
    made = [(what, changed, about) for what, changed in of_tensors(tensors, draw)]
    for what, layers in of_layers(json.loads(about["layers"]), draw):
        made.append((what, tensors, {**about, "layers": json.dumps(layers)}))
    came: Counter[str] = Counter()
    odd = {}
    for what, changed, texts in draw.sample(made, min(most, len(made))):
        write_cache_file(bad, changed, texts)
        found = outcome(bad, model, mask, expected)
        came[found.partition(":")[0]] += 1
        if found not in ("refused", "harmless"):
            odd[what] = found
    return came, odd
