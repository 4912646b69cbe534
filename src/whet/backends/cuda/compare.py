"""Compares two ranges of GPU memory on the GPU: verification uses it for results too large to read back."""

from __future__ import annotations

import functools

import numpy as np

from whet.backends._base import Difference
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import Device
from whet.backends.cuda.launch import Kernel, Launch, Module
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Stream
from whet.errors import BackendError

# Independent of the kernels under test: one value per thread, plain conversions, accumulators in float64.
SOURCE = r"""
struct Args { const unsigned char* a; const unsigned char* b; double* sums; unsigned int* peaks; unsigned long long count; };
// sums: squares of the difference, squares of b. peaks: largest difference, largest |b| (as float bits), places where one is no number.
__device__ float number(const unsigned char* p, unsigned long long i) {
#if KIND == 0
    return ((const float*)p)[i];
#elif KIND == 1
    float v; unsigned short h = ((const unsigned short*)p)[i];
    asm("{ .reg .f16 t; mov.b16 t, %1; cvt.f32.f16 %0, t; }" : "=f"(v) : "h"(h));
    return v;
#elif KIND == 2
    return __uint_as_float((unsigned int)((const unsigned short*)p)[i] << 16);
#else
    return (float)p[i];
#endif
}
extern "C" __global__ void __launch_bounds__(256) compare(const __grid_constant__ Args p) {
    double error = 0, square = 0;
    float worst = 0, largest = 0;
    unsigned int odd = 0;
    for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < p.count; i += gridDim.x * 256ull) {
        const float a = number(p.a, i), b = number(p.b, i);
        if (!isfinite(a) || !isfinite(b)) { odd += !(a == b || (isnan(a) && isnan(b))); continue; }
        const float e = fabsf(a - b);
        error += (double)e * e;
        square += (double)b * b;
        worst = fmaxf(worst, e);
        largest = fmaxf(largest, fabsf(b));
    }
    if (error) atomicAdd(p.sums, error);
    if (square) atomicAdd(p.sums + 1, square);
    if (worst) atomicMax(p.peaks, __float_as_uint(worst));
    if (largest) atomicMax(p.peaks + 1, __float_as_uint(largest));
    if (odd) atomicAdd(p.peaks + 2, odd);
}
"""
KINDS = {"f32": (0, 4), "f16": (1, 2), "bf16": (2, 2), "u8": (3, 1), "i8": (3, 1)}  # i8 as bytes: only equality matters


def emit_compare_kernel(kind: int) -> str:
    """Source of the kernel for one kind of element."""
    return f"#define KIND {kind}\n{SOURCE}"


@functools.cache
def _load_kernel(kind: int, device: Device) -> Kernel:
    return Module(compile_cubin(emit_compare_kernel(kind), name="compare.cu", arch=device.arch)).kernel("compare")


def compute_difference(device: Device, a: int, b: int, nbytes: int, dtype: str) -> Difference:
    """Compares the values at address `a` with the reference at `b`. Raises BackendError for an unsupported type."""
    if dtype not in KINDS:
        raise BackendError(f"{dtype} cannot be compared on the GPU; supported are {', '.join(KINDS)}. Read the values back instead.")
    kind, size = KINDS[dtype]
    count = nbytes // size
    result = DeviceBuffer(32)
    result.fill(0)
    stream = Stream()
    grid = (max(1, min(2048, -(-count // 2048))), 1, 1)
    arguments = np.array([a, b, result.address, result.address + 16, count], np.uint64)
    Launch(_load_kernel(kind, device), grid, 256, arguments.tobytes(), overlap=False).run(stream)
    stream.synchronize()
    stream.close()
    sums, peaks = result.read((2,), np.float64), result.read((4,), np.uint32, 16)
    result.close()
    worst, largest = (float(v) for v in peaks[:2].view(np.float32))
    return Difference(worst, float(np.sqrt(sums[0])), largest, float(np.sqrt(sums[1])), int(peaks[2]))
