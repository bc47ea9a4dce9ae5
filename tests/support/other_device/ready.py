"""What tests of whole models on the device need of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.calibrated import shipped_for
from tests.support.other_device.backend import register
from tests.support.seam.zoo import build

from kvtailor.store.host import Host

__all__ = ["GRADED", "device_and_calibrations"]

GRADED = "kvgrad"
"""A method that takes gradients: torch's autograd serves the devices that exist when it first runs in a process."""


@contextmanager
def device_and_calibrations(families: Sequence[str], folder: Path) -> Iterator[None]:
    """The device, and files of random numbers for the plans that read a calibration."""
    register()
    with shipped_for([build(family) for family in families], folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        # The CPU's own answer to a plan with segments in host memory, which a user's model on the CPU is refused.
        patch.setattr(Host, "refusal", lambda self, device: None)
        yield
