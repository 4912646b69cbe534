"""Convolutions with SiLU behind them by kernels of our own: what those kernels and their tactics share. f32 in blocks of 16 channels."""

from __future__ import annotations

from typing import Any

from whet.backends.cpu import threads
from whet.network import F32, Layer
from whet.tactics._base import Args, Operand, Packed, Signature, Stream, Tactic, stored_bytes
from whet.tactics._fused import anchor, constants_of, epilogue, outer_input, source_place
from whet.tactics.cpu import _jit
from whet.tactics.cpu._declared import Reference
from whet.tactics.cpu._kernel import static

STORED = Operand("nChw16c", F32)


class SiluKernel:
    """A planned convolution: addresses of the image, the packed weights and biases, and the result; then `sizes`, which end in items and a share."""

    scratch, rtol, deterministic = 0, 1e-5, True
    name = ""
    packed: tuple[Packed, ...]
    sizes: list[int]
    threads: int
    ir: str
    implementation: str

    def __init__(self, layer: Layer, signature: Signature) -> None:
        self.x = source_place(layer)
        self.weights, self.bias = constants_of(layer)
        self.inputs, self.outputs = stored_bytes(layer, signature)

    @property
    def constants(self) -> str:
        """What weights and biases are known by."""
        return "|".join("" if t is None else t.constant().digest for t in (self.weights, self.bias))

    def share(self, sizes: list[int], items: int, count: int, work: int, small: int) -> None:
        """Sets threads and sizes; up to `small` multiplications one thread has done before the others are there."""
        self.threads = min(count, items) if work > small else 1
        self.sizes = [*sizes, items, -(-items // self.threads)]

    def enqueue(self, args: Args, stream: Stream) -> None:
        ask = threads.address("omp_get_thread_num") if self.threads > 1 else _jit.address(self.ir, "first")
        context = [args.inputs[self.x], args.packed[0], args.outputs[0], *self.sizes, ask]
        operands = {("input", self.x): 0, ("output", 0): 2}
        stream.record(_jit.ParallelCall(_jit.address(self.ir, self.name), context, operands, self.threads, self.implementation))


class SiluConv(Tactic):
    """A convolution of constant weights with SiLU and nothing else behind it; a tactic says which ones it takes."""

    ops = ("Conv",)

    def unfit(self, head: Layer) -> str | None:
        """Why the kernel does not take this convolution."""
        raise NotImplementedError

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer) or _jit.available()
        if said:
            return said
        head = anchor(layer)
        if any(not layer.inputs[i].is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if not _ends_in_silu(layer):
            return "is for convolutions with SiLU behind them, and nothing else: oneDNN has the others at the peak"
        return self.unfit(head)

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer):
            return []
        x = source_place(layer)
        return [Signature(tuple(STORED if i == x else None for i in range(len(layer.inputs))), (STORED,))]

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing: NaN and infinities give what the ops give."""
        return [{}]

    def library_version(self) -> str:
        return _jit.version()


def _ends_in_silu(layer: Layer) -> bool:
    steps = epilogue(layer)
    if steps is None or len(steps) != 1 or steps[0].other is not None:
        return False
    return steps[0].op == "Silu" or (steps[0].op == "Swish" and float(steps[0].attrs.get("alpha", 1.0)) == 1.0)
