"""Reads a command's model: with dynamic shapes if possible, else at the fixed shapes of --shapes."""

from __future__ import annotations

from whet.cli import _exec_values as values
from whet.errors import UnsupportedError
from whet.frontends import network_from_file
from whet.network import Network


def read_network(path: str, shapes: str | None) -> tuple[Network, bool]:
    """The network of a model file (ONNX, Caffe, TensorFlow), and True if it could only be read at the fixed `shapes` (in the syntax of --shapes).

    Raises FrontendError, and UnsupportedError for a model that is not supported at these shapes, or needs `shapes` that were not given.
    """
    given = values.parse_shapes(shapes, "shapes") if shapes else None
    if path.endswith((".prototxt", ".caffemodel")):  # static models with changeable shapes
        return network_from_file(path, shapes=given), False
    try:
        return network_from_file(path), False
    except UnsupportedError:
        if not shapes:
            raise
        return network_from_file(path, shapes=given), True
