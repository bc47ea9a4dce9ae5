"""The embedded demo model: a small Llama that speaks a little English and retrieves from its context.

The recipe, each step one command (``--help`` on each)::

    python -m kvtailor.demo.tokenizer    # corpus and generated documents -> tokenizer.json
    python -m kvtailor.demo.mixture      # corpus -> array of tokens, list of filler sentences
    python -m kvtailor.demo.train        # -> checkpoints; run again to continue
    python -m kvtailor.demo.export       # checkpoint -> kvtailor/demo/weights/
    python -m kvtailor.demo.evaluate     # bits per byte, retrieval by task, length and depth
"""

from __future__ import annotations

import os
from pathlib import Path


def path() -> Path:
    """The folder of the embedded weights, tokenizer and model card."""
    return Path(__file__).resolve().parent / "weights"


def data_folder() -> Path:
    """Where the recipe looks for the data: ``$KVTAILOR_DATA``, else ``../shared/data`` beside the repository."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    return Path(os.environ.get("KVTAILOR_DATA", beside))


def work_folder() -> Path:
    """Where the recipe keeps tokens and checkpoints: ``$KVTAILOR_DEMO_WORK``, else ``/tmp/demo_train``."""
    return Path(os.environ.get("KVTAILOR_DEMO_WORK", "/tmp/demo_train"))
