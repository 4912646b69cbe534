"""Kernel text: a .cu file with its constants in front, includes put in place, tensor-core instructions spelled out."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from whet.tactics.cuda._device.arguments import KERNEL_TEXTS, emit_c_structs

FAMILIES = Path(__file__).parent.parent  # kernel texts are in the folders of the tactics that launch them
ACTIVATIONS = {
    "clip": 0,
    "silu": 1,
    "hardswish": 2,
    "gelu": 3,
    "sigmoid": 4,
    "tanh": 5,
    "leaky_relu": 6,
    "hardsigmoid": 7,
    "gelu_tanh": 8,
    "elu": 9,
    "mish": 10,
}  # codes as in common.cuh


EIGHT_BITS = {3: "s32.s8.s8", 4: "s32.u8.s8", 5: "f32.e4m3.e4m3"}  # types of accumulator, input and weights by code
WEIGHTS_AS_A = {3: "s32.s8.s8", 4: "s32.s8.u8"}  # the same with weights as operand A, which is listed first


def emit_wgmma(columns: int, bf16: bool, in8: int = 0, weights_as_a: bool = False) -> str:
    """Device functions for acc[64 x columns] (+)= A x B over 32 bytes of K: `wgmma` with A in shared memory, `wgmma_registers`.

    `in8`: operands of 8 bits (EIGHT_BITS; `weights_as_a`: A are the weights).
    """
    if not in8:
        kind = "bf16" if bf16 else "f16"
        return _write_wgmma(columns, f"k16.f32.{kind}.{kind}", ", 1, 1, 0, 0", ", 1, 1, 0")
    types = (WEIGHTS_AS_A if weights_as_a else EIGHT_BITS)[in8]
    scales = ", 1, 1" if in8 == 5 else ""  # signs of floating-point operands
    return _write_wgmma(columns, f"k32.{types}", scales, scales, "float" if in8 == 5 else "int")


def emit_transposed_wgmma(columns: int, bf16: bool) -> str:
    """The device function `wgmma_transposed` for acc[64 x columns] (+)= A x B over 16 elements, A in registers, rows of B along its columns."""
    name = "wgmma_registers"
    text = emit_wgmma(columns, bf16)
    return text[text.index(f"DEV void {name}(") :].replace(name, "wgmma_transposed").replace("p, 1, 1, 0;", "p, 1, 1, 1;")


def emit_tf32_wgmma(columns: int) -> str:
    """Device functions for acc[64 x columns] (+)= A x B over 8 elements of TF32: `wgmma` with A in shared memory, `wgmma_registers`."""
    return _write_wgmma(columns, "k8.f32.tf32.tf32", ", 1, 1", ", 1, 1")


def _write_wgmma(columns: int, types: str, memory_flags: str, register_flags: str, accumulator: str = "float") -> str:
    """`types`: depth and types of the instruction. The flags follow the predicate, with A in shared memory and in registers."""
    count = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{"f" if accumulator == "float" else "r"}"(d[{i}])' for i in range(count))

    def emit_function(name: str, parameter: str, registers_of_a: int, a: str, inputs: str, flags: str) -> str:
        at = count + registers_of_a
        return (
            f"DEV void {name}({accumulator} (&d)[{count}], {parameter}, u64 b, int add) {{\n"
            f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0; "\n'
            f'                 "wgmma.mma_async.sync.aligned.m64n{columns}{types} "\n'
            f'                 "{{{accumulators}}}, {a}, %{at}, p{flags}; }}"\n'
            f'                 : {operands} : {inputs}, "l"(b), "r"(add));\n}}\n'
        )

    four = ", ".join(f"%{count + i}" for i in range(4))
    registers = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return emit_function("wgmma", "u64 a", 1, f"%{count}", '"l"(a)', memory_flags) + emit_function(
        "wgmma_registers", "const u32 (&a)[4]", 4, f"{{{four}}}", registers, register_flags
    )


@functools.cache
def list_kernel_paths() -> dict[str, Path]:
    """Every kernel text (.cu) and device header (.cuh) under tactics/cuda by its file name, which is unique."""
    return {p.name: p for p in sorted(FAMILIES.rglob("*.cu*"))}


@functools.cache
def _read_file(name: str) -> str:
    return KERNEL_TEXTS[name] if name in KERNEL_TEXTS else list_kernel_paths()[name].read_text(encoding="utf-8")


def emit_kernel_source(name: str, constants: Mapping[str, int]) -> str:
    """The text of `<name>`, complete: no include path is needed to compile it."""
    text = _read_file(name)
    if '#include "arguments"' in text:
        text = text.replace('#include "arguments"', emit_c_structs(name))
    if '#include "wgmma"' in text:
        columns, tf32 = constants["BN"], "TERMS" in constants
        widths = {columns, constants.get("BN2", columns)}  # of a second product in the same kernel
        bf16, in8, tall = bool(constants.get("BF16", 0)), constants.get("IN8", 0), bool(constants.get("WEIGHTS_AS_A", 0))
        products = emit_tf32_wgmma(columns) if tf32 else "".join(emit_wgmma(n, bf16, in8, tall) for n in sorted(widths))
        text = text.replace('#include "wgmma"', products)
    if '#include "wgmma_transposed"' in text:
        text = text.replace('#include "wgmma_transposed"', emit_transposed_wgmma(constants["DV"], bool(constants.get("BF16", 0))))
    text = re.sub(r'#include "(\w+\.cuh)"', lambda include: _read_file(include.group(1)), text)
    return "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items())) + text
