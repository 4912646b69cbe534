"""Reads a command's model: with dynamic shapes if possible, else at the fixed shapes of --shapes."""

from __future__ import annotations

from whet.cli import _exec_values as values
from whet.errors import UnsupportedError
from whet.frontends import network_from_caffe, network_from_onnx
from whet.network import Network


def network_for(path: str, shapes: str | None) -> tuple[Network, bool]:
    """The network of an ONNX file or of a Caffe model, and True if it could only be read at the fixed `shapes` (in the syntax of --shapes).

    Raises FrontendError, and UnsupportedError for a model that is not supported at these shapes, or needs `shapes` that were not given.
    """
    if is_caffe(path):
        return network_from_caffe(path, shapes=values.shapes(shapes, "shapes") if shapes else None), False
    try:
        return network_from_onnx(path), False
    except UnsupportedError:
        if not shapes:
            raise
        return network_from_onnx(path, shapes=values.shapes(shapes, "shapes")), True


def is_caffe(path: str) -> bool:
    """True for a prototxt or a caffemodel."""
    return path.endswith((".prototxt", ".caffemodel"))
