"""Sparsity patterns for the weights of a network, by the scores of weight_scores.py; with data also a least-squares update.

With data the kept weights are refitted: those of each output channel minimize the squared error of the layer's output over sampled positions
(Frantar and Alistarh, arXiv:2301.00774, solve the same problem approximately). Patterns of N:M may first reorder coupled channels (permute.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Origin, Weight
from whet.pruning._data import check_data
from whet.pruning._layer_inputs import LayerInputs
from whet.pruning.order import note
from whet.pruning.permute import permute_channels
from whet.pruning.sensitivity import Progress
from whet.pruning.weight_scores import WeightScores
from whet.registry import suggest_name
from whet.sparsity import find_first_violation, find_reduction_axis, is_two_four
from whet.sparsity.patterns import NOfM, Pattern

MOST_REFIT_FLOPS = 2e11  # of the solutions of a layer
_RIDGE = 1e-3  # relative to the mean diagonal of the Gram matrix, as in the recovery


@dataclass(frozen=True)
class Patterned:
    """A network with patterned weights; `masks` by weight name (True: kept). `removed`: by layer, the share (0..1) of sum(|w|) that was removed;
    `left`: the reason for each other layer with weights; `refitted`: the layers with a least-squares update."""

    network: Network
    masks: Mapping[str, np.ndarray]
    removed: Mapping[str, float]
    left: Mapping[str, str]
    refitted: tuple[str, ...] = ()
    two_four: tuple[str, ...] = ()  # layers whose weights are now 2:4
    orders: Mapping[str, np.ndarray] = field(default_factory=dict)  # by group: the old index of each channel, if channels were reordered


def apply_pattern(
    net: Network,
    pattern: Pattern,
    data: Mapping[str, np.ndarray] | None = None,
    *,
    importance: str = "auto",
    labels: np.ndarray | None = None,
    permute_seconds: float = 0.0,
    skip: Collection[str] = (),
    progress: Progress | None = None,
    seed: int = 0,
) -> Patterned:
    """A copy of `net` (source stage) with `pattern` in the weights of each Conv, Gemm and MatMul that it fits.

    data: inputs by name, samples along axis 0. `importance`: one of weight_scores.KINDS; "auto" is "activation" with data, else "l1".
    `permute_seconds`: time limit of the search for an order of the channels in which the pattern keeps the highest scores (0: none).

    Raises PruneError for a quantized network, weights that hold a NaN, an unknown layer in `skip`, an importance that is unknown or lacks data, a
    permutation for another pattern than 2:4, and if the pattern fits no layer.
    """
    if any(x.op in ("QuantizeLinear", "DequantizeLinear") for x in net.layers):
        raise PruneError("the network is quantized (Q/DQ nodes): apply the pattern to the floating-point model, fine-tune, then calibrate")
    weighted = {x.name: x for x in net.layers if find_reduction_axis(x) is not None}
    if unknown := [s for s in skip if s not in weighted]:
        raise PruneError(f"no layer with weights is named {unknown[0]!r}.{suggest_name(unknown[0], weighted)}")
    wanted = {n: x for n, x in weighted.items() if n not in skip}
    if data is not None:
        check_data(data, labels)
    _must_be_finite(wanted.values())
    orders: Mapping[str, np.ndarray] = {}
    if permute_seconds > 0:
        if not (isinstance(pattern, NOfM) and (pattern.n, pattern.m) == (2, 4)):
            raise PruneError(f"the order of the channels is searched for 2:4, not for {pattern.name}: leave out the permutation")
        scores = WeightScores.of(net, wanted, importance, None if importance == "l1" else data, labels, seed)
        permuted = permute_channels(net, permute_seconds, scores, skip=skip, progress=progress)
        net, orders = permuted.network, permuted.orders
        wanted = {x.name: x for x in net.layers if x.name in wanted}
    scores = WeightScores.of(net, wanted, importance, data, labels, seed)
    inputs = scores.inputs
    made = net.clone()
    done: dict[str, np.ndarray] = {}
    found = _Found({n: "it is skipped" for n in skip})
    for i, layer in enumerate(x for x in made.layers if x.name in wanted):
        if progress is not None:
            progress(i, len(wanted), layer.name)
        place = find_reduction_axis(layer)
        assert place is not None
        w, axis = place
        if w.name in done:
            found.left[layer.name] = f"it shares its weights with another layer ('{w.name}')"
            continue
        array = w.array()
        try:
            mask = _mask(scores(layer.name, array, axis), axis, pattern)
        except ValueError as e:
            found.left[layer.name] = str(e)
            continue
        pruned = np.where(mask, array, np.zeros((), array.dtype))
        total = float(np.abs(array.astype(np.float64)).sum())
        found.removed[layer.name] = 1 - float(np.abs(pruned.astype(np.float64)).sum()) / total if total else 0.0
        if layer.name in inputs and (refit := _refit(layer, array, axis, mask, inputs[layer.name])) is not None:
            pruned = refit
            found.refitted.append(layer.name)
        w.weight = Weight(np.ascontiguousarray(pruned), Origin("source", w.name))
        done[w.name] = mask
        if is_two_four(pruned, axis):
            found.two_four.append(layer.name)
    if not done:
        reasons = "; ".join(f"{n}: {why}" for n, why in list(found.left.items())[:3])
        raise PruneError(f"the pattern {pattern.name} fits no layer of '{net.name}': {reasons or 'it has no constant weights'}")
    note(made, "prune", pattern=pattern.name)
    return Patterned(made, done, found.removed, found.left, tuple(found.refitted), tuple(found.two_four), orders)


@dataclass
class _Found:
    left: dict[str, str]
    removed: dict[str, float] = field(default_factory=dict)
    refitted: list[str] = field(default_factory=list)
    two_four: list[str] = field(default_factory=list)


def _must_be_finite(layers: Iterable[Layer]) -> None:
    for layer in layers:
        array = np.asarray((find_reduction_axis(layer) or (layer.needs(1), 0))[0].array(), np.float32)
        if np.isnan(array).any():
            at = np.unravel_index(int(np.isnan(array).argmax()), array.shape)
            raise PruneError(f"the weights of '{layer.name}' hold a NaN (at {tuple(int(i) for i in at)}): correct the model first")


def _view_as_matrix(array: np.ndarray, axis: int) -> np.ndarray:
    """A view of weights as [..., output channels, input channels]: of a convolution [*kernel, K, C], else [..., N, K]."""
    if axis == 1 and array.ndim > 2:
        return np.moveaxis(array, (0, 1), (-2, -1))
    return array if axis == array.ndim - 1 else array.swapaxes(-1, -2)


def _mask(scores: np.ndarray, axis: int, pattern: Pattern) -> np.ndarray:
    """The mask in the weights' layout. Raises ValueError if the weights do not hold whole tiles."""
    mask = np.empty(scores.shape, bool)
    _view_as_matrix(mask, axis)[...] = pattern.mask(_view_as_matrix(scores, axis))
    return mask


