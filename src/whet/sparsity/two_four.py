"""2:4 sparsity: of every aligned group of four along a weight's reduction axis at most two are nonzero (Mishra et al., arXiv:2104.08378).

For a convolution's weights [K, C/group, *kernel] a group is four input channels of one output channel and kernel position, as
in TensorRT's sparse kernels; for a matrix product, four entries along the inner dimension.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Network, Origin, Tensor, Weight

_FEW_ROWS = 4
_MANY_ZEROS = 0.4  # share of zeros from which weights were meant to be 2:4, so that the group that is not is named


def two_four(w: np.ndarray, axis: int) -> np.ndarray:
    """`w` with the two smallest magnitudes of each aligned group of four along `axis` set to zero (ties: the later one).

    w: a float array. Raises ValueError unless the length of `axis` is a multiple of 4.
    """
    if w.shape[axis] % 4:
        raise ValueError(f"axis {axis} has {w.shape[axis]} elements, not a multiple of 4")
    moved = np.moveaxis(w, axis, -1)
    fours = moved.reshape(*moved.shape[:-1], -1, 4)
    size = np.nan_to_num(np.abs(fours.astype(np.float32)), nan=-1.0, posinf=np.inf)
    larger = np.zeros(fours.shape, np.int8)  # of the other three: those that are kept rather than this one
    for i in range(4):
        for j in range(i):
            first = size[..., j] >= size[..., i]
            larger[..., i] += first
            larger[..., j] += ~first
    keep = larger < 2
    out = np.where(keep, fours, np.zeros((), w.dtype)).reshape(moved.shape)
    return np.ascontiguousarray(np.moveaxis(out, -1, axis))


def _keep_first_two(w: np.ndarray, axis: int) -> np.ndarray:
    """`w` with the last two of each aligned group of four along `axis` set to zero."""
    made = w.copy()
    made[(slice(None),) * axis + (np.arange(w.shape[axis]) % 4 > 1,)] = 0
    return made


def is_two_four(w: np.ndarray, axis: int) -> bool:
    """True if every aligned group of four along `axis` has at most two nonzero elements; False if the axis is not a multiple of 4."""
    if w.shape[axis] % 4 or w.size == 0:
        return False
    moved = np.moveaxis(w, axis, -1)
    if not _has_at_most_two(moved[:_FEW_ROWS]):  # most weights are dense: a few rows tell
        return False
    return _has_at_most_two(moved)


def _has_at_most_two(w: np.ndarray) -> bool:
    return bool(((w.reshape(*w.shape[:-1], -1, 4) != 0).sum(-1) <= 2).all())


def find_first_violation(w: np.ndarray, axis: int) -> str:
    """The first aligned group of four along `axis` with more than two nonzeros, or that holds a NaN, in words; "" if there is none.

    The other axes are searched in their order; of a convolution's weights [K, C, *kernel] and a matrix product's [K, N] the output channel is
    named as such.
    """
    if w.shape[axis] % 4:
        return f"{w.shape[axis]} input channels have no whole groups of four"
    moved = np.moveaxis(w, axis, -1)
    fours = moved.reshape(*moved.shape[:-1], -1, 4)
    nan = (fours != fours).any(-1)
    bad = ((fours != 0).sum(-1) > 2) | nan
    if not bad.any():
        return ""
    *others, group = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    outputs = 0 if axis == 1 else len(others) - 1
    rest = [i for k, i in enumerate(others) if k != outputs]
    at = f"output channel {others[outputs]}, inputs {4 * group}-{4 * group + 3}" + (f" at {tuple(rest)}" if rest else "")
    if nan[(*others, group)]:
        return f"{at} hold a NaN"
    return f"{at} have {int(np.count_nonzero(fours[(*others, group)]))} nonzeros"


def find_reduction_axis(layer: Layer) -> tuple[Tensor, int] | None:
    """The constant weight of a Conv, Gemm or MatMul (fused or not) and its reduction axis; None for other layers or computed weights."""
    if layer.op == "Fused":
        body = layer.regions["body"]
        inner = next((x for x in body.layers if x.op == layer.composite), None)
        place = {t: i for i, t in enumerate(body.inputs)}
        weight = inner.input(1) if inner is not None else None
        if weight is not None and weight.maker is not None and weight.maker.op == "DequantizeLinear":
            weight = weight.maker.inputs[0]  # a zero is the integer 0
        if inner is None or weight not in place:
            return None
        w, layer = layer.inputs[place[weight]], inner
    else:
        w = layer.input(1)
    if layer.op not in ("Conv", "Gemm", "MatMul") or w is None or w.weight is None or not (w.dtype.is_float or w.dtype.bits == 8) or w.type.rank < 2:
        return None
    if layer.op == "Conv":
        return w, 1
    if layer.op == "Gemm" and layer.attrs.get("transB"):
        return w, 1
    return w, w.type.rank - 2


def explain_ineligible(layer: Layer) -> str | None:
    """Why the weights of a layer are not 2:4; None if they are, or if `find_reduction_axis` finds no weights."""
    found = find_reduction_axis(layer)
    if found is None:
        return None
    w, axis = found
    if w.shape[axis] % 4:
        return f"its reduction axis has {w.shape[axis]} elements, no multiple of 4"
    array = w.array()
    if is_two_four(array, axis):
        return None
    pruned = np.count_nonzero(array == 0) > _MANY_ZEROS * array.size
    return "its weights are not 2:4" + (f": {find_first_violation(array, axis)}" if pruned else "")


def list_eligible_layers(net: Network) -> tuple[list[str], dict[str, str]]:
    """Names of layers with 2:4 weights, and the reason for each other weighted layer."""
    yes, no = [], {}
    for layer in net.layers:
        if find_reduction_axis(layer) is None:
            continue
        if (reason := explain_ineligible(layer)) is None:
            yes.append(layer.name)
        else:
            no[layer.name] = reason
    return yes, no


def force_two_four(net: Network, *, positional: bool = False) -> tuple[Network, list[str], dict[str, str]]:
    """A copy of `net` with 2:4 weights if the shape allows it; the names of changed layers, and the reasons for the others.

    `positional` keeps the first two of every four, as trtexec's `--sparsity=force` does; else the two of largest magnitude stay. Either way
    fine-tuning is needed to restore accuracy.
    """
    made = net.clone()
    done, left = [], {}
    renewed: dict[tuple[Tensor, int], Tensor] = {}
    for layer in made.layers:
        found = find_reduction_axis(layer)
        if found is None:
            continue
        w, axis = found
        if w.shape[axis] % 4:
            left[layer.name] = f"its reduction axis has {w.shape[axis]} elements, no multiple of 4"
            continue
        if found not in renewed and is_two_four(w.array(), axis):
            continue
        if found not in renewed:
            array = _keep_first_two(w.array(), axis) if positional else two_four(w.array(), axis)
            name = made.fresh(f"{w.name}.two_four")
            renewed[found] = Tensor(name, w.type, weight=Weight(array, Origin("source", name)))
            made.constants[name] = renewed[found]
        layer.inputs = tuple(renewed[found] if i == 1 else t for i, t in enumerate(layer.inputs))
        done.append(layer.name)
    made.prune_dead()
    return made, done, left
