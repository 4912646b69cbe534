"""Finding, loading and checking oneDNN's shared library, and the C signatures that whet uses (API v3)."""

from __future__ import annotations

import ctypes as C
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path

from whet.backends.cpu import pools, threads
from whet.backends.cpu.info import get_isa_limit
from whet.errors import BackendError
from whet.forks import make_lock_held_during_fork

#: names in `dnnl_version()->cpu_runtime`
_RUNTIMES = {0: "none", 1: "seq", 2: "omp", 4: "tbb", 8: "threadpool", 512: "sycl"}
_creating = make_lock_held_during_fork()  # oneDNN takes locks of its own while it creates primitives
_USABLE = ("seq", "omp", "tbb")
_STATUS = {1: "out of memory", 2: "invalid arguments", 3: "unimplemented", 4: "last implementation reached", 5: "runtime error"}

_md, _pd, _handle, _out, _dims, _attr, _engine = (c_void_p,) * 7
_SIGNATURES: dict[str, tuple] = {
    "engine_create": (_out, c_int, c_size_t), "engine_destroy": (_engine,),
    "stream_create": (_out, _engine, c_uint), "stream_wait": (_handle,), "stream_destroy": (_handle,),
    "set_primitive_cache_capacity": (c_int,),
    "memory_desc_create_with_tag": (_out, c_int, _dims, c_int, c_int),
    "memory_desc_create_with_strides": (_out, c_int, _dims, c_int, _dims),
    "memory_desc_destroy": (_md,), "memory_desc_clone": (_out, _md), "memory_desc_query": (_md, c_int, _out),
    "memory_create": (_out, _md, _engine, c_void_p), "memory_set_data_handle": (_handle, c_void_p), "memory_destroy": (_handle,),
    "primitive_attr_create": (_out,), "primitive_attr_destroy": (_attr,), "primitive_attr_set_post_ops": (_attr, _handle),
    "primitive_attr_set_scratchpad_mode": (_attr, c_int), "primitive_attr_set_fpmath_mode": (_attr, c_int),
    "primitive_attr_set_scales_mask": (_attr, c_int, c_int), "primitive_attr_set_zero_points_mask": (_attr, c_int, c_int),
    "post_ops_create": (_out,), "post_ops_destroy": (_handle,), "post_ops_append_sum": (_handle, c_float, c_int, c_int),
    "post_ops_append_eltwise": (_handle, c_int, c_float, c_float), "post_ops_append_binary": (_handle, c_int, _md),
    "post_ops_append_prelu": (_handle, c_int),
    "primitive_desc_next_impl": (_pd,), "primitive_desc_clone": (_out, _pd), "primitive_desc_destroy": (_pd,),
    "primitive_desc_query": (_pd, c_int, c_int, _out),
    "primitive_create": (_out, _pd), "primitive_destroy": (_handle,), "primitive_execute": (_handle, _handle, c_int, c_void_p),
    "convolution_forward_primitive_desc_create": (_out, _engine, c_int, c_int, *(_md,) * 4, *(_dims,) * 4, _attr),
    "deconvolution_forward_primitive_desc_create": (_out, _engine, c_int, c_int, *(_md,) * 4, *(_dims,) * 4, _attr),
    "inner_product_forward_primitive_desc_create": (_out, _engine, c_int, *(_md,) * 4, _attr),
    "matmul_primitive_desc_create": (_out, _engine, *(_md,) * 4, _attr),
    "pooling_forward_primitive_desc_create": (_out, _engine, c_int, c_int, _md, _md, *(_dims,) * 5, _attr),
    "eltwise_forward_primitive_desc_create": (_out, _engine, c_int, c_int, _md, _md, c_float, c_float, _attr),
    "binary_primitive_desc_create": (_out, _engine, c_int, _md, _md, _md, _attr),
    "prelu_forward_primitive_desc_create": (_out, _engine, c_int, _md, _md, _md, _attr),
    "reduction_primitive_desc_create": (_out, _engine, c_int, _md, _md, c_float, c_float, _attr),
    "softmax_forward_primitive_desc_create": (_out, _engine, c_int, c_int, _md, _md, c_int, _attr),
    "layer_normalization_forward_primitive_desc_create": (_out, _engine, c_int, _md, _md, _md, c_float, c_uint, _attr),
    "resampling_forward_primitive_desc_create": (_out, _engine, c_int, c_int, c_void_p, _md, _md, _attr),
    "concat_primitive_desc_create": (_out, _engine, _md, c_int, c_int, c_void_p, _attr),
    "sum_primitive_desc_create": (_out, _engine, _md, c_int, c_void_p, c_void_p, _attr),
    "reorder_primitive_desc_create": (_out, _md, _engine, _md, _engine, _attr),
}  # fmt: skip


