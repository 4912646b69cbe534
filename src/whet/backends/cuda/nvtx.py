"""Ranges for Nsight Systems with the user's node names: WHET_NVTX=1 turns them on; requires the package `nvtx`.

Inside of a CUDA graph a profiler sees kernels without their layers. With ranges on, layers are launched one by one, each in its range,
so the profiled run is slower than a normal one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from whet.errors import BackendError


@cache
def load_package() -> Any:
    """The package nvtx. BackendError without it."""
    try:
        import nvtx
    except ImportError as error:
        raise BackendError(f"WHET_NVTX=1 needs the package nvtx ({error}): pip install nvtx, or unset WHET_NVTX.") from error
    return nvtx


def is_enabled() -> bool:
    """True if ranges are on. Raises BackendError if they are on and the package is missing."""
    return "WHET_NVTX" in os.environ and os.environ["WHET_NVTX"] not in ("", "0") and load_package() is not None


@contextmanager
def range_of(label: str) -> Iterator[None]:
    """A range around the launches of a layer."""
    load_package().push_range(label or "layer", domain="whet")
    try:
        yield
    finally:
        load_package().pop_range(domain="whet")
