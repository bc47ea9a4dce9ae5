"""Compute the grids of `higgs` and write `src/kvtailor/ops/codes/grid_points.py`; takes some minutes on one core.

    python docs/write_grids.py

A grid has the least squared error for pairs of normal numbers of variance 1, as far as Lloyd's rounds find it: each of
its points is the mean of what is nearest to it. Means are sums over a square mesh. Rounds begin with random points of
variance 2, as dense as the best grids of many points are; of many beginnings the best ones go on over a finer mesh, and
the best of these is taken.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

PLACE = Path(__file__).parents[1] / "src/kvtailor/ops/codes/grid_points.py"
SIZES = (16, 64, 256)
SEED, BEGINNINGS, BEST = 0, 24, 4
# Half the side of the mesh: what lies outside has a probability of 1e-9.
_REACH = 6.25

_HEAD = '''"""Points of the grids of `higgs`: pairs of numbers with the least squared error for normal pairs. Made by
`python docs/write_grids.py`: change that, not this file.
"""

from __future__ import annotations

__all__ = ["POINTS"]

# First and second coordinates in turns; grids are symmetric to nothing.
POINTS = {
'''


def mesh(step: float) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 2) of a mesh around 0 and their shares (n,) of a normal pair's probability."""
    line = np.arange(-_REACH, _REACH + step / 2, step) + step / 2
    points = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    weights = np.exp(-np.square(points).sum(1) / 2)
    return points, weights / weights.sum()


def rounds(grid: np.ndarray, step: float, most: int, least: float) -> tuple[np.ndarray, float]:
    """The grid after Lloyd's rounds over a mesh, at most so many, and its squared error for each of the two numbers.

    Args:
        grid: (n, 2). step: of the mesh.
        least: rounds end where no point moves farther.
    """
    points, weights = mesh(step)
    error = np.inf
    for _ in range(most):
        distance, nearest = cKDTree(grid).query(points)
        error = float((weights * np.square(distance)).sum() / 2)
        share = np.bincount(nearest, weights, len(grid))
        sums = np.stack([np.bincount(nearest, weights * points[:, i], len(grid)) for i in range(2)], 1)
        moved = np.where(share[:, None] > 0, sums / np.maximum(share, 1e-300)[:, None], grid)
        farthest = float(np.abs(moved - grid).max())
        grid = moved
        if farthest < least:
            break
    return grid, error


def best(size: int) -> tuple[np.ndarray, float]:
    """The grid of so many points, sorted, and its error for each number."""
    random = np.random.default_rng(SEED + size)
    begun = [rounds(random.normal(0, 2**0.5, (size, 2)), 0.1, 150, 1e-3) for _ in range(BEGINNINGS)]
    begun = sorted(begun, key=lambda each: each[1])[:BEST]
    begun = [rounds(grid, 0.05, 600, 1e-4) for grid, _ in begun]
    grid, error = rounds(min(begun, key=lambda each: each[1])[0], 0.02, 60, 1e-5)
    return grid[np.lexsort((grid[:, 1], grid[:, 0]))], error


def main() -> None:
    """Write the file."""
    lines = []
    for size in SIZES:
        grid, error = best(size)
        print(f"{size} points: {error:.6f} for each number", flush=True)
        lines.append(f"    # {error:.6f} for each number.\n    {size}: (\n")
        numbers = [f"{number:.5f}" for number in grid.ravel()]
        lines += [f'        "{" ".join(numbers[i : i + 12])} "\n' for i in range(0, len(numbers), 12)]
        lines.append("    ),\n")
    PLACE.write_text(_HEAD + "".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
