"""Recovery without labels: fits a cut network's weights and statistics to the original network's activations on sample inputs.

Layers are fitted in execution order, each on the outputs of its already recovered predecessors:

- least squares: a Conv, Gemm or MatMul gets the weights (and bias, or batch-norm mean) that best reproduce the original layer's kept outputs
  from its inputs; closed form with a ridge penalty towards the cut weights. A layer that only an Add reads aims at the original sum minus
  the present other input, so that it also corrects errors of the shortcut. Where a Relu or Clip follows, values that it maps to the same bound
  count as equal, so that the weights serve the values that pass;
- batch norms: running mean and variance are re-estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Origin, Tensor, Weight
from whet.pruning._least_squares import (
    Problem,
    convert_conv_to_matrix,
    convert_matrix_to_conv,
    gather_conv_outputs,
    gather_conv_rows,
    select_row_type,
    solve,
)
from whet.pruning._sweep import Sweep
from whet.pruning.cut import Kept, find_kept_indices, get_original_name
from whet.pruning.order import check_order

_NUMBERS = 1 << 24  # inputs of a layer that a fit copies at most, unless its unknowns need more: 128 MiB
Progress = Callable[[int, int, str], None]  # (layers done, total layers, message)


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """`ridge` is relative to the mean square of a layer's inputs. `rows` limits the positions a layer is fitted on: fewer if its inputs there
    exceed 2^24 numbers, but at least four times its unknowns; `seed` selects them."""

    batch_norms: bool = True
    least_squares: bool = True
    ridge: float = 0.1  # ResNet-56 at 0.4 of the FLOPs, 128 images: 88 % top-1, with 1e-3 87 %
    rows: int = 32768
    seed: int = 0


def recover(
    pruned: Network,
    original: Network,
    kept_channels: Kept,
    data: Mapping[str, np.ndarray],
    config: RecoveryConfig | None = None,
    progress: Progress | None = None,
    *,
    insist: bool = False,
) -> Network:
    """A copy of `pruned` (= cut(original, kept_channels)) fitted to `original` on `data` (inputs by name; labels are not needed).

    Raises PruneError if `pruned` was not cut from `original` or the order of steps is wrong (unless `insist`), ShapeError if the data do not
    match the inputs.
    """
    check_order(pruned, "recover", insist)
    config = config or RecoveryConfig()
    recovered = pruned.clone()
    names = {layer.name for layer in original.layers}
    if any(layer.name not in names and get_original_name(layer.name) not in names for layer in recovered.layers):
        raise PruneError("the cut network has layers that the original lacks: recover it against the network that it was cut from")
    indexes = {(t.name, i): at for (t, i), at in find_kept_indices(original, kept_channels).items()}
    small, big = Sweep(recovered, data), Sweep(original, data)
    rng = np.random.default_rng(config.seed)
    readers = recovered.users()
    for n, layer in enumerate(recovered.layers):
        note = "ran"
        if config.least_squares and is_fittable(layer, readers):
            other = _find_other_summand(layer, n, recovered, original, small, readers)
            aim = layer.name if other is None else other[0]
            if not big.run_to(aim):
                raise PruneError(f"layer '{layer.name}' comes earlier in the original: the networks do not belong together")
            (want,) = (t for x in original.layers if x.name == aim for t in x.outputs)
            target = _take_kept_part(big.value(want), want.name, indexes)
            summand = None if other is None else small.value(other[1])
            if summand is not None:
                target = target - summand
                if (added := find_added_bias(layer, readers)) is not None:
                    target = target - added[1].array()
            bounds = _Bounds(*find_bounds(layer, recovered, readers, summed=other is not None), summand)
            note = _fit(layer, small, target, config, rng, readers, bounds)
        if config.batch_norms and layer.op == "BatchNormalization":
            note = _measure(layer, small.value(layer.needs(0)))
        small.step()
        if progress is not None:
            progress(n + 1, len(recovered.layers), f"{layer.name}: {note}")
    return recovered


def reestimate_batch_norms(net: Network, data: Mapping[str, np.ndarray], progress: Progress | None = None) -> Network:
    """A copy of `net` with batch-norm mean and variance re-estimated on `data` (inputs by name, samples along axis 0) in execution order.
    Statistics that are computed at run time are unchanged. Raises ShapeError if the data do not match the inputs."""
    updated = net.clone()
    sweep = Sweep(updated, data)
    for n, layer in enumerate(updated.layers):
        note = "ran"
        if layer.op == "BatchNormalization":
            note = _measure(layer, sweep.value(layer.needs(0)))
        sweep.step()
        if progress is not None:
            progress(n + 1, len(updated.layers), f"{layer.name}: {note}")
    return updated


def _set(t: Tensor | None, array: np.ndarray) -> None:
    """Sets a constant's values; it becomes a source weight of the recovered network."""
    assert t is not None
    t.weight = Weight(np.ascontiguousarray(array, t.dtype.numpy).reshape(array.shape), Origin("source", t.name))


