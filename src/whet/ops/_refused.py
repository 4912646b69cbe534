"""Ops that no network of whet's holds: refused by name with the reason and a way out, or read as other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def read_as_others(name: str, read: Callable[..., Any], instead: str, onnx_ops: tuple[str, ...] | None = None):
    """Registers an ONNX op whose reader makes layers of other ops (`instead` names them). `onnx_ops`: what it is in ONNX, if not `name`."""

    def infer(layer: Layer):
        raise UnsupportedError(f"{layer.op} '{layer.name}' is no layer of whet's: it is read as {instead}")

    return op(name, infer, lambda layer, *arrays: infer(layer), onnx=read, onnx_ops=onnx_ops, pure=False)
