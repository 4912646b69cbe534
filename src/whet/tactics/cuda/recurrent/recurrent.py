"""LSTM, GRU and RNN with constant weights: the inputs of all steps are multiplied at once, then a block per direction and sequence runs the steps.

For coverage: no other kernel that is on by default computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstIntPointer, ConstPointer, FloatPointer, Pointer
from whet.tactics.cuda._device.kernel import RTOL, TYPE, GpuKernel, count_blocks, launch, make_packed_array
from whet.tactics.cuda.recurrent._recurrent import GATES, RecurrentTactic, has_peepholes, make_cell_constants

_SHARED = 48 << 10  # bytes


@dataclass(frozen=True, kw_only=True)
class RecurrentArguments(Arguments, kernel="recurrent.cu"):
    """Arguments of recurrent.cu; 0 for what is absent."""

    x: ConstPointer
    w: ConstPointer
    r: ConstPointer
    bias: ConstFloatPointer  # [direction][of W, of R][row]
    peepholes: ConstFloatPointer
    lengths: ConstIntPointer
    first_h: ConstPointer
    first_c: ConstPointer
    projected: FloatPointer
    y: Pointer
    last_h: Pointer
    last_c: Pointer


@tactic
class Recurrent(RecurrentTactic):
    """A thread computes rows of the gates, with weights from the L2 cache at each step."""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        gates, h = GATES[layer.op], layer.needs(2).shape[-1]
        return None if isinstance(h, int) and (gates + 3) * h * 4 <= _SHARED else f"takes states and gates of up to {_SHARED} bytes"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        kind, gates = signature.outputs[0].dtype, GATES[layer.op]
        x, (directions, _, h) = static_shape(layer.needs(0).shape), static_shape(layer.needs(2).shape)
        steps, sequences = (x[1], x[0]) if layer.attrs["layout"] else (x[0], x[1])
        rows = gates * h

        def transposed(i: int):
            size = prod(static_shape(layer.needs(i).shape)) * kind.numpy.itemsize
            key = f"{layer.needs(i).constant().digest}|recurrent {kind}"
            return make_packed_array(key, size, lambda: np.asarray(layer.needs(i).array(), np.float32).transpose(0, 2, 1).astype(kind.numpy))

        def constant(i: int, shape: tuple[int, ...]):
            t = layer.input(i)
            key = "recurrent zeros" if t is None else f"{t.constant().digest}|recurrent f32"
            return make_packed_array(key, prod(shape) * 4, lambda: np.zeros(shape, np.float32) if t is None else np.asarray(t.array(), np.float32))

        holes = has_peepholes(layer)
        packed = [transposed(1), transposed(2), constant(3, (directions, 2 * rows)), *([constant(7, (directions, 3 * h))] if holes else [])]
        block = min(1024, max(32, -(-rows // 32) * 32))
        constants = {
            "DIRECTIONS": directions, "STEPS": steps, "SEQUENCES": sequences, "INPUTS": x[2], "UNITS": h, "GATES": gates,
            "TYPE": TYPE[kind.name], "WEIGHTS": TYPE[kind.name], "BLOCK": block, **make_cell_constants(layer),
        }  # fmt: skip
        states = 2 if layer.op == "LSTM" else 1

        def make(args: Args) -> list:
            given = (*args.inputs, *(0,) * 8)
            last = (*args.outputs[1:], 0, 0)
            arguments = RecurrentArguments(
                x=given[0], w=args.packed[0], r=args.packed[1], bias=args.packed[2], peepholes=args.packed[3] if holes else 0, lengths=given[4],
                first_h=given[5], first_c=given[6] if states == 2 else 0, projected=args.scratch, y=args.outputs[0], last_h=last[0], last_c=last[1],
            )  # fmt: skip
            count = directions * steps * sequences * rows
            if not count:
                return []
            return [
                launch("project", arguments, constants, (count_blocks(count, 256), 1, 1), 256),
                launch("recur", arguments, constants, (directions * sequences, 1, 1), block),
            ]

        scratch = directions * steps * sequences * rows * 4
        # the state stays f32 over all steps, whose rounding accumulates; results are rounded once
        rtol = max(RTOL[kind.name], 4 * RTOL["f32"])
        return GpuKernel(layer, signature, make, implementation="steps of a block", packed=packed, scratch=scratch, rtol=rtol)
