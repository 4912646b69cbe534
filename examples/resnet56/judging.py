"""Scores of an engine per image, and paired differences between two engines on the same images."""

from __future__ import annotations

import data as cifar
import numpy as np

from whet.runtime import Engine
from whet.training.data import TrainingData


def percent(right: np.ndarray) -> float:
    """Percentage of True in a boolean array."""
    return round(100 * float(right.mean()), 2)


def paired(right: np.ndarray, base: np.ndarray) -> tuple[float, float, float]:
    """Difference in points of accuracy between two networks on the same images, with its 95 % interval."""
    d = right.astype(float) - base
    half = 1.96 * d.std() / np.sqrt(len(d))
    return round(100 * d.mean(), 2), round(100 * (d.mean() - half), 2), round(100 * (d.mean() + half), 2)


def right(engine: Engine, test: TrainingData, batch: int) -> np.ndarray:
    """bool [images]: True where the engine is correct; the last batch is padded with its own first images."""
    x, found = cifar.normalized(test.inputs["x"]), np.empty(len(test), bool)
    with engine.create_context() as context:
        for i in range(0, len(x), batch):
            some = x[i : i + batch]
            full = np.resize(some, (batch, *x.shape[1:]))
            guesses = next(iter(context.run({context.input_names[0]: full}).values())).argmax(1)[: len(some)]
            found[i : i + batch] = guesses == test.labels[i : i + batch]
    return found
