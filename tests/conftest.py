"""Its place beside `__init__.py` puts the repository on the path, so that tests can import `tests.support.held_rows`.

Without a GPU Triton's kernels run in its interpreter, which must be said before triton is first imported.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest_plugins = ["tests.support.sampling"]
# Workers of pytest-xdist have it, and one process has not: output would be wrapped in some runs alone.
os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported: it would look at millions of objects at every round."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _refuse_older_names(record: logging.LogRecord) -> bool:
    """Fail where a cache is read from an output by an older name, of which transformers only logs a warning, once."""
    assert "`past_key_values`/`cache_params` are deprecated" not in record.getMessage(), record.getMessage()
    return True


logging.getLogger("transformers.utils.generic").addFilter(_refuse_older_names)


@pytest.fixture
def few_harness_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own tasks that tests name; to read the 14,000 files of all of them takes ten seconds each time."""
    index = pytest.importorskip("lm_eval.tasks._index")
    every = index.TaskIndex._iter_yaml_files
    folders = ("arc", "gsm8k", "lambada", "mmlu", "piqa", "winogrande")

    def few(root: Path) -> Iterator[Path]:
        known = [root / name for name in folders if (root / name).is_dir()]
        for folder in known or [root]:
            yield from every(folder)

    monkeypatch.setattr(index.TaskIndex, "_iter_yaml_files", staticmethod(few))
