"""Generated CUDA kernels of one thread per value, compiled as C++ for the host: their results are checked without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.backends._code_cache import get_cached_code
from whet.backends.cuda.compile import cache_folder
from whet.network import DType
from whet.tactics.cuda._device.arguments import Arguments, emit_c_structs
from whet.tactics.cuda._device.source import list_kernel_paths

_HOST = """
#include <cmath>
#include <cstdint>
#include <cstring>
using namespace std;
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define DEV inline
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(n)
struct Dim { unsigned x; };
static thread_local Dim blockIdx, threadIdx;
static void let_next_start() {}
static void wait_for_previous() {}
static void __syncthreads() {}
static float max_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static float min_nan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
static int __float_as_int(float v) { int r; memcpy(&r, &v, 4); return r; }
static float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; }
template <int KIND> float load1(const u8* base, long long i) {
    if (KIND == 0) return reinterpret_cast<const float*>(base)[i];
    if (KIND == 1) return (float)reinterpret_cast<const _Float16*>(base)[i];
    return __int_as_float((int)reinterpret_cast<const u16*>(base)[i] << 16);
}
template <int KIND> void store1(u8* base, long long i, float v) {
    if (KIND == 0) reinterpret_cast<float*>(base)[i] = v;
    else if (KIND == 1) reinterpret_cast<_Float16*>(base)[i] = (_Float16)v;
    else {
        const u32 bits = (u32)__float_as_int(v);
        reinterpret_cast<u16*>(base)[i] = v != v ? 0x7fc0 : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
struct Act { float a, b; };
template <int KIND> float activate(float x, Act p) {
    static_assert(KIND == 0, "the host has clips only");
    return min_nan(max_nan(x, p.a), p.b);
}
struct Vec8 { float v[8]; };
template <int KIND> Vec8 load8(const u8* base, long long i) {
    Vec8 r;
    for (int e = 0; e < 8; ++e) r.v[e] = load1<KIND>(base, i + e);
    return r;
}
template <int KIND> void store8(u8* base, long long i, const Vec8& r) {
    for (int e = 0; e < 8; ++e) store1<KIND>(base, i + e, r.v[e]);
}
"""


def host_compiler() -> str | None:
    """The C++ compiler; None without one."""
    return shutil.which("g++") or shutil.which("clang++")


@dataclass(frozen=True)
class HostLaunch:
    """A launch whose arguments contain addresses of host memory. Kernels with barriers have a constant BLOCK and run with blocks of one thread."""

    kernel: str  # file
    entry: str
    constants: Mapping[str, Any]
    arguments: bytes
    blocks: int
    threads: int

    @property
    def text_key(self) -> tuple[Any, ...]:
        """Launches with equal keys run the same code."""
        return (self.kernel, self.entry, *sorted(self.constants.items()))

    @staticmethod
    def of(entry: str, arguments: Arguments, constants: Mapping[str, Any], grid: tuple[int, int, int], block: int) -> HostLaunch:
        """The host's form of a tactic's launch."""
        serial = entry in list_kernel_paths()[arguments.kernel_file].read_text() and "BLOCK" in constants and block == constants["BLOCK"]
        given = {**constants, "BLOCK": 1} if "BLOCK" in constants else dict(constants)
        return HostLaunch(arguments.kernel_file, entry, given, arguments.pack(), grid[0], 1 if serial else block)


def _own_text(kernel: str) -> str:
    """The kernel's text after its shared headers, which the host replaces."""
    text = list_kernel_paths()[kernel].read_text().split('#include "common.cuh"')[1].replace('#include "vector.cuh"', "")
    text = text.replace('#include "arguments"', emit_c_structs(kernel))
    return re.sub(r'#include "(\w+\.cuh)"', lambda include: list_kernel_paths()[include.group(1)].read_text(), text)


def compile_for_host(text: str, level: str) -> ctypes.CDLL:
    """A library of C++ text. Compiled once: it is kept in the folder of compiled kernels, under the hash of its text and of the compiler."""
    compiler = host_compiler()
    assert compiler is not None
    options = ["-std=c++17", level, "-w", "-shared", "-fPIC"]

    def compile_library() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            source.write_text(text)
            done = subprocess.run([compiler, *options, "-o", str(library), str(source)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:3000]
            return library.read_bytes()

    path = cache_folder() / f"{hash_of(text, *options, tool=compiler)}.so"
    get_cached_code(path, compile_library)
    return ctypes.CDLL(str(path))


def hash_of(*texts: str, tool: str) -> str:
    """A hash of the inputs of a compilation: the texts and the file of the tool."""
    info = Path(tool).resolve().stat()
    return hashlib.sha256("\0".join((*texts, tool, str(info.st_size), str(info.st_mtime_ns))).encode()).hexdigest()


def align_arguments(arguments: bytes) -> tuple[ctypes.Array, int]:
    """Memory that must stay alive, and the address of a copy of the arguments in it, a multiple of 64."""
    memory = ctypes.create_string_buffer(len(arguments) + 64)
    at = (ctypes.addressof(memory) + 63) // 64 * 64
    ctypes.memmove(at, arguments, len(arguments))
    return memory, at


def compile_launches(
    launches: Sequence[HostLaunch], edit: Callable[[str, str], str] = lambda kernel, text: text
) -> Callable[[Sequence[HostLaunch]], None]:
    """Compiles the kernels of launches together, their texts changed by `edit(file, text)`. The result runs some of them one after the other,
    thread by thread."""
    numbers: dict[tuple[Any, ...], int] = {}
    text = _HOST
    for x in launches:
        if x.text_key in numbers:
            continue
        n = numbers[x.text_key] = len(numbers)
        text += "".join(f"#define {k} {v}\n" for k, v in x.constants.items()) + f"namespace n{n} {{\n{edit(x.kernel, _own_text(x.kernel))}\n}}\n"
        text += "".join(f"#undef {k}\n" for k in (*x.constants, "INPUT", "OUTPUT"))
        text += f"""
        extern "C" void run{n}(const void* given, int blocks, int threads) {{
            const auto& p = *reinterpret_cast<const n{n}::Args*>(given);
            for (int b = 0; b < blocks; ++b) for (int t = 0; t < threads; ++t) {{ blockIdx.x = b; threadIdx.x = t; n{n}::{x.entry}(p); }}
        }}
        """
    text = text.replace('extern "C" __global__', "static")
    compiled = compile_for_host(text, "-O0")

    def run(part: Sequence[HostLaunch]) -> None:
        for x in part:
            _memory, at = align_arguments(x.arguments)
            compiled[f"run{numbers[x.text_key]}"](ctypes.c_void_p(at), x.blocks, x.threads)

    return run


def stored(array: np.ndarray, dtype: DType) -> np.ndarray:
    """A row-major copy in a storage type."""
    with np.errstate(all="ignore"):
        return np.array(array.astype(dtype.numpy), order="C")
