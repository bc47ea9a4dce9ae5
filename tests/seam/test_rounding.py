"""The tolerance of tests of whole models is wide enough for this machine: torch's own ways lie well within it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.seam import vision, zoo
from tests.support.seam.zoo import ROUNDING, error, prompts

# From one forward to what tests do with it: some tens of decoded tokens, two turns, the worst of several.
MARGIN = 12
LENGTHS = (48, 31)


@torch.no_grad()
def distance(model: Any, inputs: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """The largest distance of a row in a padded batch from the row alone, and of "sdpa" from "eager"."""
    own, there = copy.deepcopy(model), inputs["attention_mask"].bool()
    logits = own(**inputs, use_cache=False).logits
    apart = [error(own(**alone, use_cache=False).logits[0], logits[row, there[row]]) for row, alone in enumerate(rows)]
    own.set_attn_implementation("eager")
    apart.append(error(own(**inputs, use_cache=False).logits[there], logits[there]))
    return max(apart)


# GPT-2 reads positions from a table and needs them by hand beside padding.
@pytest.mark.parametrize("family", [name for name in (*zoo.FAMILIES, *zoo.SOFTMAX_FAMILIES) if name != "gpt2"])
def test_text(family: str) -> None:
    ids, mask = prompts(LENGTHS)
    rows = [{"input_ids": ids[row : row + 1, -length:]} for row, length in enumerate(LENGTHS)]
    assert MARGIN * distance(zoo.build(family), {"input_ids": ids, "attention_mask": mask}, rows) < ROUNDING


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_images(family: str) -> None:
    batch = vision.prompt(family, vision.ROWS)
    rows = [batch.row(row).inputs() for row in range(len(vision.ROWS))]
    assert MARGIN * distance(vision.build(family), batch.inputs(), rows) < ROUNDING
