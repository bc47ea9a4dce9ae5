"""What a long-context set is, and one of its examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Example", "LongSet"]


@dataclass(frozen=True)
class LongSet:
    """A set with its official settings.

    Attributes:
        name: its name in the benchmark.
        metric: one of `metrics.METRICS`.
        generation: most tokens that are generated.
        prompt: the official template, with {context} and {input}; empty where the examples come as prompts.
        chat: a chat model gets its prompts in the chat template.
        first_line: only the first line of what was generated counts.
        stop_at_line_end: generation ends with a line.
    """

    name: str
    metric: str
    generation: int
    prompt: str = ""
    chat: bool = True
    first_line: bool = False
    stop_at_line_end: bool = False

    def clip(self, text: str) -> str:
        """The part of what was generated that counts."""
        return text.lstrip("\n").split("\n")[0] if self.first_line else text


@dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        name: its id in the data set, or its number.
        fields: what the data set has of it.
        references: right answers.
        classes: names of all classes, where it is to be put into one.
    """

    name: str
    fields: Mapping[str, Any]
    references: tuple[str, ...]
    classes: tuple[str, ...] = ()
