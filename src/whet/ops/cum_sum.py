"""CumSum: cumulative sums along the axis of input 1 (or attribute `axis`).

`exclusive` excludes the element itself, `reverse` starts at the end.
"""

import numpy as np

from whet.ops._axes import make_attribute_exporter
from whet.ops._base import INTS, Couple, op
from whet.ops._running import get_running_axis, infer, make_running_reference

op(
    "CumSum",
    infer,
    make_running_reference(np.cumsum, 0),
    attrs={"exclusive": 0, "reverse": 0, "axis": INTS},
    couples=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in range(layer.output.type.rank) if i != get_running_axis(layer)],
    to_onnx=make_attribute_exporter("axis"),
    samples=[
        (["f32[3,7]", np.array(1)], {}),
        (["f32[3,7]", np.array(0)], {"exclusive": 1}),
        (["f32[2,3,5]", np.array(-1)], {"reverse": 1, "exclusive": 1}),
        (["i64[5]", np.array(0)], {"reverse": 1}),
        (["extreme f32[3,16]", np.array(0)], {}),
    ],
)
