"""Identity: y = x."""

from whet.network import Tensor
from whet.ops._base import keep_dims, op
from whet.ops._types import infer_same_as_input, list_same_axis_couples


def read(node, g):
    x = node.inputs[0]
    return node.add(g, "Identity", x) if isinstance(x, Tensor) else x


op(
    "Identity",
    infer_same_as_input,
    lambda layer, x: x,
    samples=[(["f32[2,3]"], {}), (["extreme f32[16]"], {}), (["i64[4]"], {}), (["f16[3,5]"], {})],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    shape_value=keep_dims,
    pointwise=True,
    onnx=read,
    reads_sequences=True,
)
