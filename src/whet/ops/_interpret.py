"""Runs layers and networks with the ops' NumPy references: slow and exact, the reference for every tactic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from whet.errors import NetworkError, ShapeError
from whet.network import BF16, F16, F32, F64, SMALL_FLOATS, Dim, DType, Expr, Layer, Network, Tensor, TensorType, evaluate, substitute
from whet.ops._base import MAX_REGION_STEPS, get_op, is_data_sized

_STEPS: ContextVar[list[int] | None] = ContextVar("steps", default=None)  # layers run by the outermost layer with regions
_NARROW = frozenset(t.numpy for t in (F16, BF16, *SMALL_FLOATS))
_WIDENED = frozenset(t.numpy for t in (F32, F16, BF16))


Compute = Callable[[Layer, list[np.ndarray | None], Mapping[str, int]], list[np.ndarray]]
"""Computes a layer without regions from its inputs and the values of symbols, as `run_layer`."""


def bind_symbols(types: list[tuple[str, TensorType]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Values of the symbols in `types` (name, type) from actual shapes. Raises ShapeError that names tensor and axis."""
    env: dict[str, int] = {}
    for name, type_ in types:
        if name not in shapes:
            raise ShapeError(f"input '{name}' is missing; the network needs {', '.join(n for n, _ in types)}")
        shape = tuple(shapes[name])
        if len(shape) != type_.rank:
            raise ShapeError(f"input '{name}' has shape {list(shape)}, but {type_} is of rank {type_.rank}")
        for axis, (want, have) in enumerate(zip(type_.shape, shape, strict=True)):
            if isinstance(want, Expr):
                text = str(want)
                if text.isidentifier():
                    if env.setdefault(text, have) != have:
                        raise ShapeError(f"input '{name}', axis {axis}: {text} is {env[text]} elsewhere, {have} here")
            elif want != have:
                raise ShapeError(f"input '{name}', axis {axis}: the network has {want}, the array {have} (type {type_}, shape {list(shape)})")
    for name, type_ in types:
        for axis, (want, have) in enumerate(zip(type_.shape, shapes[name], strict=True)):
            if isinstance(want, Expr) and evaluate(want, env) != have:
                raise ShapeError(f"input '{name}', axis {axis}: {want} is {evaluate(want, env)}, the array has {have}")
    return env


def _bind_value(v, env: Mapping[str, Dim]):
    if isinstance(v, Expr):
        return substitute(v, env)
    if isinstance(v, tuple):
        return tuple(_bind_value(x, env) for x in v)
    return v


def bind_layer(layer: Layer, env: Mapping[str, Dim]) -> Layer:
    """`layer` with symbols in its attributes and types replaced from `env`; detached from its network (the original is unchanged)."""
    regions = {k: _bind_network(r, env) for k, r in layer.regions.items()}
    bound = Layer(layer.op, layer.name, (), {k: _bind_value(v, env) for k, v in layer.attrs.items()}, regions, layer.sources)
    tensors: dict[Tensor, Tensor] = {}

    def make_twin(t: Tensor, maker: Layer | None) -> Tensor:
        if t not in tensors:
            type_ = t.type.with_shape(substitute(d, env) for d in t.type.shape)
            tensors[t] = new = Tensor(t.name, type_, maker, t.index, t.weight)
            new.shape_value = None if t.shape_value is None else tuple(substitute(d, env) for d in t.shape_value)
        return tensors[t]

    bound.inputs = tuple(None if t is None else make_twin(t, None) for t in layer.inputs)
    bound.outputs = tuple(make_twin(t, bound) for t in layer.outputs)
    return bound


