"""Quantized layers on the GPU: storage types of their operands, and factors, biases and scales as the kernels with 8-bit operands want them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.network.types import BF16, F16, F32, DType
from whet.tactics._base import Operand, Packed, Signature
from whet.tactics._error_bounds import TANH_APPROX, bound_float8_sum, bound_result
from whet.tactics._quantized import FLOAT8, Parts, match_quantized
from whet.tactics.cuda._device.kernel import RTOL, Epilogue, make_packed_array, make_packed_table, match_epilogue
from whet.tactics.cuda.conv._conv import Activation, ConvShape, PostOps, Scales, count_bias_floats

INT8_TYPES = ("i8", "u8")
APPROXIMATED = ("silu", "gelu", "gelu_tanh")  # activations by tanh.approx where results are stored in 16 or 8 bits
BYTES = (*INT8_TYPES, FLOAT8)  # types of one byte an element


@functools.lru_cache(maxsize=8)
def match_parts(layer: Layer) -> Parts | str:
    """The quantized layer without its Q and DQ layers, or the reason why not; the last few are cached, as every candidate needs them."""
    return match_quantized(layer, float8=True)


def match_quantized_epilogue(parts: Parts, axis: int = 1) -> Epilogue | str:
    """The epilogue between sum and stored integer."""
    return match_epilogue(parts.view, parts.steps, axis)


def why_not_weighted(parts: Parts) -> str | None:
    """Why a Conv, Gemm or MatMul is not one of 8-bit inputs with constant symmetric i8 weights and constant biases, or None."""
    x, w, b = parts.operand_indices()
    if x not in parts.reads or w not in parts.reads:
        return "its input or its weights are not quantized"
    if not parts.view.needs(w).is_constant or (b is not None and not parts.view.needs(b).is_constant):
        return "weights or bias are computed at run time"
    kind = FLOAT8 if parts.reads[x].dtype.name == FLOAT8 else "i8"
    if parts.reads[w].zero or parts.reads[w].dtype.name != kind:
        return f"takes symmetric {kind} weights for an input of {parts.reads[x].dtype}"
    return None if parts.reads[x].scale.size == 1 else "its input has more than one scale"


def bound_quantized_result(float8: bool, products: int, activation: Activation, stored: str) -> float:
    """The error bound of a product of 8-bit operands that adds this many products: 0 for integers from integers, whose ties are judged."""
    if not float8 and stored != FLOAT8:
        return 0.0 if stored in INT8_TYPES else RTOL[stored]
    approximation = TANH_APPROX if activation[0] in APPROXIMATED and stored != "f32" else 0.0
    return max(RTOL.get(stored, 0.0), bound_result(bound_float8_sum(products), activation, stored, approximation))


def get_weight_bytes(t: Tensor) -> np.ndarray:
    """Weights of one byte each as i8: integers unchanged, float8 values as their bits."""
    a = np.ascontiguousarray(t.array())
    return np.asarray(a, np.int8) if t.dtype.name in INT8_TYPES else a.view(np.int8)


def list_signatures(parts: Parts, fmt: str, reals: Sequence[DType] = (F16, BF16, F32)) -> list[Signature]:
    """All full-size operands in format `fmt`; operands that are not quantized have each of the types `reals`."""
    view, signatures = parts.view, []
    floats = parts.stores is None or any(t is not None and not t.is_constant and i not in parts.reads for i, t in enumerate(view.inputs))
    rank = view.outputs[0].type.rank
    for real in reals if floats else (F32,):
        inputs: list[Operand | None] = []
        for i, t in enumerate(view.inputs):
            if t is None or t.is_constant:
                inputs.append(None)
            else:
                inputs.append(Operand(fmt if t.type.rank == rank else "linear", parts.reads[i].dtype if i in parts.reads else real))
        if fmt != "linear" and any(o is not None and o.format != fmt for o in inputs):
            continue
        signatures.append(Signature(tuple(inputs), (Operand(fmt, parts.stores.dtype if parts.stores else real),)))
    return signatures


@dataclass(frozen=True)
class Output:
    """The quantization of the output, and of an integer residual."""

    per_step: float = 1.0
    zero: float = 0.0
    add_step: float = 1.0
    add_shift: float = 0.0

    @staticmethod
    def of(parts: Parts, epilogue: Epilogue) -> Output:
        """From the scales of a layer."""
        stores, other = parts.stores, None if epilogue.residual is None else parts.reads.get(epilogue.residual)
        step, shift = (1.0, 0.0) if other is None else (other.number, -other.zero * other.number)
        return Output(1.0, 0.0, step, shift) if stores is None else Output(1.0 / stores.number, float(stores.zero), step, shift)


def folds(epilogue: Epilogue, stored: str) -> bool:
    """True if integer results are computed in fractions of their range: the activation is SiLU or a clip with the limits of the range."""
    kind = epilogue.post_ops.activation[0]
    return stored in INT8_TYPES and (kind == "silu" or (kind == "clip" and epilogue.post_ops.residual != 2))


def folds_float8(epilogue: Epilogue, stored: str, out: Output) -> bool:
    """True if float8 results are computed in steps of the result: the activation is a clip with an upper limit of at least e4m3's."""
    kind, _, high = epilogue.post_ops.activation
    return stored == FLOAT8 and kind == "clip" and epilogue.post_ops.residual != 2 and high * out.per_step >= 448


