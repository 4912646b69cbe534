"""Sparsity patterns for the weights of a network, by magnitude or, with data, by the energy of the inputs and with a least-squares update.

With data a weight's score is |w| times the root mean square of its input over the samples: the increase of the layer's squared output error if
the weight is removed and inputs are uncorrelated (the diagonal of the Hessian; LeCun et al., Optimal Brain Damage, 1989; Sun et al.,
arXiv:2306.11695). The kept weights are then refitted: those of each output channel minimize the squared error of the layer's output over
sampled positions (Frantar and Alistarh, arXiv:2301.00774, solve the same problem approximately).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Origin, Tensor, Weight
from whet.ops import run_network
from whet.pruning._data import check_data
from whet.pruning._least_squares import conv_rows
from whet.pruning.order import note
from whet.pruning.sensitivity import Progress
from whet.registry import nearest
from whet.sparsity import first_violation, is_two_four, reduction_axis
from whet.sparsity.patterns import Pattern

_ROWS = 4096  # sampled positions of a layer's input
_WIDEST = 2304  # inputs of an output channel above which weights are not refitted
_FLOPS = 2e11  # of the solutions of a layer at most
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


@dataclass
class _Inputs:
    """Gram matrix float64 [groups, k, k] of a layer's inputs (k: input channel and kernel position, as in its weights), and the rows in it."""

    gram: np.ndarray
    rows: int = 0


def apply_pattern(
    net: Network,
    pattern: Pattern,
    data: Mapping[str, np.ndarray] | None = None,
    *,
    skip: Collection[str] = (),
    progress: Progress | None = None,
    seed: int = 0,
) -> Patterned:
    """A copy of `net` (source stage) with `pattern` in the weights of each Conv, Gemm and MatMul that it fits.

    data: unlabelled inputs by name, samples along axis 0. Raises PruneError for a quantized network, weights that hold a NaN, an unknown layer in
    `skip`, and if the pattern fits no layer.
    """
    if any(x.op in ("QuantizeLinear", "DequantizeLinear") for x in net.layers):
        raise PruneError("the network is quantized (Q/DQ nodes): apply the pattern to the floating-point model, fine-tune, then calibrate")
    weighted = {x.name: x for x in net.layers if reduction_axis(x) is not None}
    if unknown := [s for s in skip if s not in weighted]:
        raise PruneError(f"no layer with weights is named {unknown[0]!r}.{nearest(unknown[0], weighted)}")
    wanted = {n: x for n, x in weighted.items() if n not in skip}
    if data is not None:
        check_data(data)
    inputs = {} if data is None else _gather(net, wanted, data, seed)
    made = net.clone()
    done: dict[str, np.ndarray] = {}
    found = _Found({n: "it is skipped" for n in skip})
    for i, layer in enumerate(x for x in made.layers if x.name in wanted):
        if progress is not None:
            progress(i, len(wanted), layer.name)
        place = reduction_axis(layer)
        assert place is not None
        w, axis = place
        if w.name in done:
            found.left[layer.name] = f"it shares its weights with another layer ('{w.name}')"
            continue
        array = w.array()
        if np.isnan(np.asarray(array, np.float32)).any():
            raise PruneError(f"the weights of '{layer.name}' hold a NaN ({_where_nan(array)}): correct the model first")
        try:
            mask = _mask(layer, array, axis, pattern, inputs.get(layer.name))
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
    return Patterned(made, done, found.removed, found.left, tuple(found.refitted), tuple(found.two_four))


@dataclass
class _Found:
    left: dict[str, str]
    removed: dict[str, float] = field(default_factory=dict)
    refitted: list[str] = field(default_factory=list)
    two_four: list[str] = field(default_factory=list)


def _where_nan(array: np.ndarray) -> str:
    at = np.unravel_index(int(np.isnan(np.asarray(array, np.float32)).argmax()), array.shape)
    return f"at {tuple(int(i) for i in at)}"


def _matrix(array: np.ndarray, axis: int) -> np.ndarray:
    """A view of weights as [..., output channels, input channels]: of a convolution [*kernel, K, C], else [..., N, K]."""
    if axis == 1 and array.ndim > 2:
        return np.moveaxis(array, (0, 1), (-2, -1))
    return array if axis == array.ndim - 1 else array.swapaxes(-1, -2)


def _mask(layer: Layer, array: np.ndarray, axis: int, pattern: Pattern, inputs: _Inputs | None) -> np.ndarray:
    """The mask in the weights' layout. Raises ValueError if the weights do not hold whole tiles."""
    scores = np.abs(np.asarray(array, np.float64))
    if inputs is not None:
        scores = scores * np.sqrt(_diagonal(layer, array, axis, inputs))
    mask = np.empty(array.shape, bool)
    _matrix(mask, axis)[...] = pattern.mask(_matrix(scores, axis))
    return mask


