"""Code of the docs and examples, which is written for the newest transformers, under the installed one."""

from __future__ import annotations

import re
from pathlib import Path

from kvtailor.hf.versions import CACHE_ARGUMENT

__all__ = ["as_installed", "example_as_installed"]


def as_installed(code: str) -> str:
    """The same code, with the name of the argument by which the installed transformers takes a cache."""
    # kvtailor's own functions have `cache=` under every version.
    call = re.compile(r"(?<![\w.])(model(?:\.generate)?\((?:(?!\n\S).)*?)(?<=[(,\s])cache=(?=\w)", re.DOTALL)
    return call.sub(lambda found: f"{found[1]}{CACHE_ARGUMENT}=", code)


def example_as_installed(path: Path, folder: Path) -> Path:
    """A program that does what the example at `path` does: itself, or a copy in `folder`."""
    code = path.read_text(encoding="utf-8")
    if as_installed(code) == code:
        return path
    copied = folder / path.name
    copied.write_text(as_installed(code), encoding="utf-8")
    return copied
