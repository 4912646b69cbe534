"""Any op by its NumPy reference: slow, always there. Row-major operands of the tensors' own types."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whet.backends import Call
from whet.backends.cpu.memory import make_array_at
from whet.errors import BackendError
from whet.network import Layer, static_shape
from whet.ops import get_op, is_data_sized, run_layer, run_regions
from whet.tactics._base import Args, Config, Operand, Signature, Stream, Tactic, count_stored_bytes, tactic


class NumpyCall(Call):
    """Runs a NumPy function over memory: not native, so the plan's loop comes back to Python for it."""

    def __init__(self, kernel: NumpyKernel, args: Args):
        self.kernel, self.addresses = kernel, {"input": list(args.inputs), "output": list(args.outputs)}
        self._views()

    def _views(self) -> None:
        k = self.kernel
        self.reads: list[np.ndarray | None] = []
        for t, o, address in zip(k.layer.inputs, k.signature.inputs, self.addresses["input"], strict=True):
            if t is None:
                self.reads.append(None)
            elif o is None:
                self.reads.append(t.array())
            else:
                a = make_array_at(address, static_shape(t.shape), o.dtype.numpy)
                a.flags.writeable = False
                self.reads.append(a)
        self.writes = [
            make_array_at(p, static_shape(t.shape), o.dtype.numpy)
            for t, o, p in zip(k.layer.outputs, k.signature.outputs, self.addresses["output"], strict=True)
        ]

    def run(self) -> None:
        layer = self.kernel.layer
        outs = self.kernel.compute(layer, self.reads)
        for target, got in zip(self.writes, outs, strict=True):
            if target.shape != got.shape:
                raise BackendError(f"{layer.op} '{layer.name}' returned shape {list(got.shape)} instead of the planned {list(target.shape)}")
            np.copyto(target, got, casting="unsafe")

    def set_address(self, kind: str, index: int, address: int) -> None:
        self.addresses[kind][index] = address
        self._views()


Compute = Callable[[Layer, list[np.ndarray | None]], Sequence[np.ndarray]]
"""Computes a layer's outputs from its inputs (None: absent)."""


def run_reference(layer: Layer, arrays: list[np.ndarray | None]) -> Sequence[np.ndarray]:
    """The op's reference, of regions too."""
    return run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)


class NumpyKernel:
    """One layer with static shapes, computed by a NumPy function: by default the op's reference."""

    scratch, packed, deterministic, implementation = 0, (), True, "numpy"

    def __init__(self, layer: Layer, signature: Signature, compute: Compute = run_reference, rtol: float = 1e-6):
        self.layer, self.signature, self.compute, self.rtol = layer, signature, compute, rtol
        self.inputs, self.outputs = count_stored_bytes(layer, signature)

    def enqueue(self, args: Args, stream: Stream) -> None:
        stream.record(NumpyCall(self, args))


@tactic
class NumpyReference(Tactic):
    ops = ("*",)
    fallback = True

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        ins = tuple(None if t is None or t.is_constant else Operand("linear", t.dtype) for t in layer.inputs)
        return [Signature(ins, tuple(Operand("linear", t.dtype) for t in layer.outputs))]

    def refuses(self, layer: Layer, signature: Signature, backend) -> str | None:
        if layer.op == "Reformat":
            return "moves values between formats, which the reference does not know"
        if is_data_sized(layer):
            return "its sizes depend on the data"
        if any(t is not None and t.dtype.name == "string" for t in (*layer.inputs, *layer.outputs)):
            return "strings have no place in an arena"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NumpyKernel:
        get_op(layer.op)
        return NumpyKernel(layer, signature)

    def library_version(self) -> str:
        return f"numpy {np.__version__}"
