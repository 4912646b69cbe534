"""Tests marked `data` skip, saying so, where the shared data folder is not; test processes share out the GPUs that are there."""

import os

import pytest
from hypothesis import HealthCheck, settings

import whet.composites  # noqa: F401  (samples of fused layers, in one order whichever test file is collected first)
from support.datasets import root
from support.standin_gpu import standin_gpu as standin_gpu  # a fixture of tests in several folders
from whet.backends.cpu.threads import settings as wait_settings

# how fast examples come and run says how busy the machine is, not whether the code is right
settings.register_profile("whet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whet")


def pytest_configure() -> None:
    """Each process of pytest-xdist takes one of the GPUs that CUDA_VISIBLE_DEVICES names, in turns; threads wait as whet has them wait.

    The first to load libgomp says how: with whet's own loading here, no test depends on whether one with PyTorch ran before it.
    """
    wait_settings()
    os.environ["WHET_FAILED_VERIFICATIONS"] = ""
    gpus, worker = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the skip in one place, so that no test has to think of it."""
    if root() is not None:
        return
    absent = pytest.mark.skip(reason="the shared data folder is not here (WHET_DATA names another place)")
    for item in items:
        if "data" in item.keywords:
            item.add_marker(absent)
