"""Files of another kind given as a model or as an engine are named as what they are, with the nearest way out."""

import io
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner

from whet import zoo
from whet.builder import BuildConfig, build
from whet.cli import group
from whet.engine import engine_bytes, read_engine
from whet.errors import EngineError, FrontendError, WhetError
from whet.frontends import network_from_onnx
from whet.network import parse_network


def archive(*names):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for n in names:
            z.writestr(n, b"content")
    return out.getvalue()


def engine():
    net = parse_network("network n source\nin %x: f32[2]\n%y = Relu(%x)\nout %y\n")
    return engine_bytes(build(net, BuildConfig(backend="null")))


def npy():
    out = io.BytesIO()
    np.save(out, np.zeros(3))
    return out.getvalue()


FILES = {
    "net.h5": (b"\x89HDF\r\n\x1a\n" + bytes((1 << 20) - 12) + b"model_config", "a Keras model (HDF5)", "whet.network_from_tensorflow"),
    "weights.h5": (b"\x89HDF\r\n\x1a\n" + bytes(200), "an HDF5 file without a Keras model: weights or data alone", "model.save('model.keras')"),
    "net.keras": (archive("metadata.json", "config.json", "model.weights.h5"), "a Keras model", "whet.network_from_tensorflow"),
    "deploy.prototxt": (b'name: "net"\nlayer {\n  name: "c"\n  type: "Convolution"\n}\n', "the description of a Caffe model", "network_from_caffe"),
    "net.caffemodel": (b"\x0a\x03net\xa2\x06\x04abcd", "the weights of a Caffe model", "whet.network_from_caffe"),
    "net.pt": (archive("net/data.pkl", "net/data/0"), "a checkpoint of PyTorch", "torch.onnx.export"),
    "script.pt": (archive("net/data.pkl", "net/constants.pkl"), "a TorchScript model", "torch.onnx.export"),
    "net.tflite": (b"\x1c\x00\x00\x00TFL3" + bytes(60), "a TensorFlow Lite model", "whet.network_from_tensorflow"),
    "frozen.pb": (b"\x0a\x03abc\xff\xff", "named as a TensorFlow graph", "whet.network_from_tensorflow"),
    "net.zip": (archive("a/net.onnx", "readme.txt"), "a zip archive with a/net.onnx", "Unpack it"),
    "data.npz": (archive("x.npy"), "an archive of NumPy arrays", "Calibration(samples=...)"),
    "data.npy": (npy(), "a NumPy array", "Calibration(samples=...)"),
    "page.onnx": (b"<!DOCTYPE html><html>not found</html>", "a web page", "Download the file itself"),
    "notes.onnx": ("Übersicht\nno model\n".encode(), "a text file", ".onnx file"),
    "plan.onnx": (b"ftrt" + bytes(60), "an engine (plan) of TensorRT", ".onnx file"),
    "old.engine": (b"ptrt" + bytes(60), "an engine (plan) of TensorRT", ".onnx file"),
    "program.pt2": (archive("p/models/model.json", "p/archive_format"), "an exported program of PyTorch", "torch.export.load("),
    "net.xml": (b'<?xml version="1.0"?>\n<net name="a" version="11"><layers/></net>', "an OpenVINO model", "converted from"),
    "net.bin": (b"\xff\xff" + bytes(60), "named as weights without a graph, as OpenVINO", "converted from"),
    "trees.pmml": (b'<?xml version="1.0"?>\n<PMML version="4.4"><Header/></PMML>', "a PMML model", "skl2onnx"),
    "inference.pdmodel": (b"\x0a\x10" + bytes(60), "a PaddlePaddle model", "paddle2onnx"),
    "inference.json": (b'{"base_code":{"magic":"pir","trainable":false}}', "a PaddlePaddle model", "paddle2onnx"),
    "net.param": (b"7767517\n3 3\nInput data 0 1 data\n", "an ncnn model", "converted from"),
    "net.mnn": (b"\x20\x00\x00\x00" + bytes(60), "named as an MNN model", "converted from"),
    "net.ort": (b"\x18\x00\x00\x00ORTM" + bytes(60), "a model in ONNX Runtime's own format", "converted from"),
    "yolo.cfg": (b"# comment\n[net]\nbatch=1\n[convolutional]\n", "the description of a Darknet model", "converted from"),
    "yolo.weights": (b"\x00\x00\x00\x00\x02" + bytes(60), "named as the weights of a Darknet model", "converted from"),
    "lgb.txt": (b"tree\nversion=v4\nnum_class=1\n", "a LightGBM model", "onnxmltools"),
    "xgb.json": (b'{"learner":{"attributes":{}},"version":[2,0,3]}', "an XGBoost model", "onnxmltools"),
    "xgb.ubj": (b"{L\x00\x00", "named as an XGBoost model", "onnxmltools"),
    "net.tar.gz": (b"\x1f\x8b" + bytes(60), "compressed with gzip", "Unpack"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named_as_such(name, tmp_path):
    data, kind, way_out = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FrontendError) as e:
        network_from_onnx(tmp_path / name)
    assert f"{name} is not an ONNX model, but {kind}" in str(e.value)
    assert way_out in str(e.value)
    assert "truncated" not in str(e.value)


def test_an_engine_given_as_a_model(tmp_path):
    (tmp_path / "net.engine").write_bytes(engine())
    with pytest.raises(FrontendError, match=r"net\.engine is not an ONNX model, but an engine built by whet.*--loadEngine=.*net\.engine"):
        network_from_onnx(tmp_path / "net.engine")


def test_a_folder_of_a_hugging_face_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(FrontendError, match=r"is a folder of a Hugging Face model. Export it: optimum-cli export onnx --model"):
        network_from_onnx(tmp_path)


def test_a_saved_model_folder_and_a_folder_with_a_model(tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "saved_model.pb").write_bytes(b"\x08\x01")
    with pytest.raises(FrontendError, match=r"is a TensorFlow SavedModel.*network_from_tensorflow"):
        network_from_onnx(saved)
    monkeypatch.setenv("WHET_TENSORFLOW_PYTHON", str(tmp_path / "no python"))
    done = CliRunner().invoke(group, ["check", str(saved)])  # reads it through TensorFlow
    assert isinstance(done.exception, WhetError)
    assert "WHET_TENSORFLOW_PYTHON" in str(done.exception)
    (tmp_path / "net.onnx").write_bytes(b"")
    with pytest.raises(FrontendError, match=r"Give the \.onnx file in it: net\.onnx"):
        network_from_onnx(tmp_path)


def test_a_damaged_model_is_still_called_truncated(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x3a\xff\xff\xff\x01rest")
    with pytest.raises(FrontendError, match="truncated"):
        network_from_onnx(tmp_path / "net.onnx")


def test_another_file_given_as_an_engine():
    with pytest.raises(EngineError, match="not an engine of whet, but an ONNX model"):
        read_engine(zoo.build("lenet5").SerializeToString())
    with pytest.raises(EngineError, match="not an engine of whet, but a zip archive"):
        read_engine(archive("a"))
