"""Recovery without labels: a cut network's weights and statistics fitted to what the original computes on some inputs.

Layer by layer in running order, each on what its already recovered predecessors give:

- least squares: a Conv, Gemm or MatMul gets the weights (and bias, or batch-norm mean) with which its inputs reproduce the original
  layer's kept outputs best; closed form, a ridge keeps it near the cut weights;
- batch norms: running mean and variance are measured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Origin, Tensor, Weight
from whet.pruning._least_squares import Problem, conv_matrix, conv_outputs, conv_rows, conv_weights, solve
from whet.pruning._sweep import Sweep
from whet.pruning.cut import Kept, kept_indexes
from whet.pruning.order import check_order

Progress = Callable[[int, int, str], None]  # (layers done, layers in all, what was done)


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What is fitted and how: `ridge` is relative to the mean square of a layer's inputs, `rows` the most positions it is fitted on
    (at least four times its unknowns are wanted), `seed` picks them."""

    batch_norms: bool = True
    least_squares: bool = True
    ridge: float = 1e-3
    rows: int = 8192
    seed: int = 0


def recover(
    pruned: Network,
    original: Network,
    kept: Kept,
    data: Mapping[str, np.ndarray],
    config: RecoveryConfig | None = None,
    progress: Progress | None = None,
    *,
    insist: bool = False,
) -> Network:
    """A copy of `pruned` (= cut(original, kept)) fitted to `original` on `data` (inputs by name; labels are not needed).

    Raises PruneError when the networks do not belong together or the order of steps is wrong (unless `insist`), ShapeError when the data do
    not fit.
    """
    check_order(pruned, "recover", insist)
    config = config or RecoveryConfig()
    made = pruned.clone()
    names = {layer.name for layer in original.layers}
    if not {layer.name for layer in made.layers} <= names:
        raise PruneError("the cut network has layers that the original has not: recover it against the network that it was cut from")
    indexes = {(t.name, i): at for (t, i), at in kept_indexes(original, kept).items()}
    small, big = Sweep(made, data), Sweep(original, data)
    rng = np.random.default_rng(config.seed)
    readers = made.users()
    for n, layer in enumerate(made.layers):
        note = "ran"
        if config.least_squares and _fittable(layer, readers):
            if not big.run_to(layer.name):
                raise PruneError(f"layer '{layer.name}' comes earlier in the original: the networks do not belong together")
            (want,) = (t for x in original.layers if x.name == layer.name for t in x.outputs)
            note = _fit(layer, small, _kept_part(big.value(want), want.name, indexes), config, rng, readers)
        if config.batch_norms and layer.op == "BatchNormalization":
            note = _measure(layer, small.value(layer.needs(0)))
        small.step()
        if progress is not None:
            progress(n + 1, len(made.layers), f"{layer.name}: {note}")
    return made


def reestimate_batch_norms(net: Network, data: Mapping[str, np.ndarray], progress: Progress | None = None) -> Network:
    """A copy of `net` whose batch norms have the mean and variance that `data` (inputs by name, samples along axis 0) gives, each after those
    before it. Statistics that are computed at run time are left alone. Raises ShapeError for data that do not fit."""
    made = net.clone()
    sweep = Sweep(made, data)
    for n, layer in enumerate(made.layers):
        note = "ran"
        if layer.op == "BatchNormalization":
            note = _measure(layer, sweep.value(layer.needs(0)))
        sweep.step()
        if progress is not None:
            progress(n + 1, len(made.layers), f"{layer.name}: {note}")
    return made


def _set(t: Tensor | None, array: np.ndarray) -> None:
    """New values of a constant: it is a source weight of the recovered network from now on."""
    assert t is not None
    t.weight = Weight(np.ascontiguousarray(array, t.dtype.numpy).reshape(array.shape), Origin("source", t.name))


def _measure(layer: Layer, x: np.ndarray) -> str:
    """Puts the mean and variance of `x` over all but channels into a BatchNormalization."""
    mean, variance = layer.inputs[3], layer.inputs[4]
    if mean is None or variance is None or not (mean.is_constant and variance.is_constant):
        return "its statistics are computed, left alone"
    axes = (0, *range(2, x.ndim))
    _set(mean, x.mean(axes, dtype=np.float64))
    _set(variance, x.var(axes, dtype=np.float64))
    return "mean and variance measured"


