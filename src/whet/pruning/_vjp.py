"""Reverse-mode differentiation of the NumPy references: cotangents of a layer's inputs from those of its outputs, without PyTorch.

Elementwise ops are differentiated by central differences of their reference in float64. Ops that move elements are run on element
indices, which gives the origin of each element. Contractions, pooling and norms have explicit rules.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.ops import get_op
from whet.ops._interpret import run_layer
from whet.ops._window import gather_windows
from whet.ops.conv import get_window_attributes as conv_attributes

Arrays = list[np.ndarray | None]
Rule = Callable[[Layer, Arrays, list[np.ndarray], list[np.ndarray]], Arrays]

MOVES = frozenset(
    "Reshape Flatten Squeeze Unsqueeze Identity Dropout Transpose Concat Split Slice Gather Pad Expand Tile DepthToSpace SpaceToDepth".split()
)
_STEP = 1e-6  # step of the central difference, relative to 1 + |x|


def backpropagate(layer: Layer, inputs: Arrays, outputs: list[np.ndarray], cotangents: list[np.ndarray]) -> Arrays:
    """Cotangents of the inputs (None for constants and non-floats), from the layer's inputs, outputs and output cotangents.

    Raises UnsupportedError for an op without a rule.
    """
    rule = RULES.get(layer.op)
    if rule is not None:
        return rule(layer, inputs, outputs, cotangents)
    if layer.op in MOVES:
        return _scatter_cotangents(layer, inputs, cotangents)
    if get_op(layer.op).pointwise and not layer.regions:
        return _backpropagate_pointwise(layer, inputs, cotangents[0])
    raise UnsupportedError(f"{layer.op} '{layer.name}' has no gradient rule")


def needs_cotangent(layer: Layer, i: int) -> bool:
    """True if input `i` is a computed float, which needs a cotangent."""
    t = layer.inputs[i]
    return t is not None and not t.is_constant and t.dtype.is_float


def _backpropagate_pointwise(layer: Layer, inputs: Arrays, cotangent: np.ndarray) -> Arrays:
    wide: Arrays = [a.astype(np.float64) if a is not None and a.dtype.kind == "f" else a for a in inputs]
    made: Arrays = []
    for i, x in enumerate(wide):
        if x is None or not needs_cotangent(layer, i):
            made.append(None)
            continue
        step = _STEP * (1 + np.abs(x))
        above, below = (run_layer(layer, [*wide[:i], x + s, *wide[i + 1 :]])[0] for s in (step, -step))
        width = 2 * np.broadcast_to(step.reshape((1,) * (above.ndim - x.ndim) + x.shape), above.shape)
        made.append(_unbroadcast(cotangent * ((above - below) / width), x.shape).astype(cotangent.dtype))
    return made


def _require_input(inputs: Arrays, i: int) -> np.ndarray:
    """A required input."""
    a = inputs[i]
    assert a is not None
    return a


def _unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    g = g.sum(axis=tuple(range(g.ndim - len(shape))))
    stretched = tuple(i for i, d in enumerate(shape) if d == 1 and g.shape[i] != 1)
    return g.sum(axis=stretched, keepdims=True) if stretched else g


def _scatter_cotangents(layer: Layer, inputs: Arrays, cotangents: list[np.ndarray]) -> Arrays:
    """Runs the op on element indices (0: fill value) and scatter-adds each cotangent to its element's origin."""
    numbers, starts, n = list(inputs), [0] * len(inputs), 1
    for i, (a, t) in enumerate(zip(inputs, layer.inputs, strict=True)):
        if a is not None and t is not None and a.dtype.kind == "f" and t.dtype.is_float and not (i and layer.op == "Pad"):
            numbers[i], starts[i] = np.arange(n, n + a.size, dtype=np.float64).reshape(a.shape), n
            n += a.size
        elif a is not None and layer.op == "Pad" and i == 2:
            numbers[i] = np.zeros(a.shape)  # fill values have no origin
    total = np.zeros(n)
    for at, g in zip(run_layer(layer, numbers), cotangents, strict=True):
        total += np.bincount(at.astype(np.int64).reshape(-1), g.reshape(-1), minlength=n)
    return [
        total[starts[i] : starts[i] + a.size].reshape(a.shape).astype(a.dtype) if starts[i] and a is not None and needs_cotangent(layer, i) else None
        for i, a in enumerate(inputs)
    ]


