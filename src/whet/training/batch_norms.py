"""Batch norms that an exporter has folded into convolutions are inserted for the training and folded again after it.

A network exported for inference has no batch norms: PyTorch's exporter folds them. SGD with the learning rates of such networks then diverges,
since nothing normalizes the activations. An inserted batch norm starts with the statistics of the training data and with the scale and bias that
undo its normalization, so the network computes the same function until the first step.

The output of a filter in front of a batch norm does not depend on the filter's norm, and a step of rate lr turns the filter by about lr / norm^2
(van Laarhoven, arXiv:1706.05350). A folded filter has the scale of its batch norm in it, which says nothing about a good rate; hence all filters
of an inserted batch norm get the norm FILTER_NORM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch

from whet.network import F32, Layer, Network, Origin, Weight
from whet.training.data import Batches, TrainingData
from whet.training.feeding import Feeder
from whet.training.loss import to_outputs
from whet.training.module import NetworkModule, to_array

FILTER_NORM = 2.0
SMALLEST_BATCH = 16  # with fewer samples per step the statistics are too noisy
_SAMPLES = 1024  # samples that the initial statistics are measured on
_EPSILON = 1e-5
_NORMALIZATIONS = ("GroupNormalization", "InstanceNormalization", "LayerNormalization", "LRN", "MeanVarianceNormalization", "RMSNormalization")


@dataclass(frozen=True)
class InsertedBatchNorm:
    """Names of the weights of one inserted batch norm and of the convolution in front of it."""

    weight: str  # of the convolution, output channels on axis 0
    conv_bias: str  # of the convolution in the network without batch norms
    scale: str
    bias: str
    mean: str
    variance: str

    def folded(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weight and bias of the convolution with the batch norm folded in (float32, computed in float64)."""
        w, scale, bias, mean, variance = (
            np.asarray(weights[n], np.float64) for n in (self.weight, self.scale, self.bias, self.mean, self.variance)
        )
        factor = scale / np.sqrt(variance + _EPSILON)
        columns = (-1, *(1,) * (w.ndim - 1))
        return {self.weight: (w * factor.reshape(columns)).astype(np.float32), self.conv_bias: (bias - mean * factor).astype(np.float32)}


def fold_weights(weights: Mapping[str, torch.Tensor], inserted: Iterable[InsertedBatchNorm]) -> dict[str, np.ndarray]:
    """The weights of a module by name as arrays, with `inserted` batch norms folded into their convolutions."""
    arrays = {name: to_array(value) for name, value in weights.items()}
    for norm in inserted:
        made = norm.folded(arrays)
        for name in (norm.scale, norm.bias, norm.mean, norm.variance):
            del arrays[name]
        arrays |= made
    return arrays


def insert_batch_norms(
    net: Network, data: TrainingData | Batches, *, batch: int, device: torch.device, freeze: Iterable[str] = (), filter_norm: float = FILTER_NORM
) -> tuple[Network, list[InsertedBatchNorm]]:
    """A copy of `net` (source stage) that computes the same with a batch norm after every convolution that may have had one, and the list of them.

    `batch`: samples per pass for the statistics, measured on at most 1,024 samples of `data`. Nothing is inserted into networks with other
    normalizations, or for batches below SMALLEST_BATCH.
    """
    made = net.clone()
    places = [] if batch < SMALLEST_BATCH else list_foldable(made, tuple(freeze))
    if not places:
        return made, []
    statistics = _measure_moments(made, places, data, batch, device)
    inserted = []
    for layer, (mean, variance) in zip(places, statistics, strict=True):
        inserted.append(_insert(made, layer, mean, variance, filter_norm))
    made.prune_dead()
    return made, inserted


