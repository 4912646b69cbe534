"""Quantized layers as oneDNN primitives: attributes with scales and zero points, signatures, and which kernels accumulate exactly."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from whet.network import BF16, F32, DType, Layer, format_fits, static_shape
from whet.tactics._base import Operand, Signature, Tactic
from whet.tactics._fused import EpilogueStep
from whet.tactics._quantized import Parts, Scale, match_quantized, require_quantized
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe
from whet.tactics.cpu.onednn._post_ops import Chain, Shaper, clip_bounds, is_readable_at_rank, match_post_ops

__all__ = [
    "OneDnnQuantized",
    "Parts",
    "QuantizedTactic",
    "Scale",
    "add_scales",
    "drop_implied_bounds",
    "list_same_format_signatures",
    "list_signatures",
    "make_quantized_attributes",
    "make_weight_key",
    "match_real_post_ops",
    "require_quantized",
    "why_inexact",
    "why_inexact_operand",
]

#: Implementations that accumulate 8-bit products in 32 bits; others may saturate at 16 bits.
_EXACT = ("vnni", "amx", "x64:gemm", "gemm:jit", "ref:", "simple:")


class QuantizedTactic(Tactic):
    """A tactic for quantized layers, which it splits into dequantize, operation and quantize (Parts)."""

    quantized = True

    @abstractmethod
    def why_not_parts(self, parts: Parts) -> str | None:
        """Why the kernel does not take a layer of these parts; None if it does."""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        parts = match_quantized(layer)
        return parts if isinstance(parts, str) else self.why_not_parts(parts)


class OneDnnQuantized(QuantizedTactic, OneDnnTactic):
    """Uses only implementations that accumulate exactly on this CPU."""

    def list_usable(self, recipe: Recipe) -> list[str]:
        names = super().list_usable(recipe)
        exact = [n for n in names if any(word in n for word in _EXACT)]
        if not exact:
            raise dnn.Unimplemented(
                f"oneDNN {dnn.load_library().version} has only kernels with saturating accumulators for this ({', '.join(names)})"
            )
        return exact


def why_inexact() -> str | None:
    """The reason why 8-bit products are not exact on this CPU for any operands, or None."""
    return None if dnn.has_isa("avx512_core_vnni") else "oneDNN multiplies 8-bit integers exactly with VNNI instructions only"


def why_inexact_operand(x: Scale) -> str | None:
    """The reason why 8-bit products with this left operand are not exact on this CPU, or None."""
    if why_inexact() is None:
        return None
    if x.dtype.name == "i8":
        return "without VNNI instructions oneDNN halves the weights of a signed input, which rounds them"
    return "without VNNI instructions oneDNN adds two products of u8 by i8 in 16 bits, which saturates"


def list_float_types(parts: Parts, backend) -> list[DType]:
    """Storage types for the layer's floating-point operands, [F32] if it has none."""
    floats = parts.stores is None or any(
        t is not None and not t.is_constant and i not in parts.reads and t.dtype.is_float for i, t in enumerate(parts.view.inputs)
    )
    return [F32, BF16] if floats and "avx512_bf16" in backend.capabilities.features and dnn.has_isa("avx512_core_bf16") else [F32]


def list_same_format_signatures(layer: Layer, reads: Mapping[int, DType], stores: DType) -> list[Signature]:
    """Signatures of an elementwise layer: the inputs with these indices and the output in one format."""
    signatures = []
    for f in ("nhwc", "linear"):
        if format_fits(f, layer.outputs[0].type.rank):
            inputs = tuple(Operand(f, reads[i]) if i in reads else None for i in range(len(layer.inputs)))
            signatures.append(Signature(inputs, (Operand(f, stores),)))
    return signatures


def list_signatures(parts: Parts, fmt: str, backend) -> list[Signature]:
    """Signatures with all full-size operands in `fmt`, for each float type; those that add a residual in place come first."""
    signatures, rank = [], parts.view.outputs[0].type.rank
    for real in list_float_types(parts, backend):
        inputs: list[Operand | None] = []
        for i, t in enumerate(parts.view.inputs):
            if t is None or t.is_constant:
                inputs.append(None)
            else:
                inputs.append(Operand(fmt if t.type.rank == rank else "linear", parts.reads[i].dtype if i in parts.reads else real))
        out = Operand(fmt, parts.stores.dtype if parts.stores else real)
        own = {parts.place(t) for t in parts.head.inputs}
        for p in parts.steps:
            z = p.other
            if p.op != "Add" or z is None or z in own or (addend := inputs[z]) is None:
                continue
            if parts.view.needs(z).shape == parts.view.outputs[0].shape and addend.dtype.bits == out.dtype.bits:
                signatures.append(Signature(tuple(inputs), (out,), ((z, 0),)))
        signatures.append(Signature(tuple(inputs), (out,)))
    return signatures


