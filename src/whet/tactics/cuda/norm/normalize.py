"""Softmax, log-softmax, layer, group, instance and root-mean-square norms of row-major tensors: a row is read once and kept in registers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Packed, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstPointer, Float32, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import (
    TYPE,
    GpuKernel,
    all_static,
    count_blocks,
    launch,
    list_float_types,
    make_packed_array,
    make_stored_signature,
)
from whet.tactics.cuda._device.plain_layer import UnfusedTactic
from whet.tactics.cuda._device.quantized_store import PLAIN_RESULT, QuantizedStore

_SOFT = {"Softmax": 0, "LogSoftmax": 1}
_NORMS = {"LayerNormalization": 2, "GroupNormalization": 2, "InstanceNormalization": 2, "RMSNormalization": 3}
_KEPT = 4  # groups of eight values that a thread keeps


@dataclass(frozen=True)
class NormalizeArguments(Arguments, kernel="normalize.cu"):
    input: ConstPointer
    out: Pointer
    scale: ConstFloatPointer  # one value for every `per` elements of a row; 0: none
    shift: ConstFloatPointer
    rows: Int64
    length: Int32  # scales repeat after `groups` rows
    per: Int32
    groups: Int32
    epsilon: Float32
    quantized: Pointer = 0
    per_step: Float32 = 1.0
    zero: Float32 = 0.0


@dataclass(frozen=True)
class LinesArguments(Arguments, kernel="normalize.cu", struct="Lines"):
    input: ConstPointer
    out: Pointer
    count: Int64
    length: Int32
    inner: Int32


@tactic
class Normalize(UnfusedTactic):
    """Softmax along any axis; norms over the last axes, or over channels and pixels."""

    ops = (*_SOFT, *_NORMS)
    constants = "its scale is"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return [
            make_stored_signature(layer, {0: Operand("linear", t)}, Operand("linear", t))
            for t in list_float_types([layer.inputs[0]], (F16, BF16, F32))
        ]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        shape = static_shape(layer.outputs[0].shape)
        return "more than 2**31 rows or elements of a row" if prod(shape) >= 2**31 else "it is empty" if not prod(shape) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        return self.plan_quantized(layer, signature, config, backend, PLAIN_RESULT)

    def plan_quantized(self, layer: Layer, signature: Signature, config: Config, backend: Backend, stored: QuantizedStore) -> GpuKernel:
        """The kernel that stores the result as `stored`; the floating-point result is its first output, if it is kept."""
        shape, kind = static_shape(layer.outputs[0].shape), TYPE[signature.outputs[0].dtype.name]
        number = (_SOFT | _NORMS)[layer.op]
        length, per, groups, inner = _get_row_sizes(layer, shape)
        if inner > 1:
            constants = {"TYPE": kind, "OP": number, "T": 32, "ITEMS": 1, "WIDE": 0, "EARLY": 0, **stored.constants}
            return self._lines(layer, signature, shape, constants, length, inner)
        rows = prod(shape) // length
        threads, kept, blocks, block = divide_rows(length, rows, backend)
        given = sum(t is not None for t in layer.inputs[1:3]) if layer.inputs[1:] and layer.inputs[1] is not None else 0
        wide = length % 8 == 0
        early = given if wide and kept and layer.op in ("LayerNormalization", "RMSNormalization") else 0
        constants = {"TYPE": kind, "OP": number, "T": threads, "ITEMS": kept, "WIDE": int(wide), "EARLY": early, **stored.constants}
        packed: list[Packed] = []
        for t in layer.inputs[1:3]:
            if t is not None:
                packed.append(_spread(t, layer.op, groups * (length // per), shape))
        epsilon = float(layer.attrs.get("epsilon", 0.0))

        def make(args: Args) -> list:
            addresses = iter(args.packed)
            scale, shift = (next(addresses) if t is not None else 0 for t in (*layer.inputs[1:3], None, None)[:2])
            out, quantized = stored.split_outputs(args.outputs)
            arguments = NormalizeArguments(
                args.inputs[0], out, scale, shift, rows=rows, length=length, per=per, groups=groups, epsilon=epsilon,
                quantized=quantized, per_step=stored.per_step, zero=stored.zero,
            )  # fmt: skip
            return [launch("normalize", arguments, constants, (blocks, 1, 1), block)]

        return GpuKernel(layer, signature, make, implementation=f"rows x{threads}", packed=packed)

    def _lines(self, layer: Layer, signature: Signature, shape: tuple[int, ...], constants: dict[str, int], length: int, inner: int) -> GpuKernel:
        count = prod(shape) // length

        def make(args: Args) -> list:
            arguments = LinesArguments(args.inputs[0], args.outputs[0], count=count, length=length, inner=inner)
            return [launch("lines", arguments, constants, (count_blocks(count, 128), 1, 1), 128)]

        return GpuKernel(layer, signature, make, implementation="lines")


def divide_rows(length: int, rows: int, backend: Backend) -> tuple[int, int, int, int]:
    """(threads of a row, groups of eight elements that each keeps, or 0 for rows too long for that, blocks, threads of a block)."""
    parts = -(-length // 8)
    threads = next((t for t in (4, 8, 16, 32, 128) if parts <= t * (_KEPT if t > 32 or parts > 96 else 3)), 512)
    items = -(-parts // threads)
    block = max(threads, 32 if rows * threads <= 128 * backend.capabilities.multiprocessors else 128)  # few rows spread over all multiprocessors
    return threads, items if items <= _KEPT else 0, count_blocks(rows, block // threads), block


def _get_row_sizes(layer: Layer, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Elements of a row, of the part of a row with one scale, rows before scales repeat, stride between elements of a row."""
    if layer.op in _SOFT:
        axis = int(layer.attrs["axis"]) % len(shape)
        return shape[axis], 1, 1, prod(shape[axis + 1 :])
    if layer.op in ("LayerNormalization", "RMSNormalization"):
        return prod(shape[int(layer.attrs["axis"]) % len(shape) :]), 1, 1, 1
    groups = int(layer.attrs["num_groups"]) if layer.op == "GroupNormalization" else shape[1]
    pixels = prod(shape[2:])
    return shape[1] // groups * pixels, pixels, groups, 1


def _spread(t: Tensor, op: str, count: int, shape: tuple[int, ...]) -> Packed:
    """A scale or shift as `count` f32 values: spread over the normalized axes, or one a channel."""
    assert t.weight is not None

    def spread_values() -> np.ndarray:
        a = np.asarray(t.array(), np.float32)
        if op in ("LayerNormalization", "RMSNormalization"):
            target: list[int] = []
            at = 1
            for d in reversed(shape):  # the normalized axes are the last ones that `count` values fill
                if at == count:
                    break
                target.insert(0, d)
                at *= d
            a = np.broadcast_to(a.reshape(a.shape[max(0, a.ndim - len(target)) :]), target or (1,))
        return np.ascontiguousarray(a).reshape(-1)

    return make_packed_array(f"{t.weight.digest}|norm {op} {count} {shape}", count * 4, spread_values)