def _refit(layer: Layer, array: np.ndarray, axis: int, mask: np.ndarray, inputs: LayerInputs) -> np.ndarray | None:
    """The weights whose kept ones minimize ||x W - x W'||^2 + ridge ||W - W'||^2 per output channel; None if that takes too long."""
    groups, k = inputs.gram.shape[:2]
    is_conv = layer.op == "Conv"
    w = (array.reshape(groups, -1, k) if is_conv else _view_as_matrix(array, axis)[None]).astype(np.float64)  # [groups, outputs, k]
    kept = mask.reshape(groups, -1, k) if is_conv else _view_as_matrix(mask, axis)[None]
    if 2 / 3 * w.shape[0] * w.shape[1] * kept.sum(-1).max() ** 3 > MOST_REFIT_FLOPS:
        return None
    result = np.zeros_like(w)
    for g in range(groups):
        gram = inputs.gram[g] + np.eye(k) * max(_RIDGE * np.trace(inputs.gram[g]) / k, 1e-12)
        target = w[g] @ gram  # right-hand sides of the normal equations
        for o in range(w.shape[1]):
            at = np.flatnonzero(kept[g, o])
            if len(at):
                result[g, o, at] = np.linalg.solve(gram[np.ix_(at, at)], target[o, at])
    if not np.isfinite(result).all():
        return None
    if is_conv:
        return result.reshape(array.shape).astype(array.dtype)
    return np.ascontiguousarray(result[0] if axis == array.ndim - 1 else result[0].T).astype(array.dtype)


def explain_unusable_pattern(pattern: Pattern, done: Patterned) -> str:
    """Why no kernel exploits the pattern; "" if all patterned layers are 2:4."""
    dense = [n for n in done.removed if n not in done.two_four]
    if not dense:
        return ""
    layers = {x.name: x for x in done.network.layers}
    w, axis = find_reduction_axis(layers[dense[0]]) or (None, 0)
    where = "" if w is None else find_first_violation(w.array(), axis)
    return f"{len(dense)} of {len(done.removed)} layers with {pattern.name} are not 2:4 (as '{dense[0]}': {where}), and no kernel skips other zeros"