def match_real_post_ops(parts: Parts, signature: Signature, shaper: Shaper | None = None) -> Chain | str:
    """The epilogue as post-ops on real numbers, with integer addends dequantized."""
    chain = Chain()
    for post in drop_implied_bounds(parts):
        if post.other not in parts.reads or parts.view.needs(post.other).is_constant:
            step = match_post_ops([post], parts.view, signature, shaper)
        else:
            step = _append_summand(post, parts, signature, shaper)
        if isinstance(step, str):
            return step
        chain.extend(step)
    return chain


def drop_implied_bounds(parts: Parts) -> list[EpilogueStep]:
    """The epilogue without final bounds that saturation implies: Relu before u8 with zero point 0, a Clip to the range.

    A bound is implied if it rounds to the lowest (highest) integer or beyond: values outside it saturate to the same integer.
    """
    steps, stores = list(parts.steps), parts.stores
    if stores is None:
        return steps
    lowest, highest = (-128, 127) if stores.dtype.name == "i8" else (0, 255)
    while steps and steps[-1].other is None and steps[-1].op in ("Relu", "Clip"):
        low, high = (0.0, math.inf) if steps[-1].op == "Relu" else clip_bounds(steps[-1].attrs)
        if np.rint(low / stores.number) + stores.zero > lowest or np.rint(high / stores.number) + stores.zero < highest:
            break
        steps.pop()
    return steps


def _append_summand(post: EpilogueStep, parts: Parts, signature: Signature, shaper: Shaper | None) -> Chain | str:
    """+ (z - zero) * scale: an addition in place, or the accumulator scaled to z's steps and back."""
    i, chain = post.other, Chain()
    assert i is not None
    z, t, stored = parts.reads[i], parts.view.needs(i), signature.needs(i)
    if post.op != "Add":
        return f"{post.op} with an integer operand: only Add takes one"
    if (i, 0) in signature.inplace:
        other = signature.outputs[0].dtype
        chain.post_ops.append(dnn.Sum(z.number, z.zero, None if other == z.dtype else z.dtype.name))
        return chain
    shape, out = static_shape(t.shape), static_shape(parts.view.outputs[0].shape)
    full = (1,) * (len(out) - len(shape)) + shape
    wanted = shaper(full) if shaper else full
    if wanted is None or not is_readable_at_rank(stored, shape, full):
        return f"an Add of {list(shape)} stored as {stored} does not fit the output {list(out)}"
    chain.post_ops += [
        dnn.Eltwise("linear", 1.0 / z.number, 0.0),
        dnn.Binary("add", describe(t, stored, wanted)),
        dnn.Eltwise("linear", z.number, -z.zero * z.number),
    ]
    chain.places["post1"] = ("input", i)
    return chain


def make_quantized_attributes(post_ops: Sequence[dnn.PostOp], parts: Parts, x: int, w: int, channels: tuple[int, int]) -> dnn.Attributes:
    """The primitive's attributes with these post-ops. `channels` is (mask, count) of weights with a scale per channel."""
    by_channel = parts.reads[w].scale.size > 1
    scales = [("src", 0, 1), ("weights", *channels) if by_channel else ("weights", 0, 1)]
    zeros = [("src", 0, 1)] if parts.reads[x].zero else []
    if parts.stores is not None:
        scales.append(("dst", 0, 1))
        zeros += [("dst", 0, 1)] if parts.stores.zero else []
    return dnn.Attributes(tuple(post_ops), tuple(scales), tuple(zeros))


def add_scales(recipe: Recipe, parts: Parts, x: int, w: int) -> None:
    """Adds the values of scales and zero points to the recipe."""
    for name, s in (("src", parts.reads[x]), ("weights", parts.reads[w]), ("dst", parts.stores)):
        if s is None:
            continue
        recipe.constant(f"scale:{name}", f"scale|{s.scale.tobytes().hex()}", _make_getter(s.scale))
        if s.zero:
            recipe.constant(f"zero:{name}", f"zero|{s.zero}", _make_getter(np.array([s.zero], np.int32)))


def _make_getter(a: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: a


def make_weight_key(parts: Parts, x: int, w: int) -> str:
    """Key of packed weights: for a signed input, or one with a zero point, they include compensation terms."""
    return f"{parts.view.needs(w).constant().digest}|{parts.reads[x].dtype}|{bool(parts.reads[x].zero)}"
