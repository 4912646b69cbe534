"""Match of quantized stem convolutions in a layer that also quantizes the image or pools the result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer
from whet.network.types import F32
from whet.tactics._quantized import Parts, match_quantized
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import Epilogue
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.quantized._quantized import INT8_TYPES, get_quantized_conv_shape, match_quantized_epilogue, why_not_weighted


@dataclass(frozen=True)
class Image:
    """The convolution's parts and epilogue, the index of the image, and the step that quantizes it (or None)."""

    parts: Parts
    epilogue: Epilogue
    shape: ConvShape
    image: int
    step: float | None


def match_image(layer: Layer, composite: str) -> Image | str:
    """The parts of the layer, or the reason why the kernel cannot compute it."""
    if layer.composite != composite:
        return f"computes {composite}, not {layer.composite or layer.op}"
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    fused = next((x for x in body.layers if x.op == "Fused"), None)
    if fused is None:
        return "the convolution is not quantized"
    conv, first = with_outer_inputs(fused, outer), body.layers[0]
    parts = match_quantized(conv)
    if isinstance(parts, str):
        return parts
    epilogue = match_quantized_epilogue(parts)
    if isinstance(epilogue, str):
        return epilogue
    if epilogue.residual is not None or parts.head.op != "Conv" or parts.head.attrs["group"] != 1 or parts.head.needs(0).type.rank != 4:
        return "takes a convolution of two spatial axes and one group without a residual"
    if parts.stores is None or parts.stores.dtype.name not in INT8_TYPES:
        return "stores integers"
    if reason := why_not_weighted(parts):
        return reason
    x = parts.source_index()
    step: float | None = None
    read = conv.inputs[x]
    if first.op == "QuantizeLinear":
        floats, scale = (None if t is None else outer.get(t) for t in first.inputs[:2])
        if scale is None or scale.weight is None or first.output is not fused.inputs[x] or floats is None or floats.dtype != F32:
            return "takes an f32 image that is quantized to the convolution's input"
        step, read = float(np.asarray(scale.array(), np.float32).reshape(-1)[0]), floats
    image = next((i for i, t in enumerate(layer.inputs) if t is read), None)
    return "the image is computed within the layer" if image is None else Image(parts, epilogue, get_quantized_conv_shape(parts), image, step)
