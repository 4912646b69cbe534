"""The reference kernels of products as C++ on the host, one thread after the other."""

import ctypes
from functools import cache

import numpy as np

from support.host_cuda import compile_for_host
from whet.backends.cuda.products import SOURCE, THREADS, ProductLaunch, emit_products_source, plan_convolve, plan_multiply

_HOST = """
#define __global__
#define __device__ inline
#define __grid_constant__
#define __launch_bounds__(n)
struct Dim { unsigned x; };
static thread_local Dim blockIdx, threadIdx;
"""
_TYPES = ((np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64))


def name_types(text: str) -> str:
    """The namespace of the kernels of one pair of types."""
    return "n" + "_".join(line.split()[2] for line in text.splitlines()[:2])


@cache
def compile_products(old: str = "", new: str = "") -> ctypes.CDLL:
    """The kernels for all types, with a part of their text replaced."""
    assert not old or SOURCE.count(old) == 1
    text = _HOST
    for types in _TYPES:
        source = emit_products_source(*(np.dtype(t) for t in types))
        name, body = name_types(source), (source.replace(old, new) if old else source).replace('extern "C" __global__', "static")
        text += f"#undef VALUE\n#undef SUM\nnamespace {name} {{\n{body}\n}}\n"
        for entry in ("multiply", "convolve"):
            text += f"""extern "C" void {name}_{entry}(const {name}::Args* p, long long blocks) {{
                for (long long b = 0; b < blocks; ++b) for (int t = 0; t < {THREADS}; ++t) {{
                    blockIdx.x = b; threadIdx.x = t; {name}::{entry}(*p);
                }}
            }}
            """
    return compile_for_host(text, "-O2")


def run_on_host(launch: ProductLaunch, old: str = "", new: str = "") -> np.ndarray:
    """The result of a launch; `old` in the kernels' text is replaced by `new`."""
    y = np.empty(launch.shape, launch.dtype)
    a, b, at = launch.operands
    arguments = launch.pack(a.ctypes.data, b.ctypes.data, y.ctypes.data, at.ctypes.data)
    run = getattr(compile_products(old, new), f"{name_types(launch.text)}_{launch.entry}")
    run(arguments, ctypes.c_longlong(launch.blocks))
    return y


class HostProducts:
    """A backend's `multiply` and `convolve` on the host; `old` in the kernels' text is replaced by `new`."""

    def __init__(self, old: str = "", new: str = ""):
        self.edit = old, new

    def multiply(self, a, b, dtype):
        return run_on_host(plan_multiply(a, b, dtype), *self.edit)

    def convolve(self, *args):
        return run_on_host(plan_convolve(*args), *self.edit)