def list_foldable(net: Network, freeze: tuple[str, ...] = ()) -> list[Layer]:
    """Convolutions that a batch norm may have been folded into: with a trained weight and bias of their own, no batch norm after them, and an
    output that is none of the network's."""
    if any(layer.op in _NORMALIZATIONS for layer in net.layers):
        return []
    users, outputs = net.users(), set(net.outputs)
    found = []
    for layer in net.layers:
        if layer.op != "Conv" or len(layer.inputs) < 3 or layer.output in outputs:
            continue
        w, b = layer.inputs[1:3]
        if w is None or b is None or any(t.weight is None or t.dtype != F32 or len(users[t]) > 1 for t in (w, b)):
            continue
        if any(fnmatchcase(t.name, p) for t in (w, b) for p in freeze):
            continue
        readers = users.get(layer.output, [])
        if not readers or any(i < 0 or user.op == "BatchNormalization" for user, i in readers):
            continue
        found.append(layer)
    return found


def _measure_moments(
    net: Network, places: list[Layer], data: TrainingData | Batches, batch: int, device: torch.device
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean and variance (float64, biased) per channel of the outputs of `places` on the first samples of `data`."""
    watched = net.clone()
    watched.outputs = [watched.tensor(layer.output.name) for layer in places]
    watched.prune_dead()
    module = NetworkModule(watched).to(device).eval()
    sums = [torch.zeros(2, layer.output.shape[1], dtype=torch.float64, device=device) for layer in places]
    counts = [0] * len(places)
    seen = 0
    with torch.no_grad():
        for feeds, _ in Feeder(net, select_spread_samples(data, _SAMPLES), batch=batch, device=device).all():
            for i, y in enumerate(to_outputs(module(**feeds))):
                flat = y.transpose(0, 1).flatten(1).double()
                sums[i] += torch.stack([flat.sum(1), flat.square().sum(1)])
                counts[i] += flat.shape[1]
            seen += len(next(iter(feeds.values())))
            if seen >= _SAMPLES:
                break
    found = []
    for total, n in zip(sums, counts, strict=True):
        mean, square = (total / n).cpu().numpy()
        found.append((mean, np.maximum(square - mean**2, 0.0)))
    return found


def select_spread_samples(data: TrainingData | Batches, count: int) -> TrainingData | Batches:
    """At most `count` samples from all over the data, which may be sorted by class; batches of a user's as they are."""
    if isinstance(data, Batches) or len(data) <= count:
        return data
    at = np.linspace(0, len(data) - 1, count).astype(np.int64)
    return data.part(at)


def _insert(net: Network, layer: Layer, mean: np.ndarray, variance: np.ndarray, filter_norm: float) -> InsertedBatchNorm:
    """Inserts a batch norm after `layer`, whose filters are scaled to `filter_norm` (0: not) and whose bias moves into the batch norm."""
    w, b = layer.needs(1), layer.needs(2)
    values, bias = w.array().astype(np.float64), b.array().astype(np.float64)
    norms: np.ndarray = np.linalg.norm(values.reshape(len(values), -1), axis=1)
    factor = np.where(norms > 0, filter_norm / np.where(norms > 0, norms, 1), 1.0) if filter_norm else np.ones(len(values))
    parts = {
        "scale": np.sqrt(variance * factor**2 + _EPSILON) / factor,
        "bias": mean,
        "mean": (mean - bias) * factor,
        "variance": variance * factor**2,
    }
    constants = {key: net.constant(a.astype(np.float32), f"{layer.name}.inserted_norm.{key}") for key, a in parts.items()}
    scaled = values * factor.reshape(-1, *(1,) * (values.ndim - 1))
    w.weight = Weight(scaled.astype(np.float32), Origin("source", w.name))
    readers = net.users()[layer.output]
    layer.inputs = (layer.needs(0), w)
    at = net.layers.index(layer) + 1
    y = net.add("BatchNormalization", layer.output, *constants.values(), epsilon=_EPSILON, name=f"{layer.name}.inserted_norm", at=at)
    for reader, _ in readers:
        reader.inputs = tuple(y if t is layer.output else t for t in reader.inputs)
    return InsertedBatchNorm(weight=w.name, conv_bias=b.name, **{key: t.name for key, t in constants.items()})
