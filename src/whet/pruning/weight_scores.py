"""Scores of single weights, by which patterns decide which of them stay.

    l1            |w|
    activation    |w| times the root mean square of its input on data: the increase of the layer's output error if the weight is removed and inputs
                  are uncorrelated (the diagonal of the Hessian; LeCun et al., Optimal Brain Damage, 1989; Sun et al., arXiv:2306.11695)
    second_order  w^2 / (2 [H^-1]_ii), with H the second moments of the inputs on data: the increase of the layer's squared output error if the other
                  weights are adjusted (Hassibi and Stork, Optimal Brain Surgeon, 1993; Frantar and Alistarh, arXiv:2301.00774)
    taylor1       the mean over samples of |w g|, with g the gradient of the loss (of the outputs without labels, see sensitivity.py)

A layer for which data give no score (more inputs than _layer_inputs.py holds, weights shared in a loop, computed transposes) has scores by |w|.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network
from whet.pruning._layer_inputs import LayerInputs, gather_inputs
from whet.pruning.sensitivity import compute_mean_absolute_gradients
from whet.registry import suggest_name

KINDS = ("auto", "l1", "activation", "second_order", "taylor1")
RIDGE = 1e-3  # relative to the mean diagonal of the second moments, as in the recovery


@dataclass(frozen=True)
class WeightScores:
    """Scores of the weights of a network's layers. `inputs` are the statistics of the layers' inputs, empty without data."""

    kind: str
    inputs: Mapping[str, LayerInputs] = field(default_factory=dict)
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(
        net: Network, layers: Mapping[str, Layer], kind: str, data: Mapping[str, np.ndarray] | None, labels: np.ndarray | None, seed: int
    ) -> WeightScores:
        """Gathers what the scores need. Raises PruneError for an unknown kind, or one that needs data without them."""
        if kind not in KINDS:
            raise PruneError(f"the importance of single weights is one of {', '.join(KINDS)}, not {kind!r}.{suggest_name(kind, KINDS)}")
        if data is None:
            if kind not in ("auto", "l1"):
                raise PruneError(f"the importance {kind} is measured on data: give samples (--calibData), or choose l1")
            return WeightScores("l1")
        gradients = compute_mean_absolute_gradients(net, layers, data, labels, seed=seed) if kind == "taylor1" else {}
        return WeightScores("activation" if kind == "auto" else kind, gather_inputs(net, layers, data, seed), gradients)

    def __call__(self, layer: str, array: np.ndarray, axis: int) -> np.ndarray:
        """The scores of a layer's weights, float64 in their layout; `axis` is the reduction axis."""
        size = np.abs(np.asarray(array, np.float64))
        if self.kind == "taylor1":
            return size * self.gradients[layer] if layer in self.gradients else size
        inputs = self.inputs.get(layer)
        if inputs is None or self.kind == "l1":
            return size
        moments = inputs.gram / max(inputs.rows, 1)
        if self.kind == "activation":
            return size * np.sqrt(_to_weight_layout(np.diagonal(moments, axis1=1, axis2=2), array, axis))
        k = moments.shape[-1]
        load = np.maximum(RIDGE * np.trace(moments, axis1=1, axis2=2) / k, 1e-12)
        inverse = np.linalg.inv(moments + load[:, None, None] * np.eye(k))
        return size**2 / (2 * _to_weight_layout(np.diagonal(inverse, axis1=1, axis2=2), array, axis))


def _to_weight_layout(by_input: np.ndarray, array: np.ndarray, axis: int) -> np.ndarray:
    """Values [groups, inputs] of a layer in the layout of its weights (broadcast along the output channels)."""
    groups = len(by_input)
    if array.ndim > 2:  # a convolution
        return np.repeat(by_input.reshape(groups, *array.shape[1:]), array.shape[0] // groups, axis=0)
    return by_input[0].reshape(1, -1) if axis == array.ndim - 1 else by_input[0].reshape(-1, 1)
