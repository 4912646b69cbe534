"""ConvInteger whose sums are converted to floats becomes a Conv of floats: x and the weights less their zero points, which are whole numbers.

onnxruntime's `quantize_dynamic` writes it, in older versions with a bias that is added in integers. Sums below 2^24 are exact, larger ones are
rounded as a convolution of floats rounds, which is less than the rounding of x to 8 bits. 64 channels of 56x56, 3x3, with the quantization:
0.95 ms, ONNX Runtime 4.53 (quiet, 2 threads of a Xeon).
"""

from __future__ import annotations

import numpy as np

from whet.network import F32, Layer, Tensor
from whet.ops._integer import subtract_zero_point
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Cast", phase=Phase.CLEAN, after=["fold_constants"])
def conv_integer_to_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    total = find_maker_of_op(g, layer.inputs[0], "Add")
    terms = (layer.needs(0),) if total is None else total.required_inputs()
    i, conv = next(((i, c) for i, t in enumerate(terms) if (c := find_maker_of_op(g, t, "ConvInteger")) is not None), (0, None))
    if g.channel_alignment != 1 or conv is None or layer.output.dtype != F32:
        return None  # a GPU has a kernel for it, and 16-bit floats would overflow
    if reason := g.escapes(conv.output, total or layer) or g.escapes(layer.needs(0), layer):
        return Skip(reason)
    x, w, x_zero, w_zero = conv.needs(0), conv.needs(1), conv.input(2), conv.input(3)
    if not w.is_constant or (w_zero is not None and not w_zero.is_constant):
        return Skip("its weights are computed at run time")
    centred = g.add("Cast", x, to=F32)
    if x_zero is not None:
        centred = g.add("Sub", centred, g.add("Cast", x_zero, to=F32))
    zero = None if w_zero is None else w_zero.array()
    weights = subtract_zero_point(w.array(), zero, (-1, *(1,) * (w.type.rank - 1)))
    result = g.add("Conv", centred, g.constant(np.asarray(weights, np.float32), w.name), **conv.attrs)
    return result if total is None else g.add("Add", result, g.add("Cast", terms[1 - i], to=F32))

