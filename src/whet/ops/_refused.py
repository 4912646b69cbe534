"""Ops that whet knows and does not run: their nodes are refused by name, with the reason and a way out."""

from __future__ import annotations

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.ops._base import op


def refused(name: str, reason: str, onnx_ops: tuple[str, ...] | None = None):
    """Registers an op that every use of refuses with `reason`."""

    def infer(layer: Layer):
        raise UnsupportedError(f"{layer.op} '{layer.name}': {reason}")

    def read(node, g):
        raise node.unsupported(reason)

    def reference(layer, *arrays):
        raise UnsupportedError(f"{layer.op} '{layer.name}': {reason}")

    return op(name, infer, reference, onnx=read, onnx_ops=onnx_ops, pure=False)
