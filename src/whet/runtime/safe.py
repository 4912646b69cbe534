"""A kernel for any layer in any host formats, by the op's NumPy reference. It replaces a selected tactic that cannot run."""

from __future__ import annotations

import numpy as np

from whet.backends import Call
from whet.errors import BackendError
from whet.network import Layer, compute_stored_shape, from_stored, static_shape, to_stored
from whet.ops import run_layer, run_regions
from whet.runtime.memory import make_array_at
from whet.tactics import Args, Signature, Stream, count_stored_bytes


class SafeKernel:
    """Reads the operands from their formats, runs the reference, stores the results: slow but always correct. Host memory only."""

    scratch, packed, rtol, deterministic, implementation = 0, (), 1e-6, True, "numpy reference (safe)"

    def __init__(self, layer: Layer, signature: Signature):
        self.layer, self.signature = layer, signature
        self.inputs, self.outputs = count_stored_bytes(layer, signature)

    def enqueue(self, args: Args, stream: Stream) -> None:
        stream.record(SafeCall(self, args))


class SafeCall(Call):
    """One run of the reference over memory."""

    def __init__(self, kernel: SafeKernel, args: Args):
        self.kernel = kernel
        self.addresses = {"input": list(args.inputs), "output": list(args.outputs)}

    def set_address(self, kind: str, index: int, address: int) -> None:
        self.addresses[kind][index] = address

    def run(self) -> None:
        layer, signature = self.kernel.layer, self.kernel.signature
        arrays: list[np.ndarray | None] = []
        for t, o, address in zip(layer.inputs, signature.inputs, self.addresses["input"], strict=True):
            if t is None:
                arrays.append(None)
            elif o is None:
                arrays.append(t.array())
            else:
                shape = static_shape(t.shape)
                stored = make_array_at(address, static_shape(compute_stored_shape(o.format, shape)), o.dtype.numpy)
                # a copy: the output may share these bytes
                arrays.append(np.array(from_stored(stored, o.format, shape), t.dtype.numpy, order="C"))
        with np.errstate(all="ignore"):
            outs = run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)
            for t, o, address, got in zip(layer.outputs, signature.outputs, self.addresses["output"], outs, strict=True):
                shape = static_shape(t.shape)
                if got.shape != shape:
                    raise BackendError(f"{layer.op} '{layer.name}' returned shape {list(got.shape)} instead of the planned {list(shape)}")
                target = make_array_at(address, static_shape(compute_stored_shape(o.format, shape)), o.dtype.numpy)
                np.copyto(target, to_stored(got.astype(o.dtype.numpy, copy=False), o.format))
