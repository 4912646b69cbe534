"""The null backend's kernel and its cost table: bytes at 10 GB/s plus multiply-adds at 100 G/s, times a factor per format."""

from __future__ import annotations

from math import prod

from whet.backends import Call
from whet.network import Layer, Tensor, evaluate, format_fits, static_shape
from whet.tactics._base import Args, Operand, Packed, Signature, Stream, count_stored_bytes
from whet.tactics._fused import get_root_layer

LAUNCH_SECONDS, BYTES_PER_SECOND, MACS_PER_SECOND = 2e-6, 10e9, 100e9


class NullCall(Call):
    """A recorded launch; `cost` is in seconds."""

    def __init__(self, cost: float):
        self.cost = cost

    def run(self) -> None:
        """Does nothing."""

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Does nothing: no operand is read or written."""


class NullKernel:
    """A planned launch with its cost from the table. Weights are not packed, so that builds stay fast."""

    rtol, deterministic = 1e-5, True
    packed: tuple[Packed, ...] = ()

    def __init__(self, layer: Layer, signature: Signature, implementation: str, macs: int = 0, slow: float = 1.0, scratch: int = 0):
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.implementation, self.scratch = implementation, scratch
        constants = [t for t, o in zip(layer.inputs, signature.inputs, strict=True) if t is not None and o is None and t.is_constant]
        weights = sum(evaluate(t.type.nbytes, {}) for t in constants)
        moved = sum(self.inputs) + sum(self.outputs) + weights
        self.cost = slow * (LAUNCH_SECONDS + moved / BYTES_PER_SECOND + macs / MACS_PER_SECOND)

    def enqueue(self, args: Args, stream: Stream) -> None:
        stream.record(NullCall(self.cost))


def find_data_operands(layer: Layer, fmt: str) -> tuple[Operand | None, ...] | None:
    """Inputs in `fmt` if their rank supports it, else row-major; None for constants. Returns None if an output does not support it."""
    if not all(format_fits(fmt, t.type.rank) for t in layer.outputs):
        return None
    return tuple(None if t is None or t.is_constant else Operand(format_of(t, fmt), t.dtype) for t in layer.inputs)


def format_of(t: Tensor, fmt: str) -> str:
    return fmt if format_fits(fmt, t.type.rank) else "linear"


def find_uniform_signature(layer: Layer, fmt: str, inplace: tuple[tuple[int, int], ...] = ()) -> Signature | None:
    """All operands in one format, or None if that is impossible."""
    ins = find_data_operands(layer, fmt)
    return None if ins is None else Signature(ins, tuple(Operand(fmt, t.dtype) for t in layer.outputs), inplace)


def count_product_macs(layer: Layer) -> int:
    """Multiply-adds of the Conv, Gemm or MatMul of a layer or at the root of a fused one."""
    head = get_root_layer(layer)
    out, w = head.outputs[0], head.needs(1)
    shape = static_shape(w.shape)
    per = {
        "Conv": prod(shape[1:]),
        "Gemm": shape[0 if not head.attrs.get("transB") else -1],
        "MatMul": shape[-2] if len(shape) > 1 else shape[0],
    }
    return prod(static_shape(out.shape)) * per[head.op]
