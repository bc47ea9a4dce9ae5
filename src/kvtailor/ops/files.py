"""Files that methods name in their arguments: read once, when the method is made."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileContent", "read_file", "safetensors_metadata"]


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """What a file held when it was read.

    Attributes:
        name: its name, without its folders.
        data: its bytes.
        hash: their sha256, for `Method.content_hash`.
    """

    name: str
    data: bytes
    hash: str


def read_file(path: str, asked: str) -> FileContent:
    """What a file holds; `~` is the user's folder, and a relative path begins at the current one.

    Args:
        path: where it is.
        asked: which argument of which method names it, such as "table: file".

    Raises:
        ValueError: it cannot be read; the sentence begins with `asked`.
    """
    place = Path(os.path.expanduser(path)).absolute()
    try:
        data = place.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{asked} is {path!r}, and there is no file {place}: name one that is there") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{asked} is {path!r}, which cannot be read: {error}") from error
    return FileContent(name=place.name, data=data, hash=hashlib.sha256(data).hexdigest())


def safetensors_metadata(data: bytes) -> dict[str, str]:
    """The strings in the head of a safetensors file, without its tensors.

    Raises:
        ValueError: the head is no JSON object.
    """
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    if not isinstance(head, dict):
        raise ValueError(f"its head is a {type(head).__name__} and no JSON object")
    return dict(head.get("__metadata__", {}))
