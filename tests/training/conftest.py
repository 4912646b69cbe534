"""One thread: two test workers on two cores would wait for each other at every small layer, and one thread gives repeatable bits."""

import sys


def pytest_runtest_setup(item):
    """Before every test and its fixtures: other libraries in the process also set the number of OpenMP threads, and a network's bits depend on it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
