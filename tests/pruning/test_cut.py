"""Cutting is exact: the cut network equals the original with the same channels zeroed, on complete real architectures."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from support import datasets
from support.attention import GROUPED_QUERIES
from support.selection import with_slow_names
from whet import zoo
from whet.errors import PruneError
from whet.frontends import network_from_onnx, onnx_from_network
from whet.network import parse_network, verify
from whet.ops import run_network
from whet.ops._origin import evaluate_origin
from whet.pruning import branches, choose, count_flops, count_params, cut, groups, importance, zero_channels

SMALL = {
    "bert_base": {"layers": 2, "sequence": "S", "hidden": 192, "heads": 6},
    "convnext_tiny": {"image": 64, "blocks": (1, 1, 2, 1)},
    "densenet121": {"image": 64, "blocks": (3, 4, 3, 2)},
    "lenet5": {},
    "resnet18": {"image": 64, "width": 32},
    "resnet50": {"image": 64, "width": 16},
    "resnext50_32x4d": {"image": 32, "width": 32},
    "swin_t": {"image": 64, "window": 2, "blocks": (1, 1, 2, 1), "hidden": 24},
    "unet": {"image": 32, "width": 16},
    "vit_b_16": {"layers": 2, "image": 64, "hidden": 192, "heads": 6},
    "yolov5s": {"image": 64},
    "mobilenet_v2": {"image": 32},
    "mobilenet_v3_large": {"image": 32},
    "efficientnet_b0": {"image": 32},
}
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits_resnet.onnx"


def network(name):
    return network_from_onnx(zoo.build(name, **SMALL.get(name, {"image": 64})))


def feeds_of(net, seed=0):
    rng = np.random.default_rng(seed)
    feeds = {}
    for t in net.inputs:
        shape = [d if isinstance(d, int) else {"S": 9}.get(str(d), 2) for d in t.shape]
        feeds[t.name] = rng.integers(0, 2, shape) if t.dtype.kind == "int" else rng.standard_normal(shape).astype(np.float32)
    return feeds


def in_ort(net, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(onnx_from_network(net).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def exact(net, channels, channel_groups, bound=2e-5, removed=()):
    """Cuts, compares with the zeroed network by the reference and with ONNX Runtime on the exported file; returns the cut network."""
    small = verify(cut(net, channels, channel_groups, removed=removed))
    feeds = feeds_of(net)
    want = run_network(zero_channels(net, channels, channel_groups, removed=removed), feeds)
    for got in (run_network(small, feeds), in_ort(small, feeds)):
        for name, w in want.items():
            assert np.abs(got[name] - w).max() <= bound * max(np.abs(w).max(), 1e-6), name
    return small


@pytest.mark.parametrize("name", with_slow_names([
    "resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "convnext_tiny", "swin_t", "unet", "squeezenet1_1", "lenet5", "resnext50_32x4d",
    "yolov5s", "vit_b_16", "bert_base", "efficientnet_b0", "densenet121",
], {"efficientnet_b0", "resnet50", "yolov5s"}))  # fmt: skip
def test_zoo(name):
    net = network(name)
    found = groups(net)
    kept = choose(found, importance(found, "random", seed=1), 0.4)
    small = exact(net, kept, found, 1e-4)
    assert count_params(small) < 0.95 * count_params(net)
    assert count_flops(small, {"S": 9, "sequence": 9}) < 0.95 * count_flops(net, {"S": 9, "sequence": 9})
    names = {layer.name for layer in small.layers}
    dropped = {layer.op for layer in net.layers if layer.name not in names}
    assert dropped <= {"Shape", "Gather", "Unsqueeze", "Concat", "Mul", "Div"}, "only computations of shapes that are constant now may disappear"


@pytest.mark.parametrize("name", with_slow_names([
    "resnet18", "resnet50", "resnext50_32x4d", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny", "swin_t", "vit_b_16",
    "bert_base", "yolov5s",
], {"efficientnet_b0", "resnet50", "yolov5s"}))  # fmt: skip
def test_width_heads_and_depth_at_once(name):
    """Removes every second branch, and of the rest some units of every group: channels, heads, head widths."""
    net = network(name)
    found, gone = groups(net), [b.name for b in branches(net)][::2]
    kept = choose(found, importance(found, "random", seed=3), 0.3, multiple=1)
    small = exact(net, kept, found, 1e-4, gone)
    assert not {layer.name for layer in small.layers} & set(gone)
    assert len(small.layers) < len(net.layers) - len(gone)


def only(net, ending):
    """The groups with this suffix in their names."""
    return [g for g in groups(net) if g.name.endswith(ending)]


def test_heads_and_widths_of_separate_projections():
    """BERT: cutting a head cuts its q, k and v; q and k share their width, v has its own."""
    net = network("bert_base")
    heads, qk, v, ffn = (g for g in groups(net) if any("/layer.0/" in n for n in g.layers))
    assert (heads.size, heads.block, qk.size, v.size, ffn.size) == (6, 32, 32, 32, 768)
    small = exact(net, {heads.name: [0, 2, 3, 5], qk.name: range(24), v.name: range(1, 17), ffn.name: range(0, 768, 3)}, groups(net), 1e-4)
    shapes = {n: t.shape for n, t in small.constants.items()}
    assert shapes[heads.name] == (192, 4 * 24)
    assert shapes[v.name.removesuffix("@0")] == (192, 4 * 16)


@pytest.mark.parametrize("name", ["vit_b_16", pytest.param("swin_t", marks=pytest.mark.slow)])
def test_heads_of_a_fused_projection(name):
    """One weight computes q, k and v: a head is three runs of its columns, a unit of width is one column of each head in each."""
    net = network(name)
    heads, width = only(net, "@1")[-1], only(net, "@0")[-1]
    (places,) = (at for t, _, at in heads.weights() if t.name == heads.name.removesuffix("@1"))
    assert places.shape == (heads.size, 3 * heads.block)
    assert places[1, heads.block] == heads.size * heads.block + heads.block, "its k follows all of q"
    small = exact(net, {heads.name: range(1, heads.size), width.name: range(0, width.size, 2)}, groups(net), 1e-4)
    assert small.constants[heads.name.removesuffix("@1")].shape[1] == 3 * (heads.size - 1) * width.size // 2


def test_the_ratio_holds_for_groups_times_channels():
    """Both factors of a grouped convolution's channels were cut by the ratio: 0.142 of the parameters were kept at 0.5."""
    shares = {}
    for name in ("resnext50_32x4d", "resnet50"):
        net = network(name)
        found = groups(net)
        shares[name] = count_params(cut(net, choose(found, importance(found), 0.5), found)) / count_params(net)
    assert shares["resnext50_32x4d"] == pytest.approx(shares["resnet50"], abs=0.03)


