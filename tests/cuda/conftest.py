"""The GPU for tests marked `gpu`; without one they are skipped with the reason."""

import pytest


@pytest.fixture(scope="module")
def gpu():
    pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
    from whet.backends import get_backend
    from whet.backends.cuda import driver

    if driver.available():
        pytest.skip(driver.available())
    return get_backend("cuda")
