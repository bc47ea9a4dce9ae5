"""The options that say in which dtype a model computes and its caches hold keys and values."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["CACHE_DTYPE_HELP", "dtype_options"]

CACHE_DTYPE_HELP = (
    "Of keys and values: --dtype's, or bfloat16 or float16 under float32.  [--dtype's; under float32 the checkpoint's "
    "16 bits where the CPU has no arithmetic for them]"
)


def dtype_options(command: Any) -> Any:
    """Give a command `--dtype` and `--cache-dtype`, for `bench.subject.Subject.load`."""
    of_cache = click.option("--cache-dtype", help=CACHE_DTYPE_HELP)
    of_model = click.option("--dtype", help="float32, bfloat16 or float16; otherwise the checkpoint's own.")
    return of_model(of_cache(command))
