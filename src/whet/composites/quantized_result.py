"""A normalization or attention and the QuantizeLinear of its result become one layer, which stores the result in 8 bits.

Other readers of the result, such as the residual of a transformer that normalizes last, get it in floating point as a first output. The parts stay
separate layers in the body.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body, parse_dims
from whet.composites.attention import ATTENTION, make_attention_sample
from whet.composites.norm_then_product import NORMS
from whet.network import F8E4M3, Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import fuse_nested
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_activation_obstacle
from whet.rewrite.rules import Skip

Store = tuple[float, Any]
"""Scale, and zero point in the type of the stored integers; None instead of a zero point: e4m3."""


def make_quantized_norm_sample(x: str, store: Store, *, rms: bool = False, keeps: bool = False) -> Sample:
    """The norm of rows, with a scale for each element and a layer norm with a shift too, quantized by `store`. With `keeps` the result in floating
    point is the first output."""
    inner = parse_dims(x)[-1]
    norm: list[Any] = [x, *[f"const f32[{inner}]"] * (1 if rms else 2)]

    def build_norm(body: Network, own: list[Tensor]) -> Tensor:
        return body.add("RMSNormalization" if rms else "LayerNormalization", *own, axis=-1, epsilon=1e-5)

    return _make_sample(norm, build_norm, store, keeps)


def make_quantized_attention_sample(store: Store, *sizes: int, **how: Any) -> Sample:
    """`make_attention_sample(*sizes, **how)`, quantized as in `make_quantized_norm_sample`."""
    attention = make_attention_sample(*sizes, **how)

    def build_attention(body: Network, own: list[Tensor]) -> Tensor:
        assert attention.regions is not None
        return body.add("Fused", *own, regions=attention.regions(), composite=ATTENTION.kind)

    return _make_sample(list(attention.inputs), build_attention, store)


def _make_sample(inputs: list[Any], build: Any, store: Store, keeps: bool = False) -> Sample:
    """`build(body, inputs)`, quantized by `store`."""
    scales = [np.asarray(store[0], np.float32), *([] if store[1] is None else [np.asarray(store[1])])]

    def build_regions() -> Regions:
        body, own = make_body([*inputs, *scales])
        y = build(body, own[: len(inputs)])
        if keeps:
            body.mark_output(y)
        to_float8: dict[str, Any] = {"output_dtype": F8E4M3} if store[1] is None else {}
        body.mark_output(body.add("QuantizeLinear", y, *own[len(inputs) :], **to_float8))
        return {"body": body}

    return Sample([*inputs, *scales], {"composite": "QuantizedResult"}, build_regions)


QUANTIZED_RESULT = register_composite(
    "QuantizedResult",
    title="normalization or attention with a result in 8 bits",
    unsupported="no tactic here stores the result of a normalization or of attention in 8 bits",
    samples=[
        make_quantized_norm_sample("f32[3,40,768]", (0.02, np.int8(0)), keeps=True),
        make_quantized_norm_sample("f32[2,50,128]", (0.015, np.uint8(120))),
        make_quantized_norm_sample("f32[5,7,100]", (0.02, np.int8(-7)), keeps=True),
        make_quantized_norm_sample("f32[9,4100]", (0.02, np.int8(0)), rms=True, keeps=True),
        make_quantized_norm_sample("f32[130,256]", (0.01, None), keeps=True),
        make_quantized_norm_sample("f32[4,33]", (0.01, None), rms=True),
        make_quantized_attention_sample((0.01, np.int8(0)), 2, 3, 40, 40, 64, layout="merged", scale="Mul"),
        make_quantized_attention_sample((0.008, np.uint8(130)), 1, 2, 90, 150, 64, layout="rows"),
        make_quantized_attention_sample((0.01, np.int8(3)), 1, 2, 20, 30, 40, layout="rows"),
        make_quantized_attention_sample((0.01, None), 2, 4, 130, 130, 64, layout="rows", causal=-np.inf),
    ],
)


@QUANTIZED_RESULT.matcher("QuantizeLinear")
def fuse_quantized_result(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    value = layer.needs(0)
    maker = g.maker(value)
    if maker is None or (maker.op not in NORMS and maker.composite != ATTENTION.kind):
        return None
    if len(maker.outputs) > 1:
        return Skip(f"'{maker.name}' computes more than its result")
    if reason := find_activation_obstacle(layer):
        return Skip(reason)
    if maker.op in NORMS and int(maker.attrs["axis"]) % value.type.rank != value.type.rank - 1:
        return Skip(f"'{maker.name}' normalizes several axes together")
    if maker.op in NORMS and any(t is not None and not t.is_constant for t in maker.inputs[1:]):
        return Skip(f"the scale of '{maker.name}' is computed at run time")
    reason = g.escapes(value, layer)
    if reason and maker.op not in NORMS:
        return Skip(reason)
    is_kept = reason is not None
    outputs = (value, layer.output) if is_kept else (layer.output,)
    made = fuse_nested(g, QUANTIZED_RESULT.kind, maker, layer, outputs=outputs)
    return dict(zip(outputs, made if is_kept else (made,), strict=True))
