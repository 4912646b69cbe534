"""Caffe: the real MTCNN cascade finds its faces; layers against NumPy or their definition; errors name the layer."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from support import datasets, mtcnn
from whet.cli import group
from whet.errors import FrontendError, UnsupportedError
from whet.frontends import check_caffe, network_from_caffe, network_from_onnx
from whet.frontends._caffe_schema import get_binary_net
from whet.ops import run_network

RNG = np.random.default_rng(3)


def net_of(tmp_path: Path, body: str, blobs=None, shape=(1, 4, 7, 7), inputs: str = "", **options):
    """A network with the input `x`; `blobs` maps layers to weights."""
    dims = " ".join(f"dim: {d}" for d in shape)
    path = tmp_path / "net.prototxt"
    path.write_text(f'input: "x" input_shape {{ {dims} }} {inputs} {body}')
    if blobs is None:
        return network_from_caffe(path, random_weights=True, **options)
    message = get_binary_net()()
    for name, arrays in blobs.items():
        layer = message.layer.add(name=name)
        for a in arrays:
            blob = layer.blobs.add(data=np.asarray(a, "<f4").tobytes())
            blob.shape.dim.extend(np.shape(a))
    (tmp_path / "net.caffemodel").write_bytes(message.SerializeToString())
    return network_from_caffe(path, **options)


def layer(kind: str, params: str = "", bottoms=("x",), tops=("y",), name: str = "it") -> str:
    ends = " ".join([*(f'bottom: "{b}"' for b in bottoms), *(f'top: "{t}"' for t in tops)])
    return f'layer {{ name: "{name}" type: "{kind}" {ends} {params} }}\n'


def run(net, *arrays):
    return list(run_network(net, dict(zip((t.name for t in net.inputs), arrays, strict=True))).values())


X = RNG.standard_normal((1, 4, 7, 7)).astype(np.float32)
E = np.exp(1)
FORMULAS = {
    "AbsVal": ("", np.abs(X)),
    "BNLL": ("", np.log1p(np.exp(X))),
    "Clip": ("clip_param { min: -0.5 max: 0.25 }", X.clip(-0.5, 0.25)),
    "ELU": ("elu_param { alpha: 0.5 }", np.where(X > 0, X, 0.5 * (np.exp(X) - 1))),
    "Exp": ("exp_param { base: 2 scale: 3 shift: 1 }", 2 ** (1 + 3 * X)),
    "Log": ("log_param { base: 2 scale: 0 shift: 8 }", np.full_like(X, 3)),
    "Power": ("power_param { power: 2 scale: 0.5 shift: 1 }", (1 + 0.5 * X) ** 2),
    "ReLU": ("relu_param { negative_slope: 0.1 }", np.where(X > 0, X, 0.1 * X)),
    "ReLU6": ("relu6_param { threshold: 1 }", X.clip(0, 1)),
    "Sigmoid": ("", 1 / (1 + np.exp(-X))),
    "Swish": ("swish_param { beta: 2 }", X / (1 + np.exp(-2 * X))),
    "TanH": ("", np.tanh(X)),
    "Threshold": ("threshold_param { threshold: 0.3 }", X > 0.3),
    "Softmax": ("", np.exp(X) / np.exp(X).sum(1, keepdims=True)),
    "Flatten": ("", X.reshape(1, -1)),
    "Reshape": ("reshape_param { shape { dim: 2 dim: -1 } axis: 1 num_axes: 1 }", X.reshape(1, 2, 2, 7, 7)),
    "Permute": ("permute_param { order: 0 order: 2 order: 3 order: 1 }", X.transpose(0, 2, 3, 1)),
    "ShuffleChannel": ("shuffle_channel_param { group: 2 }", X[:, [0, 2, 1, 3]]),
    "Tile": ("tile_param { axis: 1 tiles: 2 }", np.tile(X, (1, 2, 1, 1))),
    "Reduction": ("reduction_param { operation: ASUM axis: 1 coeff: 2 }", 2 * np.abs(X).sum((1, 2, 3))),
    "ArgMax": ("argmax_param { axis: 1 }", X.argmax(1)[:, None]),
    "Dropout": ("", X),
    "MVN": ("", (X - X.mean((2, 3), keepdims=True)) / (X.std((2, 3), keepdims=True) + 1e-9)),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_a_layer_without_weights(tmp_path, kind):
    params, want = FORMULAS[kind]
    (got,) = run(net_of(tmp_path, layer(kind, params)), X)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_pooling_rounds_up_and_an_average_counts_padding(tmp_path):
    x = X[..., :6, :6]
    (got,) = run(net_of(tmp_path, layer("Pooling", "pooling_param { kernel_size: 3 stride: 2 }"), shape=x.shape), x)
    assert got.shape == (1, 4, 3, 3)
    np.testing.assert_array_equal(got[..., 2, 2], x[..., 4:, 4:].max((2, 3)))
    average = layer("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }")
    (got,) = run(net_of(tmp_path, average, shape=x.shape), x)
    np.testing.assert_allclose(got[..., 0, 0], x[..., :2, :2].sum((2, 3)) / 9, rtol=1e-5)
    np.testing.assert_allclose(got[..., 3, 3], x[..., 5, 5] / 4, rtol=1e-5)  # rows 5 and 6, of which 6 is padding and 7 is beyond it
    (floor,) = run(net_of(tmp_path, layer("Pooling", "pooling_param { kernel_size: 3 stride: 2 round_mode: FLOOR }"), shape=x.shape), x)
    assert floor.shape == (1, 4, 2, 2)


def test_layers_with_weights(tmp_path):
    mean, variance, gamma, beta = (RNG.uniform(0.5, 2, 4).astype(np.float32) for _ in range(4))
    body = layer("BatchNorm", tops=["x1"], name="bn") + layer("Scale", "scale_param { bias_term: true }", ["x1"], ["x1"], "scale")
    body += layer("PReLU", "", ["x1"], ["y"], "slope")
    slopes = np.array([0.1, 0.2, 0.3, 0.4])
    net = net_of(tmp_path, body, {"bn": [mean * 4, variance * 4, [4]], "scale": [gamma, beta], "slope": [slopes]})
    assert [part.op for part in net.layers] == ["BatchNormalization", "PRelu"]
    c = (1, 4, 1, 1)
    want = (X - mean.reshape(c)) / np.sqrt(variance.reshape(c) + 1e-5) * gamma.reshape(c) + beta.reshape(c)
    np.testing.assert_allclose(run(net, X)[0], np.where(want > 0, want, want * slopes.reshape(c)), rtol=1e-4, atol=1e-5)
    w, b = RNG.standard_normal((5, 196)), RNG.standard_normal(5)
    net = net_of(tmp_path, layer("InnerProduct", "inner_product_param { num_output: 5 }"), {"it": [w, b]})
    np.testing.assert_allclose(run(net, X)[0], X.reshape(1, -1) @ w.T + b, rtol=1e-4, atol=1e-4)
    w = RNG.standard_normal((4, 1, 2, 2))
    up = "convolution_param { num_output: 4 group: 4 kernel_size: 2 stride: 2 bias_term: false }"
    want = np.einsum("nchw,cij->nchiwj", X, w[:, 0]).reshape(1, 4, 14, 14)
    np.testing.assert_allclose(run(net_of(tmp_path, layer("Deconvolution", up), {"it": [w]}), X)[0], want, rtol=1e-4, atol=1e-5)


def test_several_bottoms_and_tops(tmp_path):
    body = layer("Slice", "slice_param { slice_point: 1 }", tops=["a", "b"], name="cut")
    body += layer("Concat", "", ["b", "a"], ["c"], "join") + layer("Eltwise", "eltwise_param { coeff: 2 coeff: -1 }", ["c", "x"], ["y"], "sum")
    (got,) = run(net_of(tmp_path, body), X)
    np.testing.assert_allclose(got, 2 * X[:, [1, 2, 3, 0]] - X, rtol=1e-5, atol=1e-6)
    (got,) = run(net_of(tmp_path, body, outputs=["c"]), X)
    np.testing.assert_array_equal(got, X[:, [1, 2, 3, 0]])


def test_prior_boxes(tmp_path):
    params = "prior_box_param { min_size: 4 max_size: 9 aspect_ratio: 4 flip: false variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 }"
    body = layer("Pooling", "pooling_param { kernel_size: 4 stride: 4 }", tops=["p"], name="pool") + layer("PriorBox", params, ["p", "x"])
    (got,) = run(net_of(tmp_path, body, shape=(1, 4, 8, 8)), np.zeros((1, 4, 8, 8), np.float32))
    assert got.shape == (1, 2, 2 * 2 * 3 * 4)
    np.testing.assert_allclose(got[0, 0, :12].reshape(3, 4) * 8, [[0, 0, 4, 4], [-1, -1, 5, 5], [-2, 1, 6, 3]], atol=1e-6)
    np.testing.assert_allclose(got[0, 1, :4], [0.1, 0.1, 0.2, 0.2])


def test_old_layers_and_training_layers(tmp_path):
    train = layer("Data", "include { phase: TRAIN }", [], ["x"], "data")
    old = 'layers { name: "r" type: RELU bottom: "x" top: "x" } layers { name: "p" type: INNER_PRODUCT bottom: "x" top: "y" '
    old += "inner_product_param { num_output: 3 } }"
    assert [part.op for part in net_of(tmp_path, train + layer("ReLU")).layers] == ["Relu"]
    assert [part.op for part in net_of(tmp_path, old).layers] == ["Relu", "Flatten", "Gemm"]


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (layer("Convolutoin", name="c1"), UnsupportedError, "layer 'c1' (Convolutoin): whet has no such layer. Did you mean 'Convolution'?"),
        (layer("SoftmaxWithLoss", name="loss"), UnsupportedError, "layer 'loss' (SoftmaxWithLoss): it belongs to a training network"),
        (layer("DetectionOutput", name="d"), UnsupportedError, "layer 'd' (DetectionOutput): its number of boxes depends on the data"),
        (layer("ReLU", "", ["xx"]), FrontendError, "layer 'it' (ReLU): its bottom 'xx' is no top of an earlier layer and no input. Did you"),
        (layer("Convolution", "convolution_param { num_output: 6 group: 3 kernel_size: 1 }"), UnsupportedError, "cannot be split into 3 groups"),
        ("layer { name 3 }", FrontendError, "is not a Caffe prototxt"),
        (layer("Slice", "slice_param { slice_point: 9 }", tops=["a", "b"]), UnsupportedError, "layer 'it' (Slice): 4 elements cannot be sliced"),
    ],
)
def test_errors_name_the_layer(tmp_path, body, error, text):
    with pytest.raises(error) as e:
        net_of(tmp_path, body)
    assert text in str(e.value)


def test_missing_and_wrong_weights(tmp_path):
    conv = layer("Convolution", "convolution_param { num_output: 2 kernel_size: 1 }", name="conv1")
    with pytest.raises(FrontendError, match=r"layer 'conv1' \(Convolution\) has no weights in .* Did you mean 'conv_1'"):
        net_of(tmp_path, conv, {"conv_1": [np.zeros((2, 4, 1, 1))]})
    with pytest.raises(FrontendError, match=r"its weights has the shape \(2, 3, 1, 1\) in .* but the prototxt needs \(2, 4, 1, 1\)"):
        net_of(tmp_path, conv, {"conv1": [np.zeros((2, 3, 1, 1)), np.zeros(2)]})
    whole = (tmp_path / "net.caffemodel").read_bytes()
    (tmp_path / "net.caffemodel").write_bytes(whole[:-9])
    with pytest.raises(FrontendError, match="is not a caffemodel, or it is truncated"):
        network_from_caffe(tmp_path / "net.prototxt")
    (tmp_path / "net.caffemodel").unlink()
    with pytest.raises(FrontendError, match=r"no net.caffemodel beside"):
        network_from_caffe(tmp_path / "net.prototxt")
    with pytest.raises(FrontendError, match=r"the description of a Caffe model.*whet\.network_from_caffe"):
        network_from_onnx(tmp_path / "net.prototxt")


def test_check_lists_every_unsupported_layer(tmp_path):
    body = layer("Foo", tops=["a"], name="f") + layer("ReLU", "", ["a"], ["b"], "r") + layer("Python", "", ["x"], ["c"], "p")
    (tmp_path / "net.prototxt").write_text(f'input: "x" input_shape {{ dim: 1 dim: 4 }} {body}')
    report = check_caffe(tmp_path / "net.prototxt")
    assert [(p.node, p.reached) for p in report.problems] == [("f", True), ("r", False), ("p", True)]
    done = CliRunner().invoke(group, ["check", str(tmp_path / "net.prototxt")])
    assert done.exit_code == 1
    assert "3 of 3 layers cannot be read" in done.output
    assert "layer 'p' (Python)" in done.output


def test_exec_with_trtexecs_flags(tmp_path):
    body = layer("Convolution", "convolution_param { num_output: 2 kernel_size: 3 }") + layer("Softmax", "", ["y"], ["prob"], "prob")
    net_of(tmp_path, body, {"it": [np.ones((2, 4, 3, 3)), np.zeros(2)]})
    common = ["exec", f"--deploy={tmp_path / 'net.prototxt'}", "--output=prob", "--backend=null", "--buildOnly", "--noVerify", "--verbose"]
    done = CliRunner().invoke(group, [*common, f"--model={tmp_path / 'net.caffemodel'}", "--minShapes=x:1x4x5x7", "--maxShapes=x:4x4x9x7"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(group, common)
    assert done.exit_code == 0, done.output
    assert "the weights are random" in done.output
    done = CliRunner().invoke(group, ["exec", "--model=x.caffemodel"])
    assert done.exit_code != 0
    done = CliRunner().invoke(group, ["exec", "--uff=x.uff"])
    assert "UFF files cannot be read: give the TensorFlow model itself to --onnx" in done.output


@pytest.mark.data
def test_mtcnn_finds_the_faces():
    shapes = [{"data": ("N", 3, "H", "W")}, *({"data": ("N", None, None, None)} for _ in range(2))]
    nets = [network_from_caffe(datasets.path_of(f"caffe/det{i}.prototxt"), shapes=s) for i, s in enumerate(shapes, 1)]
    predict = [lambda x, net=net: run_network(net, {"data": np.ascontiguousarray(x)}) for net in nets]
    for photo, centres in (("test1.jpg", [(121, 61), (329, 128)]), ("test2.jpg", [(266, 178)])):
        found = mtcnn.faces(np.asarray(Image.open(datasets.path_of(f"caffe/{photo}")).convert("RGB")), *predict)
        boxes = sorted(found.tolist())
        assert [score > 0.99 for *_, score in boxes] == [True] * len(centres)
        for (x1, y1, x2, y2, _), (x, y) in zip(boxes, centres, strict=True):
            assert abs((x1 + x2) / 2 - x) < 8
            assert abs((y1 + y2) / 2 - y) < 8
