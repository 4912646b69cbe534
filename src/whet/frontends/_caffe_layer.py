"""What a converter of a Caffe layer works with: its bottoms as tensors, its blobs with checked shapes, and the network that it adds to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from whet.errors import FrontendError, UnsupportedError
from whet.frontends._caffe_files import CaffeLayer
from whet.network import Dim, Network, Origin, Tensor, Weight
from whet.registry import suggest_name

Converter = Callable[["Layer"], Tensor | Sequence[Tensor]]
CONVERTERS: dict[str, Converter] = {}


def caffe_layer(*types: str) -> Callable[[Converter], Converter]:
    """Registers the converter of layer types: it adds whet layers and returns the tensors of the tops."""

    def register(convert: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(types, convert))
        return convert

    return register


class Weights:
    """The blobs of a caffemodel by layer; without a caffemodel, seeded random values of the shapes that are asked for."""

    def __init__(self, blobs: Mapping[str, Sequence[np.ndarray]] | None, path: str = ""):
        self.blobs, self.path = blobs, path
        self._random = np.random.default_rng(0)

    def of(self, layer: CaffeLayer, i: int, shape: tuple[int, ...] | None, subject: str) -> np.ndarray:
        """Blob `i` of a layer as `shape` (None: its own). Raises FrontendError for a missing or wrong blob."""
        where = f"layer '{layer.name}' ({layer.type})"
        if self.blobs is None:
            if shape is None:
                raise FrontendError(f"{where}: its {subject} has no shape in the prototxt, so it cannot have random weights. Give the caffemodel.")
            size = np.sqrt(2 / max(1, prod(shape[1:]))) if len(shape) > 1 else 0.1
            return (self._random.standard_normal(shape) * size).astype(np.float32)
        blobs = self.blobs.get(layer.name)
        if blobs is None:
            raise FrontendError(f"{where} has no weights in {self.path}.{suggest_name(layer.name, self.blobs)} Give the caffemodel of this prototxt.")
        if i >= len(blobs):
            raise FrontendError(f"{where}: {self.path} has {len(blobs)} blobs for it, without its {subject}. Give the caffemodel of this prototxt.")
        blob = blobs[i]
        if shape is None:
            return blob
        if blob.size != np.prod(shape) or (blob.ndim == len(shape) and blob.shape != shape and blob.ndim > 1):
            raise FrontendError(f"{where}: its {subject} has the shape {blob.shape} in {self.path}, but the prototxt needs {shape}.")
        return blob.reshape(shape)


class Layer:
    """One Caffe layer in conversion. `x` is its first bottom."""

    def __init__(self, layer: CaffeLayer, net: Network, bottoms: Sequence[Tensor], weights: Weights):
        self.source, self.net, self.bottoms, self.weights = layer, net, bottoms, weights
        self.name, self.type, self.param = layer.name, layer.type, layer.param
        if not bottoms:
            raise self.unsupported("it has no bottom")

    @property
    def x(self) -> Tensor:
        return self.bottoms[0]

    def unsupported(self, reason: str) -> UnsupportedError:
        """The error for this layer with reason and workaround."""
        return UnsupportedError(f"layer '{self.name}' ({self.type}): {reason}{'' if reason.endswith('.') else '.'}")

    def add(self, op: str, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Adds a whet layer of this Caffe layer's name."""
        return self.net.add(op, *inputs, name=self.name, sources=(self.name,), **attrs)

    def blob(self, i: int, shape: tuple[int, ...] | None, subject: str) -> np.ndarray:
        """Blob `i`, float32 of `shape`. Raises FrontendError if it is missing or has another size."""
        return self.weights.of(self.source, i, shape, subject)

    def weight(self, array: np.ndarray, subject: str) -> Tensor:
        """A constant named after the layer."""
        name = f"{self.name}.{subject}"
        return self.net.constant(Weight(np.ascontiguousarray(array, np.float32), Origin("source", name)), name)

    def scalar(self, value: float) -> Tensor:
        return self.net.constant(np.array(value, np.float32), f"{self.name}.value")

    def ints(self, *values: int) -> Tensor:
        return self.net.constant(np.array(values, np.int64), f"{self.name}.ints")

    def axis(self, value: int, rank: int | None = None) -> int:
        """A non-negative axis. Raises UnsupportedError outside the rank."""
        rank = self.x.type.rank if rank is None else rank
        if not -rank <= value < rank:
            raise self.unsupported(f"its axis {value} is outside the rank {rank}")
        return value % rank

    def require_static(self, dims: Sequence[Dim], subject: str) -> tuple[int, ...]:
        """`dims` as integers. Raises UnsupportedError if one is dynamic."""
        if not all(isinstance(d, int) for d in dims):
            raise self.unsupported(f"{subject} must be fixed, not {tuple(map(str, dims))}; give fixed shapes")
        return tuple(d for d in dims if isinstance(d, int))

    def reshape(self, t: Tensor, shape: Sequence[Dim]) -> Tensor:
        """`t` with another shape; dimensions may be symbolic."""
        if list(t.shape) == list(shape):
            return t
        sizes = [d for d in shape if isinstance(d, int)]
        if len(sizes) == len(shape):
            return self.add("Reshape", t, self.ints(*sizes))
        return self.add("Reshape", t, shape=tuple(shape))
