"""The GPU for tests marked `gpu`; without one they are skipped with the reason."""

import pytest


@pytest.fixture(scope="module")
def gpu():
    pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
    from whet.backends import get_backend
    from whet.backends.cuda import driver

    if driver.why_unavailable():
        pytest.skip(driver.why_unavailable())
    return get_backend("cuda")
