"""Runs a network layer by layer over a whole set of inputs, so that a layer can be changed before what follows sees its output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.ops import bind_layer, bind_symbols, run_layer, run_regions

_CHUNK = 16  # images a convolution unrolls at a time: its window matrix is kernel-size times its input
_CHUNKED = {"Conv", "ConvTranspose", "AveragePool", "MaxPool", "LpPool"}


class Sweep:
    """A run in progress: `values` holds what later layers still read."""

    def __init__(self, net: Network, data: Mapping[str, np.ndarray]):
        self.net = net
        self.env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in data.items()})
        self.values: dict[Tensor, np.ndarray] = {t: np.asarray(data[t.name]) for t in net.inputs}
        self.done = 0
        self._last: dict[Tensor, int] = {}
        for i, layer in enumerate(net.layers):
            for t in (*layer.inputs, *(c for r in layer.regions.values() for c in r.captures())):
                if t is not None:
                    self._last[t] = i

    def value(self, t: Tensor) -> np.ndarray:
        """The value of a tensor that is constant or was computed."""
        return t.array() if t.weight is not None else self.values[t]

    def compute(self, layer: Layer) -> list[np.ndarray]:
        """The layer's outputs from the present values; stores nothing."""
        arrays = [None if t is None else self.value(t) for t in layer.inputs]
        if layer.regions:
            outer = dict(self.values)
            outer.update({t: t.array() for r in layer.regions.values() for t in r.captures() if t.weight is not None})
            return run_regions(bind_layer(layer, self.env), arrays, outer=outer, env=self.env)
        x = arrays[0]
        if layer.op in _CHUNKED and x is not None and len(x) > _CHUNK and len(layer.outputs) == 1:
            # NumPy lets go of the interpreter inside copies and products, so chunks run beside each other.
            with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) as pool:
                parts = pool.map(lambda i: run_layer(layer, [x[i : i + _CHUNK], *arrays[1:]], self.env)[0], range(0, len(x), _CHUNK))
                return [np.concatenate(list(parts))]
        return run_layer(layer, arrays, self.env)

    def step(self) -> Layer:
        """Runs the next layer and drops what nothing reads any more."""
        layer = self.net.layers[self.done]
        for t, a in zip(layer.outputs, self.compute(layer), strict=True):
            self.values[t] = a
        kept = set(self.net.outputs)
        for x in layer.inputs:
            if x is not None and self._last.get(x) == self.done and x not in kept:
                self.values.pop(x, None)
        self.done += 1
        return layer

    def run_to(self, name: str) -> bool:
        """Runs until the layer called `name` is done; False when it is not ahead."""
        if not any(layer.name == name for layer in self.net.layers[self.done :]):
            return False
        while self.step().name != name:
            pass
        return True