def _bind_network(net: Network, env: Mapping[str, Dim]) -> Network:
    """A copy of a region with symbols replaced; captured tensors remain those of the outer network."""
    if not env:
        return net
    bound = net.clone()
    for t in bound.tensors():
        t.type = t.type.with_shape(substitute(d, env) for d in t.type.shape)
        t.shape_value = None if t.shape_value is None else tuple(substitute(d, env) for d in t.shape_value)
    for layer in bound.layers:
        layer.attrs = {k: _bind_value(v, env) for k, v in layer.attrs.items()}
        layer.regions = {k: _bind_network(r, env) for k, r in layer.regions.items()}
    return bound


def run_layer(layer: Layer, arrays: list[np.ndarray | None], env: Mapping[str, int] | None = None) -> list[np.ndarray]:
    """Output arrays of one layer by its reference; `env` gives the symbols in its attributes.

    Raises NetworkError, naming the layer, for invalid values.
    """
    if any(isinstance(v, Expr | tuple) for v in layer.attrs.values()) and env:
        layer = bind_layer(layer, env)
    small_floats = any(a is not None and a.dtype in _NARROW for a in arrays)
    if small_floats:  # 16 and 8 bit floats compute in float32
        arrays = [a.astype(np.float32) if a is not None and a.dtype in _NARROW else a for a in arrays]
    try:
        with np.errstate(all="ignore"):
            results = get_op(layer.op).reference(layer, *arrays)
    except _VALUE_ERRORS as e:
        raise _with_shapes(layer, arrays, e) from e
    outs = [np.asarray(o) for o in ([results] if isinstance(results, np.ndarray | np.generic) else results)]
    if small_floats:
        with np.errstate(all="ignore"):
            types = [t.dtype.numpy for t in layer.outputs]
            outs = [o.astype(t) if o.dtype == np.float32 and t in _NARROW else o for o, t in zip(outs, types, strict=True)]
    return outs


# errors of a reference that depend on values: an index out of range, the maximum of an empty axis, an intermediate array that does not fit
_VALUE_ERRORS = (IndexError, ValueError, ArithmeticError, MemoryError)


def _with_shapes(layer: Layer, arrays: list[np.ndarray | None], e: Exception) -> NetworkError:
    shapes = ", ".join("none" if a is None else f"{a.dtype}{list(a.shape)}" for a in arrays[:8]) + (", ..." if len(arrays) > 8 else "")
    return NetworkError(f"{layer.op} '{layer.name}' cannot compute with its inputs ({shapes}): {e or type(e).__name__}")


def run_network(
    net: Network,
    inputs: Mapping[str, np.ndarray],
    *,
    widen: bool = False,
    watch: Callable[[Tensor, np.ndarray], None] | None = None,
    outer: Mapping[Tensor, np.ndarray] | None = None,
    env: Mapping[str, int] | None = None,
    compute: Compute = run_layer,
) -> dict[str, np.ndarray]:
    """Outputs of `net` by name.

    `widen` computes all floating point in float64. `watch(tensor, array)` is called for every value.
    `outer` holds values captured by a region. `compute` computes layers without regions, also in regions. Raises ShapeError for inputs of a wrong
    shape.
    """

    def widen_array(a: np.ndarray) -> np.ndarray:
        return a.astype(np.float64) if widen and a.dtype in _WIDENED else a

    if env is not None:
        env = dict(env)  # sizes that depend on the data are added
    else:
        env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in inputs.items()})
    values: dict[Tensor, np.ndarray] = dict(outer or {})
    for t in net.inputs:
        values[t] = widen_array(np.asarray(inputs[t.name]))
    last: dict[Tensor, int] = {}
    for i, layer in enumerate(net.layers):
        for x in layer.inputs:
            if x is not None:
                last[x] = i
    keep = set(net.outputs) | set(outer or {})
    for region_layer in net.layers:
        for region in region_layer.regions.values():
            keep.update(region.captures())

    def get_value(t: Tensor) -> np.ndarray:
        if t not in values:
            if t.weight is None:
                raise NetworkError(f"%{t.name} is used before it is computed")
            values[t] = widen_array(t.array())
        return values[t]

    for i, layer in enumerate(net.layers):
        arrays = [None if t is None else get_value(t) for t in layer.inputs]
        if layer.regions:
            outs = _run_regions(layer, arrays, values, get_value, widen, env, compute)
        else:
            outs = compute(widen_attributes(layer) if widen else layer, arrays, env)
        for t, a in zip(layer.outputs, outs, strict=True):
            values[t] = a
            _bind_data_sizes(layer, t, a, env)
            if watch is not None:
                watch(t, a)
        for x in layer.inputs:
            if x is not None and last.get(x) == i and x not in keep:
                values.pop(x, None)
    return {t.name: get_value(t) for t in net.outputs}


