"""Calibration files: what was measured on a model beforehand, for the methods that need it, and where it came from.

One safetensors file holds the tensors of one kind (such as `qfilters`), stacked over the layers that a plan compresses,
and in its head the kind, the model with the fingerprints of its weights, its shapes, the texts, and how it was made.
The files shipped with the package lie in `calibration/shipped/MODEL/KIND.safetensors`.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError, CalibrationError, FileError
from kvtailor.method import Method, Serves
from kvtailor.ops.files import read_file
from kvtailor.ops.tensor_file import Format, tensors_of, write_tensor_file

__all__ = [
    "CalibratedMethod",
    "Calibration",
    "Shapes",
    "calibrated",
    "how_to",
    "read",
    "shipped",
    "write",
]

_FORMAT = Format(
    name="kvtailor-calibration-2",
    unchecked="kvtailor-calibration-1",
    what="calibration file",
    cure="fetch it again, or make it again",
)
_HOME = Path(__file__).parent / "calibration" / "shipped"
# Kinds that are measured on no text.
_WITHOUT_TEXT = ("duo",)
_ENTRIES = ("kind", "model", "fingerprints", "shapes", "made", "facts", "calibrated_on")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of the model that a file was made for.

    Attributes:
        layers: layers that a plan compresses.
        q_heads: query heads of each.
        kv_heads: kv heads of each.
        head_size: d, of a key.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """One file.

    Attributes:
        name: the file's name.
        hash: sha256 of its bytes.
        kind: what it was made for.
        tensors: by name, stacked over the compressed layers.
        metadata: its head as it stands there: strings, most of them JSON.
    """

    name: str
    hash: str
    kind: str
    tensors: Mapping[str, Tensor] = field(repr=False)
    metadata: Mapping[str, str] = field(repr=False)

    @property
    def model(self) -> str:
        """The name of the model that it was made for."""
        return self.metadata["model"]

    @cached_property
    def fingerprints(self) -> frozenset[str]:
        """Of the weights it was made with, and of the same weights in smaller dtypes."""
        return frozenset(json.loads(self.metadata["fingerprints"]))

    @cached_property
    def shapes(self) -> Shapes:
        """Of the model that it was made for."""
        return Shapes(**json.loads(self.metadata["shapes"]))

    @cached_property
    def made(self) -> dict[str, Any]:
        """How it was made: tokens, rows, context, dtype, state, date, version, command."""
        return dict(json.loads(self.metadata["made"]))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What its calibrator found out about it."""
        return dict(json.loads(self.metadata["facts"]))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts that it was made from."""
        return tuple(each["text_name"] for each in json.loads(self.metadata["calibrated_on"]))

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one compressed layer, 0-based."""
        return {name: tensor[layer] for name, tensor in self.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class CalibratedMethod(Method):
    """A method whose numbers were measured on the model beforehand. Stands before the stage's contract among the bases.

    The tensors reach a scorer as `Held.calibration`, those of its layer, and an allocator as
    `BudgetRequest.calibration`.

    Attributes:
        file: that `kvtailor calibrate` wrote; None: the one that is shipped for the very model.
        calibrates: the kind of file that it reads.
        per_head: names of the tensors of which the second dimension is the kv heads.
    """

    file: str | None = None
    calibrates: ClassVar[str]
    per_head: ClassVar[tuple[str, ...]] = ()
    _calibration: Calibration | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.file is not None:
            found = read(self.file, self.calibrates, f"{self.calibrates}: file")
            object.__setattr__(self, "_calibration", found)

    @property
    def derived(self) -> Serves:
        """As of any method, but that tensors of each kv head do not serve latents."""
        why = "it is calibrated head by head, and such a layer holds one latent for all heads"
        return Serves(latents=why if self.per_head else None).over(super().derived)

    @property
    def wants_calibration(self) -> bool:
        """Whether these arguments need a file at all."""
        return True

    @property
    def calibration(self) -> Calibration | None:
        """What `file` held when this method was made; None where no file is named."""
        return self._calibration

    @property
    def content_hash(self) -> str | None:
        """Of the file; where none is named, of all that are shipped of this kind, since one of them will be read."""
        if not self.wants_calibration:
            return None
        if self._calibration is not None:
            return self._calibration.hash
        return hashlib.sha256(" ".join(each.hash for each in shipped(self.calibrates)).encode()).hexdigest()

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """A file that was made for a model of other shapes."""
        if self._calibration is None or not self.wants_calibration:
            return None
        shapes = self._calibration.shapes
        if (shapes.layers, shapes.kv_heads, shapes.head_size) == (layers, heads, size):
            return None
        return (
            f"{self.calibrates}: {self._calibration.name} was made for {self._calibration.model}, of {shapes.layers} "
            f"layers with {shapes.kv_heads} kv heads of size {shapes.head_size}, and this model has {layers} with "
            f"{heads} of size {size}: {how_to(self.calibrates)}"
        )

    @classmethod
    @abstractmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Random tensors with the names and shapes of a file of this kind, for tests and for the untrained model."""

    @classmethod
    def example_for(
        cls, *, layers: int, heads: int, group: int, size: int, value_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The same, for values of another size than keys; to be overridden where the shapes depend on it."""
        return cls.example_calibration(layers=layers, heads=heads, group=group, size=size, generator=generator)


def calibrated(methods: Iterable[Method]) -> list[CalibratedMethod]:
    """Those that need a calibration."""
    return [each for each in methods if isinstance(each, CalibratedMethod) and each.wants_calibration]


def how_to(kind: str) -> str:
    """What to do to get a file of a kind."""
    text = "" if kind in _WITHOUT_TEXT else " --text T"
    return f"run `kvtailor calibrate {kind} --model M{text} --out F.safetensors` and write {kind}(file='F.safetensors')"


def read(path: str, kind: str, asked: str) -> Calibration:
    """A file of a kind.

    Args:
        path: where it is.
        kind: that it must be of.
        asked: which argument of which method names it, such as "qfilters: file".

    Raises:
        ArgumentError: it is not there, is damaged, is none of ours, or of another kind; the sentence begins with
            `asked`.
    """
    content = read_file(path, asked)
    found = f"{asked} is {path!r}"
    try:
        file = tensors_of(content.data, content.name, _FORMAT)
    except FileError as error:
        raise ArgumentError(f"{found}, which cannot be used: {error}: {how_to(kind)}") from error
    metadata = file.about
    if lacking := [name for name in _ENTRIES if name not in metadata]:
        raise ArgumentError(f"{found}, which lacks {', '.join(lacking)} in its head: {how_to(kind)}")
    if not file.checked:
        warnings.warn(
            f"{found}, which was written without checksums, so damage to its tensors would not be noticed: make it "
            f"again ({how_to(kind)})",
            stacklevel=2,
        )
    if metadata["kind"] != kind:
        raise ArgumentError(f"{found}, which holds a calibration of kind {metadata['kind']!r}: {how_to(kind)}")
    made = Calibration(name=content.name, hash=content.hash, kind=kind, tensors=file.tensors, metadata=metadata)
    _check(made, found)
    return made


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file whole or not at all; one that exists is replaced.

    Args:
        path: of the file.
        tensors: by name, stacked over the compressed layers.
        metadata: all of `_ENTRIES`.

    Raises:
        CalibrationError: it cannot be written.
    """
    lacking = [name for name in _ENTRIES if name not in metadata]
    if lacking:
        raise ArgumentError(f"a calibration file needs {', '.join(lacking)} in its head")
    try:
        write_tensor_file(Path(path).expanduser(), tensors, metadata, _FORMAT)
    except FileError as error:
        raise CalibrationError(f"asked to write a calibration to {os.fspath(path)!r}, which failed: {error}") from error


@cache
def shipped(kind: str | None = None) -> tuple[Calibration, ...]:
    """The files that come with the package, all or those of one kind, by model and kind."""
    found = sorted(_HOME.glob("*/*.safetensors"))
    return tuple(read(str(path), path.stem, "shipped") for path in found if kind in (None, path.stem))


def _check(made: Calibration, found: str) -> None:
    try:
        shapes = made.shapes
        for name in ("fingerprints", "made", "facts", "texts"):
            getattr(made, name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"{found}, whose head cannot be read ({error}): {how_to(made.kind)}") from error
    broken = sorted(
        name
        for name, tensor in made.tensors.items()
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all())
    )
    if broken:
        raise ArgumentError(f"{found}, which has NaN or infinity in {', '.join(broken)}: {how_to(made.kind)}")
    wrong = sorted(name for name, tensor in made.tensors.items() if tensor.shape[:1] != (shapes.layers,))
    if wrong or not made.tensors:
        raise ArgumentError(
            f"{found}, which is damaged: its head has {shapes.layers} layers, and {', '.join(wrong) or 'the file'} has "
            f"other ones: {how_to(made.kind)}"
        )