def _measure(layer: Layer, x: np.ndarray) -> str:
    """Sets a BatchNormalization's statistics to the per-channel mean and variance of `x`."""
    mean, variance = layer.inputs[3], layer.inputs[4]
    if mean is None or variance is None or not (mean.is_constant and variance.is_constant):
        return "statistics computed at run time, unchanged"
    axes = (0, *range(2, x.ndim))
    _set(mean, x.mean(axes, dtype=np.float64))
    _set(variance, x.var(axes, dtype=np.float64))
    return "mean and variance re-estimated"


def is_fittable(layer: Layer, readers) -> bool:
    """True if the layer multiplies by a constant that no other layer reads."""
    w = layer.input(1)
    if layer.op not in ("Conv", "Gemm", "MatMul") or w is None or not w.is_constant or len(readers.get(w, [])) != 1:
        return False
    if layer.op == "Conv":
        return w.type.rank >= 3
    if layer.op == "Gemm":
        a = layer.attrs
        return not a["transA"] and a["alpha"] == 1 and a["beta"] == 1
    return w.type.rank == 2


def _find_other_summand(
    layer: Layer, place: int, net: Network, original: Network, sweep: Sweep, readers: Mapping[Tensor, list[tuple[Layer, int]]]
) -> tuple[str, Tensor] | None:
    """The name and the other input of the Add that alone reads the layer (or the layer plus its bias), if that input is computed and both
    networks run the Add before the next layer to fit."""
    added = find_added_bias(layer, readers)
    result = layer.output if added is None else added[0].output
    users = readers.get(result, [])
    if len(users) != 1 or users[0][0].op != "Add" or layer.output in net.outputs or result in net.outputs:
        return None
    add, i = users[0]
    other = add.needs(1 - i)
    if other not in sweep.values or not other.type == layer.output.type == add.output.type:
        return None
    for steps, start in ((net.layers, place), (original.layers, next(k for k, x in enumerate(original.layers) if x.name == layer.name))):
        end = next((k for k, x in enumerate(steps) if x.name == add.name), -1)
        if end < start or any(x.op in ("Conv", "Gemm", "MatMul") for x in steps[start + 1 : end]):
            return None
    return add.name, other


@dataclass(frozen=True)
class _Bounds:
    """Bounds (None: there is none) of a layer's outputs plus bias and `summand` beyond which all values mean the same to the reader."""

    low: float | None = None
    high: float | None = None
    summand: np.ndarray | None = None  # in the shape of the layer's outputs


def find_bounds(layer: Layer, net: Network, readers, *, summed: bool) -> tuple[float | None, float | None]:
    """The bounds of the Relu or Clip that alone reads the layer with its bias (`summed`: the Add of that and another tensor)."""
    added = find_added_bias(layer, readers)
    t = layer.output if added is None else added[0].output
    t = readers[t][0][0].output if summed else t
    users = readers.get(t, [])
    if len(users) != 1 or users[0][1] != 0 or t in net.outputs or layer.output in net.outputs:
        return None, None
    reader = users[0][0]
    if reader.op == "Relu":
        return 0.0, None
    bounds = [reader.input(i) for i in (1, 2)] if reader.op == "Clip" else [None, None]
    if any(b is not None and not b.is_constant for b in bounds):
        return None, None
    low, high = (None if b is None else float(b.array().item()) for b in bounds)
    return low, high


def _take_kept_part(y: np.ndarray, name: str, indexes: Mapping[tuple[str, int], np.ndarray]) -> np.ndarray:
    for i in range(y.ndim):
        if (name, i) in indexes:
            y = np.take(y, indexes[name, i], axis=i)
    return y


