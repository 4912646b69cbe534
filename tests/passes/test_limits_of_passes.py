"""Limits of passes: a network just within a limit is rewritten, a network just beyond it is unchanged."""

import numpy as np
import pytest
from random_networks import feeds, same

from whet.network import Network, Weight, parse_network
from whet.ops import run_network
from whet.passes import lower
from whet.passes._coupled_axes import CoupledAxes
from whet.passes._scale import to_channel_vector
from whet.passes._scores import are_scores
from whet.passes.clean.unreshape_masks import find_split_axes
from whet.passes.fold.merge_parallel_convs import make_conv_kernel
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def count(text, name, alignment=1):
    """How often a pass fires by itself; the values stay the same."""
    net = parse_network("network case source\n" + text)
    after, log = lower(net, switches=["none", "+" + name], refuses=lambda layer: None, check=True, channel_alignment=alignment)
    arrays = feeds(net)
    for want, got in zip(run_network(net, arrays, widen=True).values(), run_network(after, arrays, widen=True).values(), strict=True):
        same(want, got, 2e-6)
    return log.counts()[name]


@pytest.mark.parametrize(("layers", "fires"), [(1, 1), (7, 1), (8, 0)])
def test_transposes_move_past_seven_layers_in_a_row(layers, fires):
    steps = "".join(f"%r{i + 1} = Tanh(%r{i})\n" for i in range(layers))
    text = f"in %x: f32[2,6,4]\n%r0 = Transpose(%x, perm=(0, 2, 1))\n{steps}%y = Transpose(%r{layers}, perm=(0, 2, 1))\nout %y\n"
    assert count(text, "move_transposes") == fires


@pytest.mark.parametrize(("summands", "fires"), [(2, 1), (7, 1), (8, 0)])
def test_transposes_move_past_eight_layers_at_most(summands, fires):
    steps = "".join(f"%a{i} = Tanh(%r)\n" for i in range(summands))
    text = f"in %x: f32[2,6,4]\n%r = Transpose(%x, perm=(0, 2, 1))\n{steps}%s = Sum({', '.join(f'%a{i}' for i in range(summands))})\n"
    assert count(text + "%y = Transpose(%s, perm=(0, 2, 1))\nout %y\n", "move_transposes") == fires


@pytest.mark.parametrize(("moves", "fires"), [(0, 1), (3, 1), (4, 0), (6, 0)])
@pytest.mark.parametrize("op", ["Identity(%r{i})", "Concat(%r{i}, axis=1)", "MaxPool(%r{i}, kernel_shape=(1, 1))"])
def test_a_maximum_of_values_that_are_not_negative_takes_over_zeros(op, moves, fires):
    steps = "".join(f"%r{i + 1} = {op.format(i=i)}\n" for i in range(moves))
    text = f"in %x: f32[1,2,6,6]\n%r0 = Relu(%x)\n{steps}%p = Pad(%r{moves}, pads=(0,0,1,1,0,0,1,1))\n%y = MaxPool(%p, kernel_shape=(3,3))\nout %y\n"
    assert count(text, "fold_pads") == fires


@pytest.mark.parametrize(
    ("kind", "fires"),
    [("Relu(%x)", 1), ("Sigmoid(%x)", 1), ("Abs(%x)", 1), ("Softplus(%x)", 1), ("Softmax(%x, axis=1)", 1), ("HardSigmoid(%x)", 1), 
     ("Clip(%x, %zero)", 1),
     ("Clip(%x, %less)", 0), ("Tanh(%x)", 0), ("Elu(%x)", 0), ("Selu(%x)", 0), ("Gelu(%x)", 0), ("Floor(%x)", 0), 
     ("Neg(%x)", 0), ("Softsign(%x)", 0)],
)  # fmt: skip
def test_values_that_are_never_negative(kind, fires):
    text = f"in %x: f32[1,2,6,6]\nconst %zero: f32[] = [0.0]\nconst %less: f32[] = [-0.5]\n%r = {kind}\n"
    assert count(text + "%p = Pad(%r, pads=(0,0,1,1,0,0,1,1))\n%y = MaxPool(%p, kernel_shape=(3,3))\nout %y\n", "fold_pads") == fires


