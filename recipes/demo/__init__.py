"""The embedded models: a small Llama that retrieves from its context, and a smaller GPT-NeoX that drafts for it.

The recipe, each step one command (``--help`` on each)::

    python -m recipes.demo.tokenizer    # corpus and generated documents -> tokenizer.json
    python -m recipes.demo.mixture      # corpus -> array of tokens, list of filler sentences
    python -m recipes.demo.train        # -> checkpoints; run again to continue
    python -m recipes.demo.export       # checkpoint -> kvtailor/demo/weights/NAME/
    python -m recipes.demo.evaluate     # bits per byte, use of context, retrieval by task, length and depth
    python -m recipes.demo.separate     # how far the methods lie apart on it
    kvtailor calibrate KIND --model demo --text ... --out ...    # what methods need of it; docs/calibration.md
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtailor.hf.model.embedded import NAMES, path

__all__ = ["NAMES", "data_folder", "path", "work_folder"]


def data_folder() -> Path:
    """Where the recipe looks for the data: ``$KVTAILOR_DATA``, else ``../shared/data`` beside the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("KVTAILOR_DATA", beside))


def work_folder() -> Path:
    """Where the recipe keeps tokens and checkpoints: ``$KVTAILOR_DEMO_WORK``, else ``/tmp/demo_train``."""
    return Path(os.environ.get("KVTAILOR_DEMO_WORK", "/tmp/demo_train"))
