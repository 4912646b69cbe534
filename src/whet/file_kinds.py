"""Names the kind of a file that is not the expected one (a Keras model given as ONNX, a model given as an engine), and the nearest way out."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

_HEAD = 4096  # bytes that identify a file

_TENSORFLOW = "whet.network_from_tensorflow and all commands read it, through tf2onnx (pip install 'whet[tf]')"
_TORCH = "Load it in PyTorch and export it: torch.onnx.export(model, example_inputs, 'model.onnx')"
_CAFFE = "Give both files to whet.network_from_caffe, or to `whet exec --deploy=NET.prototxt --model=NET.caffemodel`"
_ENGINE = "Engines are not rebuilt into models. Run it with `whet exec --loadEngine=FILE`, or give the .onnx file that it was built from"
_ORIGINAL = "Give the .onnx file that it was converted from, or export the original model to ONNX"
_TENSORRT = "Build from the .onnx file that it was built from"
_PADDLE = "Convert it: paddle2onnx --model_dir FOLDER --model_filename FILE --params_filename PARAMETERS --save_file model.onnx"
_EXPORTED = "Export it: torch.onnx.export(torch.export.load('FILE'), f='model.onnx', dynamo=True)"
_TREES = "Convert the trained model to ONNX: skl2onnx for scikit-learn, onnxmltools for XGBoost and LightGBM"
_ARRAYS = "As data it belongs to --calibData, --loadInputs or --data; the model is an .onnx file"

_Kind = tuple[str, str]  # (what it is, the way out)

_HDF5 = b"\x89HDF\r\n\x1a\n"
_KERAS_CONFIG = b"model_config"  # the attribute in which Keras saves a model's layers; files of weights do not have it

#: first bytes -> kind
_MAGIC: tuple[tuple[bytes, _Kind], ...] = (
    (b"whet-eng", ("an engine built by whet", _ENGINE)),
    (b"ftrt", ("an engine (plan) of TensorRT", _TENSORRT)),
    (b"ptrt", ("an engine (plan) of TensorRT", _TENSORRT)),
    (b"\x93NUMPY", ("a NumPy array (.npy)", _ARRAYS)),
    (b"GGUF", ("a GGUF file of llama.cpp", "whet does not run such models; export the original one to ONNX")),
    (b"\x1f\x8b", ("compressed with gzip", "Unpack it with gunzip or tar -x first")),
    (b"\x28\xb5\x2f\xfd", ("compressed with zstd", "Unpack it with unzstd first")),
    (b"\x80\x02", ("a Python pickle, as older PyTorch saves (.pt, .pth)", _TORCH)),
    (b"\x80\x04", ("a Python pickle", _TORCH)),
    (b"\x7fELF", ("a program or a library", "Give the .onnx file of the model")),
    (b"\x89PNG", ("an image", _ARRAYS)),
    (b"\xff\xd8\xff", ("an image", _ARRAYS)),
    (b"%PDF", ("a PDF document", "Give the .onnx file of the model")),
)

#: pattern in a text's beginning -> kind
_TEXT: tuple[tuple[str, _Kind], ...] = (
    (r"^(<\?xml[^>]*>)?\s*<net\b", ("an OpenVINO model", _ORIGINAL)),
    (r"<PMML\b", ("a PMML model", _TREES)),
    (r'^\s*\{\s*"base_code"\s*:\s*\{[^}]*"pir"', ("a PaddlePaddle model", _PADDLE)),
    (r"^7767517\s", ("an ncnn model", _ORIGINAL)),
    (r"^\s*(#.*\s+)*\[net\]", ("the description of a Darknet model", _ORIGINAL)),
    (r"^tree\s+version=v", ("a LightGBM model", _TREES)),
    (r'^\s*\{\s*"(learner"|version"\s*:.*"learner")', ("an XGBoost model", _TREES)),
)

#: extension -> kind, for formats without a signature
_EXTENSION: dict[str, _Kind] = {
    ".caffemodel": ("the weights of a Caffe model", _CAFFE),
    ".prototxt": ("the description of a Caffe model", _CAFFE),
    ".h5": ("named as a Keras model (HDF5)", _TENSORFLOW),
    ".keras": ("named as a Keras model", _TENSORFLOW),
    ".tflite": ("named as a TensorFlow Lite model", _TENSORFLOW),
    ".pb": ("named as a TensorFlow graph (GraphDef)", _TENSORFLOW),
    ".pt": ("named as a PyTorch model", _TORCH),
    ".pth": ("named as a PyTorch model", _TORCH),
    ".pt2": ("named as an exported program of PyTorch", _EXPORTED),
    ".pdmodel": ("a PaddlePaddle model", _PADDLE),
    ".pdiparams": ("the parameters of a PaddlePaddle model", _PADDLE),
    ".param": ("named as an ncnn model", _ORIGINAL),
    ".bin": ("named as weights without a graph, as OpenVINO, ncnn and PyTorch save them", _ORIGINAL),
    ".mnn": ("named as an MNN model", _ORIGINAL),
    ".weights": ("named as the weights of a Darknet model", _ORIGINAL),
    ".cfg": ("named as the description of a Darknet model", _ORIGINAL),
    ".ubj": ("named as an XGBoost model", _TREES),
    ".mlmodel": ("a Core ML model", "Export the original model to ONNX"),
    ".safetensors": ("weights without a graph (safetensors)", _TORCH),
}


def describe_kind(source: str | os.PathLike[str] | bytes | memoryview) -> str | None:
    """The kind and the way out for a file, folder or content of a known kind: "a checkpoint of PyTorch. Load it ...". None for unknown kinds.

    The content decides; the extension only for formats without a signature.
    """
    found = _find_kind(source)
    return None if found is None else f"{found[0]}. {found[1]}."


def name_kind(source: str | os.PathLike[str] | bytes | memoryview) -> str | None:
    """The kind alone: "a checkpoint of PyTorch"."""
    found = _find_kind(source)
    return None if found is None else found[0]


def name_content(path: str | os.PathLike[str]) -> str | None:
    """The kind that a file's content shows, whatever the file is called; None for folders, unreadable files and unknown content."""
    try:
        with Path(path).open("rb") as f:
            found = _find_content_kind(f.read(_HEAD), lambda: f)
    except (OSError, ValueError):
        return None
    return None if found is None else found[0]


