"""Calibration files for tests: of random tensors, for tiny random models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.support.bench.dummy import DummyTokenizer
from tests.support.seam.zoo import build
from torch import Tensor

from kvtailor import calibration_file
from kvtailor.bench.data.overlap import Calibrated, written
from kvtailor.bench.subject import Subject
from kvtailor.calibration_file import CalibratedMethod, Shapes, write
from kvtailor.hf.model.fingerprint import weight_fingerprint
from kvtailor.hf.model.geometry import Geometry
from kvtailor.plan import registry

MADE = {"tokens": 10, "date": "2025-01-01T00:00:00+00:00", "dtype": "float32", "kvtailor": "0", "command": "none"}


def tiny(family: str = "llama", state: int = 0) -> Subject:
    """A random model that reads one token for each byte of plain text."""
    return Subject(name=f"tiny {family}", model=build(family, state=state), tokenizer=DummyTokenizer())


def write_file(
    path: Path, kind: str, tensors: Mapping[str, Tensor], model: object, /, *, on: str | None = None, **entries: str
) -> str:
    """Writes a file for a model, as if it had been made from the text `on`; `entries` replace what its head says."""
    geometry = Geometry.of(model.config)
    shapes = Shapes(
        layers=len(geometry.compressed),
        q_heads=geometry.q_heads,
        kv_heads=geometry.kv_heads,
        head_size=geometry.head_dim,
    )
    texts = () if on is None else (Calibrated.on(on, name=path.name, model="m", text_name="a text"),)
    head = {
        "kind": kind,
        "model": "m",
        "fingerprints": json.dumps([weight_fingerprint(model)]),
        "shapes": json.dumps(asdict(shapes)),
        "made": json.dumps(MADE),
        "facts": "{}",
        **written(texts),
        **entries,
    }
    write(path, tensors, head)
    return str(path)


def filters_for(model: object, state: int = 0) -> dict[str, Tensor]:
    """Random filters of the shapes that a model needs."""
    geometry = Geometry.of(model.config)
    generator = torch.Generator().manual_seed(state)
    return {"filters": torch.randn(len(geometry.compressed), geometry.kv_heads, geometry.head_dim, generator=generator)}


@contextmanager
def shipped_for(models: Iterable[object], home: Path) -> Iterator[None]:
    """As if the package came with files of random tensors of every kind for these models, and with no others."""
    kinds: dict[str, type[CalibratedMethod]] = {}
    for stage in registry.stages():
        for name in registry.methods(stage):
            method = registry.load(stage, name)
            if issubclass(method, CalibratedMethod):
                kinds[method.calibrates] = method
    for place, model in enumerate(models):
        geometry = Geometry.of(model.config)
        (home / str(place)).mkdir()
        for kind, method in kinds.items():
            tensors = method.example_for(
                layers=len(geometry.compressed),
                heads=geometry.kv_heads,
                group=geometry.q_heads // geometry.kv_heads,
                size=geometry.head_dim,
                value_size=geometry.compressed_shapes[0].value_size,
                generator=torch.Generator().manual_seed(place),
            )
            write_file(home / str(place) / f"{kind}.safetensors", kind, tensors, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_file, "_HOME", home)
        calibration_file.shipped.cache_clear()
        yield
    calibration_file.shipped.cache_clear()
