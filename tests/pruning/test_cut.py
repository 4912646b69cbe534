"""Cutting is exact: the cut network computes what the big one computes with the same channels zeroed, on whole real architectures."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from support import datasets
from whet import zoo
from whet.errors import PruneError
from whet.frontends import network_from_onnx, onnx_from_network
from whet.network import parse_network, verify
from whet.ops import run_network
from whet.ops._origin import evaluate_origin
from whet.pruning import choose, count_flops, count_params, cut, groups, importance, zeroed

SMALL = {"bert_base": {"layers": 1, "sequence": "S"}, "vit_b_16": {"layers": 1, "image": 64}, "yolov5s": {"image": 128}, "lenet5": {}}
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


def exact(net, kept, found, bound=2e-5):
    """Cuts, compares with the zeroed network by the reference, and with ONNX Runtime on the exported file; returns the cut network."""
    small = verify(cut(net, kept, found))
    feeds = feeds_of(net)
    want = run_network(zeroed(net, kept, found), feeds)
    for got in (run_network(small, feeds), in_ort(small, feeds)):
        for name, w in want.items():
            assert np.abs(got[name] - w).max() <= bound * max(np.abs(w).max(), 1e-6), name
    return small


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "mobilenet_v2",
        "squeezenet1_1",
        "lenet5",
        "resnext50_32x4d",
        "yolov5s",
        "vit_b_16",
        "bert_base",
        "efficientnet_b0",
        "densenet121",
    ],
)
def test_zoo(name):
    net = network(name)
    found = groups(net)
    kept = choose(found, importance(found, "random", seed=1), 0.4)
    small = exact(net, kept, found, 1e-4)
    assert count_params(small) < 0.93 * count_params(net)
    assert count_flops(small, {"S": 9, "sequence": 9}) < 0.95 * count_flops(net, {"S": 9, "sequence": 9})
    names = {layer.name for layer in small.layers}
    dropped = {layer.op for layer in net.layers if layer.name not in names}
    assert dropped <= {"Shape", "Gather", "Unsqueeze", "Concat", "Mul", "Div"}, "only what computed shapes that are given now may go"


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
def test_any_choice_is_exact(seed):
    """Not only choices that an importance makes: any channels of any groups, down to one."""
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
    """Reshape with a number for the cut axis, as old exporters flatten."""
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
    assert "s" not in small.constants, "the old shape is gone"


def test_keeping_all_changes_nothing():
    net = parse_network(CHAIN)
    assert str(cut(net, {"w": range(8)})) == str(net)
    assert str(cut(net, {})) == str(net)


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ({"w": []}, "at least one"),
        ({"w": [8]}, "channels 0 to 7"),
        ({"w": [-1]}, "channels 0 to 7"),
        ({"w": [1, 1]}, "each to be named once"),
        ({"w": [0.5]}, "whole number"),
        ({"nothing": [0]}, "no group 'nothing'"),
    ],
)
def test_cuts_that_make_no_sense(kept, text):
    with pytest.raises(PruneError, match=text):
        cut(parse_network(CHAIN), kept)


def test_only_source_networks_are_cut():
    with pytest.raises(PruneError, match="cut before lowering"):
        cut(parse_network(CHAIN.replace("n source", "n lowered")), {"w": [0]})


def test_the_network_itself_is_left_alone():
    net = parse_network(CHAIN)
    before = str(net)
    cut(net, {"w": [0]})
    zeroed(net, {"w": [0]})
    assert str(net) == before
