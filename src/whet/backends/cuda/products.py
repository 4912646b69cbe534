"""Sums of products on the GPU for the references of verification: a thread per result, accumulated in the order of the definition.

Independent of the tactics' kernels, with which it shares no text: no tensor cores, no shared memory, plain addressing. Operands are float32 or
float64, accumulators float64, or float32 in partial sums of 256 products as BLAS libraries have them. `plan_multiply` and `plan_convolve` need no
GPU: the tests run the kernels as C++ on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import Device
from whet.backends.cuda.launch import Kernel, Launch, Module
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Stream

THREADS = 256
_AXES = 3  # spatial axes of the kernel; a convolution with fewer has leading axes of one entry

SOURCE = r"""
struct Args { const VALUE* a; const VALUE* b; SUM* y; const long long* at; long long count; int n[32]; };

// The sum of products so far: float32 products are added in parts of 256.
struct Total {
    SUM whole, part;
    int terms;
    __device__ void add(VALUE a, VALUE b) {
        part += (SUM)a * (SUM)b;
        if (sizeof(SUM) == 4 && ++terms == 256) { whole += part; part = 0; terms = 0; }
    }
};

// n: rows, columns, products. at: for each matrix of the result the index of its a, then for each the index of its b.
extern "C" __global__ void __launch_bounds__(256) multiply(const __grid_constant__ Args p) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= p.count) return;
    const long long rows = p.n[0], columns = p.n[1], terms = p.n[2], matrices = p.count / (rows * columns);
    const long long column = i % columns, row = i / columns % rows, matrix = i / columns / rows;
    const VALUE* a = p.a + (p.at[matrix] * rows + row) * terms;
    const VALUE* b = p.b + p.at[matrices + matrix] * terms * columns + column;
    Total total = {0, 0, 0};
    for (long long k = 0; k < terms; ++k) total.add(a[k], b[k * columns]);
    p.y[i] = total.whole + total.part;
}

// The entry of an axis of x that a tap multiplies for a result: outside of the axis in padding, -1 where a transposed convolution has none.
__device__ int find_entry(const Args& p, int axis, int result, int tap) {
    const int stride = p.n[17 + axis], moved = tap * p.n[20 + axis], pad = p.n[23 + axis];
    if (!p.n[4]) return result * stride - pad + moved;
    const int place = result + pad - moved;
    return place < 0 || place % stride ? -1 : place / stride;
}

