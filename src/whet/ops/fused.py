"""Fused: a body that a tactic may compute at once. `composite` names what it is fused around; the body can be taken apart again."""

from whet.errors import NetworkError
from whet.network import Layer, Network, TensorType, parse_type
from whet.ops._attention_samples import SAMPLES as ATTENTION
from whet.ops._base import REQUIRED, Sample, op
from whet.ops._conv_product_samples import SAMPLES as PRODUCTS
from whet.ops._forked_samples import SAMPLES as FORKED
from whet.ops._fused_samples import SAMPLES as SUMS
from whet.ops._heads_samples import SAMPLES as HEADS
from whet.ops._joined_samples import SAMPLES as JOINED
from whet.ops._moves_samples import SAMPLES as MOVES
from whet.ops._pool_chain_samples import SAMPLES as POOLS
from whet.ops._quantized_samples import SAMPLES as QUANTIZED
from whet.ops._quantized_sum_samples import SAMPLES as QUANTIZED_SUMS
from whet.ops._rearrange_samples import SAMPLES as REARRANGED
from whet.ops._resized_samples import SAMPLES as RESIZED
from whet.ops._squeeze_samples import SAMPLES as GATES
from whet.ops._upright_samples import SAMPLES as UPRIGHT


def infer(layer: Layer) -> list[TensorType]:
    body = layer.regions["body"]
    if len(body.inputs) != len(layer.inputs):
        raise NetworkError(f"fused layer '{layer.name}' has {len(layer.inputs)} inputs, its body {len(body.inputs)}")
    for inner, outer in zip(body.inputs, layer.inputs, strict=True):
        if outer is None or inner.type != outer.type:
            raise NetworkError(f"fused layer '{layer.name}': body input %{inner.name} is {inner.type}, fed {outer and outer.type}")
    return [t.type for t in body.outputs]


def _conv_add_relu() -> dict[str, Network]:
    body = Network("body", "lowered")
    x, w, b = (body.add_input(n, parse_type(t)) for n, t in (("x", "f32[1,16,8,8]"), ("w", "f32[32,16,3,3]"), ("b", "f32[32]")))
    z = body.add_input("z", parse_type("f32[1,32,8,8]"))
    y = body.add("Conv", x, w, b, pads=(1, 1, 1, 1))
    body.mark_output(body.add("Relu", body.add("Add", y, z)))
    return {"body": body}


op(
    "Fused",
    infer,
    lambda layer, *arrays, run: run("body", *arrays),
    attrs={"composite": REQUIRED},
    onnx_ops=(),
    samples=[
        Sample(["f32[1,16,8,8]", "const f32[32,16,3,3]", "const f32[32]", "f32[1,32,8,8]"], {"composite": "Conv"}, _conv_add_relu),
        *ATTENTION,
        *SUMS,
        *PRODUCTS,
        *MOVES,
        *HEADS,
        *JOINED,
        *FORKED,
        *REARRANGED, *RESIZED,
        *POOLS,
        *GATES,
        *QUANTIZED,
        *QUANTIZED_SUMS,
        *UPRIGHT,
    ],
)
