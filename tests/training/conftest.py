"""Real digits and a network trained on them.

One thread: two test workers on two cores would wait for each other at every small layer, and one thread gives repeatable bits."""

import sys

import numpy as np
import pytest


@pytest.fixture(scope="module")
def digits():
    """1,200 training and 597 test images of digits, 8x8 pixels."""
    from whet.training import TrainingData

    found = pytest.importorskip("sklearn.datasets").load_digits()
    x = (found.images[:, None] / 16).astype(np.float32)
    return TrainingData({"x": x[:1200]}, found.target[:1200].astype(np.int64)), TrainingData({"x": x[1200:]}, found.target[1200:].astype(np.int64))


@pytest.fixture(scope="module")
def learned(digits):
    """The result of training `digits_net` for four epochs."""
    from test_finetune import FAST, digits_net

    from whet.training import FinetuneConfig, finetune

    return finetune(digits_net(), digits[0], FinetuneConfig(**FAST), test=digits[1])


def pytest_runtest_setup(item):
    """Before every test and its fixtures: other libraries in the process also set the number of OpenMP threads, and a network's bits depend on it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
