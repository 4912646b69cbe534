"""The model that a command reads: as it is, or where only fixed shapes decide what is in it, at those of --shapes."""

from __future__ import annotations

from whet.cli import _exec_values as values
from whet.errors import UnsupportedError
from whet.frontends import network_from_onnx
from whet.network import Network


def network_for(path: str, shapes: str | None) -> tuple[Network, bool]:
    """(the network of an ONNX file, whether it had to be read at the fixed `shapes`, which are written as --shapes has them).

    Raises FrontendError, and UnsupportedError for one that cannot be built in any shape, or without shapes.
    """
    try:
        return network_from_onnx(path), False
    except UnsupportedError:
        if not shapes:
            raise
        return network_from_onnx(path, shapes=values.shapes(shapes, "shapes")), True
