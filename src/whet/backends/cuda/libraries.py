"""NVIDIA's optional libraries: searched in pip packages first, then by the system's loader."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

CUBLASLT = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12")
_CUDA = ("nvidia.cu13", "nvidia.cublas", "nvidia.cuda_nvrtc")  # CUDA 13's wheels share a folder, CUDA 12's have one each


def list_candidate_files(names: Sequence[str], packages: Sequence[str] = _CUDA) -> list[str]:
    """Candidate files and names for a library, in search order."""
    files = []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in () if spec is None else spec.submodule_search_locations or ():
            files += [str(p) for n in names for p in Path(folder).glob(f"lib/{n}")]
    return [*files, *names]


@cache
def find_first_library(names: tuple[str, ...], packages: tuple[str, ...] = _CUDA) -> Any:
    """The first library that loads, or None."""
    for name in list_candidate_files(names, packages):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
