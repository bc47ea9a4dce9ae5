"""Its place beside `__init__.py` puts the repository on the path, so that tests can import `tests.held_rows`.

Without a GPU Triton's kernels run in its interpreter, which must be said before triton is first imported.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
