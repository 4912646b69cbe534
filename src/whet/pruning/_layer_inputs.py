"""Statistics of layers' inputs on data, for scores of single weights and for the least-squares update of those that stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Tensor
from whet.ops import run_network
from whet.pruning._least_squares import gather_conv_rows
from whet.sparsity import find_reduction_axis

_ROWS = 4096  # sampled positions of a layer's input
_WIDEST = 2304  # inputs of an output channel above which no Gram matrix is held


@dataclass
class LayerInputs:
    """Gram matrix float64 [groups, k, k] of a layer's inputs (k: input channel and kernel position, as in its weights), and the rows in it."""

    gram: np.ndarray
    rows: int = 0


def gather_inputs(
    net: Network, layers: Mapping[str, Layer], data: Mapping[str, np.ndarray], seed: int, most_rows: int = _ROWS
) -> dict[str, LayerInputs]:
    """Gram matrices of the layers' inputs over the samples; none for a layer with too many inputs, or with computed transposes.

    All batches together give `most_rows` rows at most, but each at least 64.
    """
    readers: dict[Tensor, list[Layer]] = {}
    for layer in layers.values():
        w, axis = find_reduction_axis(layer) or (None, 0)
        assert w is not None
        size = int(np.prod(w.shape[1:])) if layer.op == "Conv" else int(w.shape[axis])
        if size <= _WIDEST and not layer.attrs.get("transA") and (layer.op == "Conv" or w.type.rank == 2) and layer.input(0) is not None:
            readers.setdefault(layer.needs(0), []).append(layer)
    gathered: dict[str, LayerInputs] = {}
    rng = np.random.default_rng(seed)

    def watch(tensor: Tensor, array: np.ndarray) -> None:
        for layer in readers.get(tensor, ()):
            rows = _draw_rows(layer, array, rng, most=max(64, most_rows // batches))
            gram = rows.transpose(0, 2, 1) @ rows
            known = gathered.setdefault(layer.name, LayerInputs(np.zeros_like(gram)))
            known.gram += gram
            known.rows += rows.shape[1]

    count = len(next(iter(data.values())))
    fixed = [t.shape[0] for t in net.inputs if t.type.rank and isinstance(t.shape[0], int)]
    batch = fixed[0] if fixed else min(count, 16)
    batches = max(count // batch, 1)
    for start in range(0, count - batch + 1, batch):
        chunk = {n: a[start : start + batch] for n, a in data.items()}
        for t in net.inputs:
            watch(t, np.asarray(chunk[t.name]))
        run_network(net, chunk, watch=watch)
    return gathered


def _draw_rows(layer: Layer, x: np.ndarray, rng: np.random.Generator, most: int) -> np.ndarray:
    """Sampled rows of a layer's input, float64 [groups, rows, k]."""
    if layer.op != "Conv":
        flat = x.reshape(-1, x.shape[-1])
        return flat[rng.permutation(len(flat))[:most]].astype(np.float64)[None]
    place = find_reduction_axis(layer)
    assert place is not None
    out = layer.outputs[0]
    spatial = [int(d) for d in out.shape[2:]] if all(isinstance(d, int) for d in out.shape[2:]) else []
    if not spatial:
        raise PruneError(f"'{layer.name}' has symbolic pixels: fix the model's height and width for --calibData")
    positions = len(x) * int(np.prod(spatial))
    return gather_conv_rows(layer, x, place[0].array(), rng.permutation(positions)[:most])