class Unimplemented(BackendError):
    """oneDNN has no implementation of this primitive for these types and layouts; a tactic turns it into a refusal."""


class Version(C.Structure):
    """dnnl_version_t."""

    _fields_ = [
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    ]


class Library:
    """One loaded oneDNN: its version, its CPU engine and the one stream that every call uses.

    A CPU stream keeps no state between calls and primitives get their scratchpad from the caller, so threads may share it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.runtime = ""
        threads.load_gomp()  # first: its settings are read when it loads, and oneDNN's OpenMP build would load it
        try:
            self.lib = C.CDLL(path)
        except OSError as error:
            raise BackendError(
                f"oneDNN cannot be loaded from {path}: {error}. Install the package onednn-cpu-gomp, or let WHET_ONEDNN name an "
                "OpenMP or TBB build's libdnnl.so.3, whose own libraries (libiomp5.so or libtbb.so.12; of Intel's builds also libimf.so) "
                "must be on LD_LIBRARY_PATH when Python starts."
            ) from None
        self.check_version()
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.lib, "dnnl_" + name, None)
            if function is None:
                raise BackendError(
                    f"{path} (oneDNN {self.version}) has no function dnnl_{name}: not the C API v3. Use oneDNN 3.1 or newer."
                )
            function.argtypes, function.restype = arguments, c_int
        self.lib.dnnl_memory_desc_get_size.argtypes, self.lib.dnnl_memory_desc_get_size.restype = [c_void_p], c_size_t
        self.lib.dnnl_memory_desc_equal.argtypes, self.lib.dnnl_memory_desc_equal.restype = [c_void_p, c_void_p], c_int
        self.lib.dnnl_primitive_desc_query_md.argtypes = [c_void_p, c_int, c_int]
        self.lib.dnnl_primitive_desc_query_md.restype = c_void_p
        # With the cache on, 3.2 hands out one implementation again and again while primitives are made between next_impl() calls.
        self.call("set_primitive_cache_capacity", 0)
        self.engine = self.make("engine_create", 1, 0)
        self.stream = self.make("stream_create", self.engine, 1)
        self.execute_address = C.cast(self.lib.dnnl_primitive_execute, c_void_p).value
        pool = pools.pool_of_library(self.lib, self.runtime, threads.load_gomp())
        if pool is not None:
            self.runtime = pool.name
            threads.register_pool(pool)
        elif self.runtime == "omp":
            threads.lend_pool(self.lib)

    def check_version(self) -> None:
        if not hasattr(self.lib, "dnnl_version"):
            raise BackendError(f"{self.path} is not oneDNN: it has no function dnnl_version. Reinstall the package onednn-cpu-gomp.")
        self.lib.dnnl_version.restype = C.POINTER(Version)
        v = self.lib.dnnl_version().contents
        self.version = f"{v.major}.{v.minor}.{v.patch}"
        self.hash = (v.hash or b"").decode("ascii", "replace")[:8]
        self.runtime = _RUNTIMES.get(v.cpu_runtime, str(v.cpu_runtime))
        if v.major != 3:
            raise BackendError(f"{self.path} is oneDNN {self.version}; whet speaks the C API of version 3. Point WHET_ONEDNN at one.")
        if self.runtime not in _USABLE:
            raise BackendError(
                f"{self.path} is a build of oneDNN {self.version} for the CPU runtime '{self.runtime}', which whet does not use (a "
                "SYCL build takes about ten times longer per call). Unset WHET_ONEDNN, or point it at an OpenMP or TBB build."
            )
        if limit := get_isa_limit():
            self.lib.dnnl_set_max_cpu_isa(_ISA[limit])  # without effect on a CPU that has less
        self.isa = int(self.lib.dnnl_get_effective_cpu_isa())

    def call(self, name: str, *args: object) -> None:
        """Call dnnl_<name>. Raises Unimplemented, or BackendError for any other status."""
        with _creating if "_create" in name else nullcontext():
            status = getattr(self.lib, "dnnl_" + name)(*args)
        if status == 3:
            raise Unimplemented(f"oneDNN {self.version} has no implementation for this {name.split('_primitive_desc')[0]}")
        if status == 2 and "_primitive_desc_create" in name:
            raise Unimplemented(f"oneDNN {self.version} takes no such {name.split('_primitive_desc')[0]} (invalid arguments)")
        if status == 2 and name.endswith("_with_strides"):  # steps whose last one reaches into the next row: 3 in steps of 2
            raise Unimplemented(f"oneDNN {self.version} describes no rows that begin within the last step of the row before")
        if status:
            raise BackendError(
                f"oneDNN {self.version}: dnnl_{name} failed: {_STATUS.get(status, f'status {status}')}. "
                "Please report it with the layer that was being built; '--builderOptimizationLevel=0' may avoid it."
            )

    def make(self, name: str, *args: object) -> int:
        """Call a dnnl_<name> that makes a handle; the handle as an int."""
        out = c_void_p()
        self.call(name, C.byref(out), *args)
        assert out.value is not None
        return out.value


def _list_candidates() -> list[str]:
    """Candidate paths of libdnnl.so.3, the preferred one first."""
    named = os.environ.get("WHET_ONEDNN")
    if named:
        if not Path(named).is_file():
            raise BackendError(f"WHET_ONEDNN={named} is not a file. It must name the shared library itself (libdnnl.so.3).")
        return [named]
    return [p for p in (*_iterate_installed(), f"{sys.prefix}/lib/libdnnl.so.3") if Path(p).is_file()] or ["libdnnl.so.3"]


def _iterate_installed() -> Iterator[str]:
    """libdnnl.so.3 of the installed package, from its list of files. Reading that with importlib.metadata takes 20 ms of imports (email, socket)."""
    for folder in dict.fromkeys(sys.path):
        for record in Path(folder).glob("onednn_cpu_gomp-*.dist-info/RECORD"):
            for line in record.read_text(encoding="utf-8").splitlines():
                name = line.split(",")[0]
                if name.rpartition("/")[2] == "libdnnl.so.3":
                    yield str(Path(folder, name).resolve())


@cache
def load_library() -> Library:
    """The process's oneDNN, loaded at the first call. Raises BackendError that names the package to install."""
    return Library(_list_candidates()[0])


