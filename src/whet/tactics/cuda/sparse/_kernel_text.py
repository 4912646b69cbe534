"""The complete text of an instance of sparse.cu: constants, included files, and `wgmma.mma_async.sp` as device functions."""

from __future__ import annotations

from collections.abc import Mapping

from whet.tactics.cuda._device.source import emit_kernel_source

_TYPES = {1: "f32.f16.f16", 2: "f32.bf16.bf16", 3: "s32.s8.s8", 4: "s32.s8.u8", 5: "f32.e4m3.e4m3"}  # accumulator, weights, input by IN


def emit_sparse_wgmma(columns: int, kind: int) -> str:
    """Device functions `wgmma_sparse0` and `wgmma_sparse1`: acc[64 x columns] (+)= A x B over 64 bytes of a row of B (K = 32 elements of 16 bits
    or 64 of 8 bits), A compressed in shared memory.

    They are the first and the second instruction of a K step. Of 16-bit operands both read one metadata register: threads 0 and 1
    of a quad hold the metadata of the first instruction, threads 2 and 3 that of the second (sparsity selectors 0 and 1).
    """
    count, size = columns // 2, 1 if kind >= 3 else 2
    number, element = ("r", "int") if kind in (3, 4) else ("f", "float")
    accumulators = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{number}"(d[{i}])' for i in range(count))
    flags = {1: ", 1, 1, 0, 0", 2: ", 1, 1, 0, 0", 5: ", 1, 1"}.get(kind, "")
    return "".join(
        f"DEV void wgmma_sparse{i}({element} (&d)[{count}], u64 a, u64 b, u32 meta, int add) {{\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 3}, 0; "\n'
        f'                 "wgmma.mma_async.sp.sync.aligned.m64n{columns}k{64 // size}.{_TYPES[kind]} "\n'
        f'                 "{{{accumulators}}}, %{count}, %{count + 1}, %{count + 2}, {i if size == 2 else 0}, p{flags}; }}"\n'
        f'                 : {operands} : "l"(a), "l"(b), "r"(meta), "r"(add));\n}}\n'
        for i in range(2)
    )


def emit_sparse_source(constants: Mapping[str, int]) -> str:
    """The text of sparse.cu with these constants; it compiles without include paths."""
    return emit_kernel_source("sparse.cu", constants).replace('#include "wgmma_sparse"', emit_sparse_wgmma(constants["BN"], constants["IN"]))