def test_grouped_convolutions_lose_groups_or_channels_of_each():
    net = network_from_onnx(zoo.build("resnext50_32x4d", image=32))
    first = [g for g in groups(net) if g.name.startswith("layer1.0.conv")][:3]
    assert [g.name.removeprefix("layer1.0.") for g in first] == ["conv1.weight", "conv1.weight@0", "conv2.weight@0"]
    assert [(g.size, g.block) for g in first] == [(32, 4), (4, 1), (4, 1)]
    small = exact(net, {first[0].name: range(8, 24), first[1].name: [0, 2, 3], first[2].name: [1, 3]}, groups(net), 1e-4)
    (conv,) = (x for x in small.layers if x.name == "/layer1/layer1.0/conv2/Conv")
    assert (conv.attrs["group"], conv.inputs[1].shape[:2]) == (16, (32, 3))


def test_grouped_transposed_convolutions():
    net = parse_network("""network n source
in %x: f32[N,3,5,5]
const %w1: f32[12,3,1,1] = seed(1)
const %w2: f32[12,4,2,2] = seed(2)
const %b2: f32[12] = seed(3)
const %w3: f32[2,12,1,1] = seed(4)
%a: f32[N,12,5,5] = Conv(%x, %w1)
%b: f32[N,12,10,10] = ConvTranspose(%a, %w2, %b2, group=3, strides=(2, 2))
%y: f32[N,2,10,10] = Conv(%b, %w3)
out %y
""")
    found = groups(net)
    assert [(g.name, g.size) for g in found] == [("w1", 3), ("w1@0", 4), ("w2@0", 4)]
    small = exact(net, {"w1": [0, 2], "w1@0": [1, 2, 3], "w2@0": [0, 3]}, found)
    assert small.constants["w2"].shape == (6, 2, 2, 2)


