"""verify() refuses every kind of malformed network, and names the position."""

import pytest

from whet.errors import NetworkError
from whet.network import Layer, Network, Tensor, parse_network, parse_type, verify

NET = """network n source
in %x: f32[N,3,8,8]
in %p: bool[]
const %w: f32[4,3,1,1] = seed(1)
%a = Conv(%x, %w)
%b = Relu(%a)
%y = If(%p) {
  region then_branch
    %t = Tanh(%b)
    out %t
  region else_branch
    %e = Relu(%b)
    out %e
}
out %y
"""


def layer(net: Network, name: str) -> Layer:
    return next(x for x in net.layers if x.name == name)


def later_first(net):
    net.layers[0], net.layers[1] = net.layers[1], net.layers[0]


def read_elsewhere(net):
    layer(net, "b").inputs = (Tensor("z", parse_type("f32[N,4,8,8]")),)


def same_layer_name(net):
    layer(net, "b").name = "a"


def same_tensor_name(net):
    layer(net, "b").output.name = "x"


def input_with_a_maker(net):
    net.inputs[0].maker = layer(net, "a")


def constant_of_another_type(net):
    net.constants["w"].type = parse_type("f32[4,3,3,3]")


def constant_under_another_name(net):
    net.constants["v"] = net.constants.pop("w")


def output_of_another_layer(net):
    layer(net, "b").output.maker = layer(net, "a")


def output_at_another_place(net):
    layer(net, "b").output.index = 1


def no_outputs_of_a_layer(net):
    layer(net, "b").outputs = ()


def another_type(net):
    layer(net, "b").output.type = parse_type("f32[N,5,8,8]")


def another_type_in_a_branch(net):
    layer(net, "y").regions["else_branch"].layers[0].output.type = parse_type("f32[N,4,8,9]")


def a_branch_that_reads_what_comes_later(net):
    layer(net, "y").regions["else_branch"].layers[0].inputs = (layer(net, "y").output,)


def output_that_nothing_makes(net):
    net.outputs.append(Tensor("z", parse_type("f32[1]")))


def no_outputs(net):
    net.outputs.clear()


FAULTS = {
    later_first: r"Relu 'b' reads %a \(input 0\), which nothing before it makes",
    read_elsewhere: r"Relu 'b' reads %z",
    same_layer_name: "two layers are called 'a'",
    same_tensor_name: "the name %x is given twice in 'n': to an input and to Relu 'b'",
    input_with_a_maker: "input %x has a maker or values",
    constant_of_another_type: r"constant %w has no values of its type f32\[4,3,3,3\]",
    constant_under_another_name: "constant %w has no values",
    output_of_another_layer: "Relu 'b': output %b does not point back to it",
    output_at_another_place: "Relu 'b': output %b does not point back to it",
    no_outputs_of_a_layer: "Relu 'b' has no outputs",
    another_type: r"Relu 'b': %b is f32\[N,5,8,8\], but Relu makes f32\[N,4,8,8\]",
    another_type_in_a_branch: r"Relu 'e': %e is f32\[N,4,8,9\]",
    a_branch_that_reads_what_comes_later: "Relu 'e' reads %y",
    output_that_nothing_makes: "output %z of 'n' is made by nothing in it",
    no_outputs: "network 'n' has no outputs",
}


def test_valid_networks_pass():
    net = parse_network(NET)
    assert verify(net) is net


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_each_fault_is_named(fault):
    net = parse_network(NET)
    fault(net)
    with pytest.raises(NetworkError, match=FAULTS[fault]):
        verify(net)


def test_missing_parts_are_refused():
    net = parse_network(NET)
    conv = layer(net, "a")
    assert conv.needs(1) is net.constants["w"]
    assert net.constants["w"].constant() is net.constants["w"].weight
    with pytest.raises(NetworkError, match="Conv 'a' has no input 2, which it needs"):
        conv.needs(2)
    with pytest.raises(NetworkError, match="%a is computed at run time"):
        conv.output.constant()
