"""One thread: two test workers on two cores would wait for each other at every small layer, and one thread repeats its bits."""

import sys


def pytest_runtest_setup(item):
    """Before every test and its fixtures: other libraries in the process count OpenMP's threads too, and a network's bits depend on them."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