@pytest.mark.parametrize(("v", "y", "fires"), [("4,3,5", "4,3,5", 1), ("4,4,3,5", "4,4,3,5", 0), ("3,5", "4,3,5", 0)])
def test_heads_are_split_where_both_operands_have_the_same_axes(v, y, fires):
    text = f"""in %s: f32[2,2,3,3]
in %v: f32[{v}]
%p = Softmax(%s, axis=-1)
%c = Reshape(%p, shape=(4,3,3))
%y: f32[{y}] = MatMul(%c, %v)
out %y
"""
    assert count(text, "unmerge_heads") == fires


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [((3, 1, 1), 1, [0.0, 1.0, 2.0]), ((1, 3, 1, 1), 1, [0.0, 1.0, 2.0]), ((), 1, [0.0, 0.0, 0.0]), ((1,), 1, [0.0, 0.0, 0.0]), 
     ((3, 1), 1, None), ((4,), 3, [0.0, 1.0, 2.0, 3.0]),
     ((3,), 3, None), ((2, 3, 1, 1), 1, None), ((3, 0, 1), 1, None), ((0, 3, 1, 1), 1, None), 
     ((3, 4, 1), 1, None), ((1, 1, 3, 1, 1), 1, None), ((0,), 3, None)],
)  # fmt: skip
def test_constants_with_a_value_per_channel(shape, axis, expected):
    net = Network("n")
    x = parse_network("network n source\nin %x: f32[2,3,4,4]\nout %x\n").inputs[0]
    t = net.constant(Weight(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)), "c")
    vector = to_channel_vector(t, x, axis)
    assert (None if vector is None else vector.array.tolist()) == expected


def fire_texts(text, name):
    """The texts of a pass's firings, and of its skips."""
    _, log = lower(parse_network("network case source\n" + text), switches=["none", "+" + name], refuses=lambda layer: None, check=True)
    return [said for _, _, said in log.fired], [said for (owner, _), said in log.skipped.items() if owner == name]


@pytest.mark.parametrize(("added", "fires"), [("[1,4,1,1]", 1), ("[4,1,1]", 1), ("[1,1,2,2]", 0)])
def test_zero_channels_of_a_sum_with_a_constant_of_as_many_axes(added, fires):
    """The constant is zero in the same channels, or adds something to all of them."""
    values = "[0.5, 0.0, 2.0, 0.0]" if "4" in added else "[1.0, 2.0, 3.0, 4.0]"
    text = f"""in %x: f32[1,3,2,2]
const %c: f32{added} = {values}
const %v: f32[2,4,1,1] = seed(2)
const %e: f32[4,3,1,1] = [1,1,1, 0,0,0, 1,1,1, 0,0,0]
%a = Conv(%x, %e)
%m = Add(%a, %c)
%y = Conv(%m, %v)
out %y
"""
    assert count(text, "remove_zero_channels") == fires


def test_a_reason_names_2_4_weights_only_if_they_read_the_channels():
    """One of 16 channels is zero; other channels, some of them zero too, are read by 2:4 weights."""
    text = """in %x: f32[1,4,2,2]
const %w: f32[16,4,1,1] = seed(1)
const %v: f32[2,16,1,1] = seed(2)
const %u: f32[8,4,1,1] = seed(3)
const %t: f32[2,8,1,1] = [1,2,0,0,3,4,0,0, 5,0,6,0,0,7,0,8]
%a = Conv(%x, %w)
%b = Conv(%a, %v)
%c = Conv(%x, %u)
%d = Conv(%c, %t)
out %b
out %d
"""
    net = parse_network("network case source\n" + text)
    for name, zeros in (("w", [3]), ("u", [1])):
        a = net.constants[name].array().copy()
        a[zeros] = 0
        net.constants[name].weight = Weight(a)
    _, log = lower(net, switches=["none", "+remove_zero_channels"], refuses=lambda layer: None, check=True)
    said = {layer: text for (_, layer), text in log.skipped.items()}
    assert said["a"] == "1 of 16 channels are zero, but fewer would not be a multiple of 8"
    assert "2:4 weights read them" in said["c"]


