"""One thread: two test workers on two cores would wait for each other at every small layer, and one thread repeats its bits."""

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
