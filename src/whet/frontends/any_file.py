"""Reads or checks a model file of any supported kind: ONNX, Caffe, TensorFlow."""

from __future__ import annotations

import os
from pathlib import Path

from whet.frontends._onnx_shapes import UserShapes
from whet.frontends.caffe import check_caffe, network_from_caffe
from whet.frontends.onnx import network_from_onnx
from whet.frontends.onnx_check import Report, check_onnx
from whet.frontends.tensorflow import check_tensorflow, find_tensorflow_kind, network_from_tensorflow
from whet.network import Network

_CAFFE = (".prototxt", ".caffemodel")


def model_kind(path: str | os.PathLike) -> str:
    """The reader of a file: "caffe", "tensorflow" or "onnx" (any other file, which its reader names)."""
    if Path(path).suffix.lower() in _CAFFE:
        return "caffe"
    return "tensorflow" if find_tensorflow_kind(path) else "onnx"


def network_from_file(path: str | os.PathLike, *, shapes: UserShapes | None = None) -> Network:
    """Reads an ONNX file, a Caffe prototxt or caffemodel, or a TensorFlow model (SavedModel folder, .h5, .keras, .pb, .tflite).

    `shapes` maps inputs to shapes, as for network_from_onnx. Raises FrontendError, UnsupportedError, and BackendError without TensorFlow's packages.
    """
    kind = model_kind(path)
    if kind == "caffe":
        return network_from_caffe(path, shapes=shapes)
    return network_from_tensorflow(path, shapes=shapes) if kind == "tensorflow" else network_from_onnx(path, shapes=shapes)


def check_file(path: str | os.PathLike, *, shapes: UserShapes | None = None) -> Report:
    """What of such a file is supported, node by node, before any other work."""
    kind = model_kind(path)
    if kind == "caffe":
        return check_caffe(path, shapes=shapes)
    return check_tensorflow(path, shapes=shapes) if kind == "tensorflow" else check_onnx(path, shapes=shapes)