def fold_into_float8(out: Output, epilogue: Epilogue) -> tuple[float, Output, PostOps]:
    """(multiplier of real values, the output's quantization, the epilogue) for results in steps of float8."""
    per, (kind, low, high) = out.per_step, epilogue.post_ops.activation
    return per, Output(1.0, 0.0, out.add_step * per, 0.0), PostOps((kind, low * per, high), epilogue.post_ops.residual)


def fold_into_range(out: Output, epilogue: Epilogue, stored: str) -> tuple[float, float, Output, PostOps]:
    """(multiplier, shift) that scale real values to [0, 1] over the range of results, the output's quantization and the activation for kernels with
    FOLD. For SiLU the values are fractions of the range with 0 at 0; the activation has the factor of the exponent and the position of 0."""
    bottom, top = (0, 255) if stored == "u8" else (-128, 127)
    if epilogue.post_ops.activation[0] == "silu":
        span = float(top - bottom)
        per, zero, late = out.per_step / span, (out.zero - bottom) / span, epilogue.post_ops.residual == 2
        more = out.add_shift * per
        silu = PostOps(("silu", -float(np.log2(np.e)) / per, zero + (more if late else 0.0)), epilogue.post_ops.residual)
        return per, 0.0 if late else more, Output(span, 12582912.0 + bottom, out.add_step * per, 0.0), silu
    _, low, high = epilogue.post_ops.activation
    ends = np.clip(np.array([low, high]) * out.per_step, -1e6, 1e6)
    least, most = np.clip(np.rint(ends) + out.zero, bottom, top)
    span = float(most - least)
    per = out.per_step / span if span else 0.0
    shift = (out.zero - least) / span + out.add_shift * per if span else 0.0
    return per, float(shift), Output(span, 12582912.0 + float(least), out.add_step * per, 0.0), epilogue.post_ops


@dataclass(frozen=True)
class Factors:
    """Real value of a step of each channel's sum, and biases that take the input's zero point back: one, or one a class of pixels."""

    factor: np.ndarray  # [k] f32
    bias: np.ndarray  # [classes, k] f32
    classes: np.ndarray  # [pixels] u16, or empty

    def times(self, by: float, shift: float) -> Factors:
        """The same for real values times `by` plus `shift`."""
        factor, bias = self.factor.astype(np.float64) * by, self.bias.astype(np.float64) * by + shift
        return Factors(factor.astype(np.float32), bias.astype(np.float32), self.classes)

    @property
    def border(self) -> bool:
        """True if the bias depends on the pixel."""
        return self.classes.size > 0


