"""Shared by all CUDA tactics: planned kernels, storage types, epilogues as the kernels compute them, single launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import get_current_device, per_device
from whet.backends.cuda.executor import GpuCall
from whet.backends.cuda.launch import GpuWork, Kernel, Launch, Module
from whet.network import Layer, Tensor, static_shape
from whet.network.types import BF16, F16, F32, DType
from whet.tactics._base import Args, Operand, Packed, Signature, Stream, count_stored_bytes
from whet.tactics._fused import EpilogueStep
from whet.tactics.cuda._device.arguments import Arguments
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import NONE, Activation, PostOps

#: relative error of one layer: rounding of weights and results to the storage type, f32 accumulators in between
RTOL = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.5e-2}
TYPE = {"f32": 0, "f16": 1, "bf16": 2}  # codes as in vector.cuh
FLOAT16_TYPES = (F16, BF16)


class GpuKernel:
    """A planned layer. `make(args)` gives its launches; nothing is compiled before it is called."""

    deterministic = True

    def __init__(
        self,
        layer: Layer,
        signature: Signature,
        make: Callable[[Args], Sequence[GpuWork]],
        *,
        implementation: str,
        packed: Sequence[Packed] = (),
        scratch: int = 0,
        rtol: float | None = None,
    ) -> None:
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.packed, self.scratch, self.implementation = tuple(packed), scratch, implementation
        stored = [o.dtype.name for o in (*signature.inputs, *signature.outputs) if o is not None]
        self.rtol = max((RTOL[name] for name in stored if name in RTOL), default=0.0) if rtol is None else rtol
        self._make = make

    def launches(self, args: Args) -> Sequence[GpuWork]:
        """The launches for these addresses."""
        return self._make(args)

    def enqueue(self, args: Args, stream: Stream) -> None:
        """Record the launches for these addresses."""
        stream.record(GpuCall(lambda ins, outs: self._make(Args(ins, outs, args.packed, args.scratch)), args.inputs, args.outputs))


def machine_has(backend: Backend, feature: str) -> bool:
    """True if the GPU has the feature: "wgmma", "tma", "sm_90", ..."""
    return feature in backend.capabilities.features


def get_shared_limit(backend: Backend) -> int:
    """Bytes of shared memory that a block can use."""
    return backend.capabilities.shared_memory


def compile_ahead(backend: Backend, sources: Sequence[str]) -> None:
    """Starts background compilation of candidates on a real GPU's backend."""
    backend.compile_ahead(sources)


@per_device
def load_kernel(name: str, entry: str, constants: tuple[tuple[str, Any], ...], shared: int = 0) -> Kernel:
    """Function `entry` of `<name>` with these constants and dynamic shared memory, compiled and loaded once a process."""
    here = get_current_device()
    arch = "sm_90a" if here is None else here.arch
    return Module(compile_cubin(emit_kernel_source(name, dict(constants)), name=name, arch=arch)).kernel(entry, shared)


def launch(
    entry: str,
    arguments: Arguments,
    constants: Mapping[str, Any],
    grid: tuple[int, int, int],
    block: int,
    *,
    shared: int = 0,
    cluster: int = 1,
    label: str = "",
) -> Launch:
    """A launch of the function `entry` in the arguments' kernel file: `grid` blocks of `block` threads with `shared` bytes of dynamic shared
    memory, in clusters of `cluster` blocks. Raises BackendError if the arguments are not those of an instance with these constants."""
    arguments.check(constants)
    kernel = load_kernel(arguments.kernel_file, entry, tuple(sorted(constants.items())), shared)
    return Launch(kernel, grid, block, arguments.pack(), cluster=cluster, label=label)


