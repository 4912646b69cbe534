"""The digits of examples/digits for a search: training images for recovery, 297 validation images for the search, and 300 test images."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "digits"))

from data import load_heldback, load_train

CHOOSING = 297  # of the 597 images that training does not use; the search never sees the other 300


def unlabelled() -> Iterator[np.ndarray]:
    """Training images, one at a time, without their labels."""
    images, _ = load_train()
    yield from images[:, None]


def training() -> tuple[np.ndarray, np.ndarray]:
    """Training images float32 [1200,1,32,32] and digits, for fine-tuning."""
    return load_train()


def choosing() -> tuple[np.ndarray, np.ndarray]:
    """Validation images and labels: every trial is scored on them."""
    images, digits = load_heldback()
    return images[:CHOOSING], digits[:CHOOSING]


def judging() -> tuple[np.ndarray, np.ndarray]:
    """Test images and labels, for the final comparison only."""
    images, digits = load_heldback()
    return images[CHOOSING:], digits[CHOOSING:]