def _bind_data_sizes(layer: Layer, t: Tensor, array: np.ndarray, env: dict[str, int]) -> None:
    """Adds the values of the symbols in the shape of `t` that only the layer's output determines."""
    for d, n in zip(t.shape, array.shape, strict=False):
        if isinstance(d, Expr) and (name := str(d)).isidentifier() and (name not in env or is_data_sized(layer)):
            env[name] = n


def _run_regions(layer: Layer, arrays, values, value, widen: bool, env, compute: Compute) -> list[np.ndarray]:
    """Runs a layer with regions: its reference is passed `run(region name, *arrays)`."""
    for region in layer.regions.values():
        for t in region.captures():
            value(t)
    return run_regions(bind_layer(layer, env) if env else layer, arrays, widen=widen, outer=values, env=env, compute=compute)


def run_regions(
    layer: Layer, arrays, *, widen: bool = False, outer=None, env: Mapping[str, int] | None = None, compute: Compute = run_layer
) -> list[np.ndarray]:
    """Output arrays of a layer with regions and static shapes; `outer` holds values captured by the regions, and `compute` computes their layers.

    Raises NetworkError for invalid values, and when the regions' layers run more than MAX_REGION_STEPS times: a loop may not end.
    """

    def run(name: str, *args: np.ndarray) -> list[np.ndarray]:
        region = layer.regions[name]
        count(layer, region)
        feed = dict(zip((t.name for t in region.inputs), args, strict=True))
        return list(run_network(region, feed, widen=widen, outer=outer, env=env or {}, compute=compute).values())

    try:
        with count_region_steps() as count, np.errstate(all="ignore"):
            values = get_op(layer.op).reference(layer, *arrays, run=run)
    except _VALUE_ERRORS as e:
        raise _with_shapes(layer, arrays, e) from e
    return [values] if isinstance(values, np.ndarray) else list(values)


@contextmanager
def count_region_steps() -> Iterator[Callable[[Layer, Network], None]]:
    """Gives a function that is called before each run of a layer's region, together with those of the layers in it. It raises NetworkError when
    the regions' layers have run more than MAX_REGION_STEPS times: a loop may not end."""
    counted = _STEPS.get()
    steps, token = (counted, None) if counted is not None else (made := [0], _STEPS.set(made))

    def count(layer: Layer, region: Network) -> None:
        steps[0] += 1 + len(region.layers)
        if steps[0] > MAX_REGION_STEPS:
            raise NetworkError(f"{layer.op} '{layer.name}' ran {MAX_REGION_STEPS} layers of its body and did not end")

    try:
        yield count
    finally:
        if token is not None:
            _STEPS.reset(token)


def widen_attributes(layer: Layer) -> Layer:
    """The layer with float types in its attributes replaced by f64 (Cast to f32 would round). Float8 stays, since its rounding is intended."""
    if not any(v in (F32, F16, BF16) for v in layer.attrs.values() if isinstance(v, DType)):
        return layer
    attrs = {k: F64 if isinstance(v, DType) and v in (F32, F16, BF16) else v for k, v in layer.attrs.items()}
    wide = Layer(layer.op, layer.name, layer.inputs, attrs, layer.regions, layer.sources)
    wide.outputs = layer.outputs
    return wide
