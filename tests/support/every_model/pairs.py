"""Every pair of a model type and a class that transformers offers for text, and for images and text."""

from __future__ import annotations

from typing import NamedTuple

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

__all__ = ["Pair", "every_pair"]


class Pair(NamedTuple):
    """One line of the table.

    Attributes:
        mapping: "causal" for `MODEL_FOR_CAUSAL_LM_MAPPING`, "image" for `MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING`.
        model_type: transformers' name of the configuration.
        model_class: the name of the class that the mapping gives for it.
    """

    mapping: str
    model_type: str
    model_class: str

    def __str__(self) -> str:
        return f"{self.mapping} {self.model_type} {self.model_class}"


def every_pair() -> list[Pair]:
    """Return all pairs that the installed transformers has a configuration for, in its own order."""
    mappings = {
        "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "image": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    found = []
    for mapping, names in mappings.items():
        for model_type, classes in names.items():
            if model_type in CONFIG_MAPPING_NAMES:
                for each in (classes,) if isinstance(classes, str) else classes:
                    found.append(Pair(mapping, model_type, each))
    return found
