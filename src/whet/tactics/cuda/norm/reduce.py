"""Reductions of row-major tensors over any axes, accumulators in f32.

For coverage: no other kernel computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

from whet.backends import Backend
from whet.backends.cuda.launch import Launch
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.ops._reduce import list_reduced_axes
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int64, Pointer, UInt32, make_array_type
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, count_blocks, launch, list_float_types, make_stored_signature
from whet.tactics.cuda._device.plain_layer import UnfusedTactic

OPS = {
    "ReduceSum": 0, "ReduceMean": 1, "ReduceMax": 2, "ReduceMin": 3, "ReduceProd": 4, "ReduceSumSquare": 5, "ReduceL2": 6, "ReduceL1": 7,
    "ReduceLogSum": 8, "ReduceLogSumExp": 9, "GlobalAveragePool": 1, "GlobalMaxPool": 2,
}  # fmt: skip
_LEAST_ITEMS = 4  # elements (or groups of eight) of a thread in each share
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
    share: UInt32  # of them, those of a block
    elements: UInt32  # that a mean is of


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

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        walks = list_walks(layer)
        if isinstance(walks, str):
            return []
        work = ReductionWork(*vectorize_walks(*walks))
        most = work.count // (work.threads * _LEAST_ITEMS)
        shares = {min(each * backend.capabilities.multiprocessors // work.blocks, most) for each in (1, 4)}
        return [(), *((("shares", s),) for s in sorted(shares) if s > 1)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        walks = list_walks(layer)
        if isinstance(walks, str):
            raise PlanRefused(walks)
        work, shares = ReductionWork(*vectorize_walks(*walks)), int(dict(config).get("shares", 1))
        if not 1 <= shares <= min(work.count, 65535):
            raise PlanRefused(f"{shares} shares of {work.count} elements")
        stored, op = TYPE[signature.outputs[0].dtype.name], OPS[layer.op]
        results = prod(walks[0][0])
        join = ReductionWork(*vectorize_walks(((1, 1, 1, results), (0, 0, 0, 1)), ((1, 1, 1, shares), (0, 0, 0, results))))
        elements = prod(walks[1][0])

        def make(args: Args) -> list:
            if shares == 1:
                return [work.launch(args.inputs[0], args.outputs[0], op, (stored, stored), 0, elements)]
            first = work.launch(args.inputs[0], args.scratch, op, (stored, TYPE["f32"]), 1, elements, shares)
            return [first, join.launch(args.scratch, args.outputs[0], op, (TYPE["f32"], stored), 2, elements)]

        name = f"reduce x{work.threads}" + " by eights" * (work.wide > 0) + f" s{shares}" * (shares > 1)
        return GpuKernel(layer, signature, make, implementation=name, scratch=results * shares * 4 if shares > 1 else 0)


@dataclass(frozen=True)
class ReductionWork:
    """The walks of a reduction as vectorize_walks returns them."""

    kept: Walk
    over: Walk
    wide: int

    @property
    def results(self) -> int:
        return prod(self.kept[0])

    @property
    def count(self) -> int:
        """Elements of a result, or groups of eight."""
        return prod(self.over[0])

    @property
    def threads(self) -> int:
        """Threads of a result."""
        if self.count <= 8 or (self.over[1][-1] != 1 and self.results >= 4096):
            return 1
        return 32 if self.count <= 2048 or self.results >= 2048 else 256

    @property
    def blocks(self) -> int:
        return count_blocks(self.results, 256 // self.threads)

    def launch(self, source: int, target: int, op: int, types: tuple[int, int], part: int, elements: int, shares: int = 1) -> Launch:
        """The launch that reads and stores these types; `part` as in reduce.cu, `elements` in total of a result."""
        constants = {"TYPE": types[0], "TO": types[1], "OP": op, "T": self.threads, "WIDE": self.wide, "PART": part}
        arguments = ReduceArguments(
            input=source,
            out=target,
            results=self.results,
            kept_stride=self.kept[1],
            over_stride=self.over[1],
            kept=self.kept[0],
            over=self.over[0],
            count=self.count,
            share=-(-self.count // shares),
            elements=elements,
        )
        return launch("reduce", arguments, constants, (self.blocks, shares, 1), 256)


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
    shape = static_shape(layer.needs(0).shape)
    axes = tuple(range(2, len(shape))) if layer.op.startswith("Global") else list_reduced_axes(layer)
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
