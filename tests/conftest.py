"""Tests marked `data` are skipped with a note without the shared data folder; each test process has a cache folder, and a share of the GPUs."""

import gc
import os
from collections.abc import Generator
from contextlib import nullcontext, suppress
from importlib import import_module

import pytest
from _pytest.runner import runtestprotocol  # plugins with reports of their own use it; pytest has no public name for it
from hypothesis import HealthCheck, settings

from support.own_cache import use_own_cache
from support.scrambled_times import scramble_processes

use_own_cache()
scramble_processes()

import whet.composites  # noqa: F401  (samples of fused layers, in one order whichever test file is collected first)
from support.datasets import root
from support.exporting import shared_registry as shared_registry
from support.standin_gpu import standin_gpu as standin_gpu  # fixtures for tests in several folders
from whet.backends import Load
from whet.backends.cpu import CpuBackend
from whet.backends.cpu.threads import wait_settings
from whet.measure import timing_cache

# deadlines of examples depend on the load of the machine, not on the code
settings.register_profile("whet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whet")
# Hypothesis would parse all files of whet for numbers and texts to try: seconds in each process, and examples that change with unrelated code.
with suppress(ImportError):  # old releases do not parse files
    import_module("hypothesis.internal.conjecture.providers").is_local_module_file = lambda path: False


def pytest_configure() -> None:
    """Each process of pytest-xdist uses one GPU of CUDA_VISIBLE_DEVICES, round-robin; threads wait in whet's mode. Other processes do not count as
    external load, under which timings are repeated and not stored: a build in a test does not depend on the tests of other workers.

    The first library to load libgomp sets the mode: whet's own loading here makes tests independent of earlier tests with PyTorch.
    """
    wait_settings()
    timing_cache.SYNCHRONOUS = "OFF"  # thousands of commits do not wait for the disk, 8 ms each: no test takes the power away
    CpuBackend.watch = lambda self: nullcontext(Load(others=0.0))
    os.environ["WHET_FAILED_VERIFICATIONS"] = ""
    os.environ["WHET_VERIFIED"] = "0"  # every load runs its checks; the tests of records give a folder
    os.environ["WHET_PROGRESS_SECONDS"] = "0"  # output of slow commands on a busy machine stays the same
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
        gc.set_threshold(20_000, 20, 20)  # a network has thousands of objects


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A process of pytest-xdist sends one message about a test that passed, its result, in place of five: their receiver is one process for all."""
    if not hasattr(item.config, "workerinput") or item.config.getoption("durations") is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


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
