"""Base classes of the oneDNN tactics: a kernel with one oneDNN descriptor, and the formats and types to select from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np

from whet.backends import Backend, Call
from whet.backends.cpu import serial, threads
from whet.network import FORMATS, Layer, Tensor, format_fits, static_shape
from whet.network.types import BF16, F32, DType
from whet.tactics._base import Args, Config, Kernel, Operand, Packed, PlanRefused, Signature, Stream, Tactic, count_stored_bytes
from whet.tactics._fused import get_root_layer
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._nonfinite import Reference, list_declared_references

#: bound on the relative error of one layer by storage type; f32 sums of some thousand products stay below it
RTOL = {"f32": 1e-5, "bf16": 1e-2}
#: multiply-adds above which oneDNN's scalar loops (ref) are not timed
REFERENCE_LIMIT = 2e7
#: multiply-adds, bytes of weights, and elements of layers without products, below which one thread is faster: starting the others takes 5 us, and
#: more if they sleep since the layers before ran on one thread
SERIAL_PRODUCTS, SERIAL_WEIGHTS, SERIAL_ELEMENTS = 1 << 18, 1 << 18, 1 << 14
MAX_IMPLEMENTATIONS = 4

Place = tuple[str, int]
"""The tensor that an operand of a call refers to: ("input" | "output" | "packed", index)."""


class Bindable(Protocol):
    """One primitive and the tensors of its operands: what a call needs of a kernel."""

    @property
    def descriptor(self) -> dnn.Descriptor: ...

    @property
    def places(self) -> Mapping[str, Place]: ...

    @property
    def offsets(self) -> Mapping[str, int]: ...

    @property
    def scratch(self) -> int: ...


class OneDnnCall(Call):
    """One recorded launch: oneDNN's call, and the inputs and outputs of the layer among its operands. It runs on one thread, without a parallel
    region, if its descriptor was made for one and the engine has more."""

    def __init__(self, kernel: Bindable, args: Args, team: int = 1) -> None:
        """`team`: threads of the engine, if the primitive is made for only one of them."""
        at = {"input": args.inputs, "output": args.outputs, "packed": args.packed}
        self._offsets = kernel.offsets
        addresses = {operand: at[kind][index] + self._offsets.get(operand, 0) for operand, (kind, index) in kernel.places.items()}
        if kernel.scratch:
            addresses["scratchpad"] = args.scratch
        with threads.limited_threads(1 if team > 1 else threads.get_threads()):
            self._call = kernel.descriptor.primitive().call(addresses)
        self._operands: dict[Place, list[str]] = {}
        for operand, place in kernel.places.items():
            self._operands.setdefault(place, []).append(operand)
        self.operands = self._operands.keys()
        self._serial = serial.SerialCall(self._call.step, team) if team > 1 else None
        self.native: tuple[int, int, int, int, int] | None = self._call.step if self._serial is None else self._serial.native

    def run(self) -> None:
        if self._serial is None:
            return self._call()
        with threads.limited_threads(1):
            self._call()

    def set_address(self, kind: str, index: int, address: int) -> None:
        for operand in self._operands.get((kind, index), ()):
            self._call.bind(operand, address + self._offsets.get(operand, 0))

    def make_address_setter(self, kind: str, index: int) -> Callable[[int], None]:
        """`set_address` for one operand as a function."""
        operands = self._operands.get((kind, index), [])
        if len(operands) == 1 and not self._offsets.get(operands[0], 0):
            return partial(self._call.bind, operands[0])
        return partial(self.set_address, kind, index)


class OneDnnKernel:
    """A planned launch of one oneDNN primitive; `places` gives the tensor of each operand, `offsets` an offset in bytes. `stored` is
    `count_stored_bytes(layer, signature)`, for layers of many launches."""

    deterministic = True
    team = 1  # see OneDnnCall

    def __init__(
        self,
        layer: Layer,
        signature: Signature,
        descriptor: dnn.Descriptor,
        places: Mapping[str, Place],
        packed: Sequence[Packed] = (),
        rtol: float | None = None,
        offsets: Mapping[str, int] | None = None,
        stored: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        self.offsets = dict(offsets or {})
        self.descriptor, self.places, self.packed = descriptor, dict(places), tuple(packed)
        self.inputs, self.outputs = stored or count_stored_bytes(layer, signature)
        self.scratch = descriptor.scratch_bytes
        self.implementation = descriptor.name
        self.rtol = RTOL[signature.outputs[0].dtype.name] if rtol is None else rtol

    def enqueue(self, args: Args, stream: Stream) -> None:
        stream.record(OneDnnCall(self, args, self.team))


class Recipe:
    """A layer as a oneDNN primitive: the descriptor that lists implementations, the tensors of the operands, constants and how to pack them.

    `constants` has for an operand its weight's digest, a function that computes its array, and that array's layout (None: the layout of the
    primitive).
    """

    def __init__(self, first: dnn.Descriptor, places: dict[str, Place], rtol: float | None = None, work: float = 0.0) -> None:
        self.first, self.places, self.rtol, self.work = first, places, rtol, work
        self.few_channels = False  # too few for an AVX-512 register: kernels with smaller registers are timed too
        self.offsets: dict[str, int] = {}
        self.constants: dict[str, tuple[str, Callable[[], np.ndarray], dnn.MemoryDesc | None]] = {}

    def constant(self, operand: str, key: str, make: Callable[[], np.ndarray], desc: dnn.MemoryDesc | None = None) -> None:
        """Marks `operand` as a constant, which is packed once, when the engine is built."""
        self.constants[operand] = (key, make, desc)

    def kernel(self, layer: Layer, signature: Signature, descriptor: dnn.Descriptor) -> OneDnnKernel:
        places = dict(self.places)
        packed: list[Packed] = []
        for operand, (key, make, given) in self.constants.items():
            places[operand] = ("packed", len(packed))
            packed.append(_pack(key, make, given, descriptor.md(operand)))
        return OneDnnKernel(layer, signature, descriptor, places, packed, self.rtol, self.offsets)


def _pack(key: str, make: Callable[[], np.ndarray], desc: dnn.MemoryDesc | None, wanted: dnn.MemoryDesc) -> Packed:
    if desc is None:
        return Packed(f"{key}|{wanted.text}", wanted.nbytes, lambda: np.ascontiguousarray(make()).reshape(-1).view(np.uint8), storable=True)
    return Packed(f"{key}|{desc.text}|{wanted.text}", wanted.nbytes, lambda: dnn.pack(np.ascontiguousarray(make()), desc, wanted), storable=True)


class OneDnnTactic(Tactic):
    """A tactic for layers that are one oneDNN primitive. Subclasses give `signatures` and `recipe`; implementations become configs."""

    library = "oneDNN"
    backend = "cpu"
    _last: tuple[Any, ...] = (None, None, 0, None)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """The ops of the layer for which the implementation differs from the reference on NaN or infinities (_nonfinite.py)."""
        return list_declared_references(layer, implementation)

    @abstractmethod
    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        """The layer as a primitive, or why oneDNN cannot compute it. May raise dnn.Unimplemented."""

    def _recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        """`recipe` for the layer's threads on this machine. The last result is kept, since refuses, configs and plan need the same one."""
        threads.set_threads(backend.threads)
        last = self._last
        if last[0] is layer and last[1] == signature and last[2] == backend.threads:
            return last[3]
        with planned_threads(layer, backend):
            try:
                got = self.recipe(layer, signature, backend)
                if isinstance(got, Recipe):
                    self.list_usable(got)
            except dnn.Unimplemented as error:
                got = f"{error} with {signature}"
        self._last = (layer, signature, backend.threads, got)
        return got

    def list_usable(self, recipe: Recipe) -> list[str]:
        """Names of the implementations to time. Raises Unimplemented if there are none."""
        names = [d.name for d in recipe.first.implementations()]
        fast = [n for n in names if not n.startswith(("ref", "simple:any"))]
        if not fast and recipe.work > REFERENCE_LIMIT:
            raise dnn.Unimplemented(f"oneDNN {dnn.load_library().version} has only scalar loops (ref) for this")
        if any(":avx512" in n for n in fast) and not recipe.few_channels:  # the same kernels with half the register are slower
            fast = [n for n in fast if not n.endswith((":avx2", ":avx", ":sse41"))]
        return (fast or names)[:MAX_IMPLEMENTATIONS]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        got = self._recipe(layer, signature, backend)
        return got if isinstance(got, str) else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        got = self._recipe(layer, signature, backend)
        with planned_threads(layer, backend):
            return [] if isinstance(got, str) else [(("impl", name),) for name in self.list_usable(got)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        return self._plan(lambda: self._recipe(layer, signature, backend), layer, signature, config, backend)

    def _plan(self, ask: Callable[[], Recipe | str], layer: Layer, signature: Signature, config: Config, backend: Backend) -> OneDnnKernel:
        """The kernel of a recipe with the configured implementation (default: oneDNN's first)."""
        with planned_threads(layer, backend) as count:
            try:
                got = ask()
                if isinstance(got, str):
                    raise PlanRefused(got)
                name = dict(config).get("impl")
                descriptor = got.first if name is None else got.first.select(str(name))
            except dnn.Unimplemented as error:
                raise PlanRefused(str(error)) from None
            kernel = got.kernel(layer, signature, descriptor)
        kernel.team = backend.threads if count < backend.threads else 1
        return kernel

    def missing_library(self) -> str | None:
        return dnn.load_error()

    def library_version(self) -> str:
        return dnn.get_library_version()


class TwoPrimitives(OneDnnTactic):
    """A tactic with two alternative primitives: `recipe` describes the first, `other` the second; the config key "kind" selects one."""

    kinds = ("", "")

    @abstractmethod
    def second_recipe(self, layer: Layer, signature: Signature) -> Recipe | str:
        """The layer as the second primitive, or why that cannot compute it. May raise dnn.Unimplemented."""

    def select_implementations(self, names: list[str]) -> list[str]:
        """The implementations of the second primitive to time."""
        return names

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        first, second = self.kinds
        base = [(("kind", first), *c) for c in super().configs(layer, signature, backend)]
        with planned_threads(layer, backend):
            try:
                other = self.second_recipe(layer, signature)
                names = [] if isinstance(other, str) else self.select_implementations(self.list_usable(other))
            except dnn.Unimplemented:
                names = []
        return base + [(("kind", second), ("impl", n)) for n in names]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        if dict(config).get("kind") != self.kinds[1]:
            return super().plan(layer, signature, config, backend)
        return self._plan(lambda: self.second_recipe(layer, signature), layer, signature, config, backend)


def select_thread_count(layer: Layer, backend: Backend) -> int:
    """Threads for a layer: all, or one if its work takes less time than starting the others."""
    return 1 if backend.threads > 1 and _is_small(layer) and serial.why_not_serial() is None else backend.threads


@contextmanager
def planned_threads(layer: Layer, backend: Backend) -> Iterator[int]:
    """Descriptors made in the block are for the layer's threads, which it yields; afterwards the calling thread has the backend's."""
    count = select_thread_count(layer, backend)
    threads.set_threads(count)
    try:
        yield count
    finally:
        threads.set_threads(backend.threads)


def _is_small(layer: Layer) -> bool:
    head = get_root_layer(layer)
    tensors = [t for t in (*layer.inputs, *head.inputs, *layer.outputs, *head.outputs) if t is not None]
    if not all(t.type.static for t in tensors):
        return False
    if head.op not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return max(prod(static_shape(t.shape)) for t in tensors) <= SERIAL_ELEMENTS
    if sum(prod(static_shape(t.shape)) * t.dtype.bits // 8 for t in layer.inputs if t is not None and t.is_constant) > SERIAL_WEIGHTS:
        return False
    left, right = (static_shape(head.needs(i).shape) for i in (0, 1))
    out = static_shape(head.outputs[0].shape)
    if head.op in ("Gemm", "MatMul"):
        of_each = left[-2] if head.op == "Gemm" and head.attrs.get("transA") else left[-1]
    else:
        of_each = prod(right[1:])
    return prod(left if head.op == "ConvTranspose" else out) * of_each <= SERIAL_PRODUCTS


def list_image_formats(rank: int) -> tuple[str, ...]:
    """Candidate formats for activations of a rank, the most promising first."""
    block = "nChw16c" if (dnn.has_isa("avx512_core") if dnn.load_error() is None else jit.has("avx512f")) else "nChw8c"
    return tuple(f for f in ("nhwc", block, "linear") if f in FORMATS and format_fits(f, rank))


def list_storage_types(tensors: Sequence[Tensor | None], backend: Backend) -> list[DType]:
    """Storage types for a layer of these activations: f32 and, if the CPU multiplies it, bf16."""
    names = {t.dtype.name for t in tensors if t is not None}
    if names == {"f32"}:
        return [F32, BF16] if "avx512_bf16" in backend.capabilities.features and dnn.has_isa("avx512_core_bf16") else [F32]
    return [BF16] if names == {"bf16"} and dnn.has_isa("avx512_core") else []


def is_static(layer: Layer) -> bool:
    """True if every shape of the layer is known and none is empty."""
    tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None]
    return all(t.type.static for t in tensors) and all(0 not in static_shape(t.shape) for t in tensors)


def list_runtime_tensors(layer: Layer) -> list[Tensor]:
    """Inputs that are computed at run time, and the outputs."""
    return [t for t in (*layer.inputs, *layer.outputs) if t is not None and not t.is_constant]


def to_f32(tensor: Tensor) -> np.ndarray:
    """A constant's values as f32."""
    return np.asarray(tensor.array(), np.float32)


def describe(tensor: Tensor, operand: Operand, shape: Sequence[int] | None = None) -> dnn.MemoryDesc:
    """An activation's layout; with `shape`, seen as another (equally stored) shape."""
    return dnn.describe(static_shape(tensor.shape) if shape is None else shape, operand.dtype.name, operand.format)
