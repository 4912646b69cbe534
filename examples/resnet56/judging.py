"""What an engine gets right, image by image, and whether another on the same images gets more or less of them right."""

from __future__ import annotations

import data as cifar
import numpy as np

from whet.runtime import Engine
from whet.training.data import TrainingData


def percent(right: np.ndarray) -> float:
    """Of a boolean array."""
    return round(100 * float(right.mean()), 2)


def paired(right: np.ndarray, base: np.ndarray) -> tuple[float, float, float]:
    """By how many points one network is right more often than another on the same images, and the 95 % interval of that."""
    d = right.astype(float) - base
    half = 1.96 * d.std() / np.sqrt(len(d))
    return round(100 * d.mean(), 2), round(100 * (d.mean() - half), 2), round(100 * (d.mean() + half), 2)


def right(engine: Engine, test: TrainingData, batch: int) -> np.ndarray:
    """bool [images]: what the engine gets right; the last batch is filled with its own first images."""
    x, found = cifar.normalized(test.inputs["x"]), np.empty(len(test), bool)
    with engine.create_context() as context:
        for i in range(0, len(x), batch):
            some = x[i : i + batch]
            full = np.resize(some, (batch, *x.shape[1:]))
            guesses = next(iter(context.run({context.input_names[0]: full}).values())).argmax(1)[: len(some)]
            found[i : i + batch] = guesses == test.labels[i : i + batch]
    return found
