"""Constant nodes, and immediate folding of small constants: exporters write pads, sizes and axes as chains of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.errors import FrontendError, UnsupportedError
from whet.frontends._onnx_advice import DAMAGED
from whet.network import Network, Origin, Tensor, Weight
from whet.ops import OPS, FoldBudget, run_layer

LARGEST = 1024  # elements; larger results stay layers that passes fold (for example a transposed weight)
_KEPT = {"QuantizeLinear", "DequantizeLinear"}  # Q/DQ on a constant carries precision information


def read_constant(attrs: dict[str, Any], name: str) -> np.ndarray:
    """The array of a Constant node. Raises FrontendError or UnsupportedError."""
    if len(attrs) != 1:
        raise FrontendError(f"node '{name}' (Constant) needs one value, it has {', '.join(attrs) or 'none'}. {DAMAGED}")
    ((key, value),) = attrs.items()
    match key:
        case "value" | "sparse_value" if isinstance(value, np.ndarray):
            return value
        case "value_float" | "value_floats":
            return np.array(value, np.float32)
        case "value_int" | "value_ints":
            return np.array(value, np.int64)
    raise UnsupportedError(f"node '{name}' (Constant): a constant given as {key} is not supported; save it as an ordinary tensor.")


def fold(
    net: Network, start: int, outputs: Sequence[Tensor | None], inputs: Sequence[Tensor | None], names: Sequence[str], budget: FoldBudget
) -> list[Tensor] | None:
    """Folds the layers from `start` into constants when every input is known and the outputs are small; else returns None.

    `budget` limits the work of all foldings: large weights may be reduced to small values many times.

    A tensor of known sizes counts as known, but a layer that keeps symbolic sizes is not folded: it records their origin.
    """
    added = net.layers[start:]
    known = [t for t in inputs if t is not None]
    if not added or any(layer.regions or layer.op in _KEPT or not OPS[layer.op].pure for layer in added):
        return None
    if not all(t.type.is_static_up_to(LARGEST) for layer in added for t in layer.outputs):
        return None
    values: dict[Tensor, np.ndarray] = {}
    origins: dict[Tensor, Origin] = {}
    for t in known:
        array = _find_value(t)
        if array is None:
            return None
        values[t] = array
        origins[t] = t.weight.origin if t.weight is not None else Origin("source", t.name)
    if not all(t.is_constant for t in known) and all(t is not None and t.shape_value is not None for t in outputs):
        return None
    if not known and all(t is not None and t.shape_value is not None for t in outputs):
        return None
    if any(budget.why_not(layer) for layer in added):
        return None
    for layer in added:
        for x in layer.inputs:
            if x is not None and x not in values:
                if x.weight is None:
                    return None
                values[x], origins[x] = x.array(), x.weight.origin
        arrays = [None if t is None else values[t] for t in layer.inputs]
        made = run_layer(layer, arrays)
        args = tuple(None if t is None else origins[t] for t in layer.inputs)
        attrs = tuple(sorted(layer.attrs.items()))
        for t, a in zip(layer.outputs, made, strict=True):
            values[t] = a
            origins[t] = Origin.of_operation(layer.op, args, attrs, t.index, name=t.name)
    if any(t is None or t not in values for t in outputs):
        return None
    del net.layers[start:]
    net._names -= {name for layer in added for name in (layer.name, *(t.name for t in layer.outputs))}  # the constants take them over
    taken = [
        net.constant(Weight(values[t], origins[t]), names[i] if i < len(names) and names[i] else t.name) for i, t in enumerate(outputs) if t
    ]
    return taken


def _find_value(t: Tensor) -> np.ndarray | None:
    if t.weight is not None:
        return t.array()
    if t.shape_value is not None and all(isinstance(v, int) for v in t.shape_value) and t.type.static:
        return np.array(t.shape_value, t.dtype.numpy).reshape(t.shape)
    return None
