"""LSTM, GRU and RNN in PyTorch. The usual forms run in torch's own layers (cuDNN on CUDA); the others, step by step as the reference does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.training.translate._base import Compute, torch_op

Function = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[..., tuple[torch.Tensor, ...]]
_BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}  # ONNX's gates in torch's order: LSTM i o f c -> i f c o, GRU z r h -> r z h
_PLAIN: dict[str, Function] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu, "softsign": F.softsign, "softplus": F.softplus,
}  # fmt: skip


@torch_op("LSTM")
def _translate_lstm(layer: Layer) -> Compute:
    def step(from_x, r, rb, states, functions, peepholes):
        h, c = states
        f, g, k = functions
        i, o, forget, new = (from_x + h @ r.T + rb).chunk(4, dim=1)
        pi, po, pf = (None, None, None) if peepholes is None else peepholes.chunk(3)
        i = f(_clip(layer, i if pi is None else i + pi * c))
        forget = 1 - i if layer.attrs["input_forget"] else f(_clip(layer, forget if pf is None else forget + pf * c))
        c = forget * c + i * g(_clip(layer, new))
        o = f(_clip(layer, o if po is None else o + po * c))
        return o * k(c), c

    return _make_function(layer, step, not layer.attrs["input_forget"])


@torch_op("GRU")
def _translate_gru(layer: Layer) -> Compute:
    linear = bool(layer.attrs["linear_before_reset"])

    def step(from_x, r, rb, states, functions, peepholes):
        (h,) = states
        f, g = functions
        n = h.shape[1]
        z, reset = (f(_clip(layer, v)) for v in (from_x[:, : 2 * n] + h @ r[: 2 * n].T + rb[: 2 * n]).chunk(2, dim=1))
        if linear:
            new = from_x[:, 2 * n :] + reset * (h @ r[2 * n :].T + rb[2 * n :])
        else:
            new = from_x[:, 2 * n :] + (reset * h) @ r[2 * n :].T + rb[2 * n :]
        return ((1 - z) * g(_clip(layer, new)) + z * h,)

    return _make_function(layer, step, linear)


@torch_op("RNN")
def _translate_rnn(layer: Layer) -> Compute:
    def step(from_x, r, rb, states, functions, peepholes):
        return (functions[0](_clip(layer, from_x + states[0] @ r.T + rb)),)

    return _make_function(layer, step, True)


def _make_function(layer: Layer, step: Step, usual: bool) -> Compute:
    """The layer's function. `usual`: torch has this form, if the activations are the default ones and nothing is clipped or masked."""
    states = 2 if layer.op == "LSTM" else 1
    backwards = _BACKWARDS[layer.attrs["direction"]]
    names = [n.lower() for n in layer.attrs.get("activations") or _DEFAULTS[layer.op] * len(backwards)]
    functions = _get_activations(layer, names)
    standard = [n.lower() for n in _DEFAULTS[layer.op] * len(backwards)]
    relu = layer.op == "RNN" and set(names) == {"relu"}
    fits = usual and layer.attrs.get("clip") is None and layer.input(4) is None and layer.input(5 + states) is None
    fits = fits and (names == standard or relu) and layer.attrs["direction"] != "reverse"

    def compute(x, w, r, b=None, lengths=None, *states_and_peepholes):
        padded = [*states_and_peepholes, *[None] * 3]
        first, peepholes = padded[:states], padded[states]
        if layer.attrs["layout"]:
            x, first = x.transpose(0, 1), [None if s is None else s.transpose(0, 1) for s in first]
        h0 = [x.new_zeros(len(backwards), x.shape[1], r.shape[2]) if s is None else s for s in first]
        if fits:
            y, last = _run_torch_layers(layer.op, relu, x, w, r, b, h0)
        else:
            y, last = _run_steps(step, backwards, functions, x, w, r, b, lengths, h0, peepholes)
        if layer.attrs["layout"]:
            return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last)
        return y, *last

    return compute


def _run_torch_layers(op: str, relu: bool, x, w, r, b, first: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Y [time, directions, batch, units] and the final states by torch's recurrent layers."""
    directions, units = len(w), r.shape[2]

    def reorder_gates(t: torch.Tensor) -> torch.Tensor:
        gates = t.split(units)
        return torch.cat([gates[k] for k in _GATES[op]])

    flat = []
    for d in range(directions):
        flat += [reorder_gates(w[d]), reorder_gates(r[d])]
        if b is not None:
            flat += [reorder_gates(part) for part in b[d].chunk(2)]
    how = (flat, b is not None, 1, 0.0, True, directions == 2, False)  # in training mode: cuDNN has no gradients otherwise
    if op == "LSTM":
        y, *last = torch._VF.lstm(x, tuple(first), *how)
    else:
        call = torch._VF.gru if op == "GRU" else torch._VF.rnn_relu if relu else torch._VF.rnn_tanh
        y, *last = call(x, first[0], *how)
    return y.unflatten(2, (directions, units)).transpose(1, 2), last


def _run_steps(
    step: Step, backwards: Sequence[bool], functions: Sequence[Sequence[Function]], x, w, r, b, lengths, first: Sequence[torch.Tensor], peepholes
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """As `_run_torch_layers`, but past its end a sequence keeps its state and outputs zeros."""
    time, half = len(x), w.shape[1]
    ys, lasts = [], []
    for d, back in enumerate(backwards):
        wb, rb = (x.new_zeros(half),) * 2 if b is None else (b[d, :half], b[d, half:])
        from_x = x @ w[d].T + wb
        states = [s[d] for s in first]
        out: list[torch.Tensor] = [x] * time
        for i in reversed(range(time)) if back else range(time):
            new = step(from_x[i], r[d], rb, states, functions[d], None if peepholes is None else peepholes[d])
            if lengths is None:
                states, out[i] = list(new), new[0]
                continue
            on = (i < lengths)[:, None]
            states = [torch.where(on, a, old) for a, old in zip(new, states, strict=True)]
            out[i] = torch.where(on, new[0], torch.zeros_like(new[0]))
        ys.append(torch.stack(out))
        lasts.append(states)
    return torch.stack(ys, dim=1), [torch.stack(s) for s in zip(*lasts, strict=True)]


def _get_activations(layer: Layer, names: Sequence[str]) -> list[list[Function]]:
    """Functions per direction. Raises UnsupportedError for those with parameters."""
    for name in names:
        if name not in _PLAIN:
            raise UnsupportedError(f"the network cannot be trained: {layer.op} '{layer.name}' has the activation {name}; {', '.join(_PLAIN)} can be")
    each = len(_DEFAULTS[layer.op])
    functions = [_PLAIN[n] for n in names]
    return [functions[i : i + each] for i in range(0, len(functions), each)]


def _clip(layer: Layer, v: torch.Tensor) -> torch.Tensor:
    c = layer.attrs.get("clip")
    return v if c is None else v.clamp(-c, c)
