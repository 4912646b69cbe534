"""Dropout at inference: y = x. The reader turns it into Identity; the mask output is all true."""

import numpy as np

from whet.network import BOOL
from whet.ops._base import find_known_values, op
from whet.ops._types import infer_same_as_input, list_same_axis_couples


def read(node, g):
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is not None and find_known_values(mode) is None:
        raise node.unsupported("whether it drops values (training_mode) is computed at run time; export the model in evaluation mode")
    ratio = node.input(1)
    if mode is not None and find_known_values(mode) != (0,) and not (ratio is not None and find_known_values(ratio) == (0,)):
        raise node.unsupported("it drops values (training_mode is set); export the model in evaluation mode")
    x = node.inputs[0]
    if len(node.outputs) < 2 or not node.outputs[1]:
        return node.add(g, "Identity", x)
    y = g.add("Identity", x, name=node.name, outputs=node.outputs[:1])
    return y, g.add("ConstantOfShape", g.add("Shape", x), value=1, dtype=BOOL, outputs=node.outputs[1:2])


op(
    "Dropout",
    infer_same_as_input,
    lambda layer, x: np.array(x),
    onnx=read,
    samples=[(["f32[2,3]"], {})],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
)
