"""Expressions over weights: computes a weight and records its origin, and recomputes it from the source weights.

`literal` weights are values created by a pass (an epsilon, a list of axes): their origin holds the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.errors import NetworkError
from whet.network import DType, Network, Origin, Weight, get_dtype
from whet.ops._interpret import run_layer

_LARGEST_LITERAL = 1 << 18  # elements, a scale for each word of a large vocabulary; larger arrays are data, not values created by a pass


def make_literal(array: Any, dtype: DType | None = None) -> Weight:
    """A weight of given values. Raises NetworkError if it is too large for an origin."""
    a = np.asarray(array, dtype.numpy if dtype is not None else None)
    if a.size > _LARGEST_LITERAL:
        raise NetworkError(f"a literal of {a.size} elements is too large; make it a source weight")
    values = tuple(a.reshape(-1).tolist())
    return Weight(a, Origin("literal", attrs=(("dtype", get_dtype(a)), ("shape", a.shape), ("values", values))))


def express(op: str, *args: Weight | None, output: int = 0, assumes: tuple[str, ...] = (), **attrs: Any) -> Weight:
    """The weight `op(args, **attrs)`, computed by the op's reference, with its origin. Raises NetworkError for invalid arguments."""
    net = Network("expression")
    inputs = [None if w is None else net.constant(w, f"w{i}") for i, w in enumerate(args)]
    layer = net.add_layer(op, inputs, attrs)
    arrays = run_layer(layer, [None if w is None else w.array for w in args])
    kept = tuple(sorted(layer.attrs.items()))
    origin = Origin.of_operation(op, tuple(None if w is None else w.origin for w in args), kept, output, assumes=assumes, name=f"{op.lower()} result")
    return Weight(np.ascontiguousarray(arrays[output]).reshape(arrays[output].shape), origin)


def evaluate_origin(origin: Origin, sources: Mapping[str, np.ndarray]) -> np.ndarray:
    """Computes the array described by `origin` from source weights by name. Raises NetworkError for a missing source."""
    return _evaluate(origin, sources, {})


def _evaluate(origin: Origin, sources: Mapping[str, np.ndarray], cache: dict[int, np.ndarray]) -> np.ndarray:
    if id(origin) in cache:
        return cache[id(origin)]
    if origin.op == "source":
        if origin.name not in sources:
            raise NetworkError(f"the source weight {origin.name!r} is missing")
        results = np.asarray(sources[origin.name])
    elif origin.op == "literal":
        array = dict(origin.attrs)
        results = np.array(array["values"], array["dtype"].numpy).reshape(array["shape"])
    else:
        args = [None if a is None else Weight(_evaluate(a, sources, cache)) for a in origin.args]
        results = express(origin.op, *args, output=origin.output, **dict(origin.attrs)).array
    cache[id(origin)] = results
    return results
