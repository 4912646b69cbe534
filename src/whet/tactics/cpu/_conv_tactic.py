"""Convolutions by kernels of our own, in f32 and blocks of 16 channels: what those kernels and their tactics share."""

from __future__ import annotations

from typing import Any

from whet.network import F32, Layer
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, Tactic, stored_bytes
from whet.tactics._fused import anchor, constants_of, epilogue, outer_input, source_place
from whet.tactics.cpu import _jit
from whet.tactics.cpu._declared import Reference
from whet.tactics.cpu._kernel import activations, static

STORED = Operand("nChw16c", F32)


class ConvKernel:
    """A planned convolution: addresses of the image, the packed weights and biases, the result and what is added to it; then `sizes`, which end in
    items and a share."""

    scratch, rtol, deterministic = 0, 1e-5, True
    name = ""
    packed: tuple[Packed, ...]
    sizes: list[int]
    threads: int
    ir: str
    implementation: str

    def __init__(self, layer: Layer, signature: Signature) -> None:
        found = steps_of(layer)
        assert found is not None, "the tactic takes no other layers"
        self.steps, self.added = found
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
        context, operands = [args.inputs[self.x], args.packed[0], args.outputs[0]], {("input", self.x): 0, ("output", 0): 2}
        if self.added is not None:
            operands["input", self.added] = len(context)
            context.append(args.inputs[self.added])
        context += self.sizes
        stream.record(_jit.ParallelCall(_jit.address(self.ir, self.name), context, operands, self.threads, self.implementation))


class ConvTactic(Tactic):
    """A convolution of constant weights; a tactic says which ones it takes, and with what behind them."""

    ops = ("Conv",)
    behind = "SiLU, ReLU or nothing behind them"

    def unfit(self, head: Layer) -> str | None:
        """Why the kernel does not take this convolution."""
        raise NotImplementedError

    def takes(self, steps: tuple[str, ...]) -> bool:
        """Whether the kernel computes these steps behind the sums."""
        return steps in ((), ("Silu",), ("Relu",))

    def fits(self, layer: Layer, signature: Signature, sizes: dict[str, int]) -> bool:
        """Whether the tile of a config can compute a layer of these shapes, which may be others than those that it was chosen for."""
        raise NotImplementedError

    def kernel(self, layer: Layer, signature: Signature, sizes: dict[str, int], count: int) -> ConvKernel:
        """The planned layer, on up to `count` threads."""
        raise NotImplementedError

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> ConvKernel:
        sizes = {name: int(value) for name, value in config}
        if not self.fits(layer, signature, sizes):
            raise PlanRefused(f"a tile of {', '.join(f'{v} {n}' for n, v in sizes.items())} does not fit a result of {layer.outputs[0].shape}")
        return self.kernel(layer, signature, sizes, machine.threads)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer) or _jit.available()
        if said:
            return said
        head = anchor(layer)
        if any(not layer.inputs[i].is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if any(t.dtype != F32 for t in activations(layer)):
            return "computes in 32-bit floating point"
        steps = steps_of(layer)
        if steps is None or not self.takes(steps[0]):
            return f"is for convolutions with {self.behind}"
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


def steps_of(layer: Layer) -> tuple[tuple[str, ...], int | None] | None:
    """What follows the convolution, as "Silu", "Relu" and "Add" (of one other value as large as the result, computed at run time), and which input is
    added; None for anything else."""
    posts = epilogue(layer)
    if posts is None:
        return None
    names: list[str] = []
    added = None
    for post in posts:
        name = "Silu" if post.op == "Swish" and float(post.attrs.get("alpha", 1.0)) == 1.0 else post.op
        if name == "Add" and post.other is not None and added is None and _as_large(layer, post.other):
            added = post.other
        elif name not in ("Silu", "Relu") or post.other is not None:
            return None
        names.append(name)
    return tuple(names), added


def _as_large(layer: Layer, i: int) -> bool:
    return not layer.inputs[i].is_constant and layer.inputs[i].shape == layer.outputs[0].shape
