"""DeformableConv (domain com.example.vision): a convolution whose taps are read at positions shifted by computed offsets.

Importing the package registers the op; whet imports it by its entry point.
"""

import whet
from whet.plugins import CudaTactic, LlvmTactic, NumpyTactic
from whet_deformable import cpu, cuda, triton_kernel
from whet_deformable.meaning import couples, infer, reference

TACTICS = [
    NumpyTactic("matmul", cpu.as_matmul, rtol=1e-5),
    LlvmTactic("pixels", emit=cpu.emit_pixels, words=cpu.words, items="pixels", serial_items=64, rtol=1e-5),
    CudaTactic(
        "gather", cuda.SOURCE, "deformable_conv", grid=cuda.grid, block=cuda.BLOCK, parameters=cuda.parameters, macros=cuda.macros, rtol=1e-5,
        configs=cuda.configs,
    ),
]  # fmt: skip
if triton_kernel.TACTIC is not None:  # Triton is installed
    TACTICS.append(triton_kernel.TACTIC)

whet.register(
    "DeformableConv",
    infer,
    reference,
    domain="com.example.vision",
    package_name="whet_deformable",
    version="1.0",
    attrs={"strides": (1, 1), "pads": (0, 0)},
    couples=couples,
    samples=[
        (["f32[1,2,5,6]", "const f32[3,2,2,3]", "f32[1,12,4,4]"], {}),
        (["f32[2,4,6,6]", "const f32[5,4,3,3]", "f32[2,18,3,3]", "const f32[5]"], {"strides": (2, 2), "pads": (1, 1)}),
        (["nonfinite f32[1,1,7,7]", "const f32[1,1,2,2]", "f32[1,8,6,6]"], {}),
    ],
    tactics=TACTICS,
)