def count_blocks(count: int, each: int) -> int:
    """Blocks that cover `count` things, `each` a block."""
    return max(1, -(-count // each))


def find_activation(post: EpilogueStep) -> Activation | None:
    """A unary op as a kernel's activation; None if the kernels have none for it. Constant operands are the attributes `input1` and `input2`."""
    a = post.attrs.get

    def get_number(name: str, otherwise: float) -> float:
        value = a(name)
        return otherwise if value is None else float(np.asarray(value).reshape(-1)[0])

    match post.op:
        case "Relu":
            return ("clip", 0.0, np.inf)
        case "Clip":
            low, high = get_number("input1", get_number("min", -np.inf)), get_number("input2", get_number("max", np.inf))
            return ("clip", low, high) if low <= high else None
        case "Silu":
            return ("silu", 0.0, 0.0)
        case "Swish":
            return ("silu", 0.0, 0.0) if get_number("alpha", 1.0) == 1.0 else None
        case "HardSwish":
            return ("hardswish", 0.0, 0.0)
        case "Gelu":
            return ("gelu_tanh" if a("approximate", "none") == "tanh" else "gelu", 0.0, 0.0)
        case "Sigmoid" | "Tanh" | "Mish":
            return (post.op.lower(), 0.0, 0.0)
        case "LeakyRelu":
            return ("leaky_relu", get_number("alpha", 0.01), 0.0)
        case "HardSigmoid":
            return ("hardsigmoid", get_number("alpha", 0.2), get_number("beta", 0.5))
        case "Elu":
            return ("elu", get_number("alpha", 1.0), 0.0)
    return None


__all__ = ["ACTIVATIONS", "FLOAT16_TYPES", "RTOL", "TYPE", "Epilogue", "GpuKernel"]


class Epilogue:
    """A fused layer's epilogue: constant biases to add, one residual input, one activation."""

    def __init__(self) -> None:
        self.biases: list[Tensor] = []
        self.residual: int | None = None
        self.post_ops = PostOps(NONE)

    @property
    def key(self) -> str:
        """The digests of the biases, for the key of the packed bias."""
        return "+".join(t.weight.digest for t in self.biases if t.weight is not None)

    def bias(self, own: Tensor | None, channels: int) -> np.ndarray:
        """The sum of the root layer's bias and those of the epilogue, [channels] f32."""
        total = np.zeros(channels, np.float32)
        for t in (own, *self.biases):
            if t is not None:
                total += np.asarray(t.array(), np.float32).reshape(-1)
        return total


def match_epilogue(layer: Layer, steps: Sequence[EpilogueStep] | None, channel_axis: int = 1) -> Epilogue | str:
    """The epilogue as an Epilogue, or why it cannot be one."""
    if steps is None:
        return "its fused operations do not form a chain"
    out, epilogue, activated = static_shape(layer.outputs[0].shape), Epilogue(), False
    for post in steps:
        if post.other is None:
            kind = find_activation(post)
            if kind is None:
                return f"computes no {post.op} in its epilogue"
            if activated:
                return "takes one activation, not two"
            epilogue.post_ops, activated = PostOps(kind, epilogue.post_ops.residual), True
            continue
        other = post.other_tensor
        if post.op != "Add" or other is None:
            return f"computes no {post.op} with two operands in its epilogue"
        shape = static_shape(other.shape)
        full = (1,) * (len(out) - len(shape)) + shape
        if other.is_constant:
            if activated or len(full) != len(out) or any(d != (out[i] if i == channel_axis else 1) for i, d in enumerate(full)):
                return f"an Add of a constant of shape {list(shape)} is not a bias"
            epilogue.biases.append(other)
        elif shape != out or epilogue.residual is not None:
            return f"an Add of {list(shape)} is not the only residual, of shape {list(out)}"
        else:
            epilogue.residual = post.other
            epilogue.post_ops = PostOps(epilogue.post_ops.activation, 2 if activated else 1)
    return epilogue


def make_packed_array(key: str, nbytes: int, make: Callable[[], np.ndarray]) -> Packed:
    """A packed weight from a function that makes its array of values; kernels must not compute addresses from them (see `make_packed_table`)."""
    return Packed(key, nbytes, lambda: np.ascontiguousarray(make()).reshape(-1).view(np.uint8), storable=True)


def make_packed_table(key: str, nbytes: int, make: Callable[[], np.ndarray]) -> Packed:
    """An array of indices or offsets from the function that makes it: engine files never contain it."""
    return Packed(key, nbytes, lambda: np.ascontiguousarray(make()).reshape(-1).view(np.uint8))


def list_float_types(tensors: Sequence[Tensor | None], kinds: Sequence[DType] = (*FLOAT16_TYPES, F32)) -> list[DType]:
    """Storage types to offer for float tensors: those of `kinds` for f32 ones, else their own."""
    own = {t.dtype for t in tensors if t is not None}
    if own <= {F32}:
        return list(kinds)
    return [t for t in own if t in kinds] if len(own) == 1 else []


def all_static(layer: Layer) -> bool:
    """True if every shape of the layer is known."""
    return all(t is None or t.type.static for t in (*layer.inputs, *layer.outputs))


def make_stored_signature(layer: Layer, stored: dict[int, Operand], out: Operand) -> Signature:
    """A signature with the run-time inputs in `stored` and one output."""
    return Signature(tuple(stored.get(i) for i in range(len(layer.inputs))), (out,))
