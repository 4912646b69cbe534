"""AMX tiles: eight registers of 16 rows of 64 bytes, and the product of two of them added to a third.

A process needs Linux's permission before it uses them. A thread's tile configuration (the rows and bytes per row of each register) belongs to
whoever set it, oneDNN for example: kernels save it, set their own, and restore it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT8, INT64, Function, Pointer, Value

TILE_ROWS, TILE_BYTES = 16, 64
CONFIG_WORDS = 8  # of 64 bits
_PALETTE = 1
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # system call and constants of Linux on x86-64


@cache
def why_no_tiles() -> str | None:
    """Reason why this process cannot multiply tiles of bf16; None if it can."""
    if not (jit.has("amx_tile") and jit.has("amx_bf16") and jit.has("avx512bw")):
        return "the CPU has no amx_bf16"
    if platform.system() != "Linux":
        return "tile registers are enabled on Linux only"
    failed = ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return f"Linux does not permit tile registers (error {ctypes.get_errno()})" if failed else None


def make_config(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """The configuration of registers with these (rows, bytes per row), as words."""
    memory = np.zeros(CONFIG_WORDS * 8, np.uint8)
    memory[0] = _PALETTE
    for register, (rows, row_bytes) in enumerate(shapes):
        memory[16 + 2 * register] = row_bytes
        memory[48 + register] = rows
    return [int(w) for w in memory.view(np.int64)]


@contextmanager
def configured_tiles(f: Function, config: Pointer) -> Iterator[None]:
    """Emits code that sets the configuration at `config` (i8), and restores the previous one at the end of the block."""
    saved = f.allocate(INT8, CONFIG_WORDS * 8)
    f.call_external("llvm.x86.sttilecfg", None, saved)
    f.call_external("llvm.x86.ldtilecfg", None, config)
    yield
    f.call_external("llvm.x86.ldtilecfg", None, saved)


def zero_tile(f: Function, register: int) -> None:
    f.call_external("llvm.x86.tilezero", None, _name_register(f, register))


def load_tile(f: Function, register: int, address: Pointer, stride: Value | int) -> None:
    """Loads rows `stride` bytes apart."""
    f.call_external("llvm.x86.tileloadd64", None, _name_register(f, register), address, f.value(stride, INT64))


def store_tile(f: Function, register: int, address: Pointer, stride: Value | int) -> None:
    f.call_external("llvm.x86.tilestored64", None, _name_register(f, register), address, f.value(stride, INT64))


def add_bf16_product(f: Function, target: int, left: int, right: int) -> None:
    """Adds the product of `left` (rows of bf16) and `right` (rows of pairs of bf16: two consecutive rows of a matrix, interleaved), in f32."""
    f.call_external("llvm.x86.tdpbf16ps", None, *(_name_register(f, r) for r in (target, left, right)))


def _name_register(f: Function, register: int) -> Value:
    return f.value(register, INT8)
