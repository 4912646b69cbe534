"""Tests marked `data` are skipped with a note without the shared data folder; test processes distribute the available GPUs."""

import gc
import os
from collections.abc import Generator
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, settings
from platformdirs import user_cache_dir

import whet.composites  # noqa: F401  (samples of fused layers, in one order whichever test file is collected first)
from support.datasets import root
from support.standin_gpu import standin_gpu as standin_gpu  # a fixture for tests in several folders
from whet.backends import Load
from whet.backends.cpu import CpuBackend
from whet.backends.cpu.threads import wait_settings

# deadlines of examples depend on the load of the machine, not on the code
settings.register_profile("whet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whet")


def pytest_configure() -> None:
    """Each process of pytest-xdist uses one GPU of CUDA_VISIBLE_DEVICES, round-robin; threads wait in whet's mode. Other processes do not count as
    external load, under which timings are repeated and not stored: a build in a test does not depend on the tests of other workers.

    The first library to load libgomp sets the mode: whet's own loading here makes tests independent of earlier tests with PyTorch.
    """
    wait_settings()
    CpuBackend.watch = lambda self: nullcontext(Load(others=0.0))
    os.environ["WHET_FAILED_VERIFICATIONS"] = ""
    os.environ["WHET_VERIFIED"] = "0"  # every load runs its checks; the tests of records give a folder
    os.environ["WHET_PROGRESS_SECONDS"] = "0"  # output of slow commands on a busy machine stays the same
    for variable, name in (("WHET_CPU_CACHE", "objects"), ("WHET_CUDA_CACHE", "cubins")):  # also for tests with a cache folder of their own
        os.environ.setdefault(variable, os.path.join(user_cache_dir("whet"), name))
    gpus, worker = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting creates millions of objects that live to the end: the garbage collector does not search them, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def frozen_heap() -> None:
    """Garbage collections in the test are quick: they search the objects that the test makes, not the millions of this process."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the skip centrally."""
    if root() is not None:
        return
    absent = pytest.mark.skip(reason="the shared data folder is not here (WHET_DATA names another place)")
    for item in items:
        if "data" in item.keywords:
            item.add_marker(absent)
