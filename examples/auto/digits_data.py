"""The digits of examples/digits for a search: training images to recover on, 297 held-back ones to choose by, 300 others to judge by."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "digits"))

from data import load_heldback, load_train

CHOOSING = 297  # of the 597 held-back images; the search never sees the other 300


def unlabelled() -> Iterator[np.ndarray]:
    """Training images, one at a time, without their labels."""
    images, _ = load_train()
    yield from images[:, None]


def training() -> tuple[np.ndarray, np.ndarray]:
    """Training images float32 [1200,1,32,32] and digits, for fine-tuning."""
    return load_train()


def choosing() -> tuple[np.ndarray, np.ndarray]:
    """What every trial is scored on."""
    images, digits = load_heldback()
    return images[:CHOOSING], digits[:CHOOSING]


def judging() -> tuple[np.ndarray, np.ndarray]:
    """What only the last comparison sees."""
    images, digits = load_heldback()
    return images[CHOOSING:], digits[CHOOSING:]
