"""The newest of some vectors that is like each of others, in C++: a product is compared where it was made.

`score.decoding.rkv` says the same in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.ops.cpu.library import Alike, Library, library

__all__ = ["ALIKE_VARIANTS", "newest_alike"]

ALIKE_VARIANTS = ("avx512vnni", "avxvnni", "avx2")
"""Variants that `newest_alike` is built for; it was measured on the first and the last."""
# Below so many multiplications a barrier costs more than a second thread brings.
_SMALL = 1 << 19


def newest_alike(
    directions: Tensor, rows: Tensor, columns: Tensor, above: float, *, newer: bool, using: Library | None = None
) -> Tensor:
    """Return the newest slot whose product with each row is above a bound, counted from 1; 0 where none is.

    Args:
        directions: (n, d) float32 on the CPU.
        rows: (r,) int64 ascending slots that look. columns: (k,) int64 ascending slots that are looked at.
        above: the bound.
        newer: of the columns those count that are newer than the row, else those that are older.
        using: one of `ALIKE_VARIANTS`; None: the best.

    Returns:
        (r,) int64.

    Raises:
        RuntimeError: torch ran no threads.
    """
    used = using or library()
    assert used is not None, "asked for a kernel that was not built"
    directions, rows, columns = directions.contiguous(), rows.contiguous(), columns.contiguous()
    newest = torch.zeros(rows.shape, dtype=torch.int64)
    call = Alike(
        vectors=directions.data_ptr(),
        rows=rows.data_ptr(),
        columns=columns.data_ptr(),
        newest=newest.data_ptr(),
        size=directions.shape[1],
        row_count=rows.shape[0],
        column_count=columns.shape[0],
        newer=newer,
        above=above,
    )
    large = rows.shape[0] * columns.shape[0] * directions.shape[1] > _SMALL
    used.run("alike", call, scratch="alike_scratch", threads=torch.get_num_threads() if large else 1)
    return newest