@pytest.mark.parametrize(("bias", "fires"), [("[4]", 1), ("[1,4]", 1), ("[1,1]", 1), ("[]", 1), ("[3,4]", 0), ("[3,1]", 0)])
def test_a_factor_folds_into_a_product_with_a_bias_per_column(bias, fires):
    text = f"""in %x: f32[3,5]
const %w: f32[5,4] = seed(1)
const %b: f32{bias} = seed(2)
const %c: f32[4] = [1.0, 2.0, 0.5, 4.0]
%a = Gemm(%x, %w, %b)
%y = Mul(%a, %c)
out %y
"""
    fired, skipped = fire_texts(text, "fold_scale_shift")
    assert (len(fired), count(text, "fold_scale_shift")) == (fires, fires)
    assert fires or "is not a bias per column" in skipped[0]


@pytest.mark.parametrize(("view", "shape", "groups"), [
    ((2, 3, 1), (2, 3), [[0], [1, 2]]), ((2, 3), (2, 3), [[0], [1]]), ((2, 3, 4, 1, 1), (6, 4), [[0, 1], [2, 3, 4]]), ((2, 3, 4), (6, 2), None),
    ((1, 6), (6,), [[0, 1]]), ((2, 3, 2), (2, 3), None),
])  # fmt: skip
def test_axes_of_a_view(view, shape, groups):
    assert find_split_axes(view, shape) == groups


def test_scores_are_products_of_two_computed_values():
    net = parse_network("""network n source
in %x: f32[2,3,4]
in %z: f32[2,3,4]
const %w: f32[4,5] = seed(1)
%a = MatMul(%x, %w)
%t = Transpose(%z, perm=(0, 2, 1))
%b = MatMul(%x, %t)
%c = Einsum(%x, %z, equation="bij,bkj->bik")
%d = Einsum(%x, equation="bij->bji")
%e = Einsum(%x, %z, %z, equation="bij,bkj,bkj->bik")
out %a
out %b
out %c
out %d
out %e
""")
    assert [are_scores(Graph(net), t) for t in net.outputs] == [False, True, True, False, False]


@pytest.mark.parametrize(("first", "second", "merges"), [("[2,2]", "[1,1]", False), ("[1,1]", "[2,2]", False), ("[2,2]", "[2,2]", True)])
def test_parallel_convolutions_of_other_strides_do_not_merge(first, second, merges):
    net = parse_network(f"""network n source
in %x: f32[1,3,2,2]
const %w: f32[4,3,3,3] = seed(1)
const %v: f32[4,3,2,2] = seed(2)
%a = Conv(%x, %w, pads=[1,1,1,1], strides={first})
%b = Conv(%x, %v, strides={second})
out %a
out %b
""")
    found = make_conv_kernel(*net.layers)
    assert (not isinstance(found, Skip)) == merges
    assert merges or found.reason == "'a' and 'b' have other groups or strides"


def test_padding_of_an_axis_of_one_entry_repeats_that_entry():
    """In a Concat of an axis of 1, padded to 3, and one of 2: ~0 is padding after entry 0."""
    axes = CoupledAxes(Network("n"))
    one, two, whole = ("one", 0), ("two", 0), ("whole", 0)
    axes.parts_of[whole] = ((one, 1), (two, 1))
    sizes = {"one": 1, "two": 2}
    layout = axes.layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.passes._coupled_axes.get_axis_size", lambda node: sizes[node[0]])
        assert layout(whole, {one: 3}).tolist() == [0, ~0, ~0, 1, 2]
        assert layout(whole, {two: 3}).tolist() == [0, 1, 2, ~2]