// n: channels of x, groups, channels of a group of x, channels of a group of y, 1 for the transposed convolution, 0, 0, 0;
// then three each: sizes of x, sizes of y, taps, strides, dilations, pads before.
extern "C" __global__ void __launch_bounds__(256) convolve(const __grid_constant__ Args p) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= p.count) return;
    const int channels = p.n[0], groups = p.n[1], ins = p.n[2], outs = p.n[3], transposed = p.n[4];
    const int *size = p.n + 8, *out = p.n + 11, *taps = p.n + 14;
    int to[3];
    long long rest = i;
    for (int axis = 2; axis >= 0; --axis) { to[axis] = (int)(rest % out[axis]); rest /= out[axis]; }
    const int k = (int)(rest % (groups * outs)), group = k / outs;
    const long long image = rest / (groups * outs), entries = (long long)taps[0] * taps[1] * taps[2];
    Total total = {0, 0, 0};
    for (int c = 0; c < ins; ++c) {
        const VALUE* x = p.a + (image * channels + group * ins + c) * size[0] * size[1] * size[2];
        const VALUE* w = p.b + (transposed ? (long long)(group * ins + c) * outs + k % outs : (long long)k * ins + c) * entries;
        for (int r = 0; r < taps[0]; ++r) {
            const int z = find_entry(p, 0, to[0], r);
            for (int s = 0; s < taps[1]; ++s) {
                const int y = find_entry(p, 1, to[1], s);
                const bool inside = z >= 0 && z < size[0] && y >= 0 && y < size[1];
                const VALUE* line = x + ((long long)z * size[1] + y) * size[2];
                for (int t = 0; t < taps[2]; ++t, ++w) {
                    const int at = find_entry(p, 2, to[2], t);
                    if (inside && at >= 0 && at < size[2]) total.add(line[at], *w);
                    else if (!transposed) total.add(0, *w);  // padding is multiplied: an infinite weight gives NaN
                }
            }
        }
    }
    p.y[i] = total.whole + total.part;
}
"""
_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


@dataclass(frozen=True)
class ProductLaunch:
    """One launch of a kernel of SOURCE with its operands on the host: a, b, and indices of matrices. `shape` and `dtype` are the result's."""

    entry: str
    text: str
    operands: tuple[np.ndarray, np.ndarray, np.ndarray]
    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def blocks(self) -> int:
        """Blocks of THREADS threads, a thread per result."""
        return -(-prod(self.shape) // THREADS)

    def pack(self, a: int, b: int, y: int, at: int) -> bytes:
        """The kernel's argument for these addresses of the operands and the result."""
        numbers = np.zeros(32, np.int32)
        numbers[: len(self.numbers)] = self.numbers
        return np.array([a, b, y, at, prod(self.shape)], np.int64).tobytes() + numbers.tobytes()


def emit_products_source(value: np.dtype, sums: np.dtype) -> str:
    """Source of both kernels for operands and accumulators of these types."""
    return f"#define VALUE {_TYPES[value]}\n#define SUM {_TYPES[sums]}\n{SOURCE}"


def plan_multiply(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> ProductLaunch:
    """`np.matmul(a, b)` of operands of rank 2 or more, with accumulators of `dtype`."""
    a, b, text = _prepare_operands(a, b, dtype)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    indices = [np.broadcast_to(np.arange(prod(x.shape[:-2])).reshape(x.shape[:-2]), batch).reshape(-1) for x in (a, b)]
    rows, terms, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return ProductLaunch("multiply", text, (a, b, np.concatenate(indices).astype(np.int64)), (rows, columns, terms), (*batch, rows, columns), dtype)


def plan_convolve(
    x: np.ndarray, w: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int], group: int,
    transposed: bool, dtype: np.dtype,
) -> ProductLaunch:  # fmt: skip
    """The convolution, or the transposed one, of x [N, C, *spatial] with up to three spatial axes; `pads` are those before each axis."""
    x, w, text = _prepare_operands(x, w, dtype)
    ins = x.shape[1] // group
    outs = w.shape[1] if transposed else len(w) // group
    ones = (1,) * (_AXES - len(sizes))
    axes = [(*ones, *v) for v in (x.shape[2:], sizes, w.shape[2:], strides, dilations)]
    numbers = (x.shape[1], group, ins, outs, int(transposed), 0, 0, 0, *(n for v in axes for n in v), *(0 for _ in ones), *pads)
    return ProductLaunch("convolve", text, (x, w, np.zeros(1, np.int64)), numbers, (len(x), group * outs, *sizes), dtype)


def _prepare_operands(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, str]:
    """Both operands in C order and in one type, and the kernels' source for it."""
    value = np.result_type(a, b)
    return np.ascontiguousarray(a, value), np.ascontiguousarray(b, value), emit_products_source(value, dtype)


@functools.cache
def _load_kernel(text: str, entry: str, device: Device) -> Kernel:
    return Module(compile_cubin(text, name="products.cu", arch=device.arch)).kernel(entry)


def run_products(device: Device, launch: ProductLaunch) -> np.ndarray:
    """The result of a launch. Binds the GPU to the calling thread. Raises BackendError, also if there is too little memory."""
    device.make_current()
    kernel = _load_kernel(launch.text, launch.entry, device)
    buffers = [DeviceBuffer.of(x) for x in launch.operands]
    result = DeviceBuffer(prod(launch.shape) * launch.dtype.itemsize)
    stream = Stream()
    try:
        arguments = launch.pack(buffers[0].address, buffers[1].address, result.address, buffers[2].address)
        Launch(kernel, (launch.blocks, 1, 1), THREADS, arguments, overlap=False).run(stream)
        stream.synchronize()
        return result.read(launch.shape, launch.dtype)
    finally:
        stream.close()
        for buffer in (*buffers, result):
            buffer.close()
