"""The number of threads of NumPy's OpenBLAS: products that several threads run at once must not use all cores each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


@cache
def find_thread_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """(get, set) of the OpenBLAS that NumPy has loaded; None for another library or another operating system than Linux."""
    np.ones((2, 2)) @ np.ones((2, 2))  # loads it
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:  # names of mapped files may be no UTF-8
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    except OSError:
        return None
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            get, put = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
            if get is not None and put is not None:
                return get, put
    return None


@contextmanager
def limit_blas_threads(count: int) -> Iterator[None]:
    """Limits NumPy's products to `count` threads within the block, if its library is known."""
    functions = find_thread_functions()
    before = None if functions is None else functions[0]()
    if functions is not None:
        functions[1](count)
    try:
        yield
    finally:
        if functions is not None and before is not None:
            functions[1](before)