def compute_factors(parts: Parts, epilogue: Epilogue, weights: np.ndarray, shape: ConvShape, bias: Tensor | None) -> Factors:
    """For integer `weights` [k, c, r, s]. Padding is the real 0, in memory the integer 0: a tap on padding does not subtract the zero point."""
    x, w, _ = parts.operand_indices()
    reads = parts.reads[x]
    factor = np.broadcast_to(parts.reads[w].scale.astype(np.float64) * reads.number, (shape.k,))
    plain = epilogue.bias(bias, shape.k).astype(np.float64)
    if not reads.zero:
        return Factors(factor.astype(np.float32), plain[None].astype(np.float32), np.zeros(0, np.uint16))
    taps = weights.astype(np.float64).sum(axis=1)  # [k, r, s]
    rows, columns = _list_taps_inside(shape, 0), _list_taps_inside(shape, 1)
    kinds = [(r, c) for r in dict.fromkeys(rows) for c in dict.fromkeys(columns)]
    table = [plain - reads.zero * factor * (taps * np.outer(r, c)).sum(axis=(1, 2)) for r, c in kinds]
    number = {kind: i for i, kind in enumerate(kinds)}
    classes = np.array([number[r, c] for r in rows for c in columns], np.uint16) if len(kinds) > 1 else np.zeros(0, np.uint16)
    return Factors(factor.astype(np.float32), np.array(table, np.float32), classes)


def has_border(parts: Parts, shape: ConvShape) -> bool:
    """True if biases depend on the pixel: the input has a zero point, and some windows read padding."""
    x = parts.source_index()
    return bool(parts.reads[x].zero) and len({*_list_taps_inside(shape, 0)}) * len({*_list_taps_inside(shape, 1)}) > 1


def _list_taps_inside(shape: ConvShape, axis: int) -> list[tuple[bool, ...]]:
    """The taps within the image, for each output row (or column)."""
    count, taps, size = ((shape.p, shape.r, shape.h), (shape.q, shape.s, shape.w))[axis]
    at = [[o * shape.stride[axis] - shape.pad[axis] + t * shape.dilation[axis] for t in range(taps)] for o in range(count)]
    return [tuple(0 <= y < size for y in row) for row in at]


def pack_factors(key: str, shape: ConvShape, classes: int, border: bool, make: Any) -> tuple[Packed, Packed]:
    """[classes] biases, then the factors, each count_bias_floats(k) floats; and the class of each pixel. `make` gives the Factors."""
    count = count_bias_floats(shape.k)

    def make_floats() -> np.ndarray:
        f = make()
        out = np.zeros((classes + 1, count), np.float32)
        out[:classes, : shape.k], out[classes, : shape.k] = f.bias, f.factor
        return out

    pixels = shape.p * shape.q if border else 1
    return (
        make_packed_array(f"{key} factors", (classes + 1) * count * 4, make_floats),
        make_packed_table(f"{key} classes", pixels * 2, lambda: make().classes if border else np.zeros(1, np.uint16)),
    )


def count_classes(shape: ConvShape) -> int:
    """Classes of pixels with the same taps within the image."""
    return len({*_list_taps_inside(shape, 0)}) * len({*_list_taps_inside(shape, 1)})


def make_integer_scales(out: Output, factors_at: int, classes_at: int, classes: int, k: int) -> tuple[int, Scales]:
    """Address of the biases, and the scales of the launch."""
    pitch = count_bias_floats(k)
    return factors_at, Scales(factors_at + classes * pitch * 4, classes_at, out.per_step, out.zero, out.add_step, out.add_shift, pitch)


def make_key(parts: Parts, epilogue: Epilogue) -> str:
    """The scales and biases that packed constants depend on, as a key."""
    x, w, b = parts.operand_indices()
    t, bias = parts.view.needs(w), None if b is None else parts.view.inputs[b]
    return f"{t.constant().digest}|{parts.reads[x].key}|{parts.reads[w].key}|{bias.constant().digest if bias is not None else ''}|{epilogue.key}"


def get_quantized_conv_shape(parts: Parts) -> ConvShape:
    """The sizes of a quantized Conv of two spatial axes."""
    a = parts.head.attrs
    n, c, h, w = static_shape(parts.head.needs(0).shape)
    k, _, r, s = static_shape(parts.head.needs(1).shape)
    return ConvShape(
        n, h, w, c, k, r, s, tuple(a.get("strides") or (1, 1)), tuple(a.get("pads") or (0, 0, 0, 0)), tuple(a.get("dilations") or (1, 1))
    )
