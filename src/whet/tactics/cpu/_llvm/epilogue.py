"""What follows a sum of 16 floats in registers before it is stored, as lines of LLVM IR: SiLU, ReLU, an added vector."""

from __future__ import annotations

from collections.abc import Sequence

from whet.tactics.cpu._llvm.ir import FLOATS, WIDE, load
from whet.tactics.cpu._llvm.silu import silu

ADDED = "added"  # the word of a context that is the address of what "Add" adds; behind the result's


def words(own: Sequence[str], steps: Sequence[str]) -> tuple[str, ...]:
    """Names of what a context holds, in order: a kernel's own, which begin with the addresses of image, weights and result, and what is added."""
    return (*own[:3], *([ADDED] if "Add" in steps else []), *own[3:])


def behind(value: str, n: str, steps: Sequence[str], base: str, offset: int, estimate: bool) -> tuple[str, str]:
    """Lines that take `value` through "Silu", "Relu" and "Add" (of the vector at %base plus `offset` floats), each once at most, and the result's
    name; names begin with `n`. `estimate`: the CPU has AVX-512 (F and DQ)."""
    lines = []
    for step in steps:
        if step == "Silu":
            text, value = silu(value[1:], n, estimate)
            lines.append(text)
        elif step == "Relu":  # a NaN stays one
            lines.append(f"  %{n}.rc = fcmp olt {FLOATS} {value}, %zero")
            lines.append(f"  %{n}.ro = select <{WIDE} x i1> %{n}.rc, {FLOATS} %zero, {FLOATS} {value}")
            value = f"%{n}.ro"
        else:
            lines.append(f"{load(f'{n}.added', base, offset)}\n  %{n}.sum = fadd {FLOATS} {value}, %{n}.added")
            value = f"%{n}.sum"
    return "\n".join(lines), value
