"""A prototxt and a caffemodel -> the layers of the TEST phase, and the weights by layer name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from whet.errors import FrontendError
from whet.files import read_bounded
from whet.frontends._caffe_schema import V1_TYPES, get_binary_net, get_text_net

_MOST = 2**31 - 1  # protobuf's own limit of one message


@dataclass(frozen=True)
class CaffeLayer:
    """A layer of a prototxt; `param` is its message, which holds the parameters of each layer type."""

    name: str
    type: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    param: Any


@dataclass(frozen=True)
class CaffeModel:
    """A deploy network: name, inputs with shapes, layers in execution order. `path` is for messages."""

    path: str
    name: str
    inputs: Mapping[str, tuple[int, ...]]
    layers: Sequence[CaffeLayer]


def read_prototxt(path: str | os.PathLike) -> CaffeModel:
    """Reads a deploy prototxt. Raises FrontendError with line and column for text that is not one, and for a training network."""
    path = Path(path)
    data = _read_bytes(path)
    net = get_text_net()()
    try:
        text_format.Parse(data.decode("utf-8", "replace"), net, allow_unknown_field=True)
    except text_format.ParseError as e:
        where = str(e)[:200]  # protobuf quotes the whole line
        raise FrontendError(f"{path} is not a Caffe prototxt: {where} (line:column). Give the deploy prototxt; weights are in the caffemodel.") from e
    if net.layer and net.layers:
        raise FrontendError(f"{path} has both `layer` and `layers`. Upgrade it with Caffe's upgrade_net_proto_text.")
    layers = [_make_layer(m, path) for m in (*net.layer, *net.layers) if _in_test_phase(m)]
    inputs: dict[str, tuple[int, ...]] = {}
    for i, name in enumerate(net.input):
        dims = tuple(net.input_shape[i].dim) if i < len(net.input_shape) else tuple(net.input_dim[4 * i : 4 * i + 4])
        if not dims:
            raise FrontendError(f"{path}: the input {name!r} has no input_shape and no four input_dim. Add them.")
        inputs[name] = dims
    for layer in layers:
        if layer.type == "Input":
            shapes = layer.param.input_param.shape
            if len(shapes) not in (1, len(layer.tops)):
                raise FrontendError(f"{path}: layer '{layer.name}' (Input) has {len(shapes)} shapes for {len(layer.tops)} tops. Give one for each.")
            inputs |= {top: tuple(shapes[min(i, len(shapes) - 1)].dim) for i, top in enumerate(layer.tops)}
    if not layers:
        raise FrontendError(f"{path} has no layers. Give the deploy prototxt.")
    return CaffeModel(str(path), net.name or "caffe", inputs, [layer for layer in layers if layer.type != "Input"])


def read_caffemodel(path: str | os.PathLike) -> dict[str, list[np.ndarray]]:
    """Maps a layer's name to its blobs, float32 arrays. Raises FrontendError for a file that is not a caffemodel."""
    path = Path(path)
    data = _read_bytes(path)
    net = get_binary_net()()
    try:
        net.ParseFromString(data)
    except DecodeError as e:
        raise FrontendError(f"{path} is not a caffemodel, or it is truncated ({len(data)} bytes): {e}. Copy it again.") from e
    weights = {m.name: [_decode_blob(b, f"{path}: layer '{m.name}'") for b in m.blobs] for m in (*net.layers, *net.layer) if m.blobs}
    if not weights:
        raise FrontendError(f"{path} holds no weights: it is not a caffemodel, or it is truncated. Copy it again.")
    return weights


def _decode_blob(blob: Any, subject: str) -> np.ndarray:
    try:
        values = np.frombuffer(blob.data, "<f4") if blob.data else np.frombuffer(blob.double_data, "<f8").astype(np.float32)
    except ValueError as e:
        raise FrontendError(f"{subject} has a blob of a broken number of bytes. Copy the caffemodel again.") from e
    shape = tuple(blob.shape.dim) if blob.HasField("shape") else (blob.num, blob.channels, blob.height, blob.width)
    if any(d < 0 for d in shape) or prod(shape) != values.size:
        raise FrontendError(f"{subject} has a blob of shape {shape} with {values.size} values. Copy the caffemodel again.")
    return values.astype(np.float32, copy=False).reshape(shape)


def _make_layer(m: Any, path: Path) -> CaffeLayer:
    kind = m.type
    if isinstance(kind, int):  # `layers { type: RELU }`, before 2014
        if m.HasField("layer"):
            raise FrontendError(f"{path} has the layer format of 2013. Upgrade it with Caffe's upgrade_net_proto_text.")
        old = m.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number[kind].name
        kind = V1_TYPES.get(old, "".join(word.capitalize() for word in old.split("_")))
    return CaffeLayer(m.name or (m.top[0] if m.top else kind), kind, tuple(m.bottom), tuple(m.top), m)


def _in_test_phase(m: Any) -> bool:
    """True if the layer's include and exclude rules admit phase TEST, level 0 and no stage."""
    test = m.DESCRIPTOR.fields_by_name["phase"].enum_type.values_by_name["TEST"].number
    if m.HasField("phase") and m.phase != test:
        return False

    def meets(rule: Any) -> bool:
        return (
            (not rule.HasField("phase") or rule.phase == test)
            and (not rule.HasField("min_level") or rule.min_level <= 0)
            and (not rule.HasField("max_level") or rule.max_level >= 0)
            and not rule.stage
        )

    return any(map(meets, m.include)) if m.include else not any(map(meets, m.exclude))


def _read_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise FrontendError(f"{path} is a folder; give the file.")
        data = read_bounded(path, _MOST)
    except (OSError, ValueError) as e:
        raise FrontendError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}. Check the path and its permissions.") from e
    if not data:
        raise FrontendError(f"{path} is empty. Copy it again.")
    if data.startswith(b"version https://git-lfs"):
        raise FrontendError(f"{path} is a Git LFS pointer, not the model. Fetch it with `git lfs pull`.")
    return data