@pytest.mark.parametrize("group", [1, 160])
def test_a_batch_norm_joins_convolutions_whose_weights_are_too_large_for_a_literal(group):
    """Wide stages of RepVGG, and FastViT's depthwise convolutions of 7 by 7: the identity is computed, not listed."""
    channels, inner, k = (176, 176, 3) if group == 1 else (160, 1, 41)
    constants = "".join(f"const %{n}: f32[{channels}] = seed({i})\n" for i, n in enumerate("shm", 2))
    constants += f"const %d: f32[{channels}] = [{', '.join(['2.0'] * channels)}]\n"
    text = f"in %x: f32[1,{channels},4,4]\nconst %w: f32[{channels},{inner},{k},{k}] = seed(1)\n{constants}"
    text += f"%a = Conv(%x, %w, group={group}, pads=({k // 2},{k // 2},{k // 2},{k // 2}))\n%b = BatchNormalization(%x, %s, %h, %m, %d)\n"
    assert count(text + "%y = Add(%a, %b)\nout %y\n", "merge_parallel_convs") == 1


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_a_norm_of_more_elements_than_a_literal_may_have_is_recognized(op):
    centred = "%m = ReduceMean(%x, axes=(1,2,3))\n%c = Sub(%x, %m)\n" if op == "LayerNormalization" else "%c = Identity(%x)\n"
    text = f"in %x: f32[2,20,120,120]\nconst %e: f32[] = [1e-05]\nconst %w: f32[20,120,120] = seed(1)\n{centred}"
    text += "%q = Mul(%c, %c)\n%v = ReduceMean(%q, axes=(1,2,3))\n%a = Add(%v, %e)\n%r = Sqrt(%a)\n%n = Div(%c, %r)\n%y = Mul(%n, %w)\nout %y\n"
    name = "recognize_layer_norm" if op == "LayerNormalization" else "recognize_rms_norm"
    after, log = lower(parse_network("network case source\n" + text), refuses=lambda layer: None, check=True)
    assert log.counts()[name] == 2
    assert [layer.op for layer in after.layers] == [op]


@pytest.mark.parametrize(("rows", "folds"), [(2048, True), (2049, False)])
def test_masks_of_at_most_sixteen_mebibytes_are_added_at_build_time(rows, folds):
    text = f"""in %q: f32[1,1,{rows},1]
in %k: f32[1,1,1,2048]
const %bias: f32[{rows},2048] = seed(1)
const %mask: f32[2048] = seed(2)
%s = MatMul(%q, %k)
%a = Add(%s, %bias)
%b = Add(%a, %mask)
%y = Softmax(%b, axis=-1)
out %y
"""
    net, log = lower(parse_network("network case source\n" + text), switches=["none", "+merge_masks"], check=True)
    assert log.counts()["merge_masks"] == 1
    assert [x.op for x in net.layers].count("Add") == (1 if folds else 2)


def test_channels_that_are_a_multiple_already_need_no_padding_to_be_joined():
    """The network's input cannot be padded, and has 8 channels; the 11 of a convolution of little work become 16 for the one that reads both."""
    text = """in %x: f32[1,8,24,24]
const %w: f32[11,8,1,1] = seed(1)
const %u: f32[8,19,1,1] = seed(2)
%a = Conv(%x, %w)
%j = Concat(%x, %a, axis=1)
%y = Conv(%j, %u)
out %y
"""
    source = parse_network("network case source\n" + text)
    net, log = lower(source, switches=["none", "+pad_channels"], check=True, channel_alignment=16)
    assert {"a": 16, "j": 24} == {x.name: x.output.shape[1] for x in net.layers if x.name in "aj"}
    assert not log.skipped
    arrays = feeds(source)
    same(run_network(source, arrays, widen=True)["y"], run_network(net, arrays, widen=True)["y"], 2e-6)


@pytest.mark.parametrize("rows", ["S", "3"])
def test_zero_channels_are_removed_beside_products_of_another_number_of_rows(rows):
    """A product of values without a known number of channels, and one whose channels are not zero, are as they were."""
    text = f"""in %x: f32[1,3,2,2]
in %t: f32[1,{rows},4]
const %e: f32[4,3,1,1] = [1,1,1, 0,0,0, 1,1,1, 0,0,0]
const %v: f32[2,4,1,1] = seed(1)
const %w: f32[4,8] = seed(2)
%a = Conv(%x, %e)
%y = Conv(%a, %v)
%z = MatMul(%t, %w)
out %y
out %z
"""
    source = parse_network("network case source\n" + text)
    net, log = lower(source, switches=["none", "+remove_zero_channels"], check=True)
    assert log.counts()["remove_zero_channels"] == 1
    assert {x.name: x.output.shape[1:] for x in net.layers if x.name == "a"} == {"a": (2, 2, 2)}
    arrays = feeds(source, sizes={"S": 5})
    want, got = run_network(source, arrays, widen=True), run_network(net, arrays, widen=True)
    for name in ("y", "z"):
        same(want[name], got[name], 2e-6)


