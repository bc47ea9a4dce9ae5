"""What a calibrator gets and returns. A file of this folder or of one in it that holds one public dataclass made from
`Calibrator` is the calibrator of its name, and the kind of file that methods name in `calibrates`.
"""

from __future__ import annotations

import ast
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kvtailor.errors import UnknownName

if TYPE_CHECKING:
    from kvtailor.bench.subject import Subject
    from kvtailor.calibration.passages import Passage

__all__ = ["Calibrator", "Job", "Made", "calibrator", "kinds"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a calibrator works on.

    Attributes:
        subject: the model and its tokenizer.
        passages: pieces of the texts, each of `context` tokens, spread evenly; none if the kind reads no text.
        context: tokens of a passage.
        count: how many passages the run takes.
        state: seed of all random numbers.
        advance: called after each of `Calibrator.units`, with the name of what runs.
        draft: writes tensors to a temporary file of the kind and returns its path, so that a calibrator can measure
            what it has made.
    """

    subject: Subject
    passages: tuple[Passage, ...]
    context: int
    count: int
    state: int
    advance: Callable[[str], None]
    draft: Callable[[Mapping[str, Tensor]], str]


@dataclass(frozen=True, kw_only=True)
class Made:
    """The result of a calibrator.

    Attributes:
        tensors: by name, stacked over the compressed layers.
        facts: what was measured of them, JSON-able.
        texts: texts that it made itself and measured on, by name; the check for overlap covers them too.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


class Calibrator(ABC):
    """One kind of calibration. A subclass is a frozen, keyword-only dataclass of its own settings.

    Attributes:
        summary: what it measures, in one line.
        reads_text: whether it needs texts at all.
        tokens: how many tokens of text it uses by default.
        context: how many tokens a passage has by default.
    """

    summary: ClassVar[str]
    reads_text: ClassVar[bool] = True
    tokens: ClassVar[int] = 65_536
    context: ClassVar[int] = 1024

    @abstractmethod
    def units(self, passages: int) -> int:
        """Return how often `measure` calls `Job.advance` for `passages` passages."""

    @abstractmethod
    def measure(self, job: Job) -> Made:
        """Run the model and measure. The model's parameters and its attention implementation do not change.

        Raises:
            KvtailorError: it cannot be measured on this model or these texts.
        """


@cache
def kinds() -> dict[str, str]:
    """Return the names of all calibrators and the class in each one's file, from their syntax trees."""
    return {name: made for name, (_, made) in _found().items()}


@cache
def _found() -> dict[str, tuple[str, str]]:
    """The module and the class of each."""
    found, home = {}, Path(__file__).parent
    for path in sorted(home.rglob("*.py"), key=lambda path: path.stem):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        made = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Calibrator" for base in node.bases)
        ]
        if made:
            module = ".".join(["kvtailor.calibration", *path.relative_to(home).with_suffix("").parts])
            found[path.stem] = module, made[0]
    return found


def calibrator(kind: str) -> Calibrator:
    """Return the calibrator of a kind, with its own settings.

    Raises:
        UnknownName: there is none.
    """
    if kind not in kinds():
        raise UnknownName("kind of calibration", kind, kinds())
    module, name = _found()[kind]
    made: Calibrator = getattr(importlib.import_module(module), name)()
    return made