def _wrap_first_input_rule(f: Callable[[Layer, Arrays, np.ndarray, np.ndarray], np.ndarray]) -> Rule:
    """Wraps a rule of a single-output op where only the first input has a cotangent."""

    def rule(layer: Layer, inputs: Arrays, outputs: list[np.ndarray], cotangents: list[np.ndarray]) -> Arrays:
        made = f(layer, inputs, outputs[0], cotangents[0]) if needs_cotangent(layer, 0) else None
        if any(needs_cotangent(layer, i) for i in range(1, len(inputs))):
            raise UnsupportedError(f"{layer.op} '{layer.name}' reads a computed weight, which has no gradient rule")
        return [made, *[None] * (len(inputs) - 1)]

    return rule


def _spread(columns: np.ndarray, x: np.ndarray, kernel, strides, dilations, pads, out) -> np.ndarray:
    """col2im: adds columns [N, C, *kernel, *out] to their positions of x [N, C, *spatial]."""
    r = len(kernel)
    full = np.zeros((*x.shape[:2], *(x.shape[2 + i] + pads[i] + pads[r + i] for i in range(r))), x.dtype)
    for at in np.ndindex(*kernel):
        places = tuple(slice(at[i] * dilations[i], at[i] * dilations[i] + (out[i] - 1) * strides[i] + 1, strides[i]) for i in range(r))
        full[(slice(None), slice(None), *places)] += columns[(slice(None), slice(None), *at)]
    return full[(slice(None), slice(None), *(slice(pads[i], pads[i] + x.shape[2 + i]) for i in range(r)))]


