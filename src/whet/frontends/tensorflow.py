"""Reads TensorFlow's models (SavedModel, Keras, frozen graph, TensorFlow Lite) as source Networks, through tf2onnx in a process of its own.

TensorFlow requires other versions of protobuf than onnx does, so it may live in another environment: WHET_TENSORFLOW_PYTHON names its Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

from whet.errors import BackendError, FrontendError
from whet.file_kinds import name_content
from whet.frontends._onnx_shapes import UserShapes
from whet.frontends.onnx import network_from_onnx
from whet.frontends.onnx_check import Report, check_onnx
from whet.network import Network

OPSET = 18
_SCRIPT = Path(__file__).with_name("_tensorflow_script.py")
_TIMEOUT = 600  # seconds; TensorFlow needs ten to start
_INSTALL = (
    "pip install 'whet[tf]', or in an environment of its own (python -m venv tf; tf/bin/pip install tensorflow-cpu tf2onnx tf_keras) that "
    "WHET_TENSORFLOW_PYTHON=tf/bin/python names"
)
_KINDS = {".h5": "keras", ".hdf5": "keras", ".keras": "keras", ".pb": "graph_def", ".tflite": "tflite"}
_TITLES = {
    "saved_model": "a TensorFlow SavedModel",
    "keras": "a Keras model",
    "graph_def": "a frozen graph of TensorFlow",
    "tflite": "a TensorFlow Lite model",
}
_UNNAMED = "unk__"  # how tf2onnx calls sizes without a name
_SAVED = ("saved_model.pb", "saved_model.pbtxt")


def find_tensorflow_kind(path: str | os.PathLike) -> str | None:
    """"saved_model", "keras", "graph_def" or "tflite" by the folder's files or the extension; None for other files."""
    path = Path(path)
    if os.path.isdir(path):
        return "saved_model" if any((path / name).exists() for name in _SAVED) else None
    if path.name in _SAVED:
        return "saved_model"
    kind = _KINDS.get(path.suffix.lower())
    return None if kind == "graph_def" and _is_onnx(path) else kind


def _is_onnx(path: Path) -> bool:
    """True for an ONNX model called .pb: it begins with its version (field 1, an integer), a GraphDef with a node (field 1, a message)."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"\x08"
    except OSError:
        return False


def network_from_tensorflow(path: str | os.PathLike, *, shapes: UserShapes | None = None) -> Network:
    """Reads a SavedModel (its folder), a Keras model (.h5, .keras), a frozen graph (.pb) or a TensorFlow Lite model (.tflite).

    `shapes` is as for network_from_onnx. A SavedModel is read at its signature `serving_default`; inputs of a frozen graph are its placeholders,
    outputs the values that no node reads. Activations stay channels-last at inputs and outputs, as in TensorFlow.
    Raises BackendError if tensorflow or tf2onnx is not installed, FrontendError if the model cannot be converted, UnsupportedError for an op.
    """
    model = onnx_from_tensorflow(path)
    net = network_from_onnx(model, shapes=shapes)
    unnamed = {str(t.shape[0]) for t in net.inputs if t.type.rank and str(t.shape[0]).startswith(_UNNAMED)}
    if shapes is not None or len(unnamed) != 1:
        return net
    batch = {t.name: ("N" if str(t.shape[0]) in unnamed else None, *(None,) * (t.type.rank - 1)) for t in net.inputs if t.type.rank}
    return network_from_onnx(model, shapes=batch)


def check_tensorflow(path: str | os.PathLike, *, shapes: UserShapes | None = None) -> Report:
    """Tries every op of the converted model and reports all unsupported ones. Raises like network_from_tensorflow."""
    report = check_onnx(onnx_from_tensorflow(path), shapes=shapes)
    report.source = str(path)
    return report


def onnx_from_tensorflow(path: str | os.PathLike) -> onnx.ModelProto:
    """The model as tf2onnx converts it, unchanged."""
    kind, source = find_tensorflow_kind(path), Path(path)
    if kind is None:
        raise FrontendError(f"{path} is not a SavedModel folder, a Keras model (.h5, .keras), a frozen graph (.pb) or a .tflite file")
    if not source.exists():
        raise FrontendError(f"cannot read {path}: there is no such file")
    if kind == "saved_model" and not source.is_dir():
        source = source.parent
    if source.is_file():
        _check_content(source, kind)
    python = os.environ.get("WHET_TENSORFLOW_PYTHON") or sys.executable
    with tempfile.TemporaryDirectory(prefix="whet-tf-") as folder:
        target = Path(folder) / "model.onnx"
        command = [python, str(_SCRIPT), kind, str(source.absolute()), str(target), str(OPSET)]
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")} if python != sys.executable else None
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, cwd=folder, env=environment)
        except OSError as e:
            raise BackendError(f"cannot start {python}: {e.strerror}. WHET_TENSORFLOW_PYTHON names the Python with TensorFlow: {_INSTALL}") from e
        except subprocess.TimeoutExpired as e:
            raise FrontendError(f"{path}: tf2onnx took longer than {_TIMEOUT} s. Convert the model by hand: python -m tf2onnx.convert") from e
        if done.returncode or not target.exists():
            raise _make_conversion_error(path, kind, python, done.stderr)
        return onnx.load(target)


def _check_content(path: Path, kind: str) -> None:
    """Raises FrontendError for a file whose content cannot be of the kind that its extension names; TensorFlow is not needed to say so."""
    content = name_content(path)
    if kind == "graph_def":
        fits = content is None  # a message without a signature
    else:
        fits = content is not None and content.startswith(_TITLES[kind])
    if not fits:
        raise FrontendError(f"{path} is named as {_TITLES[kind]}, but is {content or _describe_unknown(path)}. Give the model's own file.")


def _describe_unknown(path: Path) -> str:
    return "of another kind, or damaged" if path.stat().st_size else "empty"


def _make_conversion_error(path: str | os.PathLike, kind: str, python: str, stderr: str) -> Exception:
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "it stopped without a message"
    if "No module named" in last:
        return BackendError(f"{path} is {_TITLES[kind]}: reading it needs tensorflow and tf2onnx, and {python} says: {last}. {_INSTALL}.")
    reason = next((line for line in reversed(lines) if "Error" in line.partition(":")[0]), last)
    return FrontendError(
        f"{path} cannot be converted by tf2onnx: {reason[:500]}. Export it again with a newer TensorFlow (a SavedModel: model.export(folder)), or "
        "convert it by hand and give the .onnx file: python -m tf2onnx.convert --help"
    )
