"""NVIDIA's optional libraries: pip's packages first, then what the system's loader finds."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

CUBLASLT = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12")
_CUDA = ("nvidia.cu13", "nvidia.cublas", "nvidia.cuda_nvrtc")  # CUDA 13's wheels share a folder, those of CUDA 12 have one each


def places(names: Sequence[str], packages: Sequence[str] = _CUDA) -> list[str]:
    """Files and names that are tried for a library, in order."""
    found = []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in () if spec is None else spec.submodule_search_locations or ():
            found += [str(p) for n in names for p in Path(folder).glob(f"lib/{n}")]
    return [*found, *names]


@cache
def first_library(names: tuple[str, ...], packages: tuple[str, ...] = _CUDA) -> Any:
    """The first that loads, or None."""
    for name in places(names, packages):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
