"""TensorFlow models: the kind of a file, the real trained networks with their accuracy, frozen graphs and TFLite, errors with the way out.

Conversions need TensorFlow: this Python, or the one that WHET_TENSORFLOW_PYTHON names (make tensorflow).
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import whet
from support import datasets, realdata
from whet.cli import group
from whet.errors import BackendError, FrontendError
from whet.frontends import model_kind, network_from_tensorflow
from whet.ops import run_network

KERAS_HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(5000) + b"model_config"
PYTHON = os.environ.get("WHET_TENSORFLOW_PYTHON") or sys.executable


def can_convert() -> bool:
    code = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(n) for n in ('tensorflow', 'tf2onnx', 'tf_keras')))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True).returncode == 0


converts = pytest.mark.skipif(not can_convert(), reason="TensorFlow is not installed (make tensorflow; WHET_TENSORFLOW_PYTHON)")


@pytest.mark.parametrize(("name", "head", "kind"), [
    ("a.h5", b"\x89HDF", "tensorflow"), ("a.keras", b"PK", "tensorflow"), ("a.tflite", b"", "tensorflow"), ("saved_model.pb", b"\x08", "tensorflow"),
    ("frozen.pb", b"\x0a\x10", "tensorflow"), ("model.pb", b"\x08\x07\x12", "onnx"), ("a.onnx", b"", "onnx"), ("a.prototxt", b"", "caffe"),
])  # fmt: skip
def test_the_reader_of_a_file_follows_from_its_name_and_first_byte(name, head, kind, tmp_path):
    (tmp_path / name).write_bytes(head)
    assert model_kind(tmp_path / name) == kind


def test_a_folder_is_a_saved_model_if_it_holds_one(tmp_path):
    assert model_kind(tmp_path) == "onnx"
    (tmp_path / "saved_model.pb").write_bytes(b"")
    assert model_kind(tmp_path) == "tensorflow"


def test_without_tensorflow_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.h5").write_bytes(KERAS_HDF5)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'tf2onnx'\" >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("WHET_TENSORFLOW_PYTHON", str(fake))
    with pytest.raises(BackendError, match=r"a\.h5 is a Keras model: .*No module named 'tf2onnx'.*whet\[tf\].*WHET_TENSORFLOW_PYTHON"):
        network_from_tensorflow(tmp_path / "a.h5")
    monkeypatch.setenv("WHET_TENSORFLOW_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(BackendError, match="cannot start"):
        network_from_tensorflow(tmp_path / "a.h5")


def test_a_failed_conversion_gives_tensorflows_reason(tmp_path, monkeypatch):
    (tmp_path / "a.h5").write_bytes(KERAS_HDF5)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'ValueError: Unknown layer: Mine.' >&2\necho 'more' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("WHET_TENSORFLOW_PYTHON", str(fake))
    with pytest.raises(FrontendError, match=r"a\.h5 cannot be converted by tf2onnx: ValueError: Unknown layer: Mine\..*tf2onnx\.convert --help"):
        network_from_tensorflow(tmp_path / "a.h5")
    with pytest.raises(FrontendError, match="no such file"):
        network_from_tensorflow(tmp_path / "absent.h5")


@pytest.mark.parametrize(("name", "content", "error"), [
    ("weights.h5", b"\x89HDF\r\n\x1a\n" + bytes(3000), r"named as a Keras model, but is an HDF5 file without a Keras model"),
    ("page.h5", b"<!DOCTYPE html><html>not found</html>", "named as a Keras model, but is a web page"),
    ("plan.keras", b"whet-eng" + bytes(60), "named as a Keras model, but is an engine built by whet"),
    ("zeros.hdf5", bytes(600), "named as a Keras model, but is of another kind, or damaged"),
    ("none.tflite", b"", "named as a TensorFlow Lite model, but is empty"),
    ("frozen.pb", b"\x89PNG" + bytes(60), "named as a frozen graph of TensorFlow, but is an image"),
])  # fmt: skip
def test_a_file_of_another_kind_is_named_before_tensorflow_is_started(name, content, error, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("WHET_TENSORFLOW_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(FrontendError, match=error):
        network_from_tensorflow(tmp_path / name)


MODELS = {"pretrainedResnet.h5": "resnet8_mlperftiny", "vww_96.h5": "vww_mobilenet025_96"}  # file -> its row in the data's README


@converts
@pytest.mark.data
@pytest.mark.parametrize("file", MODELS)
def test_keras_models_have_the_stated_accuracy(file):
    """An engine of the .h5 file, on all images of the data's README (88.1 % of 1,000 and 86.7 % of 128)."""
    real = next(m for m in realdata.models() if m.name == MODELS[file])
    path = datasets.path_of(f"tensorflow/{file}")
    net = network_from_tensorflow(path)
    (given,), (made,) = net.inputs, net.outputs
    assert str(given.shape[0]) == "N"
    profile = whet.Profile(min=(1, *given.shape[1:]), opt=(8, *given.shape[1:]))
    engine = whet.build(net, shapes={given.name: profile}, timing_cache="", optimization_level=1)
    images = [np.moveaxis(next(iter(feeds.values())), 1, -1) for feeds in real.inputs(None)]  # TensorFlow's layout
    outputs = [engine(np.concatenate(images[i : i + 8])) for i in range(0, len(images), 8)]
    scored = real.score([{"probs": row[None]} for row in np.concatenate(outputs)], None)
    for m in real.metrics:
        assert abs(scored[m.name] - m.stated) <= m.tolerance, (scored, m)
    assert made.shape[1:] == outputs[0].shape[1:]


