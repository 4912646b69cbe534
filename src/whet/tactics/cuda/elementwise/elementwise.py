"""Elementwise layers and chains of them: one pass over memory, eight elements per thread, the steps generated as CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape, to_stored
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import EpilogueStep, find_epilogue_steps, get_root_layer, outer_input
from whet.tactics.cuda._device.arguments import Arguments, CType, Int32, Int64, Pointer
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


@dataclass(frozen=True)
class ElementwiseArguments(Arguments, kernel="elementwise.cu"):
    out: Pointer
    input: Annotated[Sequence[tuple[int, int, int]], CType("Operand", "Qii", 8, _OPERANDS)]  # address, kind, type; see `operands`
    count: Int64
    channels: Int32  # stride of the channel axis if channels are not last
    inner: Int32


def pad_operands(*offsets: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Operands (address, kind as in elementwise.cu, type as in vector.cuh), padded to the length of the structure's arrays."""
    return [*offsets, *[(0, 0, 0)] * (_OPERANDS - len(offsets))]


@tactic
class Elementwise(Tactic):
    """Operands of the result's shape, one value per channel (of all samples or each), or one value."""

    ops = (
        *BINARY, *UNARY, *WITH_ATTRIBUTES, "Relu", "Clip", "Silu", "HardSwish", "Gelu", "Sigmoid", "Tanh", "Mish", "LeakyRelu", "HardSigmoid", "Elu",
    )  # fmt: skip

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        chain = match_chain(layer)
        if isinstance(chain, str):
            return []
        tensors = [layer.needs(i) for i in chain.inputs]
        if any(t.dtype != layer.outputs[0].dtype for t in tensors) or layer.outputs[0].dtype.name not in TYPE:
            return []
        kinds = (F16, BF16, F32) if layer.outputs[0].dtype == F32 else (layer.outputs[0].dtype,)
        rank = layer.outputs[0].type.rank
        signatures = []
        for kind in kinds:
            for form in ("nhwc", "linear") if rank == 4 else ("linear",):
                ins = [None if t is None or t.is_constant else Operand(form, kind) for t in layer.inputs]
                if any(o is not None and t.type.rank != rank for o, t in zip(ins, layer.inputs, strict=True) if t is not None):
                    continue
                signatures.append(Signature(tuple(ins), (Operand(form, kind),)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        chain = match_chain(layer)
        if isinstance(chain, str):
            return chain
        return f"more than {_OPERANDS} operands" if len(chain.operands) > _OPERANDS else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        chain = match_chain(layer)
        if isinstance(chain, str):
            raise PlanRefused(chain)
        out = signature.outputs[0]
        shape = static_shape(layer.outputs[0].shape)
        last = out.format == "nhwc"
        channels = shape[1] if len(shape) > 1 else 1
        inner = int(np.prod(shape[2:])) if len(shape) > 2 else 1
        count = int(np.prod(shape))
        packed: list[Packed] = []
        places: list[tuple[str, int, int]] = []  # (input | packed, index, kind)
        for where, kind in chain.operands:
            t = layer.inputs[where]
            assert t is not None
            if t.is_constant:
                places.append(("packed", len(packed), kind))
                packed.append(_pack_constant(t, kind, shape, out))
            else:
                places.append(("input", where, kind))
        constants = {"TYPE": TYPE[out.dtype.name], "LAST": int(last), "STEPS": chain.text}
        grid = (count_blocks(count, 2048), 1, 1)

        def make(args: Args) -> list:
            rows = []
            for source, index, kind in places:
                address = args.packed[index] if source == "packed" else args.inputs[index]
                rows.append((address, kind, 0 if source == "packed" and kind else TYPE[out.dtype.name]))
            arguments = ElementwiseArguments(out=args.outputs[0], input=pad_operands(*rows), count=count, channels=channels, inner=inner)
            return [launch("pointwise", arguments, constants, grid, 256)]

        return GpuKernel(layer, signature, make, implementation="pointwise", packed=packed)


class _Chain:
    """Operands (input index, kind as in elementwise.cu) and the generated statements."""

    def __init__(self) -> None:
        self.operands: list[tuple[int, int]] = []
        self.text = ""

    @property
    def inputs(self) -> list[int]:
        return [i for i, _ in self.operands]

    def unary(self, expression: str) -> None:
        self.text += f"for (int e = 0; e < 8; ++e) {{ const float a = x.v[e]; x.v[e] = {expression}; }} "

    def binary(self, op: str, swapped: bool, number: int) -> None:
        names = ("y.v[e]", "x.v[e]") if swapped else ("x.v[e]", "y.v[e]")
        self.text += (
            f"{{ const Vec8 y = operand(p, {number}, at, length); "
            f"for (int e = 0; e < 8; ++e) {{ const float a = {names[0]}, b = {names[1]}; x.v[e] = {BINARY[op]}; }} }} "
        )


def match_chain(layer: Layer) -> _Chain | str:
    """The layer as a chain over its first full operand, or why it is none."""
    steps, head = find_epilogue_steps(layer), get_root_layer(layer)
    if steps is None:
        return "its fused operations do not form a chain"
    out, chain = static_shape(layer.outputs[0].shape), _Chain()

    def find_kind(i: int) -> int | None:
        shape = static_shape(layer.needs(i).shape)
        full = (1,) * (len(out) - len(shape)) + shape
        if full == out:
            return 0
        if all(d == 1 for d in full):
            return 2
        if len(out) >= 2 and len(full) == len(out) and full[1] == out[1] and all(d == 1 for d in full[2:]):
            return 1 if full[0] == 1 else 3 if full[0] == out[0] else None
        spread = len(full) == len(out) and all(f in (1, o) for f, o in zip(full, out, strict=True))
        return 0 if spread and layer.needs(i).is_constant else None

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
        how = find_kind(other)
        if op not in BINARY or how is None:
            return f"the kernel has no {op} with an operand of shape {list(static_shape(layer.needs(other).shape))}"
        if (other, how) not in chain.operands:  # ConvNeXt V2 adds the values that it began with: its chain has four operands, not five
            chain.operands.append((other, how))
        chain.binary(op, swapped, chain.operands.index((other, how)))
        return None

    where = [outer_input(layer, t) for t in head.inputs if t is not None]
    computed = [i is not None and (t := layer.inputs[i]) is not None and not t.is_constant for i in where]
    if head.op in BINARY:
        if len(where) != 2:
            return f"takes {head.op} of two operands"
        first = next(((i, at) for i, at in enumerate(where) if at is not None and find_kind(at) == 0 and computed[i]), None)
        if first is None:
            return "no operand has the result's shape"
        i, at = first
        chain.operands.append((at, 0))
        reason = step(head.op, head.attrs, where[1 - i], i == 1)
    else:
        if any(i is not None and not layer.needs(i).is_constant for i in where[1:]):
            return f"{head.op}'s bounds are computed at run time"
        if where[0] is None:
            return f"{head.op}'s operand is computed within the layer"
        chain.operands.append((where[0], 0))
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


def _pack_constant(t: Tensor, kind: int, shape: tuple[int, ...], out: Operand) -> Packed:
    """A constant operand in f32: one value, one per channel, or all values of the result's shape in its format."""
    assert t.weight is not None
    if kind == 0:
        size = int(np.prod(shape)) * out.dtype.numpy.itemsize
        key = f"{t.weight.digest}|pointwise {shape} {out}"
        return make_packed_array(key, size, lambda: to_stored(np.broadcast_to(np.asarray(t.array()), shape).astype(out.dtype.numpy), out.format))
    channels = shape[1] if len(shape) > 1 else 1
    count = {1: channels, 2: 1, 3: shape[0] * channels if shape else 1}[kind]
    return make_packed_array(f"{t.weight.digest}|pointwise f32 {kind}", count * 4, lambda: np.asarray(t.array(), np.float32).reshape(-1))
