"""LSTM, GRU and RNN in f32: one launch for all steps, directions and sequences.

For coverage: otherwise NumPy computes them.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import F32, I32, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.onednn._kernel import is_static
from whet.tactics.cpu.recurrent._recurrent_ir import BLOCK, GATES, count_scratch_floats, emit_recurrent_ir

_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_KNOWN = [{"sigmoid"}, {"tanh", "relu"}, {"tanh", "relu"}]  # functions that are 0 at 0, except for gates: padding stays 0
_MANY_SEQUENCES, _MANY_UNITS = 8, 256  # beyond both, products of matrices are faster than one product per sequence


class RecurrentKernel(CompiledKernel):
    """A planned launch."""

    serial_work = 1 << 14  # multiplications
    rtol, implementation = 1e-5, "sequences"

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        x = static_shape(layer.needs(0).shape)
        self.layer, self.directions, self.units = layer, static_shape(layer.needs(1).shape)[0], static_shape(layer.needs(2).shape)[-1]
        self.batch_first = bool(layer.attrs["layout"])
        self.batch, self.time = x[:2] if self.batch_first else x[1::-1]
        self.size, self.gates = x[2], GATES[layer.op]
        self.padded_units = -(-self.units // LANES) * LANES
        self.rows = -(-self.gates * self.padded_units // BLOCK) * BLOCK
        self.items = self.directions * self.batch
        super().__init__(layer, signature, self.items * self.time * self.rows * (self.size + self.units), min(count, self.items))
        self.scratch = 4 * self.items * count_scratch_floats(self.rows, self.padded_units)
        digests = [layer.needs(i).constant().digest for i in (1, 2)]
        bias = layer.input(3)
        digests.append("" if bias is None else bias.constant().digest)
        key = f"recurrent {self.directions} {self.gates} {self.units}"
        self.packed = (
            Packed(f"{digests[0]}|{key}", 4 * self.directions * self.rows * self.size, lambda: self._matrix(1), storable=True),
            Packed(f"{digests[1]}|{key}", 4 * self.directions * self.rows * self.units, lambda: self._matrix(2), storable=True),
            Packed(f"{digests[2]}|{key} bias", 8 * self.directions * self.rows, self._biases, storable=True),
        )

    def _pad_gates(self, a: np.ndarray) -> np.ndarray:
        """[..., gates * units, columns] with padded units and rows."""
        *lead, _, columns = a.shape
        padded = np.zeros((*lead, self.gates, self.padded_units, columns), np.float32)
        padded[..., : self.units, :] = a.reshape(*lead, self.gates, self.units, columns)
        rows = np.zeros((*lead, self.rows, columns), np.float32)
        rows[..., : self.gates * self.padded_units, :] = padded.reshape(*lead, -1, columns)
        return rows

    def _matrix(self, i: int) -> np.ndarray:
        rows = self._pad_gates(np.asarray(self.layer.needs(i).array(), np.float32))
        blocks = rows.reshape(self.directions, self.rows // BLOCK, BLOCK, -1).transpose(0, 1, 3, 2)
        return np.ascontiguousarray(blocks).reshape(-1).view(np.uint8)

    def _biases(self) -> np.ndarray:
        """Of inputs, then of the state, per direction."""
        if (b := self.layer.input(3)) is None:
            return np.zeros(2 * self.directions * self.rows, np.float32).view(np.uint8)
        pairs = np.asarray(b.array(), np.float32).reshape(self.directions, 2, self.gates * self.units, 1)
        return np.ascontiguousarray(self._pad_gates(pairs)).reshape(-1).view(np.uint8)

    def enqueue(self, args: Args, stream: Stream) -> None:
        layer, d, n, h = self.layer, self.directions, self.batch, self.units
        given = [(t := layer.input(5 + k)) is not None and not t.is_constant for k in range(2 if layer.op == "LSTM" else 1)]
        first = [("input", 5 + k) if g else 0 for k, g in enumerate(given)] + [0] * (2 - len(given))
        last = [("output", 1), ("output", 2) if layer.op == "LSTM" else 0]
        if self.batch_first:
            strides = [self.time * self.size, self.size, self.time * d * h, d * h, h, d * h, h]
        else:
            strides = [self.size, n * self.size, h, d * n * h, n * h, h, n * h]
        is_reversed = int(layer.attrs["direction"] == "reverse")
        sizes = [self.items, n, self.time, self.size, h, self.padded_units, self.rows, is_reversed]
        lengths = layer.input(4) is not None
        data = [("input", 0), ("output", 0), ("input", 4) if lengths else 0]
        words: list[tuple[str, int] | int] = [*data, *first, *last, args.scratch, *sizes, *strides]
        states, resets_before = (given[0], layer.op == "LSTM" and given[1]), layer.op == "GRU" and not layer.attrs["linear_before_reset"]
        ir = emit_recurrent_ir(layer.op, _list_activations(layer), states, h % LANES, lengths, resets_before)
        self.launch(stream, ir, "recurrent", args, words, self.items)


def _list_activations(layer: Layer) -> tuple[str, ...]:
    """The functions of the first direction."""
    defaults = _DEFAULTS[layer.op]
    return tuple(a.lower() for a in layer.attrs.get("activations") or defaults)[: len(defaults)]


@tactic
class Recurrent(CompiledTactic):
    ops = tuple(GATES)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if any(t is not None and t.dtype != F32 for t in layer.inputs if t is not layer.input(4)):
            return "computes in f32"
        states = 2 if layer.op == "LSTM" else 1
        if any(not t.is_constant for i in (1, 2, 3) if (t := layer.input(i)) is not None):
            return "weights or bias are computed at run time"
        if (lengths := layer.input(4)) is not None and lengths.dtype != I32:
            return "lengths of sequences are i32"
        if layer.input(5 + states) is not None:
            return "it has peepholes"
        if layer.needs(0).is_constant or any(t.is_constant and t.array().any() for k in range(states) if (t := layer.input(5 + k)) is not None):
            return "the input is constant, or an initial state is constant and not zero"
        if layer.attrs.get("clip") is not None or layer.attrs.get("input_forget"):
            return "inputs of its activations are clipped, or input and forget gate are coupled"
        return _why_not_activations(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        row_major = Operand("linear", F32)
        inputs = tuple(
            None if t is None or (t.is_constant and i != 4) else Operand("linear", t.dtype) for i, t in enumerate(layer.inputs)
        )  # constant lengths are stored, too
        return [Signature(inputs, (row_major,) * len(layer.outputs))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        batch = static_shape(layer.needs(0).shape)[0 if layer.attrs["layout"] else 1]
        if batch > _MANY_SEQUENCES and static_shape(layer.needs(2).shape)[-1] > _MANY_UNITS:
            return f"more than {_MANY_SEQUENCES} sequences and {_MANY_UNITS} units: each sequence would read all weights in each step"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> RecurrentKernel:
        if reason := self.why_not(layer) or self.refuses(layer, signature, backend):
            raise PlanRefused(reason)
        return RecurrentKernel(layer, signature, backend.threads)


def _why_not_activations(layer: Layer) -> str | None:
    names, defaults = [a.lower() for a in layer.attrs.get("activations") or ()], _DEFAULTS[layer.op]
    if len(set(zip(*[iter(names)] * len(defaults), strict=True))) > 1:
        return "the directions have different activations"
    known = _KNOWN if layer.op != "RNN" else _KNOWN[1:]
    if any(a not in k for a, k in zip(_list_activations(layer), known, strict=False)):
        return f"has no kernel for the activations {', '.join(names)}"
    return None