@converts
@pytest.mark.data
def test_a_saved_model_gives_what_tensorflow_computes(tmp_path):
    path = datasets.path_of("tensorflow/kws_saved_model")
    net = network_from_tensorflow(path)
    x = np.random.default_rng(0).standard_normal((4, 49, 10, 1)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import os, sys; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "import numpy as np, tf_keras, tensorflow as tf\n"
        "f = tf.saved_model.load(sys.argv[1]).signatures['serving_default']\n"
        "y = f(tf.constant(np.load(sys.argv[2])))\n"
        "np.save(sys.argv[3], list(y.values())[0].numpy())\n"
    )
    command = [PYTHON, "-c", code, str(path), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run(command, check=True, capture_output=True, env={"PATH": ""})
    want = np.load(tmp_path / "y.npy")
    np.testing.assert_allclose(run_network(net, {net.inputs[0].name: x})[net.outputs[0].name], want, atol=1e-5)
    engine = whet.build(str(path), shapes={net.inputs[0].name: x.shape}, timing_cache="", optimization_level=0)
    np.testing.assert_allclose(engine(x), want, atol=1e-5)


WRITE = """
import os, sys; os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
folder = sys.argv[1]
inputs = tf.keras.Input((8, 8, 3), name="image")
x = tf.keras.layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
x = tf.keras.layers.GlobalAveragePooling2D()(x)
model = tf.keras.Model(inputs, tf.keras.layers.Dense(5, name="scores")(x))
model.save(f"{folder}/net.keras")
f = tf.function(model).get_concrete_function(tf.TensorSpec((2, 8, 8, 3), tf.float32))
frozen = convert_variables_to_constants_v2(f)
tf.io.write_graph(frozen.graph, folder, "net.pb", as_text=False)
open(f"{folder}/net.tflite", "wb").write(tf.lite.TFLiteConverter.from_concrete_functions([frozen]).convert())
image = np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype("f4")
np.savez(f"{folder}/io.npz", image=image, scores=model(image).numpy())
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small network as .keras, frozen graph and TFLite, with an input and TensorFlow's output."""
    folder = tmp_path_factory.mktemp("tensorflow")
    done = subprocess.run([PYTHON, "-c", WRITE, str(folder)], capture_output=True, text=True, env={"PATH": "", "HOME": str(folder)})
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@converts
@pytest.mark.parametrize("file", ["net.keras", "net.pb", "net.tflite"])
def test_keras_3_frozen_graphs_and_tflite_give_what_tensorflow_computes(file, written):
    net, data = network_from_tensorflow(written / file), np.load(written / "io.npz")
    got = run_network(net, {net.inputs[0].name: data["image"]})[net.outputs[0].name]
    np.testing.assert_allclose(got, data["scores"], atol=1e-5)
    if file == "net.keras":
        assert ([t.name for t in net.inputs], [t.name for t in net.outputs]) == (["image"], ["scores"])


@converts
def test_commands_take_tensorflow_files(written, tmp_path):
    run = CliRunner().invoke
    checked = run(group, ["check", str(written / "net.keras")])
    assert checked.exit_code == 0, checked.output
    assert "every node is supported" in checked.output
    ran = run(group, ["exec", f"--onnx={written / 'net.keras'}", "--shapes=image:2x8x8x3", "--iterations=2", "--duration=0", "--warmUp=0",
                      f"--saveEngine={tmp_path / 'net.engine'}", "--builderOptimizationLevel=0"])  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "net.engine").exists()
    pruned = run(group, ["prune", str(written / "net.keras"), "--ratio=0.25", "-o", str(tmp_path / "pruned.onnx")])
    assert pruned.exit_code == 0, pruned.output
    assert Path(tmp_path / "pruned.onnx").exists()
