"""Elementwise layers and chains of them: one pass over memory, eight elements per thread, the steps generated as CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, NamedTuple

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, compute_stored_shape, static_shape, to_stored
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import EpilogueStep, find_epilogue_steps, get_root_layer, outer_input
from whet.tactics.cuda._device.arguments import Arguments, CType, Int64, Pointer
from whet.tactics.cuda._device.kernel import ACTIVATIONS, TYPE, GpuKernel, all_static, count_blocks, find_activation, launch, make_packed_array

BINARY = {"Add": "a + b", "Sub": "a - b", "Mul": "a * b", "Div": "a / b", "Pow": "powf(a, b)", "Max": "max_nan(a, b)", "Min": "min_nan(a, b)"}
UNARY = {
    "Exp": "__expf(a)", "Log": "logf(a)", "Sqrt": "sqrtf(a)", "Abs": "fabsf(a)", "Neg": "-a", "Softplus": "a > 20.f ? a : log1pf(__expf(a))",
    "Erf": "erff(a)", "Reciprocal": "1.f / a", "Floor": "floorf(a)", "Ceil": "ceilf(a)", "Round": "rintf(a)", "Sin": "sinf(a)", "Cos": "cosf(a)",
    "Tan": "tanf(a)", "Asin": "asinf(a)", "Acos": "acosf(a)", "Atan": "atanf(a)", "Sinh": "sinhf(a)", "Cosh": "coshf(a)", "Asinh": "asinhf(a)",
    "Acosh": "acoshf(a)", "Atanh": "atanhf(a)", "Sign": "a > 0.f ? 1.f : a < 0.f ? -1.f : a", "Softsign": "a / (1.f + fabsf(a))",
}  # fmt: skip
#: expressions with the op's attributes as numbers
WITH_ATTRIBUTES = {
    "Swish": "a / (1.f + __expf(-({alpha}) * a))",
    "Selu": "({gamma}) * (a > 0.f ? a : ({alpha}) * expm1f(a))",
    "Celu": "a > 0.f ? a : ({alpha}) * expm1f(a / ({alpha}))",
    "ThresholdedRelu": "a > ({alpha}) ? a : 0.f",
}
_OPERANDS = 4


class Spread(NamedTuple):
    """How an operand spreads over the elements of the result, in the order in which they are stored: members of elementwise.cu's Operand."""

    kind: int
    outer: int = 0
    stride: int = 0
    inner: int = 1
    size: int = 1  # `count` in the kernel


WHOLE, ONE_VALUE = Spread(0), Spread(2)
Row = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class ElementwiseArguments(Arguments, kernel="elementwise.cu"):
    out: Pointer
    input: Annotated[Sequence[Row], CType("Operand", "QiiIIII", 8, _OPERANDS)]
    count: Int64


def make_operands(*operands: tuple[int, int, Spread]) -> list[Row]:
    """Operands (address, type as in vector.cuh, spread), padded to the length of the structure's array."""
    rows: list[Row] = [(address, spread.kind, dtype, *spread[1:]) for address, dtype, spread in operands]
    return [*rows, *[(0, 0, 0, 0, 0, 1, 1)] * (_OPERANDS - len(rows))]


def find_spread(shape: Sequence[int], out: Sequence[int], form: str) -> Spread | None:
    """How an operand of `shape` spreads over a result of shape `out` stored in `form`. None: in a way that the kernel does not compute.

    Neighbouring axes that the operand has, or lacks, count as one. It may have one of these, anywhere, or two of which one is the outermost.
    """
    own = (1,) * (len(out) - len(shape)) + tuple(shape)
    if own == tuple(out):
        return WHOLE
    if len(own) != len(out) or any(d not in (1, o) for d, o in zip(own, out, strict=True)) or prod(out[1:]) >= 2**32:
        return None
    runs: list[tuple[int, bool]] = []  # size, whether the operand has it
    stored = (static_shape(compute_stored_shape(form, shape)) for shape in (own, tuple(out)))
    for d, o in zip(*stored, strict=True):
        if o != 1 and runs and runs[-1][1] == (d == o):
            runs[-1] = (runs[-1][0] * o, d == o)
        elif o != 1:
            runs.append((o, d == o))
    kept = [i for i, (_, has) in enumerate(runs) if has]
    if not kept:
        return ONE_VALUE
    inner, count = prod(size for size, _ in runs[kept[-1] + 1 :]), runs[kept[-1]][0]
    kind = 1 if inner == 1 and count % 8 == 0 else 2 if inner % 8 == 0 else 3
    if len(kept) == 1:
        return Spread(kind, inner=inner, size=count)
    return Spread(kind, prod(size for size, _ in runs[1:]), count, inner, count) if kept == [0, 2] else None


