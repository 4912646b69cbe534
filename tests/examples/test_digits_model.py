"""The demo's trained network: the values stated in its README, and its data."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "digits"
MODEL = FOLDER / "digits_resnet.onnx"
README = (FOLDER / "README.md").read_text()


@pytest.fixture(scope="module")
def data():
    spec = importlib.util.spec_from_file_location("digits_data", FOLDER / "data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    return onnx.load(MODEL)


def right(images: np.ndarray, digits: np.ndarray) -> int:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(MODEL), options, providers=["CPUExecutionProvider"])
    return int((session.run(["logits"], {"input": images})[0].argmax(1) == digits).sum())


def stated(pattern: str) -> float:
    return float(re.search(pattern, README)[1].replace(",", ""))


def test_accuracy_on_the_held_out_images_is_the_stated_one(data):
    x, y = data.load_heldback()
    assert len(y) >= 500
    hits = right(x, y)
    assert hits / len(y) >= 0.985
    assert hits == stated(r"\(([\d,]+) correct\)")
    assert round(100 * hits / len(y), 2) == stated(r"([\d.]+) % of the 597")


def test_the_file_is_small_and_its_numbers_are_the_stated_ones(model):
    size = MODEL.stat().st_size
    assert size <= 3_000_000
    assert size == stated(r"file \| ([\d,]+) bytes")
    trained = [w for w in model.graph.initializer if "running" not in w.name]
    assert sum(int(np.prod(w.dims)) for w in trained) == stated(r"parameters \| ([\d,]+)")


def test_the_graph_has_coupled_channels(model):
    onnx.checker.check_model(model, full_check=True)
    kinds = [n.op_type for n in model.graph.node]
    assert {k: kinds.count(k) for k in set(kinds)} == {
        "Conv": 11, "BatchNormalization": 11, "Relu": 9, "Add": 4, "GlobalAveragePool": 1, "Flatten": 1, "Gemm": 1}
    assert model.opset_import[0].version == 17
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    assert "layer2.0.downsample.0.weight" in {w.name for w in model.graph.initializer}


def test_the_split_is_fixed_and_disjoint(data):
    order = data.order()
    assert sorted(order) == list(range(1797))
    assert order[:8].tolist() == [662, 431, 1150, 1718, 1740, 692, 1010, 1309]
    held, train = data.load_heldback()[0], data.load_train()[0]
    assert held.shape == (597, 1, 32, 32)
    assert train.shape == (1200, 1, 32, 32)
    assert held.dtype == train.dtype == np.float32
    assert not {x.tobytes() for x in held} & {x.tobytes() for x in train}
    assert abs(train.mean()) < 0.02
    assert abs(train.std() - 1) < 0.02


def test_upscaling_is_bilinear_with_centres_at_half_integers(data):
    y, x = np.mgrid[:8, :8].astype(float)
    plane = data.upscale((2 * x + 3 * y + 1)[None], 32)[0]
    at = (np.arange(32) + 0.5) / 4 - 0.5
    expected = 2 * np.clip(at, 0, 7)[None, :] + 3 * np.clip(at, 0, 7)[:, None] + 1
    np.testing.assert_allclose(plane, expected, atol=1e-5)
    same = np.random.default_rng(0).random((3, 8, 8))
    np.testing.assert_allclose(data.upscale(same, 8), same, atol=1e-6)


def test_upscaling_equals_pillows(data):
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).random((8, 8), np.float32)
    theirs = np.asarray(image_module.fromarray(pixels).resize((32, 32), image_module.Resampling.BILINEAR))
    np.testing.assert_allclose(data.upscale(pixels[None])[0], theirs, atol=1e-5)
