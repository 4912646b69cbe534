"""CastLike: x in the element type of input 1. The reader turns it into Cast."""

from whet.ops._base import op
from whet.ops._types import list_same_axis_couples
from whet.ops.cast import cast

op(
    "CastLike",
    lambda layer: layer.needs(0).type.with_dtype(layer.needs(1).dtype),
    lambda layer, x, like: cast(x, like.dtype),
    onnx=lambda node, g: node.add(g, "Cast", node.inputs[0], to=node.inputs[1].dtype, saturate=node.attrs.get("saturate", 1)),
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
    samples=[(["f32[3,5]", "i64[1]"], {}), (["i64[3,5]", "f32[2]"], {})],
)
