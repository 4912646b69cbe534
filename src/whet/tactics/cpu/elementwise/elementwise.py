"""Elementwise layers and chains of them in one pass over memory, with any broadcasting, of floats, integers and booleans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, DType, Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, tactic
from whet.tactics._fused import is_quantized
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.packing import RTOL, list_small_floats
from whet.tactics.cpu.elementwise._elementwise_ir import Program, Step, emit_elementwise_ir
from whet.tactics.cpu.elementwise._memory_axes import broadcast_strides, find_memory_shape, list_candidate_formats, merge_axes, pad_channels
from whet.tactics.cpu.elementwise._operations import OPERATIONS, list_read_inputs, read_attributes, why_not_elementwise
from whet.tactics.cpu.onednn._kernel import is_static

_MAX_OPERANDS = 12
_ZERO_OF_ZEROS = {"Add", "Gelu", "HardSwish", "LeakyRelu", "Max", "Min", "Mish", "Mul", "Relu", "Sub", "Swish"}


@dataclass(frozen=True)
class _Description:
    """A layer as a program: its operands, computed ones first, each with the index of the layer's input and its shape for broadcasting."""

    program: Program
    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    packed: int


def make_program(layer: Layer) -> _Description | str:
    """The program of an elementwise layer or of a fused layer of them with static shapes, or why there is none."""
    body = layer.regions["body"].layers if layer.op == "Fused" else [layer]
    outer: dict[Tensor, int] = {}
    for i, t in enumerate(layer.regions["body"].inputs if layer.op == "Fused" else layer.inputs):
        if t is not None:
            outer.setdefault(t, i)
    shapes: dict[int, tuple[int, ...]] = {}
    for inner in body:
        for i in list_read_inputs(inner):
            t = inner.inputs[i]
            if t is None or t not in outer:
                continue
            shape = _get_operand_shape(inner, i)
            if shapes.setdefault(outer[t], shape) != shape:
                return f"%{t.name} broadcasts in two ways"
    places = sorted(shapes, key=lambda i: (layer.needs(i).is_constant, i))
    if len(places) > _MAX_OPERANDS:
        return f"more than {_MAX_OPERANDS} operands"
    numbers: dict[Tensor, int] = {t: places.index(i) for t, i in outer.items() if i in shapes}
    steps: list[Step] = []
    for inner in body:
        indices = tuple(None if (t := inner.inputs[i]) is None else numbers[t] for i in list_read_inputs(inner))
        numbers[inner.outputs[0]] = len(places) + len(steps)
        steps.append(Step(inner.op, read_attributes(inner), indices))
    result = layer.regions["body"].outputs[0] if layer.op == "Fused" else layer.outputs[0]
    if numbers[result] != len(places) + len(steps) - 1:
        return "its result is not that of its last op"
    dtypes = (*(layer.needs(i).dtype.name for i in places), layer.outputs[0].dtype.name)
    packed = sum(layer.needs(i).is_constant for i in places)
    return _Description(Program(dtypes, tuple(steps)), tuple(places), tuple(shapes[i] for i in places), packed)


def _pad(layer: Layer, form: str, description: _Description) -> tuple[tuple[int, ...], _Description]:
    """The result's shape and the layer with whole blocks of channels, if results of zeros are zeros: padding channels are computed, too."""
    shape = static_shape(layer.outputs[0].shape)
    if find_memory_shape(form, shape) is not None or description.packed or set(description.program.dtypes) != {"f32"}:
        return shape, description
    if any(s.op not in _ZERO_OF_ZEROS for s in description.program.steps):
        return shape, description
    if any(len(s) != len(shape) or s[1] != shape[1] for s in description.shapes):
        return shape, description
    return pad_channels(form, shape, shape[1]), replace(description, shapes=tuple(pad_channels(form, s, shape[1]) for s in description.shapes))


