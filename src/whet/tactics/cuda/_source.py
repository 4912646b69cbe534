"""Kernel text: a file of `_kernels/` with its constants in front, includes put in place, tensor-core instructions spelled out."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

KERNELS = Path(__file__).parent / "_kernels"
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
}  # numbers as in common.cuh


def wgmma(columns: int, bf16: bool) -> str:
    """The device function `wgmma(acc, a, b, add)`: acc[64 x columns] (+)= A x B over 16 elements of K, both from shared memory."""
    count = columns // 2
    kind = "bf16" if bf16 else "f16"
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"DEV void wgmma(float (&d)[{count}], u64 a, u64 b, int add) {{\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "\n'
        f'                 "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"\n'
        f'                 : {operands} : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


@functools.cache
def _file(name: str) -> str:
    return (KERNELS / name).read_text()


def source(name: str, constants: Mapping[str, int]) -> str:
    """The text of `_kernels/<name>`, complete: no include path is needed to compile it."""
    text = _file(name)
    if '#include "wgmma"' in text:
        text = text.replace('#include "wgmma"', wgmma(constants["BN"], bool(constants.get("BF16", 0))))
    text = re.sub(r'#include "(\w+\.cuh)"', lambda found: _file(found.group(1)), text)
    return "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items())) + text
