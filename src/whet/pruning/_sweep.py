"""Runs a network layer by layer over all samples, so that a layer can be changed before later layers read its output."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from whet.backends.cpu.threads import count_affinity_cpus
from whet.network import Layer, Network, Tensor
from whet.ops import bind_layer, bind_symbols, run_layer, run_regions
from whet.pruning._data import check_data

_CHUNK = 16  # samples per im2col chunk: its matrix is kernel-size times the input
_CHUNKED = {"Conv", "ConvTranspose", "AveragePool", "MaxPool", "LpPool"}


class Sweep:
    """A layer-by-layer run: `values` holds live tensors, one array per run.

    A network with a fixed batch processes more samples in several runs, whose values are stacked when read. Raises PruneError for data
    without samples or with NaN.
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
        """The value of a constant or computed tensor, runs stacked along axis 0."""
        if t.weight is not None:
            return t.array()
        found = self.values[t]
        return found[0] if len(found) == 1 or found[0].ndim == 0 else np.concatenate(found)

    def compute(self, layer: Layer, run: int = 0) -> list[np.ndarray]:
        """Computes the layer's outputs from the current values of one run without storing them."""
        arrays = [None if t is None else t.array() if t.weight is not None else self.values[t][run] for t in layer.inputs]
        if layer.regions:
            outer = {t: a[run] for t, a in self.values.items()}
            outer.update({t: t.array() for r in layer.regions.values() for t in r.captures() if t.weight is not None})
            return run_regions(bind_layer(layer, self.env), arrays, outer=outer, env=self.env)
        x = arrays[0]
        if layer.op in _CHUNKED and x is not None and len(x) > _CHUNK and len(layer.outputs) == 1:
            # NumPy releases the GIL in copies and products, so chunks run in parallel.
            with ThreadPoolExecutor(count_affinity_cpus()) as pool:
                parts = pool.map(lambda i: run_layer(layer, [x[i : i + _CHUNK], *arrays[1:]], self.env)[0], range(0, len(x), _CHUNK))
                return [np.concatenate(list(parts))]
        return run_layer(layer, arrays, self.env)

    def step(self) -> Layer:
        """Runs the next layer and frees dead values."""
        layer = self.net.layers[self.done]
        if len(self.runs) == 1:
            made = [self.compute(layer)]
        else:
            with ThreadPoolExecutor(count_affinity_cpus()) as pool:
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
        """Runs up to and including the layer called `name`; False when it is not among the remaining layers."""
        if not any(layer.name == name for layer in self.net.layers[self.done :]):
            return False
        while self.step().name != name:
            pass
        return True


def runs_of(net: Network, data: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Splits `data` into runs: one, unless every input has a static axis 0 that divides the data by the same factor."""
    arrays = {k: np.asarray(v) for k, v in data.items()}
    times = set()
    for t in net.inputs:
        a, rows = arrays.get(t.name), t.shape[0] if t.shape else None
        if a is not None and a.ndim == t.type.rank and isinstance(rows, int) and rows > 0 and len(a) % rows == 0:
            times.add(len(a) // rows)
        else:
            times.add(1)
    n = times.pop() if len(times) == 1 else 1
    if n <= 1:
        return [arrays]
    return [{t.name: np.array_split(arrays[t.name], n)[k] for t in net.inputs} for k in range(n)]