def test_digits():
    net = network_from_onnx(DIGITS)
    found = groups(net)
    assert len(found) == 7
    assert sum(g.size for g in found) == 656
    small = exact(net, choose(found, importance(found), 0.4), found)
    assert count_params(small) < 0.4 * count_params(net)


@pytest.mark.data
@pytest.mark.parametrize(
    "name",
    [
        "cifar10/resnet20_cifar10.onnx",
        "coco_val128/nanodet_m.onnx",
        "face/version-RFB-320.onnx",
        "mnist/vit_mnist.onnx",
        "imagenet_sample/squeezenet1.1.onnx",
    ],
)
def test_real_networks(name):
    if datasets.root() is None:
        pytest.skip("the shared data folder is not here")
    net = network_from_onnx(datasets.path_of(name))
    found = groups(net)
    exact(net, choose(found, importance(found), 0.3), found, 1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_any_selection_is_exact(seed):
    """Arbitrary selections, not only by importance: any channels of any groups, down to one."""
    net = network("squeezenet1_1" if seed % 2 else "mobilenet_v2")
    found, rng = groups(net), np.random.default_rng(seed)
    some = [g for g in found if rng.random() < 0.5]
    kept = {g.name: rng.choice(g.size, int(rng.integers(1, g.size + 1)), replace=False) for g in some}
    exact(net, kept, found, 1e-4)


CHAIN = """network n source
in %x: f32[N,3]
const %w: f32[3,8] = seed(1)
const %b: f32[8] = seed(3)
const %v: f32[8,3] = seed(2)
%a: f32[N,8] = MatMul(%x, %w)
%c: f32[N,8] = Add(%a, %b)
%y: f32[N,3] = MatMul(%c, %v)
out %y
"""


def test_the_origin_of_a_cut_weight_applies_to_other_values():
    net = parse_network(CHAIN)
    small = cut(net, {"w": [6, 1]})
    w = small.constants["w"].weight
    assert np.array_equal(w.array, net.constants["w"].array()[:, [1, 6]])
    assert str(w.origin).startswith("Gather(w, ")
    other = np.arange(24, dtype=np.float32).reshape(3, 8)
    assert np.array_equal(evaluate_origin(w.origin, {"w": other}), other[:, [1, 6]])


def test_a_shape_that_counts_channels_is_rewritten():
    """Reshape with a constant size of the cut axis, as old exporters flatten."""
    net = parse_network("""network n source
in %x: f32[2,3,4,4]
const %w: f32[6,3,1,1] = seed(1)
const %v: f32[96,5] = seed(2)
const %s: i64[2] = [2, 96]
%a: f32[2,6,4,4] = Conv(%x, %w)
%f: f32[2,96] = Reshape(%a, %s)
%y: f32[2,5] = MatMul(%f, %v)
out %y
""")
    found = groups(net)
    small = exact(net, {found[0].name: [0, 2, 5]}, found)
    assert small.tensor("f").shape == (2, 48)
    assert "s" not in small.constants, "the old shape was replaced"


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("ways", [1, 2])
def test_recurrent_layers(op, gates, ways):
    """Their inputs and their own units, all gates at once; the initial state as exporters write it, zeros of a computed or sliced shape."""
    states = "%first, %first" if op == "LSTM" else "%first"
    direction = "bidirectional" if ways == 2 else "forward"
    net = parse_network(f"""network n source
in %x: f32[N,3,4,6]
const %w: f32[8,3,4,1] = seed(1)
const %W: f32[{ways},{gates * 5},8] = seed(2)
const %R: f32[{ways},{gates * 5},5] = seed(3)
const %B: f32[{ways},{2 * gates * 5}] = seed(4)
const %v: f32[{ways * 5},2] = seed(5)
const %ways: i64[1] = [{ways}]
const %units: i64[1] = [5]
%a = Conv(%x, %w)
%s = Squeeze(%a, axes=(2,))
%t = Transpose(%s, perm=(2, 0, 1))
%n = Shape(%x, start=0, end=1)
%sizes = Concat(%ways, %n, %units, axis=0)
%first = ConstantOfShape(%sizes)
%h, {"%hn, %cn" if op == "LSTM" else "%hn"} = {op}(%t, %W, %R, %B, none, {states}, hidden_size=5, direction="{direction}")
%p = Transpose(%h, perm=(0, 2, 1, 3))
%q = Reshape(%p, shape=(0,0,{ways * 5}))
%y = MatMul(%q, %v)
out %y
""")
    found = groups(net)
    assert [g.size for g in found] == [8, 5]
    small = exact(net, {found[0].name: [0, 3, 7], found[1].name: [1, 4]}, found)
    assert (small.constants["W"].shape, small.constants["R"].shape) == ((ways, 2 * gates, 3), (ways, 2 * gates, 2))


def test_an_initial_state_sliced_from_a_constant():
    """Its zeros are folded, as small shapes are, and are cut with the units nevertheless."""
    net = parse_network("""network n source
in %x: f32[6,2,3]
const %w: f32[3,8] = seed(1)
const %W: f32[1,20,8] = seed(2)
const %R: f32[1,20,5] = seed(3)
const %zeros: f32[2,2,5] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
const %v: f32[5,2] = seed(5)
%a = MatMul(%x, %w)
%first = Slice(%zeros, starts=(0,), ends=(1,), axes=(0,))
%h, %hn, %cn = LSTM(%a, %W, %R, none, none, %first, %first, hidden_size=5)
%y = MatMul(%h, %v)
out %y
""")
    found = groups(net)
    assert sorted(g.size for g in found) == [5, 8]
    exact(net, {g.name: [0, 2] for g in found}, found)


@pytest.mark.parametrize(("op", "mode", "wide"), [("DepthToSpace", "DCR", 6), ("DepthToSpace", "CRD", 6), ("SpaceToDepth", "DCR", 96)])
def test_channels_into_pixels_and_back(op, mode, wide):
    net = parse_network(f"""network n source
in %x: f32[N,3,4,4]
const %w: f32[24,3,1,1] = seed(1)
const %v: f32[2,{wide},1,1] = seed(2)
%a = Conv(%x, %w)
%b = {op}(%a, blocksize=2, mode="{mode}")
%y = Conv(%b, %v)
out %y
""")
    (g,) = groups(net)
    assert g.size == {"DepthToSpace": 6, "SpaceToDepth": 24}[op]
    exact(net, {g.name: [0, 2, 5]}, [g])


def test_widths_with_heads_and_batch_on_one_axis():
    """torch.nn.MultiheadAttention reads [S, N, H * W] as [S, N * H, W]; N * H has no single head, but W has the widths."""
    net = parse_network("""network n source
in %x: f32[5,N,6]
const %wq: f32[6,12] = seed(1)
const %wk: f32[6,12] = seed(2)
const %wv: f32[6,12] = seed(3)
const %wo: f32[12,3] = seed(4)
%q = MatMul(%x, %wq)
%k = MatMul(%x, %wk)
%v = MatMul(%x, %wv)
%q1 = Reshape(%q, shape=(5,-1,4))
%k1 = Reshape(%k, shape=(5,-1,4))
%v1 = Reshape(%v, shape=(5,-1,4))
%q2 = Transpose(%q1, perm=(1, 0, 2))
%k2 = Transpose(%k1, perm=(1, 2, 0))
%v2 = Transpose(%v1, perm=(1, 0, 2))
%s = MatMul(%q2, %k2)
%p = Softmax(%s, axis=-1)
%c = MatMul(%p, %v2)
%ct = Transpose(%c, perm=(1, 0, 2))
%r = Reshape(%ct, shape=(5,-1,12))
%y = MatMul(%r, %wo)
out %y
""")
    found = groups(net)
    assert [(g.name, g.size) for g in found] == [("wq@0", 4), ("wv@0", 4)]
    small = exact(net, {"wq@0": [0, 3], "wv@0": [1, 2, 3]}, found)
    assert (small.constants["wq"].shape, small.constants["wo"].shape) == ((6, 6), (9, 3))


BY_SHAPE = """network n source
in %x: f32[N,5,6]
const %wq: f32[6,8] = seed(1)
const %wk: f32[6,8] = seed(2)
const %wv: f32[6,8] = seed(3)
const %wo: f32[8,3] = seed(4)
const %last: i64[] = [2]
%q = MatMul(%x, %wq)
%k = MatMul(%x, %wk)
%v = MatMul(%x, %wv)
%s = Shape(%q)
%n = Gather(%s, %last)
%d = Cast(%n, to=f32)
%r = Sqrt(%d)
%t = Transpose(%k, perm=(0, 2, 1))
%qk = MatMul(%q, %t)
%e = Div(%qk, %r)
%p = Softmax(%e, axis=-1)
%c = MatMul(%p, %v)
%y = MatMul(%c, %wo)
out %y
"""


@pytest.mark.parametrize("line", ["%d = Cast(%n, to=f32)", "%h = Cast(%n, to=f16)\n%d = Cast(%h, to=f32)"])
def test_a_scale_computed_from_a_shape_keeps_its_value(line):
    """Exported attention divides by the root of Shape(q)[-1]; cut to half the width it must divide by the same value."""
    net = parse_network(BY_SHAPE.replace("%d = Cast(%n, to=f32)", line))
    found = groups(net)
    assert [g.name for g in found] == ["wq", "wv"]
    exact(net, {"wq": [0, 2, 5], "wv": [1, 7]}, found)


def test_a_size_with_cut_channels_and_a_dynamic_axis_is_refused():
    net = parse_network(CHAIN.replace("%y: f32[N,3] = MatMul(%c, %v)", "%n = Size(%c)\n%f = Cast(%n, to=f32)\n%d = Div(%c, %f)\n%y = MatMul(%d, %v)"))
    with pytest.raises(PruneError, match=r"Div 'd' computes with .* Do not cut the groups that it counts"):
        cut(net, {"w": [6, 1]})


def test_keeping_all_changes_nothing():
    net = parse_network(CHAIN)
    assert str(cut(net, {"w": range(8)})) == str(net)
    assert str(cut(net, {})) == str(net)


@pytest.mark.parametrize(
    ("channels", "text"),
    [
        ({"w": []}, "non-empty list"),
        ({"w": [8]}, "channels 0 to 7"),
        ({"w": [-1]}, "channels 0 to 7"),
        ({"w": [1, 1]}, "each at most once"),
        ({"w": [0.5]}, "list of integers"),
        ({"nothing": [0]}, "unknown group 'nothing'"),
    ],
)
def test_invalid_cuts(channels, text):
    with pytest.raises(PruneError, match=text):
        cut(parse_network(CHAIN), channels)


def test_only_source_networks_are_cut():
    with pytest.raises(PruneError, match="cut before lowering"):
        cut(parse_network(CHAIN.replace("n source", "n lowered")), {"w": [0]})


def test_the_source_network_is_unchanged():
    net = parse_network(CHAIN)
    before = str(net)
    cut(net, {"w": [0]})
    zero_channels(net, {"w": [0]})
    assert str(net) == before


def test_grouped_queries_with_rotary_positions():
    """Eight query heads read four key heads: pairs of a rotation, key heads with their queries, queries of each key, and value widths."""
    net = parse_network(GROUPED_QUERIES)
    found = {g.name: g for g in groups(net)}
    first = {name: {t.name: at[0].tolist() for (t, _), at in g.members.items() if t.is_constant} for name, g in found.items()}
    assert set(first) == {"wq@0", "wq", "wq@repeat", "wv@0"}
    assert first["wq@0"]["inv"] == [0]
    assert first["wq@0"]["wk"] == [0, 2, 4, 6, 8, 10, 12, 14], "a pair of every head"
    assert first["wq"]["wq"] == list(range(8)), "two query heads of width 4"
    assert first["wq"]["wk"] == list(range(4)), "with one key head"
    assert set(first["wq@repeat"]) == {"wq", "wo"}, "keys and values stay"
    assert first["wq@repeat"]["wq"] == [n for head in (0, 2, 4, 6) for n in range(4 * head, 4 * head + 4)]
    x = {"x": np.random.default_rng(1).standard_normal((2, 5, 12)).astype(np.float32)}
    for kept in ({"wq@repeat": [1]}, {"wq": [0, 2, 3], "wq@repeat": [0]}, {"wq@0": [1], "wq": [1, 2], "wq@repeat": [1], "wv@0": [0, 3]}):
        got, want = (run_network(n, x)["y"] for n in (cut(net, kept), zero_channels(net, kept)))
        np.testing.assert_allclose(got, want, atol=1e-4)
        assert np.abs(want - run_network(net, x)["y"]).max() > 1e-3