def _get_operand_shape(layer: Layer, i: int) -> tuple[int, ...]:
    """The shape that an operand broadcasts from: scales and zero points are aligned with their axis."""
    shape = static_shape(layer.needs(i).shape)
    if prod(shape) == 1:
        return ()
    if layer.op in ("QuantizeLinear", "DequantizeLinear") and i:
        rank = layer.needs(0).type.rank
        axis = layer.attrs["axis"] % rank
        return tuple(shape[0] if k == axis else 1 for k in range(rank))
    return shape


class ElementwiseKernel(CompiledKernel):
    """A planned launch."""

    serial_work = 1 << 14  # elements
    implementation = "generated"

    def __init__(self, layer: Layer, signature: Signature, description: _Description, count: int) -> None:
        form = signature.outputs[0].format
        shape, description = _pad(layer, form, description)
        sizes = find_memory_shape(form, shape)
        rows = [_find_strides(layer, signature, shape, i, own) for i, own in zip(description.places, description.shapes, strict=True)]
        assert sizes is not None
        dense = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
        sizes_, strides, _ = merge_axes(sizes, [*(r for r in rows if r is not None), dense])
        super().__init__(layer, signature, prod(sizes), count)
        result = signature.outputs[0].dtype
        self.rtol = RTOL.get(result, 1e-5)
        stored = (None if (o := signature.inputs[i]) is None else o.dtype for i in description.places)  # None: a packed constant
        dtypes = (own if d is None else d.name for d, own in zip(stored, description.program.dtypes, strict=False))
        self.program = replace(description.program, dtypes=(*dtypes, result.name))
        self.found, self.width, self.outer_sizes = description, sizes_[-1], sizes_[:-1]
        self.steps = tuple(s[-1] for s in strides[:-1])
        self.strides = [s[:-1] for s in strides[:-1]]
        self.uniform = tuple(not any(s) for s in strides[:-1])
        self.packed = tuple(_pack_constant(layer.needs(i), form, len(shape), own) for i, own in _list_constants(layer, description))
        if any(step not in (0, 1) for step in self.steps):
            raise PlanRefused("an operand is strided along the innermost axis")

    def enqueue(self, args: Args, stream: Stream) -> None:
        found, outer = self.found, len(self.outer_sizes)
        computed = found.places[: len(found.places) - found.packed]
        rows = prod(self.outer_sizes)
        words: list[tuple[str, int] | int] = [*(("input", i) for i in computed), ("output", 0), rows, self.width, *self.outer_sizes[1:]]
        words += [s for row in self.strides for s in row]
        ir = emit_elementwise_ir(self.program, found.packed, self.steps, self.uniform, outer, self.width % LANES if outer else 0)
        items, step = (rows, 1) if outer else (self.width, LANES)
        self.launch(stream, ir, "elementwise", args, words, items, step)


def _list_constants(layer: Layer, description: _Description) -> list[tuple[int, tuple[int, ...]]]:
    pairs = list(zip(description.places, description.shapes, strict=True))
    return pairs[len(pairs) - description.packed :]