def _backpropagate_conv(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    x, w = _require_input(inputs, 0), _require_input(inputs, 1)
    strides, dilations, pads = conv_attributes(layer)
    group, kernel, out = layer.attrs["group"], w.shape[2:], g.shape[2:]
    columns = np.matmul(w.reshape(group, w.shape[0] // group, -1).transpose(0, 2, 1), g.reshape(len(g), group, w.shape[0] // group, -1))
    return _spread(columns.reshape(len(g), x.shape[1], *kernel, *out), x, kernel, strides, dilations, pads, out)


def _backpropagate_conv_transpose(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    from whet.ops.conv_transpose import get_window_attributes

    x, w = _require_input(inputs, 0), _require_input(inputs, 1)
    strides, dilations, pads, _ = get_window_attributes(layer)
    group, r = layer.attrs["group"], w.ndim - 2
    columns = gather_windows(g, w.shape[2:], strides, dilations, pads, 0)
    columns = columns[(slice(None), slice(None), *(slice(0, n) for n in x.shape[2:]))]  # [N, K, *spatial, *kernel]
    n, per = len(g), w.shape[1]
    v = columns.reshape(n, group, per, *columns.shape[2:]).transpose(0, 1, 2, *range(3 + r, 3 + 2 * r), *range(3, 3 + r))
    return np.matmul(w.reshape(group, x.shape[1] // group, -1), v.reshape(n, group, -1, int(np.prod(x.shape[2:])))).reshape(x.shape)


def _backpropagate_gemm(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    b = _require_input(inputs, 1) if layer.attrs["transB"] else _require_input(inputs, 1).T
    made = layer.attrs["alpha"] * (g @ b)
    return made.T if layer.attrs["transA"] else made


def _backpropagate_matmul(layer: Layer, inputs: Arrays, outputs: list[np.ndarray], cotangents: list[np.ndarray]) -> Arrays:
    a, b, g = _require_input(inputs, 0), _require_input(inputs, 1), cotangents[0]
    if a.ndim < 2 or b.ndim < 2:
        raise UnsupportedError(f"MatMul '{layer.name}' with a vector has no gradient rule")
    left = _unbroadcast(np.matmul(g, np.swapaxes(b, -1, -2)), a.shape) if needs_cotangent(layer, 0) else None
    return [left, _unbroadcast(np.matmul(np.swapaxes(a, -1, -2), g), b.shape) if needs_cotangent(layer, 1) else None]


def _batch_norm(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    scale, variance = _require_input(inputs, 1), _require_input(inputs, 4)
    return g * (scale / np.sqrt(variance + layer.attrs["epsilon"])).reshape(-1, *(1,) * (g.ndim - 2)).astype(g.dtype)


def _backpropagate_layer_norm(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    x = _require_input(inputs, 0)
    axes = tuple(range(layer.attrs["axis"] % x.ndim, x.ndim))
    d = x - x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt((d * d).mean(axes, keepdims=True) + layer.attrs["epsilon"])
    scale = inputs[1] if len(inputs) > 1 else None
    h, u = d * inverse, g if scale is None else g * scale
    return ((u - u.mean(axes, keepdims=True) - h * (u * h).mean(axes, keepdims=True)) * inverse).astype(g.dtype)


def _backpropagate_softmax(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    return y * (g - (g * y).sum(layer.attrs["axis"], keepdims=True))


def _backpropagate_max_pool(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    x = _require_input(inputs, 0)
    kernel = layer.attrs["kernel_shape"]
    r = len(kernel)
    strides, dilations, pads = (layer.attrs.get(k) or (d,) * n for k, d, n in (("strides", 1, r), ("dilations", 1, r), ("pads", 0, 2 * r)))
    if layer.attrs.get("ceil_mode") or len(layer.outputs) > 1:
        raise UnsupportedError(f"MaxPool '{layer.name}' with ceil_mode or indices has no gradient rule")
    v = gather_windows(x, kernel, strides, dilations, pads, -np.inf)
    largest = v.reshape(*v.shape[: 2 + r], -1).argmax(-1)
    taken = (np.arange(int(np.prod(kernel))).reshape(-1, *(1,) * r) == largest[:, :, None]) * g[:, :, None]
    return _spread(taken.reshape(*g.shape[:2], *kernel, *g.shape[2:]).astype(x.dtype), x, kernel, strides, dilations, pads, g.shape[2:])


def _average_pool(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    x = _require_input(inputs, 0)
    kernel = layer.attrs["kernel_shape"]
    r = len(kernel)
    strides, pads = layer.attrs.get("strides") or (1,) * r, layer.attrs.get("pads") or (0,) * 2 * r
    if layer.attrs.get("ceil_mode") or (any(pads) and not layer.attrs.get("count_include_pad")):
        raise UnsupportedError(f"AveragePool '{layer.name}' with ceil_mode or uncounted padding has no gradient rule")
    each = np.broadcast_to((g / np.prod(kernel)).reshape(*g.shape[:2], *(1,) * r, *g.shape[2:]), (*g.shape[:2], *kernel, *g.shape[2:]))
    return _spread(each, x, kernel, strides, (1,) * r, pads, g.shape[2:])


def _backpropagate_global_average_pool(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    shape = _require_input(inputs, 0).shape
    return np.broadcast_to(g / np.prod(shape[2:]), shape).astype(g.dtype)


def _resize(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    from whet.ops.resize import make_resampling, resize_axes

    shape = _require_input(inputs, 0).shape
    for axis, _, scale, part in reversed(resize_axes(layer, shape, *inputs[1:])):
        g = make_resampling(layer).apply_transposed(g, axis, shape[axis], scale, part)
    return g


def _reduce(mean: bool) -> Callable[[Layer, Arrays, np.ndarray, np.ndarray], np.ndarray]:
    def rule(layer: Layer, inputs: Arrays, y: np.ndarray, g: np.ndarray) -> np.ndarray:
        from whet.ops._axes import find_given_axes

        x = _require_input(inputs, 0)
        axes = find_given_axes(layer, x.ndim)
        if not axes and layer.attrs.get("noop_with_empty_axes"):
            return g
        axes = axes or tuple(range(x.ndim))
        kept = g.reshape([1 if i in axes else d for i, d in enumerate(x.shape)])
        return np.broadcast_to(kept / (np.prod([x.shape[i] for i in axes]) if mean else 1), x.shape).astype(g.dtype)

    return rule


RULES: dict[str, Rule] = {
    "Conv": _wrap_first_input_rule(_backpropagate_conv),
    "ConvTranspose": _wrap_first_input_rule(_backpropagate_conv_transpose),
    "Gemm": _wrap_first_input_rule(_backpropagate_gemm),
    "MatMul": _backpropagate_matmul,
    "BatchNormalization": _wrap_first_input_rule(_batch_norm),
    "LayerNormalization": _wrap_first_input_rule(_backpropagate_layer_norm),
    "Softmax": _wrap_first_input_rule(_backpropagate_softmax),
    "MaxPool": _wrap_first_input_rule(_backpropagate_max_pool),
    "AveragePool": _wrap_first_input_rule(_average_pool),
    "GlobalAveragePool": _wrap_first_input_rule(_backpropagate_global_average_pool),
    "ReduceMean": _wrap_first_input_rule(_reduce(True)),
    "ReduceSum": _wrap_first_input_rule(_reduce(False)),
    "Resize": _wrap_first_input_rule(_resize),
}
