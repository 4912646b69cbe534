"""Shared by LSTM, GRU and RNN: shapes, directions, sequence lengths, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import I32, Layer, TensorType
from whet.ops._base import FLOAT, FLOATS, INT, STRINGS, Couple, op
from whet.ops._types import may_equal, require_one_float_type
from whet.ops._unary import sigmoid, softplus

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {
    "sigmoid": lambda x, a, b: sigmoid(x),
    "tanh": lambda x, a, b: np.tanh(x),
    "relu": lambda x, a, b: np.maximum(x, 0),
    "affine": lambda x, a, b: (1.0 if a is None else a) * x + (0.0 if b is None else b),
    "leakyrelu": lambda x, a, b: np.where(x >= 0, x, x * (0.01 if a is None else a)),
    "hardsigmoid": lambda x, a, b: np.clip(x * (0.2 if a is None else a) + (0.5 if b is None else b), 0, 1),
    "softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "softplus": lambda x, a, b: softplus(x),
}
ATTRS: dict[str, Any] = {
    "hidden_size": INT,
    "direction": "forward",
    "layout": 0,
    "clip": FLOAT,
    "activations": STRINGS,
    "activation_alpha": FLOATS,
    "activation_beta": FLOATS,
}

Step = Callable[..., tuple[np.ndarray, ...]]


def list_activations(layer: Layer, defaults: tuple[str, ...]) -> list[list[Callable[..., np.ndarray]]]:
    """Activation functions per direction. Raises UnsupportedError for an unknown one."""
    directions = len(DIRECTIONS[layer.attrs["direction"]])
    names = layer.attrs.get("activations") or defaults * directions
    alphas, betas = (iter(layer.attrs.get(k) or ()) for k in ("activation_alpha", "activation_beta"))
    functions: list[Callable[..., np.ndarray]] = []
    for name in names:
        key = name.lower()
        if key not in ACTIVATIONS:
            raise UnsupportedError(f"{layer.op} '{layer.name}': unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
        takes = {"affine": 2, "hardsigmoid": 2, "leakyrelu": 1}.get(key, 0)
        a = next(alphas, None) if takes else None
        b = next(betas, None) if takes == 2 else None
        functions.append(lambda x, f=ACTIVATIONS[key], a=a, b=b: f(x, a, b).astype(x.dtype, copy=False))
    if len(functions) != len(defaults) * directions:
        raise NetworkError(f"{layer.op} '{layer.name}' needs {len(defaults) * directions} activations, not {len(functions)}")
    return [functions[i * len(defaults) : (i + 1) * len(defaults)] for i in range(directions)]


def infer(layer: Layer, gates: int, states: int, defaults: tuple[str, ...]) -> list[TensorType]:
    """Types of Y and of the final states."""
    x, w, r = layer.needs(0), layer.needs(1), layer.needs(2)
    where = f"{layer.op} '{layer.name}'"
    if layer.attrs["direction"] not in DIRECTIONS:
        raise NetworkError(f"{where}: direction is one of {', '.join(DIRECTIONS)}, not {layer.attrs['direction']!r}")
    d, h = len(DIRECTIONS[layer.attrs["direction"]]), r.shape[-1]
    if layer.attrs.get("hidden_size") not in (None, h):
        raise NetworkError(f"{where}: hidden_size is {layer.attrs['hidden_size']}, R is {r}")
    if x.type.rank != 3 or not may_equal(w.shape, (d, gates * h, x.shape[2])) or not may_equal(r.shape, (d, gates * h, h)):
        raise NetworkError(f"{where}: W {w} and R {r} do not match X {x}, {d} direction(s) and {h} units")
    if layer.input(3) is not None and not may_equal(layer.needs(3).shape, (d, 2 * gates * h)):
        raise NetworkError(f"{where}: B is {layer.inputs[3]}, it needs shape [{d},{2 * gates * h}]")
    lengths = layer.input(4)
    if lengths is not None and lengths.dtype != I32:
        raise NetworkError(f"{where}: sequence lengths are i32, not {lengths.type}")
    require_one_float_type(layer, 0, 1, 2, 3, *range(5, len(layer.inputs)))
    peepholes = layer.input(5 + states)
    if peepholes is not None and not may_equal(peepholes.shape, (d, 3 * h)):
        raise NetworkError(f"{where}: peepholes are {peepholes}, they need shape [{d},{3 * h}]")
    batch_first = bool(layer.attrs["layout"])
    list_activations(layer, defaults)
    n, t = x.shape[:2] if batch_first else x.shape[1::-1]
    if lengths is not None and not may_equal(lengths.shape, (n,)):
        raise NetworkError(f"{where}: sequence lengths {lengths} are not one per sequence of {n}")
    for s in (layer.input(5 + i) for i in range(states)):
        if s is not None and not may_equal(s.shape, (n, d, h) if batch_first else (d, n, h)):
            raise NetworkError(f"{where}: an initial state is {s.type}, it must be {(n, d, h) if batch_first else (d, n, h)}")
    y = (n, t, d, h) if batch_first else (t, d, n, h)
    state = (n, d, h) if batch_first else (d, n, h)
    return [x.type.with_shape(y), *[x.type.with_shape(state)] * states]


def list_couples(layer: Layer, gates: int, states: int) -> list[Couple]:
    """Features of X are coupled to W's columns. A state unit is coupled to its rows of W and R (one per gate), its column of R and its biases,
    equally in both directions. Batch and time are independent; directions are not pruned."""
    x, w, r, b = layer.needs(0), layer.needs(1), layer.needs(2), layer.input(3)
    if not all(t.is_constant for t in (w, r, b) if t is not None) or not isinstance(h := r.shape[2], int):
        return []
    rows = [Couple(r, 2, t, 1, b_repeat=gates, count=h) for t in (w, r)]
    result = [Couple(x, 2, w, 2, summed=True), *rows]
    if b is not None:
        result.append(Couple(r, 2, b, 1, b_repeat=2 * gates, count=h))
    if (peepholes := layer.input(5 + states)) is not None:  # peepholes
        result.append(Couple(r, 2, peepholes, 1, b_repeat=3, count=h))
    first = [t for i in range(states) if (t := layer.input(5 + i)) is not None]
    result += [Couple(r, 2, t, t.type.rank - 1) for t in (*layer.outputs, *first)]
    sample, y_sample, state_sample = (0, 0, 0) if layer.attrs["layout"] else (1, 2, 1)
    result += [Couple(x, sample, layer.outputs[0], y_sample), *(Couple(x, sample, t, state_sample) for t in (*layer.outputs[1:], *first))]
    return result if layer.input(4) is None else [*result, Couple(x, sample, layer.needs(4), 0)]


def recut(layer: Layer, kept_indices) -> dict[str | int, Any]:
    """Updates the attribute hidden_size, if given."""
    r = layer.inputs[2]
    return {"hidden_size": len(kept_indices[r, 2])} if (r, 2) in kept_indices and layer.attrs.get("hidden_size") is not None else {}


def run(layer: Layer, x, w, r, b, lengths, first, step: Step, gates: int, defaults: tuple[str, ...], extra=None) -> list[np.ndarray]:
    """Y and the final states. `step(layer, gates from x, r, recurrent bias, states, functions)` returns the next states, h first; if `extra` is given
    (an LSTM's peepholes), it also gets those of the direction."""
    if layer.attrs["layout"]:
        x = x.transpose(1, 0, 2)
        first = [None if s is None else s.transpose(1, 0, 2) for s in first]
    t, n = x.shape[:2]
    h = r.shape[-1]
    lengths = np.full(n, t) if lengths is None else lengths
    ys, lasts = [], []
    for d, (backwards, functions) in enumerate(zip(DIRECTIONS[layer.attrs["direction"]], list_activations(layer, defaults), strict=True)):
        wb, rb = (np.zeros(gates * h, x.dtype),) * 2 if b is None else (b[d, : gates * h], b[d, gates * h :])
        from_x = np.matmul(x, w[d].T) + wb
        states = [np.zeros((n, h), x.dtype) if s is None else s[d] for s in first]
        y = np.zeros((t, n, h), x.dtype)
        more = {} if extra is None else {"extra": extra[d]}
        for i in reversed(range(t)) if backwards else range(t):
            new = step(layer, from_x[i], r[d], rb, states, functions, **more)
            on = (i < lengths)[:, None]  # past its end a sequence keeps its state and outputs zeros
            states = [np.where(on, a, old) for a, old in zip(new, states, strict=True)]
            y[i] = np.where(on, new[0], 0)
        ys.append(y)
        lasts.append(states)
    out, last = np.stack(ys, axis=1), [np.stack(s) for s in zip(*lasts, strict=True)]
    if layer.attrs["layout"]:
        return [out.transpose(2, 0, 1, 3), *(s.transpose(1, 0, 2) for s in last)]
    return [out, *last]


def clip_inputs(layer: Layer, v: np.ndarray) -> np.ndarray:
    """Activation inputs clipped to the attribute `clip`."""
    c = layer.attrs.get("clip")
    return v if c is None else np.clip(v, -c, c)


def register_recurrent(name: str, gates: int, states: int, step: Step, defaults: tuple[str, ...], attrs: dict[str, Any], samples):
    """Registers a recurrent op whose inputs are X, W, R, B, sequence lengths, initial states[, more]."""

    def of_one_state(layer, x, w, r, b=None, lengths=None, state=None):
        return run(layer, x, w, r, b, lengths, [state], step, gates, defaults)

    def of_two_states(layer, x, w, r, b=None, lengths=None, state=None, cell=None, peepholes=None):
        return run(layer, x, w, r, b, lengths, [state, cell], step, gates, defaults, peepholes)

    return op(
        name,
        lambda layer: infer(layer, gates, states, defaults),
        of_one_state if states == 1 else of_two_states,
        attrs={**ATTRS, **attrs},
        couples=lambda layer: list_couples(layer, gates, states),
        recut=recut,
        samples=samples,
    )
