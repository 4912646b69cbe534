"""Match of quantized layers of two convolutions, the second a 1x1 on the first's integers, for a kernel that computes both in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Tensor
from whet.tactics._base import Packed
from whet.tactics._quantized import Parts, match_quantized
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import Epilogue, make_packed_array
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, count_bias_floats, pack_weights
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    Output,
    compute_factors,
    fold_into_range,
    folds,
    get_quantized_conv_shape,
    get_weight_bytes,
    has_border,
    make_key,
    match_quantized_epilogue,
    pack_factors,
    why_not_weighted,
)


@dataclass(frozen=True)
class Half:
    """One of the two convolutions: parts, epilogue, sizes, the integers that it reads and those that it adds."""

    parts: Parts
    epilogue: Epilogue
    shape: ConvShape
    reads: Tensor
    added: Tensor | None

    @property
    def stored(self) -> str:
        """The type of its integers."""
        assert self.parts.stores is not None
        return self.parts.stores.dtype.name

    def folded_epilogue(self) -> tuple[float, float, Output, PostOps]:
        """Multiplier and shift of its real values, the quantization of its output, and its epilogue."""
        return fold_into_range(Output.of(self.parts, self.epilogue), self.epilogue, self.stored)

    def packed(self) -> tuple[Packed, Packed]:
        """Weights as rows [k][r][s][c] of i8; count_bias_floats(k) biases and as many factors, in parts of the range of results."""
        view, s, (per, shift, _, _) = self.parts.view, self.shape, self.folded_epilogue()
        _, w, b = self.parts.operand_indices()
        weights, bias = view.needs(w), None if b is None else view.inputs[b]

        def array() -> np.ndarray:
            return get_weight_bytes(weights)

        digest, key = weights.constant().digest, make_key(self.parts, self.epilogue)
        rows = make_packed_array(f"{digest}|conv krsc 8 bits", s.k * s.r * s.s * s.c, lambda: pack_weights(array(), 16, np.dtype(np.int8)))
        numbers, _ = pack_factors(
            f"{key}|product {s} {per} {shift}", s, 1, False, lambda: compute_factors(self.parts, self.epilogue, array(), s, bias).times(per, shift)
        )
        return rows, numbers

    def factor(self, numbers: int) -> int:
        """The address of the factors, which follow the biases at `numbers`."""
        return numbers + count_bias_floats(self.shape.k) * 4


@dataclass(frozen=True)
class Both8:
    """The two convolutions of a quantized ConvThenPointwise, and the indices of the fused layer's input and residual."""

    first: Half
    product: Half
    x: int
    residual: int | None


def split_halves(layer: Layer) -> tuple[Half, Half] | str:
    """Both convolutions of the layer's body, the second of which computes its result, or the reason why it has no such pair."""
    body = layer.regions["body"]
    if len(body.layers) != 2 or body.outputs != [body.layers[1].outputs[0]] or any(x.op != "Fused" for x in body.layers):
        return "the body is not a pair of quantized convolutions"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    first, second = (match_half(with_outer_inputs(x, outer)) for x in body.layers)
    if isinstance(first, str):
        return first
    return second if isinstance(second, str) else (first, second)


def match_halves(layer: Layer) -> Both8 | str:
    """The two convolutions, or the reason why the kernel cannot compute the layer."""
    halves = split_halves(layer)
    if isinstance(halves, str):
        return halves
    (first, product), body, fed = halves, layer.regions["body"], {t: i for i, t in enumerate(layer.inputs)}
    if product.reads is not body.layers[0].outputs[0] or first.reads not in fed:
        return "the second convolution has other inputs than the first"
    if product.added is not None and product.added not in fed:
        return "the residual is computed within the layer"
    if first.added is not None or not product.shape.plain or has_border(first.parts, first.shape):
        return "takes a first convolution without a residual and padded with the integer 0, and a 1x1 without stride and padding"
    source = first.reads.dtype.name
    if source != first.stored:
        return f"the first reads {source} and stores {first.stored}: takes one type of integers for both products"
    return Both8(first, product, fed[first.reads], None if product.added is None else fed[product.added])


def match_half(conv: Layer) -> Half | str:
    """A quantized convolution with its epilogue, or the reason why accumulators in registers cannot compute it."""
    parts = match_quantized(conv)
    if isinstance(parts, str):
        return parts
    if parts.head.op != "Conv" or parts.head.attrs["group"] != 1 or parts.head.needs(0).type.rank != 4:
        return "takes convolutions of two spatial axes and one group"
    if reason := why_not_weighted(parts):
        return reason
    epilogue = match_quantized_epilogue(parts)
    if isinstance(epilogue, str):
        return epilogue
    stored = None if parts.stores is None else parts.stores.dtype.name
    if stored is None or stored not in INT8_TYPES or not folds(epilogue, stored) or epilogue.post_ops.residual == 2:
        return "stores integers after a Clip or SiLU, with no residual after it"
    added = None if epilogue.residual is None else conv.inputs[epilogue.residual]
    if epilogue.residual is not None and (epilogue.residual not in parts.reads or parts.reads[epilogue.residual].dtype.name not in INT8_TYPES):
        return "takes a residual of integers"
    return Half(parts, epilogue, get_quantized_conv_shape(parts), conv.needs(parts.source_index()), added)
