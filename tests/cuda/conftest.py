"""The GPU that tests marked `gpu` run on; they skip, saying why, where there is none."""

import os

import pytest


@pytest.fixture(scope="module")
def gpu():
    """The backend. Many test processes at once share the CPUs: each has few processes that compile."""
    pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
    from whet.backends import get_backend
    from whet.backends.cuda import compile_workers, driver

    if driver.available():
        pytest.skip(driver.available())
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    compile_workers.MOST = max(2, min(compile_workers.MOST, 3 * (os.cpu_count() or 1) // beside))
    return get_backend("cuda")