def _fittable(layer: Layer, readers) -> bool:
    """Whether the layer multiplies by a constant that only it reads."""
    w = layer.input(1)
    if layer.op not in ("Conv", "Gemm", "MatMul") or w is None or not w.is_constant or len(readers.get(w, [])) != 1:
        return False
    if layer.op == "Conv":
        return w.type.rank >= 3
    if layer.op == "Gemm":
        a = layer.attrs
        return not a["transA"] and a["alpha"] == 1 and a["beta"] == 1
    return w.type.rank == 2


def _kept_part(y: np.ndarray, name: str, indexes: Mapping[tuple[str, int], np.ndarray]) -> np.ndarray:
    for i in range(y.ndim):
        if (name, i) in indexes:
            y = np.take(y, indexes[name, i], axis=i)
    return y


def _fit(layer: Layer, sweep: Sweep, want: np.ndarray, config: RecoveryConfig, rng: np.random.Generator, readers) -> str:
    """Solves for the layer's weights; returns what came of it."""
    x, wt = sweep.value(layer.needs(0)), layer.needs(1)
    w, group = wt.array(), layer.attrs.get("group", 1)
    bias, norm = _bias(layer, readers), _norm_after(layer, readers)
    intercept = bias is not None or norm is not None
    if layer.op == "Conv":
        positions = want.shape[0] * int(np.prod(want.shape[2:]))
        at = _some(positions, max(config.rows, 4 * int(np.prod(w.shape[1:]))), rng)
        rows, targets, matrix = conv_rows(layer, x, w, at), conv_outputs(want, group, at), conv_matrix(w, group)
    else:
        flat, given = x.reshape(-1, x.shape[-1]), want.reshape(-1, want.shape[-1])
        at = _some(len(flat), max(config.rows, 4 * x.shape[-1]), rng)
        rows, targets = flat[at][None].astype(np.float64), given[at][None].astype(np.float64)
        matrix = (w.T if layer.attrs.get("transB") else w)[None].astype(np.float64)
    if layer.op != "MatMul" and bias is not None:
        targets = targets - bias.array().reshape(targets.shape[0], 1, -1)
    before = float(np.sum((targets - rows @ matrix) ** 2))
    size = float(np.sum(targets**2))
    if before <= 1e-12 * max(size, 1e-30):
        return "exact already"
    made, shift = solve(Problem(rows, targets), matrix, ridge=config.ridge, intercept=intercept)
    after = float(np.sum((targets - rows @ made - shift[:, None]) ** 2))
    if layer.op == "Conv":
        _set(wt, conv_weights(made, w))
    else:
        _set(wt, made[0].T if layer.attrs.get("transB") else made[0])
    if bias is not None:
        _set(bias, bias.array() + shift.reshape(bias.array().shape))
    elif norm is not None:
        _set(norm, norm.array() - shift.reshape(-1))
    return f"error {np.sqrt(before / size):.3f} -> {np.sqrt(after / size):.3f} of its output"


def _some(n: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most `most` of n positions, sorted."""
    return np.arange(n) if n <= most else np.sort(rng.choice(n, most, replace=False))


def _bias(layer: Layer, readers) -> Tensor | None:
    """The layer's own bias, one number per output, which nothing else reads."""
    b = layer.input(2)
    if layer.op == "MatMul" or b is None or not b.is_constant or len(readers.get(b, [])) != 1:
        return None
    return b if b.type.rank == 1 and b.shape[0] == layer.output.shape[1] else None


def _norm_after(layer: Layer, readers) -> Tensor | None:
    """The running mean of the batch norm that alone reads the layer's output: it can take up an intercept."""
    users = readers.get(layer.output, [])
    if layer.op != "Conv" or len(users) != 1 or users[0][0].op != "BatchNormalization" or users[0][1] != 0:
        return None
    mean = users[0][0].inputs[3]
    return mean if mean is not None and mean.is_constant and len(readers.get(mean, [])) == 1 else None