def _diagonal(layer: Layer, array: np.ndarray, axis: int, inputs: _Inputs) -> np.ndarray:
    """Mean square of each weight's input, in the weights' layout (broadcast)."""
    energy = np.diagonal(inputs.gram, axis1=1, axis2=2) / max(inputs.rows, 1)  # [groups, k]
    if layer.op == "Conv":
        groups = len(energy)
        return np.repeat(energy.reshape(groups, *array.shape[1:]), array.shape[0] // groups, axis=0)
    return energy[0].reshape(1, -1) if axis == array.ndim - 1 else energy[0].reshape(-1, 1)


def _gather(net: Network, layers: Mapping[str, Layer], data: Mapping[str, np.ndarray], seed: int) -> dict[str, _Inputs]:
    """Gram matrices of the layers' inputs over the samples; none for a layer with too many inputs, or with computed transposes."""
    readers: dict[Tensor, list[Layer]] = {}
    for layer in layers.values():
        w, axis = reduction_axis(layer) or (None, 0)
        assert w is not None
        size = int(np.prod(w.shape[1:])) if layer.op == "Conv" else int(w.shape[axis])
        if size <= _WIDEST and not layer.attrs.get("transA") and (layer.op == "Conv" or w.type.rank == 2) and layer.input(0) is not None:
            readers.setdefault(layer.needs(0), []).append(layer)
    found: dict[str, _Inputs] = {}
    rng = np.random.default_rng(seed)

    def watch(tensor: Tensor, array: np.ndarray) -> None:
        for layer in readers.get(tensor, ()):
            rows = _rows(layer, array, rng, most=max(64, _ROWS // batches))
            gram = rows.transpose(0, 2, 1) @ rows
            known = found.setdefault(layer.name, _Inputs(np.zeros_like(gram)))
            known.gram += gram
            known.rows += rows.shape[1]

    count = len(next(iter(data.values())))
    fixed = [t.shape[0] for t in net.inputs if t.type.rank and isinstance(t.shape[0], int)]
    batch = fixed[0] if fixed else min(count, 16)
    batches = max(count // batch, 1)
    for start in range(0, count - batch + 1, batch):
        run_network(net, {n: a[start : start + batch] for n, a in data.items()}, watch=watch)
    return found


def _rows(layer: Layer, x: np.ndarray, rng: np.random.Generator, most: int) -> np.ndarray:
    """Sampled rows of a layer's input, float64 [groups, rows, k]."""
    if layer.op != "Conv":
        flat = x.reshape(-1, x.shape[-1])
        return flat[rng.permutation(len(flat))[:most]].astype(np.float64)[None]
    place = reduction_axis(layer)
    assert place is not None
    out = layer.outputs[0]
    spatial = [int(d) for d in out.shape[2:]] if all(isinstance(d, int) for d in out.shape[2:]) else []
    if not spatial:
        raise PruneError(f"'{layer.name}' has symbolic pixels: fix the model's height and width for --calibData")
    positions = len(x) * int(np.prod(spatial))
    return conv_rows(layer, x, place[0].array(), rng.permutation(positions)[:most])


def _refit(layer: Layer, array: np.ndarray, axis: int, mask: np.ndarray, inputs: _Inputs) -> np.ndarray | None:
    """The weights whose kept ones minimize ||x W - x W'||^2 + ridge ||W - W'||^2 per output channel; None if that takes too long."""
    groups, k = inputs.gram.shape[:2]
    is_conv = layer.op == "Conv"
    w = (array.reshape(groups, -1, k) if is_conv else _matrix(array, axis)[None]).astype(np.float64)  # [groups, outputs, k]
    kept = mask.reshape(groups, -1, k) if is_conv else _matrix(mask, axis)[None]
    if 2 / 3 * w.shape[0] * w.shape[1] * kept.sum(-1).max() ** 3 > _FLOPS:
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


def unusable(pattern: Pattern, done: Patterned) -> str:
    """Why no kernel exploits the pattern; "" if all patterned layers are 2:4."""
    dense = [n for n in done.removed if n not in done.two_four]
    if not dense:
        return ""
    layers = {x.name: x for x in done.network.layers}
    w, axis = reduction_axis(layers[dense[0]]) or (None, 0)
    where = "" if w is None else first_violation(w.array(), axis)
    return f"{len(dense)} of {len(done.removed)} layers with {pattern.name} are not 2:4 (as '{dense[0]}': {where}), and no kernel skips other zeros"
