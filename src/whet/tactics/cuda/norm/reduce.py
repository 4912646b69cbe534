"""Reductions of row-major tensors over any axes, accumulators in f32.

For coverage: no other kernel computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.ops._reduce import list_reduced_axes
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int64, Pointer, UInt32, make_array_type
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, count_blocks, launch, list_float_types, make_stored_signature
from whet.tactics.cuda._device.plain_layer import UnfusedTactic

OPS = {
    "ReduceSum": 0, "ReduceMean": 1, "ReduceMax": 2, "ReduceMin": 3, "ReduceProd": 4, "ReduceSumSquare": 5, "ReduceL2": 6, "ReduceL1": 7,
    "ReduceLogSum": 8, "ReduceLogSumExp": 9,
}  # fmt: skip
Walk = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides (elements), four of each, outermost first."""


@dataclass(frozen=True)
class ReduceArguments(Arguments, kernel="reduce.cu"):
    input: ConstPointer
    out: Pointer
    results: Int64
    kept_stride: Annotated[Sequence[int], make_array_type("long long", 4)]  # elements; outermost first
    over_stride: Annotated[Sequence[int], make_array_type("long long", 4)]
    kept: Annotated[Sequence[int], make_array_type("u32", 4)]
    over: Annotated[Sequence[int], make_array_type("u32", 4)]
    count: UInt32  # elements of one result, or groups of eight


@tactic
class Reduce(UnfusedTactic):
    """Neighbouring axes count as one; at most four runs of kept and of reduced ones."""

    ops = tuple(OPS)
    constants = "the axes are"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        kinds = (F32,) if layer.op == "ReduceProd" else (F16, BF16, F32)  # the product of many values leaves the range of 16 bits
        return [make_stored_signature(layer, {0: Operand("linear", t)}, Operand("linear", t)) for t in list_float_types([layer.inputs[0]], kinds)]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if prod(static_shape(layer.needs(0).shape)) >= 2**31:
            return "more than 2**31 elements"
        if not prod(static_shape(layer.needs(0).shape)):
            return "it is empty"
        walks = list_walks(layer)
        return walks if isinstance(walks, str) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        walks = list_walks(layer)
        if isinstance(walks, str):
            raise PlanRefused(walks)
        kept, over, wide = vectorize_walks(*walks)
        results, count = prod(kept[0]), prod(over[0])
        threads = 1 if count <= 8 or (over[1][-1] != 1 and results >= 4096) else 32 if count <= 2048 or results >= 2048 else 256
        constants = {"TYPE": TYPE[signature.outputs[0].dtype.name], "OP": OPS[layer.op], "T": threads, "WIDE": wide}

        def make(args: Args) -> list:
            arguments = ReduceArguments(
                input=args.inputs[0],
                out=args.outputs[0],
                results=results,
                kept_stride=kept[1],
                over_stride=over[1],
                kept=kept[0],
                over=over[0],
                count=count,
            )
            return [launch("reduce", arguments, constants, (count_blocks(results, 256 // threads), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"reduce x{threads}" + (" by eights" if wide else ""))


def vectorize_walks(kept_walk: Walk, reduced_walk: Walk) -> tuple[Walk, Walk, int]:
    """The walks in steps of eight adjacent elements, if these are whole 16-byte vectors: of one result (1) or of eight results (2)."""
    for wide, walk, other in ((1, reduced_walk, kept_walk), (2, kept_walk, reduced_walk)):
        (*sizes, last), (*steps, step) = walk
        apart = [s for n, s in zip((*sizes, *other[0]), (*steps, *other[1]), strict=True) if n > 1]
        if step == 1 and last % 8 == 0 and not any(s % 8 for s in apart):
            eights: Walk = ((*sizes, last // 8), (*steps, 8))
            return (kept_walk, eights, 1) if wide == 1 else (eights, reduced_walk, 2)
    return kept_walk, reduced_walk, 0


def list_walks(layer: Layer) -> tuple[Walk, Walk] | str:
    """How to walk over the kept and over the reduced axes, or why the kernel cannot."""
    shape, axes = static_shape(layer.needs(0).shape), list_reduced_axes(layer)
    runs: list[list[Any]] = []  # [reduced, size, stride]
    stride = 1
    for i in reversed(range(len(shape))):
        if shape[i] != 1:
            if runs and runs[-1][0] == (i in axes):
                runs[-1][1] *= shape[i]
            else:
                runs.append([i in axes, shape[i], stride])
        stride *= shape[i]
    walks = []
    for which in (False, True):
        mine = [(size, step) for is_reduced, size, step in reversed(runs) if is_reduced == which]
        if len(mine) > 4:
            return "takes at most four runs of axes"
        mine = [(1, 0)] * (4 - len(mine)) + mine
        walks.append((tuple(s for s, _ in mine), tuple(s for _, s in mine)))
    return walks[0], walks[1]
