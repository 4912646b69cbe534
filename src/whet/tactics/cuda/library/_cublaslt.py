"""NVIDIA's cuBLASLt from Python: products D = act(X W^T + bias + R) as launches that a graph can capture. No package binds it; ctypes does.

Row-major X[m,k], W[n,k], D[m,n] are column-major k x m, k x n and n x m for the library, so it computes D^T = W X^T.
Names and values of attributes: cublasLt.h of CUDA 13, https://docs.nvidia.com/cuda/cublas/#cublaslt-datatypes-reference.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import GpuWork
from whet.backends.cuda.libraries import CUBLASLT, find_first_library
from whet.backends.cuda.stream import Stream
from whet.errors import BackendError

WORKSPACE = 8 << 20  # bytes that the library may use in addition to the operands
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType
_COMPUTE = {"f32": 68, "tf32": 77}  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_TRANSA, _EPILOGUE, _BIAS, _BIAS_TYPE = 3, 7, 8, 26
_RELU, _WITH_BIAS = 2, 4
_MAX_WORKSPACE = 1
_MIN_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D


class _Found(ctypes.Structure):
    _fields_ = (
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@cache
def load_library() -> Any:
    """The loaded library, or None if it is not installed: the package nvidia-cublas, or the system's."""
    path = find_first_library(CUBLASLT)
    if path is not None:
        path.cublasLtGetVersion.restype = ctypes.c_size_t
    return path


def get_version() -> str:
    """The library's version, or "" without the library."""
    lib = load_library()
    return "" if lib is None else f"cublasLt {lib.cublasLtGetVersion()}"


def _check_status(status: int, call: str) -> None:
    if status:
        raise BackendError(f"cuBLASLt: {call} failed with status {status}. --tacticSources=-CUBLASLT builds without it.")


@per_device
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check_status(load_library().cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle


@dataclass(frozen=True)
class Product:
    """D[m,n] = relu?(X[m,k] W[n,k]^T + bias[n] + residual[m,n]); `math` is "f32" or "tf32" for f32 operands."""

    m: int
    n: int
    k: int
    dtype: str
    math: str
    relu: bool
    residual: bool
    algo: int
    align: int = 16  # bytes at which all operands begin


class LtLaunch(GpuWork):
    """One product with its addresses, ready to go on a stream (or into a graph's capture)."""

    def __init__(self, product: Product, x: int, w: int, bias: int, residual: int, out: int, workspace: int) -> None:
        lib, p = load_library(), product
        if lib is None:
            raise BackendError("libcublasLt cannot be loaded: pip install nvidia-cublas, or build with --tacticSources=-CUBLASLT.")
        self._lib, self._product = lib, p
        self._x, self._w, self._residual, self._out, self._workspace = x, w, residual or out, out, workspace
        kind = _TYPES[p.dtype]
        self._desc = ctypes.c_void_p()
        _check_status(lib.cublasLtMatmulDescCreate(ctypes.byref(self._desc), _COMPUTE[p.math], _TYPES["f32"]), "cublasLtMatmulDescCreate")
        self._set(_TRANSA, ctypes.c_int(1))
        self._set(_EPILOGUE, ctypes.c_int(_WITH_BIAS + (_RELU if p.relu else 0)))
        self._set(_BIAS, ctypes.c_void_p(bias))
        self._set(_BIAS_TYPE, ctypes.c_int(kind))
        self._layouts = [self._layout(kind, p.k, p.n), self._layout(kind, p.k, p.m), self._layout(kind, p.n, p.m)]
        self._one, self._beta = ctypes.c_float(1), ctypes.c_float(1.0 if p.residual else 0.0)
        self._algo = self._choose()

    def _set(self, attribute: int, value: Any) -> None:
        _check_status(self._lib.cublasLtMatmulDescSetAttribute(self._desc, attribute, ctypes.byref(value), ctypes.sizeof(value)), "a descriptor")

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        rows_, columns_ = ctypes.c_uint64(rows), ctypes.c_uint64(columns)
        _check_status(self._lib.cublasLtMatrixLayoutCreate(ctypes.byref(made), kind, rows_, columns_, ctypes.c_int64(rows)), "a matrix layout")
        return made

    def _choose(self) -> _Found:
        """The library's `algo`-th proposal. Raises BackendError when it has fewer."""
        wanted, preference, count = self._product.algo + 1, ctypes.c_void_p(), ctypes.c_int()
        _check_status(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")
        size = ctypes.c_size_t(WORKSPACE)
        _check_status(self._lib.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, ctypes.byref(size), 8), "a preference")
        aligned = ctypes.c_uint32(self._product.align)
        for operand in _MIN_ALIGNMENTS:  # the library takes 256 bytes for granted
            _check_status(self._lib.cublasLtMatmulPreferenceSetAttribute(preference, operand, ctypes.byref(aligned), 4), "a preference")
        found = (_Found * wanted)()
        w, x, d = self._layouts
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(_handle(), self._desc, w, x, d, d, preference, wanted, found, ctypes.byref(count))
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        _check_status(status, "cublasLtMatmulAlgoGetHeuristic")
        if count.value < wanted or found[wanted - 1].state:
            raise BackendError(f"cuBLASLt proposes {count.value} ways for this product, not {wanted}.")
        return found[wanted - 1]

    def run(self, stream: Stream) -> None:
        """Put the product on the stream."""
        w, x, d = self._layouts
        pointer = ctypes.c_void_p
        status = self._lib.cublasLtMatmul(
            _handle(), self._desc, ctypes.byref(self._one), pointer(self._w), w, pointer(self._x), x, ctypes.byref(self._beta),
            pointer(self._residual), d, pointer(self._out), d, ctypes.byref(self._algo), pointer(self._workspace),
            ctypes.c_size_t(WORKSPACE), pointer(int(stream.handle)),
        )  # fmt: skip
        _check_status(status, "cublasLtMatmul")

    def __del__(self) -> None:
        for layout in getattr(self, "_layouts", ()):
            self._lib.cublasLtMatrixLayoutDestroy(layout)
        if getattr(self, "_desc", None):
            self._lib.cublasLtMatmulDescDestroy(self._desc)
