"""A model's configuration by name, without its weights."""

from __future__ import annotations

from typing import Any

from kvtailor import demo
from kvtailor.errors import KvtailorError

__all__ = ["config_of"]


def config_of(model: str) -> Any:
    """The transformers configuration of the embedded model ("demo"), of a local folder or of a name on the hub.

    Raises:
        KvtailorError: there is no such model.
    """
    from transformers import AutoConfig

    source = str(demo.path()) if model == "demo" else model
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise KvtailorError(
            f"there is no model {model!r}: it is neither a folder with a config.json nor found on the hub; check the "
            f"name, or give 'demo' for the embedded model ({reason})"
        ) from error