@pytest.mark.parametrize(("steps", "read", "fires"), [
    ("%m = Mul(%h, %a)", "%m", 1), ("%n = Mul(%h, %a)\n%m = Mul(%n, %a)", "%m", 1), ("%n = Div(%h, %a)\n%m = Mul(%a, %n)", "%m", 1),
    ("%n = Mul(%h, %a)\n%m = Mul(%n, %a)\n%o = Neg(%h)\nout %o", "%m", 0),
])  # fmt: skip
def test_the_factor_of_a_swish_may_be_several_factors(steps, read, fires):
    text = f"""in %x: f32[3,4]
const %w: f32[4,8] = seed(1)
const %v: f32[8,4] = seed(2)
const %a: f32[] = [1.5]
%h = MatMul(%x, %w)
{steps}
%s = Sigmoid({read})
%g = Mul(%h, %s)
%y = MatMul(%g, %v)
out %y
"""
    assert count(text, "scale_swish") == fires


@pytest.mark.parametrize(("height", "fires"), [(3, 1), (0, 0)])
def test_images_without_pixels_are_not_transposed(height, fires):
    """A Reshape to a size of 0 would copy that size from its input."""
    text = f"in %x: f32[2,3,{height},4]\n%f = Reshape(%x, shape=(2,3,{4 * height}), allowzero=1)\n%y = Transpose(%f, perm=(0,2,1))\nout %y\n"
    assert count(text, "transpose_images") == fires


@pytest.mark.parametrize(("scale", "fires"), [("1.0", 1), ("1e29", 1), ("1e31", 0), ("1e-29", 1), ("1e-31", 0)])
def test_scales_near_the_ends_of_float32_are_rounded_again(scale, fires):
    text = f"in %x: f32[4]\nconst %s: f32[] = [{scale}]\n%q = QuantizeLinear(%x, %s, output_dtype=f8e4m3)\n%d = DequantizeLinear(%q, %s)\n"
    assert count(text + "%r = QuantizeLinear(%d, %s, output_dtype=f8e4m3)\n%y = DequantizeLinear(%r, %s)\nout %y\n", "cancel_quantize") == fires


@pytest.mark.parametrize(("bias", "fires"), [("const %b: f32[3] = seed(2)", 1), ("in %b: f32[3]", 0)])
def test_a_transposed_convolution_of_volumes_needs_a_constant_bias(bias, fires):
    text = f"in %x: f32[1,2,3,4,4]\nconst %w: f32[2,3,1,3,3] = seed(1)\n{bias}\n%y = ConvTranspose(%x, %w, %b)\nout %y\n"
    assert count(text, "conv_3d_to_2d", alignment=16) == fires


@pytest.mark.parametrize(("rank", "shape", "fires"), [(4, "2,4,3,6", 1), (5, "2,2,2,3,6", 0)])
def test_an_activation_is_lifted_above_reshapes_to_four_axes_at_most(rank, shape, fires):
    """Five axes are a detector's head, whose channels are split into anchors."""
    text = "in %x: f32[2,3,3,6]\nconst %w: f32[4,3,1,1] = seed(1)\n%c = Conv(%x, %w)\n"
    assert len(shape.split(",")) == rank
    assert count(text + f"%r = Reshape(%c, shape=({shape}))\n%y = Relu(%r)\nout %y\n", "lift_activations") == fires


@pytest.mark.parametrize(("axis", "fires"), [(1, True), (-2, True), (2, False), (-1, False)])
def test_a_gather_along_the_last_axis_moves_no_rows(axis, fires):
    """The rows are moved and moved back around a layer that computes each row: a move within the rows is none."""
    size = 4
    order, back = (3, 0, 2, 1), (1, 3, 2, 0)
    text = f"in %x: f32[2,{size},{size}]\nconst %s: f32[{size}] = seed(1)\nconst %w: f32[{size},{size}] = seed(2)\n"
    text += f"const %o: i64[{size}] = [{', '.join(map(str, order))}]\nconst %k: i64[{size}] = [{', '.join(map(str, back))}]\n"
    text += f"%t = Tanh(%x)\n%n = LayerNormalization(%t, %s, axis=-1)\n%m = Gather(%n, %o, axis={axis})\n%p = MatMul(%m, %w)\n"
    assert (count(text + f"%b = Gather(%p, %k, axis={axis})\n%y = Add(%t, %b)\nout %y\n", "keep_windows") > 0) == fires
