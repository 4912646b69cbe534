"""Makes every computed value of an ONNX model an output, to compare intermediate values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from whet.errors import FrontendError


def with_all_outputs(path: str | Path, names: Iterable[str] | None = None) -> tuple[bytes, list[str]]:
    """The serialized model with the values `names` (default: every node output of the main graph) as outputs, and all output names.

    Raises FrontendError for an unreadable file, or a model beyond 2 GiB, protobuf's limit.
    """
    import onnx
    from google.protobuf.message import DecodeError, EncodeError

    try:
        model = onnx.load(str(path))
    except (OSError, DecodeError, ValueError) as e:
        raise FrontendError(f"{path} cannot be read as ONNX: {e}") from e
    there = [o.name for o in model.graph.output]
    produced = [n for node in model.graph.node for n in node.output if n]
    wanted = set(produced if names is None else names)
    for name in produced:
        if name in wanted and name not in there:
            model.graph.output.append(onnx.ValueInfoProto(name=name))
            there.append(name)
    try:
        return model.SerializeToString(), there
    except (EncodeError, ValueError) as e:
        raise FrontendError(f"{path} is too large to mark its values as outputs in memory ({e}); compare outputs only: --outputsOnly") from e
