"""oneDNN's C API v3 from Python: descriptors that list implementations, primitives, calls that a compiled loop can run.

    src = describe((1, 64, 56, 56), "f32", "nhwc")
    first = convolution(src, describe((64, 64, 3, 3), "f32", "any"), None, src, (1, 1), (1, 1), ((1, 1), (1, 1)))
    for implementation in first.implementations(): ...        # implementation.name, .md("weights"), .scratch_bytes
    call = first.primitive().call({"src": address, ...})      # call(), call.bind("src", other), call.step

The set_threads() in force when a descriptor is made is the one it is made for: run it with the same.
"""

from whet.tactics.cpu.onednn._api.attributes import BINARY, ELTWISE, Attributes, Binary, Eltwise, PostOp, Prelu, Sum
from whet.tactics.cpu.onednn._api.conv import convolution
from whet.tactics.cpu.onednn._api.library import Unimplemented, get_library_version, has_isa, load_error, load_library
from whet.tactics.cpu.onednn._api.matmul import inner_product, matmul
from whet.tactics.cpu.onednn._api.memory import ALIGNMENT, MemoryDesc, allocate_aligned, compute_row_major_strides, describe
from whet.tactics.cpu.onednn._api.move import concat, pack, reorder
from whet.tactics.cpu.onednn._api.norm import layer_normalization, softmax
from whet.tactics.cpu.onednn._api.pointwise import binary, eltwise, prelu, sum_of
from whet.tactics.cpu.onednn._api.primitive import Call, Descriptor, Primitive, run
from whet.tactics.cpu.onednn._api.window import pooling, reduction, resampling

__all__ = [
    "ALIGNMENT",
    "BINARY",
    "ELTWISE",
    "Attributes",
    "Binary",
    "Call",
    "Descriptor",
    "Eltwise",
    "MemoryDesc",
    "PostOp",
    "Prelu",
    "Primitive",
    "Sum",
    "Unimplemented",
    "allocate_aligned",
    "binary",
    "compute_row_major_strides",
    "concat",
    "convolution",
    "describe",
    "eltwise",
    "get_library_version",
    "has_isa",
    "inner_product",
    "layer_normalization",
    "load_error",
    "load_library",
    "matmul",
    "pack",
    "pooling",
    "prelu",
    "reduction",
    "reorder",
    "resampling",
    "run",
    "softmax",
    "sum_of",
]  # fmt: skip
