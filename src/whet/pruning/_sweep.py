"""Runs a network layer by layer over a whole set of inputs, so that a layer can be changed before what follows sees its output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.ops import bind_layer, bind_symbols, run_layer, run_regions
from whet.pruning._data import check_data

_CHUNK = 16  # images a convolution unrolls at a time: its window matrix is kernel-size times its input
_CHUNKED = {"Conv", "ConvTranspose", "AveragePool", "MaxPool", "LpPool"}


class Sweep:
    """A run in progress: `values` holds what later layers still read, one array a run.

    A network whose batch is fixed takes more samples than it has rows in several runs; what is read of them is stacked. Raises PruneError for
    data without samples or with NaN.
    """

    def __init__(self, net: Network, data: Mapping[str, np.ndarray]):
        check_data(data)
        self.net = net
        self.runs = runs_of(net, data)
        self.env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in self.runs[0].items()})
        self.values: dict[Tensor, list[np.ndarray]] = {t: [np.asarray(r[t.name]) for r in self.runs] for t in net.inputs}
        self.done = 0
        self._last: dict[Tensor, int] = {}
        for i, layer in enumerate(net.layers):
            for t in (*layer.inputs, *(c for r in layer.regions.values() for c in r.captures())):
                if t is not None:
                    self._last[t] = i

    def value(self, t: Tensor) -> np.ndarray:
        """The value of a tensor that is constant or was computed, the runs stacked along axis 0."""
        if t.weight is not None:
            return t.array()
        found = self.values[t]
        return found[0] if len(found) == 1 or found[0].ndim == 0 else np.concatenate(found)

    def compute(self, layer: Layer, run: int = 0) -> list[np.ndarray]:
        """The layer's outputs from the present values of one run; stores nothing."""
        arrays = [None if t is None else t.array() if t.weight is not None else self.values[t][run] for t in layer.inputs]
        if layer.regions:
            outer = {t: a[run] for t, a in self.values.items()}
            outer.update({t: t.array() for r in layer.regions.values() for t in r.captures() if t.weight is not None})
            return run_regions(bind_layer(layer, self.env), arrays, outer=outer, env=self.env)
        x = arrays[0]
        if layer.op in _CHUNKED and x is not None and len(x) > _CHUNK and len(layer.outputs) == 1:
            # NumPy lets go of the interpreter inside copies and products, so chunks run beside each other.
            with ThreadPoolExecutor(_cpus()) as pool:
                parts = pool.map(lambda i: run_layer(layer, [x[i : i + _CHUNK], *arrays[1:]], self.env)[0], range(0, len(x), _CHUNK))
                return [np.concatenate(list(parts))]
        return run_layer(layer, arrays, self.env)

    def step(self) -> Layer:
        """Runs the next layer and drops what nothing reads any more."""
        layer = self.net.layers[self.done]
        if len(self.runs) == 1:
            made = [self.compute(layer)]
        else:
            with ThreadPoolExecutor(_cpus()) as pool:
                made = list(pool.map(lambda k: self.compute(layer, k), range(len(self.runs))))
        for i, t in enumerate(layer.outputs):
            self.values[t] = [outputs[i] for outputs in made]
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


def runs_of(net: Network, data: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """`data` as inputs of one run each: one, unless every input has a fixed axis 0 of which the data are the same multiple."""
    arrays = {k: np.asarray(v) for k, v in data.items()}
    times = set()
    for t in net.inputs:
        a, rows = arrays.get(t.name), t.shape[0] if t.shape else None
        fits = a is not None and a.ndim == t.type.rank and isinstance(rows, int) and rows > 0 and len(a) % rows == 0
        times.add(len(a) // rows if fits else 1)  # type: ignore[arg-type, operator]
    n = times.pop() if len(times) == 1 else 1
    if n <= 1:
        return [arrays]
    return [{t.name: np.array_split(arrays[t.name], n)[k] for t in net.inputs} for k in range(n)]


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