@cache
def load_error() -> str | None:
    """The reason why oneDNN cannot be loaded here (no package for this platform, a broken library); None if it is loaded.

    Raises BackendError if WHET_ONEDNN names a library that cannot be used: it was asked for.
    """
    try:
        load_library()
    except BackendError as error:
        if os.environ.get("WHET_ONEDNN"):
            raise
        return str(error)
    return None


def get_library_version() -> str:
    """The properties that timings and engines depend on: version, commit, threading runtime and instruction set."""
    lib = load_library()
    return f"onednn {lib.version} {lib.hash} {lib.runtime} isa={lib.isa:#x}"


_ISA = {"sse41": 0x1, "avx2": 0x7, "avx512_core": 0x27, "avx512_core_vnni": 0x67, "avx512_core_bf16": 0xE7, "avx512_core_fp16": 0x1EF}


def has_isa(name: str) -> bool:
    """True if oneDNN uses this x86 instruction set here (sse41, avx2, avx512_core, ..._vnni, ..._bf16, ..._fp16); False without oneDNN."""
    return load_error() is None and load_library().isa & _ISA[name] == _ISA[name]


_long = c_int64  # dnnl_dim_t


def make_dims_array(values: tuple[int, ...] | list[int]) -> C.Array:
    """dnnl_dims_t of `values` (at most 12)."""
    return (_long * 12)(*values)