def _find_kind(source: str | os.PathLike[str] | bytes | memoryview) -> _Kind | None:
    if isinstance(source, bytes | memoryview):
        return _find_content_kind(bytes(source[:_HEAD]), lambda: io.BytesIO(source))
    path = Path(source)
    try:
        return _find_folder_kind(path) if path.is_dir() else _find_file_kind(path)
    except (OSError, ValueError):
        return None


def _find_folder_kind(path: Path) -> _Kind | None:
    if (path / "saved_model.pb").exists() or (path / "saved_model.pbtxt").exists():
        return "a TensorFlow SavedModel", _TENSORFLOW
    if path.suffix == ".mlpackage":
        return _EXTENSION[".mlmodel"]
    models = sorted(p.name for p in path.glob("*.onnx"))
    if not models and (path / "config.json").exists():
        return "a folder of a Hugging Face model", f"Export it: optimum-cli export onnx --model {path} {path}-onnx"
    return ("a folder", f"Give the .onnx file in it: {', '.join(models[:3])}") if models else None


def _find_file_kind(path: Path) -> _Kind | None:
    with path.open("rb") as f:
        head = f.read(_HEAD)
        suffix = path.suffix.lower()
        if path.name == "saved_model.pb":
            return "the graph of a TensorFlow SavedModel", _TENSORFLOW
        found = _find_content_kind(head, lambda: f)
    named = _EXTENSION.get(suffix)
    if named is not None and (found is None or found[0].startswith("a text file")):
        found = named
    return None if found is None else (found[0], found[1].replace("FILE", str(path)))


def _find_content_kind(head: bytes, open_whole: Callable[[], IO[bytes]]) -> _Kind | None:
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head.startswith(_HDF5):
        return _find_hdf5_kind(open_whole())
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model", _TENSORFLOW
    if head[4:8] == b"ORTM":
        return "a model in ONNX Runtime's own format (.ort)", "Give the .onnx file that it was converted from"
    if head.startswith(b"PK\x03\x04"):
        return _find_zip_kind(open_whole())
    if len(head) > 9 and head[8:10] in (b'{"', b"{ ") and int.from_bytes(head[:8], "little") < 1 << 27:
        return _EXTENSION[".safetensors"]
    return _find_text_kind(head)


def _find_hdf5_kind(file: IO[bytes]) -> _Kind:
    file.seek(0)
    tail = b""
    while block := file.read(1 << 20):
        if _KERAS_CONFIG in tail + block:
            return "a Keras model (HDF5)", _TENSORFLOW
        tail = block[-len(_KERAS_CONFIG) :]
    return "an HDF5 file without a Keras model: weights or data alone", "Save the whole model in Keras: model.save('model.keras')"


def _find_zip_kind(file: IO[bytes]) -> _Kind:
    import zipfile

    try:
        with zipfile.ZipFile(file) as z:
            names = z.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return "a truncated zip archive", "Download or copy it again"

    def has(ending: str) -> bool:
        return any(n == ending or n.endswith(f"/{ending}") for n in names)

    if has("data.pkl"):
        if has("constants.pkl"):
            return "a TorchScript model of PyTorch (.pt)", _TORCH
        return "a checkpoint of PyTorch (.pt, .pth)", _TORCH
    if has("archive_format") or has("models/model.json"):
        return "an exported program of PyTorch (.pt2)", _EXPORTED
    if has("model.weights.h5") or (has("config.json") and has("metadata.json")):
        return "a Keras model (.keras)", _TENSORFLOW
    if names and all(n.endswith(".npy") for n in names):
        return "an archive of NumPy arrays (.npz)", _ARRAYS
    if has("saved_model.pb"):
        return "a zip archive of a TensorFlow SavedModel", "Unpack it. " + _TENSORFLOW
    return "a zip archive" + _list_models(names), "Unpack it first"


def _list_models(names: Sequence[str]) -> str:
    models = [n for n in names if n.endswith(".onnx")]
    return f" with {', '.join(models[:3])}" if models else ""


def _find_text_kind(head: bytes) -> _Kind | None:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as e:
        if e.start < len(head) - 4 or not e.start:  # a character may be cut at the end of the head
            return None
        text = head[: e.start].decode("utf-8")
    if not text.strip() or any(ord(c) < 32 and c not in "\t\n\r\f" for c in text):
        return None
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype html", "<html")):
        return "a web page: the download gave a page instead of the model", "Download the file itself (on GitHub: the raw file)"
    for pattern, kind in _TEXT:
        if re.search(pattern, text):
            return kind
    if ("layer {" in text or "layers {" in text or "layer{" in text) and "type:" in text:
        return _EXTENSION[".prototxt"]
    return "a text file", "Give the .onnx file of the model"
