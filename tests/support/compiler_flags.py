"""How tests compile kernels whose code they do not read: in `make test` with less optimization, in `make test-long` as for users."""

import pytest

from whet.backends.cuda.compile import FLAGS

# --Ofast-compile=mid takes a quarter of the time.
COMPILER_FLAGS = pytest.mark.parametrize(
    "flags", [pytest.param((*FLAGS, "--Ofast-compile=mid"), id="quick"), pytest.param(FLAGS, id="optimized", marks=pytest.mark.slow)]
)
