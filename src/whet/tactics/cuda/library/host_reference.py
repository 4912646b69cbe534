"""Any op by its NumPy reference on the host: inputs are copied to it and results back. Only with `--allowFallback`."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.driver import check_status, load_driver
from whet.backends.cuda.executor import GpuCall
from whet.backends.cuda.launch import GpuWork
from whet.backends.cuda.stream import Stream
from whet.errors import BackendError
from whet.network import Layer, from_stored, static_shape
from whet.ops import run_layer, run_regions
from whet.tactics import list_tactics
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, count_stored_bytes, tactic
from whet.tactics.cuda._device.kernel import all_static


@tactic
class HostReference(Tactic):
    """Slow, always right. A step of it waits for the GPU, so an engine that has one runs without a CUDA graph."""

    ops = ("*",)
    fallback = True
    opt_in = True

    def why_not(self, layer: Layer) -> str | None:
        return "reformats run on the GPU" if layer.op == "Reformat" else super().why_not(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        ins = tuple(None if t is None or t.is_constant else Operand("linear", t.dtype) for t in layer.inputs)
        return [Signature(ins, tuple(Operand("linear", t.dtype) for t in layer.outputs))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if any(t is not None and t.dtype.bits < 8 for t in (*layer.inputs, *layer.outputs)):
            return "elements of less than a byte"
        for t in list_tactics("cuda"):
            if not t.opt_in and t.why_not(layer) is None:
                if any(t.refuses(layer, s, backend) is None for s in t.signatures(layer, backend)):
                    return f"{t.name} computes this on the GPU"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> HostKernel:
        return HostKernel(layer, signature)


class HostKernel:
    """A planned layer on the host."""

    scratch, packed, rtol, deterministic, implementation = 0, (), 1e-6, True, "numpy on the host (copies there and back)"

    def __init__(self, layer: Layer, signature: Signature) -> None:
        self.layer, self.signature = layer, signature
        self.inputs, self.outputs = count_stored_bytes(layer, signature)

    def enqueue(self, args: Args, stream: Any) -> None:
        """Record the step for these addresses."""
        stream.record(GpuCall(lambda ins, outs: [HostStep(self, ins, outs)], args.inputs, args.outputs))


class HostStep(GpuWork):
    """One run: waits for the stream, copies, computes, copies back. No graph can hold it (`on_host`)."""

    on_host = True

    def __init__(self, kernel: HostKernel, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.kernel, self.inputs, self.outputs = kernel, inputs, outputs

    def run(self, stream: Stream) -> None:
        """Do the step in the stream's order; the host waits."""
        layer, signature = self.kernel.layer, self.kernel.signature
        stream.synchronize()
        arrays: list[np.ndarray | None] = []
        for t, o, address, nbytes in zip(layer.inputs, signature.inputs, self.inputs, self.kernel.inputs, strict=True):
            if t is None:
                arrays.append(None)
            elif o is None:
                arrays.append(t.array())
            else:
                raw = np.empty(nbytes, np.uint8)
                if nbytes:
                    check_status(load_driver().cuMemcpyDtoH(raw.ctypes.data, address, nbytes))
                arrays.append(np.array(from_stored(raw.view(o.dtype.numpy).reshape(static_shape(t.shape)), o.format, static_shape(t.shape))))
        with np.errstate(all="ignore"):
            outputs = run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)
        for t, o, address, a in zip(layer.outputs, signature.outputs, self.outputs, outputs, strict=True):
            if a.shape != static_shape(t.shape):
                raise BackendError(f"{layer.op} '{layer.name}' returned shape {list(a.shape)}, planned was {list(static_shape(t.shape))}")
            out = np.ascontiguousarray(a.astype(o.dtype.numpy, copy=False))
            if out.nbytes:
                check_status(load_driver().cuMemcpyHtoD(address, out.ctypes.data, out.nbytes))
        check_status(load_driver().cuStreamSynchronize(0))