def get_index_type(count: int) -> str:
    """The macro INDEX for a result of `count` elements."""
    return "u32" if count < 2**32 - 2**11 else "u64"


@tactic
class Elementwise(Tactic):
    """Operands of the result's shape, or that spread over it along some axes: a value per channel, row, or sample and channel, or one value."""

    ops = (
        *BINARY, *UNARY, *WITH_ATTRIBUTES, "Relu", "Clip", "Silu", "HardSwish", "Gelu", "Sigmoid", "Tanh", "Mish", "LeakyRelu", "HardSigmoid", "Elu",
    )  # fmt: skip

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        forms = [form for form in ("nhwc", "linear") if form == "linear" or layer.outputs[0].type.rank == 4]
        chains = {form: chain for form in forms if not isinstance(chain := match_chain(layer, form), str)}
        if not chains:
            return []
        tensors = [layer.needs(i) for i in next(iter(chains.values())).operands]
        if any(t.dtype != layer.outputs[0].dtype for t in tensors) or layer.outputs[0].dtype.name not in TYPE:
            return []
        kinds = (F16, BF16, F32) if layer.outputs[0].dtype == F32 else (layer.outputs[0].dtype,)
        rank = layer.outputs[0].type.rank
        signatures = []
        for kind in kinds:
            for form in chains:
                ins = [None if t is None or t.is_constant else Operand(form, kind) for t in layer.inputs]
                if form == "nhwc" and any(o is not None and t is not None and t.type.rank != rank for o, t in zip(ins, layer.inputs, strict=True)):
                    continue
                signatures.append(Signature(tuple(ins), (Operand(form, kind),)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        chain = match_chain(layer, signature.outputs[0].format)
        if isinstance(chain, str):
            return chain
        return f"more than {_OPERANDS} operands" if len(chain.operands) > _OPERANDS else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        out = signature.outputs[0]
        chain = match_chain(layer, out.format)
        if isinstance(chain, str):
            raise PlanRefused(chain)
        shape = static_shape(layer.outputs[0].shape)
        count, dtype = prod(shape), TYPE[out.dtype.name]
        packed: list[Packed] = []
        places: list[tuple[bool, int, int, Spread]] = []  # whether it is packed, index, type, spread
        for where in chain.operands:
            t = layer.needs(where)
            spread = find_spread(static_shape(t.shape), shape, out.format)
            if not t.is_constant:
                assert spread is not None
                places.append((False, where, dtype, spread))
            else:
                whole = spread is None or spread.kind == 0
                places.append((True, len(packed), dtype if whole else 0, WHOLE if whole or spread is None else spread))
                packed.append(_pack_constant(t, whole, shape, out))
        constants = {"TYPE": dtype, "INDEX": get_index_type(count), "STEPS": chain.text}
        grid = (count_blocks(count, 2048), 1, 1)

        def make(args: Args) -> list:
            operands = [((args.packed if is_packed else args.inputs)[index], kind, spread) for is_packed, index, kind, spread in places]
            arguments = ElementwiseArguments(out=args.outputs[0], input=make_operands(*operands), count=count)
            return [launch("pointwise", arguments, constants, grid, 256)]

        return GpuKernel(layer, signature, make, implementation="pointwise", packed=packed)


class _Chain:
    """Operands (input indices) and the generated statements."""

    def __init__(self) -> None:
        self.operands: list[int] = []
        self.text = ""

    def unary(self, expression: str) -> None:
        self.text += f"for (int e = 0; e < 8; ++e) {{ const float a = x.v[e]; x.v[e] = {expression}; }} "

    def binary(self, op: str, swapped: bool, number: int) -> None:
        names = ("y.v[e]", "x.v[e]") if swapped else ("x.v[e]", "y.v[e]")
        self.text += (
            f"{{ const Vec8 y = operand(p, {number}, at, length); "
            f"for (int e = 0; e < 8; ++e) {{ const float a = {names[0]}, b = {names[1]}; x.v[e] = {BINARY[op]}; }} }} "
        )


def match_chain(layer: Layer, form: str = "linear") -> _Chain | str:
    """The layer, with its result stored in `form`, as a chain over its first operand of the result's shape, or why it is none."""
    steps, head = find_epilogue_steps(layer), get_root_layer(layer)
    if steps is None:
        return "its fused operations do not form a chain"
    out, chain = static_shape(layer.outputs[0].shape), _Chain()

    def is_taken(i: int) -> bool:
        t, shape = layer.needs(i), static_shape(layer.needs(i).shape)
        full = (1,) * (len(out) - len(shape)) + shape
        if t.is_constant:
            return len(full) == len(out) and all(f in (1, o) for f, o in zip(full, out, strict=True))
        return find_spread(shape, out, form) is not None

    def is_whole(i: int) -> bool:
        shape = static_shape(layer.needs(i).shape)
        return (1,) * (len(out) - len(shape)) + shape == out

    def step(op: str, attrs: Any, other: int | None, swapped: bool) -> str | None:
        if other is None:
            act = find_activation(EpilogueStep(op, attrs))
            if op in UNARY:
                chain.unary(UNARY[op])
            elif act is not None:
                chain.unary(f"activate<{ACTIVATIONS[act[0]]}>(a, Act{{{format_number(act[1])}, {format_number(act[2])}}})")
            elif op in WITH_ATTRIBUTES:
                chain.unary(WITH_ATTRIBUTES[op].format(**{k: format_number(v) for k, v in attrs.items() if isinstance(v, float)}))
            else:
                return f"the kernel has no {op}"
            return None
        if op not in BINARY or not is_taken(other):
            return f"the kernel has no {op} with an operand of shape {list(static_shape(layer.needs(other).shape))}"
        if other not in chain.operands:  # ConvNeXt V2 adds the values that it began with: its chain has four operands, not five
            chain.operands.append(other)
        chain.binary(op, swapped, chain.operands.index(other))
        return None

    where = [outer_input(layer, t) for t in head.inputs if t is not None]
    computed = [i is not None and (t := layer.inputs[i]) is not None and not t.is_constant for i in where]
    if head.op in BINARY:
        if len(where) != 2:
            return f"takes {head.op} of two operands"
        first = next(((i, at) for i, at in enumerate(where) if at is not None and is_whole(at) and computed[i]), None)
        if first is None:
            return "no operand has the result's shape"
        i, at = first
        chain.operands.append(at)
        reason = step(head.op, head.attrs, where[1 - i], i == 1)
    else:
        if any(i is not None and not layer.needs(i).is_constant for i in where[1:]):
            return f"{head.op}'s bounds are computed at run time"
        if where[0] is None:
            return f"{head.op}'s operand is computed within the layer"
        chain.operands.append(where[0])
        bounds = {
            f"input{i}": layer.needs(p).array() for i, t in enumerate(head.inputs) if i and t is not None and (p := outer_input(layer, t)) is not None
        }
        reason = step(head.op, {**head.attrs, **bounds}, None, False)
    for post in steps:
        reason = reason or step(post.op, post.attrs, post.other, post.swapped)
    return reason or chain


def format_number(value: float) -> str:
    """A float as its bits, infinities included."""
    return f"__int_as_float(0x{int(np.float32(value).view(np.uint32)):08x})"


def _pack_constant(t: Tensor, whole: bool, shape: tuple[int, ...], out: Operand) -> Packed:
    """A constant operand: all values of the result's shape as it is stored, or its own values in f32, in the order of the result's format."""
    assert t.weight is not None
    own = (1,) * (len(shape) - t.type.rank) + static_shape(t.shape)
    if whole:
        key, size = f"{t.weight.digest}|pointwise {shape} {out}", prod(shape) * out.dtype.numpy.itemsize
        return make_packed_array(key, size, lambda: to_stored(np.broadcast_to(np.asarray(t.array()), shape).astype(out.dtype.numpy), out.format))
    key = f"{t.weight.digest}|pointwise f32 {own} {out.format}"
    return make_packed_array(key, prod(own) * 4, lambda: to_stored(np.asarray(t.array(), np.float32).reshape(own), out.format))
