"""Common subexpressions: only layers with equal operation, attributes and inputs are merged."""

import pytest

from whet.network import parse_network
from whet.passes import lower

NET = """network n source
in %x: f32[2,2]
const %s: i64[1] = [0]
%a = {op}(%x{inputs}, {first}) from "a"
%b = {op}(%x{inputs}, {second}) from "b"
%y = Add(%a, %b) from "add"
out %y
"""


@pytest.mark.parametrize(("op", "first", "second"), [
    ("Softmax", "axis=0", "axis=1"),
    ("LogSoftmax", "axis=0", "axis=1"),
    ("CumSum", "exclusive=0", "exclusive=1"),
])  # fmt: skip
@pytest.mark.parametrize("equal", [False, True])
def test_layers_with_different_attributes_stay_apart(op, first, second, equal):
    inputs = ", %s" if op == "CumSum" else ""
    net = parse_network(NET.format(op=op, inputs=inputs, first=first, second=first if equal else second))
    after, _ = lower(net, switches=("none", "+merge_equal_layers"))
    assert sum(layer.op == op for layer in after.layers) == (1 if equal else 2)
