"""NVIDIA's cuSPARSELt from Python: products D = act(X W^T + bias + R) with 2:4 weights W, as launches that a graph can capture. ctypes calls it.

Row-major X[m,k], D[m,n] are column-major k x m and n x m for the library, W[n,k] is its structured operand in rows: it computes D^T = W X^T.
Names and values of enumerations: cusparseLt.h of version 0.7, https://docs.nvidia.com/cuda/cusparselt/types.html.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import GpuWork
from whet.backends.cuda.libraries import find_first_library
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Stream
from whet.errors import BackendError
from whet.tactics.cuda.library._cublaslt import Product

NAMES = ("libcusparseLt.so.0",)
PACKAGES = ("nvidia.cusparselt", "cusparselt")
_OPAQUE = 1 << 14  # bytes of a descriptor: the largest of any version has 11,024
_TYPES = {"f16": 2, "bf16": 14}  # cudaDataType
_ROW, _COLUMN, _PLAIN, _HALF, _F32 = 2, 1, 0, 0, 2  # orders, operation, 50 % sparsity, type of the sums
_RELU, _BIAS = 0, 8  # attributes of a product
_CONFIG_ID = 0  # of an algorithm


@cache
def load_library() -> Any:
    """The loaded library, or None if it is not installed: the package nvidia-cusparselt, or the system's."""
    return find_first_library(NAMES, PACKAGES)


@cache
def get_version() -> str:
    """The library's version, or "" without the library or a GPU."""
    lib = load_library()
    if lib is None:
        return ""
    parts = [ctypes.c_int() for _ in range(3)]
    for i, part in enumerate(parts):
        if lib.cusparseLtGetProperty(i, ctypes.byref(part)):
            return ""
    return "cusparseLt " + ".".join(str(p.value) for p in parts)


def _check_status(status: int, call: str) -> None:
    if status:
        raise BackendError(f"cuSPARSELt: {call} failed with status {status}. Leave out --tacticSources=+CUSPARSELT to build without it.")


class _Opaque:
    """Memory of a descriptor, aligned as the library demands."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_OPAQUE + 64)
        self.address = ctypes.c_void_p(-(-ctypes.addressof(self._memory) // 64) * 64)


@per_device
def _handle() -> _Opaque:
    handle = _Opaque()
    _check_status(load_library().cusparseLtInit(handle.address), "cusparseLtInit")
    return handle


class SparseLtLaunch(GpuWork):
    """One product with its addresses. The weights are compressed into memory of its own when it is made."""

    def __init__(self, product: Product, x: int, w: int, bias: int, residual: int, out: int, workspace: int, workspace_bytes: int) -> None:
        lib, p = load_library(), product
        if lib is None:
            raise BackendError("libcusparseLt cannot be loaded: pip install nvidia-cusparselt-cu13, or leave out --tacticSources=+CUSPARSELT.")
        self._lib, self._x, self._residual, self._out, self._workspace = lib, x, residual or out, out, workspace
        h, kind = _handle().address, _TYPES[p.dtype]
        weights, inputs, results, matmul, choice, self._plan = (_Opaque() for _ in range(6))
        self._kept = (weights, inputs, results, matmul, choice)
        n, k, m = (ctypes.c_int64(v) for v in (p.n, p.k, p.m))
        align = ctypes.c_uint32(16)
        _check_status(
            lib.cusparseLtStructuredDescriptorInit(h, weights.address, n, k, k, align, kind, _ROW, _HALF), "cusparseLtStructuredDescriptorInit"
        )
        _check_status(lib.cusparseLtDenseDescriptorInit(h, inputs.address, k, m, k, align, kind, _COLUMN), "cusparseLtDenseDescriptorInit")
        _check_status(lib.cusparseLtDenseDescriptorInit(h, results.address, n, m, n, align, kind, _COLUMN), "cusparseLtDenseDescriptorInit")
        descriptors = (weights.address, inputs.address, results.address, results.address)
        _check_status(lib.cusparseLtMatmulDescriptorInit(h, matmul.address, _PLAIN, _PLAIN, *descriptors, _F32), "cusparseLtMatmulDescriptorInit")
        self._set(h, matmul, _BIAS, ctypes.c_void_p(bias))
        if p.relu:
            self._set(h, matmul, _RELU, ctypes.c_int(1))
        _check_status(lib.cusparseLtMatmulAlgSelectionInit(h, choice.address, matmul.address, 0), "cusparseLtMatmulAlgSelectionInit")
        number = ctypes.c_int(p.algo)
        if lib.cusparseLtMatmulAlgSetAttribute(h, choice.address, _CONFIG_ID, ctypes.byref(number), ctypes.c_size_t(4)):
            raise BackendError(f"cuSPARSELt has no algorithm {p.algo} for this product.")
        _check_status(lib.cusparseLtMatmulPlanInit(h, self._plan.address, matmul.address, choice.address), "cusparseLtMatmulPlanInit")
        needed = ctypes.c_size_t()
        _check_status(lib.cusparseLtMatmulGetWorkspace(h, self._plan.address, ctypes.byref(needed)), "cusparseLtMatmulGetWorkspace")
        if needed.value > workspace_bytes:
            raise BackendError(f"cuSPARSELt needs {needed.value} bytes of scratch for this product, {workspace_bytes} are planned.")
        self._one, self._beta = ctypes.c_float(1), ctypes.c_float(1.0 if p.residual else 0.0)
        self._compressed = self._compress(h, w)

    def _set(self, h: Any, matmul: _Opaque, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check_status(self._lib.cusparseLtMatmulDescSetAttribute(h, matmul.address, attribute, ctypes.byref(value), size), "a descriptor")

    def _compress(self, h: Any, weights: int) -> DeviceBuffer:
        size, needed = ctypes.c_size_t(), ctypes.c_size_t()
        found = self._lib.cusparseLtSpMMACompressedSize(h, self._plan.address, ctypes.byref(size), ctypes.byref(needed))
        _check_status(found, "cusparseLtSpMMACompressedSize")
        compressed, scratch, stream = DeviceBuffer(size.value), DeviceBuffer(max(needed.value, 1)), Stream()
        addresses = (ctypes.c_void_p(a) for a in (weights, compressed.address, scratch.address, int(stream.handle)))
        _check_status(self._lib.cusparseLtSpMMACompress(h, self._plan.address, *addresses), "cusparseLtSpMMACompress")
        stream.synchronize()
        return compressed

    def run(self, stream: Stream) -> None:
        """Puts the product on the stream."""
        pointer, streams = ctypes.c_void_p, (ctypes.c_void_p * 1)(int(stream.handle))
        status = self._lib.cusparseLtMatmul(
            _handle().address, self._plan.address, ctypes.byref(self._one), pointer(self._compressed.address), pointer(self._x),
            ctypes.byref(self._beta), pointer(self._residual), pointer(self._out), pointer(self._workspace), streams, 1,
        )  # fmt: skip
        _check_status(status, "cusparseLtMatmul")

    def __del__(self) -> None:
        if hasattr(self, "_compressed"):
            self._lib.cusparseLtMatmulPlanDestroy(self._plan.address)