def _find_strides(layer: Layer, signature: Signature, shape: tuple[int, ...], i: int, own: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of input `i` along the axes of the result, of `shape`, in memory."""
    form = signature.outputs[0].format
    stored = signature.inputs[i]
    if stored is None:  # a constant, packed in the order of the axes
        sizes = _compute_packed_shape(form, own, len(shape), shape)
        return tuple(0 if d == 1 else prod(sizes[k + 1 :]) for k, d in enumerate(sizes))
    return broadcast_strides(form, shape, own, stored.format == "linear")


def _compute_packed_shape(form: str, own: tuple[int, ...], rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    full = (1,) * (rank - len(own)) + own
    if form.startswith("nChw") and full[1] == 1:
        return (full[0], 1, *full[2:], 1)
    sizes = find_memory_shape(form, full)
    assert sizes is not None
    return sizes


def _pack_constant(t: Tensor, form: str, rank: int, own: tuple[int, ...]) -> Packed:
    """A constant operand in the order of the result's axes."""
    full = (1,) * (rank - len(own)) + own

    def pack() -> np.ndarray:
        a = np.asarray(t.array()).reshape(full)
        if form == "nhwc":
            a = np.moveaxis(a, 1, -1)
        elif form.startswith("nChw") and full[1] > 1:
            block = int(form[4:-1])
            a = np.moveaxis(a.reshape(full[0], full[1] // block, block, *full[2:]), 2, -1)
        return np.ascontiguousarray(a).reshape(-1).view(np.uint8)

    nbytes = prod(own) * t.dtype.numpy.itemsize
    return Packed(f"{t.constant().digest}|elementwise {form} {full}", nbytes, pack, storable=True)


def _may_share(layer: Layer, i: int) -> bool:
    """True if the result may overwrite input `i`."""
    t, out = layer.needs(i), layer.outputs[0]
    return not t.is_constant and t.type == out.type and list(layer.inputs).count(t) == 1


def _list_rounded_types(layer: Layer, backend: Backend) -> list[DType]:
    """The 16-bit types that the layer may be stored in if everything that it reads and writes at run time is f32."""
    is_f32 = all(t.dtype == F32 for t in (*layer.inputs, *layer.outputs) if t is not None and not t.is_constant)
    return list_small_floats(backend.capabilities.features) if is_f32 else []


@tactic
class Elementwise(CompiledTactic):
    ops = tuple(OPERATIONS)

    def why_not(self, layer: Layer) -> str | None:
        if is_quantized(layer) != self.quantized:
            own, other = ("integers", "is not") if self.quantized else ("floating point", "is")
            return f"computes in {own}, the layer {other} quantized"
        if layer.op == "Fused" and layer.composite not in OPERATIONS:
            return f"computes elementwise ops, not {layer.composite}"
        if reason := jit.why_unavailable():
            return reason
        if len(layer.outputs) != 1:
            return "computes layers with one output"
        for inner in layer.regions["body"].layers if layer.op == "Fused" else [layer]:
            if reason := why_not_elementwise(inner):
                return reason
        if all(t is None or t.is_constant for t in layer.inputs):
            return "all operands are constant"
        if any(t is not None and t.dtype.name == "f16" for t in (*layer.inputs, *layer.outputs)) and not jit.has("f16c") and not jit.has("fphp"):
            return "the CPU does not convert f16"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        description = make_program(layer)
        if isinstance(description, str):
            return []
        out = layer.outputs[0]
        shape = static_shape(out.shape)
        listed: list[Signature] = []
        for form, rounded in product(list_candidate_formats(shape, takes_padding=True), (None, *_list_rounded_types(layer, backend))):
            stored: list[Operand | None] = []
            for t in layer.inputs:
                if t is None or t.is_constant:
                    stored.append(None)
                else:
                    stored.append(Operand(form if t.type.rank == len(shape) else "linear", rounded or t.dtype))
            signature = Signature(tuple(stored), (Operand(form, rounded or out.dtype),))
            if self.refuses(layer, signature, backend) is not None:
                continue
            shared = [i for i in description.places if _may_share(layer, i)]
            listed += [Signature(signature.inputs, signature.outputs, ((i, 0),)) for i in shared[:2]]
            listed.append(signature)
        return listed

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        description = make_program(layer)
        if isinstance(description, str):
            return description
        form = signature.outputs[0].format
        shape, description = _pad(layer, form, description)
        sizes = find_memory_shape(form, shape)
        if sizes is None:
            return f"the channels are padded in {form}"
        rows = []
        for i, own in zip(description.places, description.shapes, strict=True):
            strides = None
            if len(own) <= len(shape):
                strides = _find_strides(layer, signature, shape, i, own)
            if strides is None:
                return f"{list(own)} does not broadcast to {list(shape)} in {form}"
            rows.append(strides)
        _, merged_rows, _ = merge_axes(sizes, [*rows, [prod(sizes[k + 1 :]) for k in range(len(sizes))]])
        if any(r[-1] not in (0, 1) for r in merged_rows):
            return f"an operand is strided along the innermost axis of {form}"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ElementwiseKernel:
        description = make_program(layer)
        if isinstance(description, str):
            raise PlanRefused(description)
        return ElementwiseKernel(layer, signature, description, backend.threads)