def _fit(
    layer: Layer, sweep: Sweep, want: np.ndarray, config: RecoveryConfig, rng: np.random.Generator, readers, bounds: _Bounds
) -> str:  # fmt: skip
    """Solves for the layer's weights; returns a message for `progress`."""
    x, wt = sweep.value(layer.needs(0)), layer.needs(1)
    w, group = wt.array(), layer.attrs.get("group", 1)
    bias, norm = find_bias(layer, readers), find_norm_mean(layer, readers)
    intercept, kind = bias is not None or norm is not None, select_row_type(config.ridge)
    if layer.op == "Conv":
        positions = want.shape[0] * int(np.prod(want.shape[2:]))
        at = sample_positions(positions, compute_row_limit(config.rows, int(np.prod(w.shape[1:]))), rng)
        rows, matrix = gather_conv_rows(layer, x, w, at, kind), convert_conv_to_matrix(w, group)
        targets, *summands = (gather_conv_outputs(y, group, at, kind) for y in (want, bounds.summand) if y is not None)
    else:
        flat = x.reshape(-1, x.shape[-1])
        at = sample_positions(len(flat), compute_row_limit(config.rows, x.shape[-1]), rng)
        rows = flat[at][None].astype(kind)
        targets, *summands = (y.reshape(-1, y.shape[-1])[at][None].astype(kind) for y in (want, bounds.summand) if y is not None)
        matrix = (w.T if layer.attrs.get("transB") else w)[None].astype(np.float64)
    offset = np.zeros((1, 1, 1), kind) if bias is None else bias.array().reshape(targets.shape[0], 1, -1).astype(kind)
    if layer.op != "MatMul":
        targets = targets - offset
    others = sum(summands, offset)
    low, high = (None if v is None else np.broadcast_to(kind(v) - others, targets.shape) for v in (bounds.low, bounds.high))
    problem = Problem(rows, targets, low, high)
    unfitted = rows @ matrix.astype(kind)
    before = _sum_squares(problem.find_nearest_targets(unfitted) - unfitted)
    size = _sum_squares(targets)
    if before <= 1e-12 * max(size, 1e-30):
        return "already exact"
    fitted, shift = solve(problem, matrix, ridge=config.ridge, intercept=intercept)
    made = rows @ fitted.astype(kind) + shift[:, None].astype(kind)
    after = _sum_squares(problem.find_nearest_targets(made) - made)
    if layer.op == "Conv":
        _set(wt, convert_matrix_to_conv(fitted, w))
    else:
        _set(wt, fitted[0].T if layer.attrs.get("transB") else fitted[0])
    if bias is not None:
        _set(bias, bias.array() + shift.reshape(bias.array().shape))
    elif norm is not None:
        _set(norm, norm.array() - shift.reshape(-1))
    return f"relative output error {np.sqrt(before / size):.3f} -> {np.sqrt(after / size):.3f}"


def _sum_squares(a: np.ndarray) -> float:
    return float(np.sum(np.square(a), dtype=np.float64))


def compute_row_limit(rows: int, unknowns: int) -> int:
    """Rows of a least-squares problem that fit into memory, at least four per unknown."""
    return max(min(rows, _NUMBERS // unknowns), 4 * unknowns)


def sample_positions(n: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """At most `limit` random positions out of n, sorted."""
    return np.arange(n) if n <= limit else np.sort(rng.choice(n, limit, replace=False))


def find_added_bias(layer: Layer, readers) -> tuple[Layer, Tensor] | None:
    """The Add that alone reads a MatMul, and its constant with one value per output, if no other layer reads that."""
    users = readers.get(layer.output, [])
    if layer.op != "MatMul" or len(users) != 1 or users[0][0].op != "Add":
        return None
    add, i = users[0]
    b, width = add.needs(1 - i), layer.output.shape[-1]
    fits = b.is_constant and b.type.rank >= 1 and b.shape[-1] == width == b.array().size
    return (add, b) if fits and len(readers.get(b, [])) == 1 and add.output.type == layer.output.type else None


def find_bias(layer: Layer, readers) -> Tensor | None:
    """The layer's constant bias (one value per output), if no other layer reads it."""
    added = find_added_bias(layer, readers)
    if added is not None:
        return added[1]
    b = layer.input(2)
    if layer.op == "MatMul" or b is None or not b.is_constant or len(readers.get(b, [])) != 1:
        return None
    return b if b.type.rank == 1 and b.shape[0] == layer.output.shape[1] else None


def find_norm_mean(layer: Layer, readers) -> Tensor | None:
    """The running mean of a batch norm that is the only reader of the layer's output; it can absorb an intercept."""
    users = readers.get(layer.output, [])
    if layer.op != "Conv" or len(users) != 1 or users[0][0].op != "BatchNormalization" or users[0][1] != 0:
        return None
    mean = users[0][0].inputs[3]
    return mean if mean is not None and mean.is_constant and len(readers.get(mean, [])) == 1 else None
