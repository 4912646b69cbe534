"""The tactic contract, the same on every backend: one way to compute a layer there. No library's type appears in it.

A tactic answers, in this order:

    signatures(layer, backend)           supported formats and storage types, and in-place pairs
    refuses(layer, signature, backend)   the reason why it cannot, or None
    configs(layer, signature, backend)   the points of its tuning space
    plan(layer, signature, config, backend) -> Kernel
                                         for a layer with static shapes: exact bytes of every operand, of scratch and of packed
                                         weights, the error bound, deterministic or not
    Kernel.enqueue(args, stream)         records the launch on a stream; the backend's executor replays it

`layer` may be a plain layer or a `Fused` one; `get_root_layer(layer)` and `epilogue(layer)` describe a fused body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from whet.backends import Backend, Call
from whet.errors import BuildError
from whet.network import DType, Layer, Tensor, format_bytes
from whet.registry import suggest_name
from whet.tactics._fused import get_root_layer, is_quantized

Config = tuple[tuple[str, int | str], ...]
"""One point of a tuning space: enumerated (name, value) pairs, never source text or addresses."""


@dataclass(frozen=True)
class Operand:
    """How one tensor is stored: memory format and storage type."""

    format: str
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}:{self.format}"


@dataclass(frozen=True)
class Signature:
    """Operands of the inputs (None: absent, or a constant that the tactic packs itself) and outputs.

    `inplace` lists (input, output) pairs that must share their bytes when the tactic is chosen with this signature.
    """

    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    inplace: tuple[tuple[int, int], ...] = ()

    def needs(self, i: int) -> Operand:
        """The operand of input `i`. Raises BuildError when it is absent or packed by the tactic."""
        o = self.inputs[i]
        if o is None:
            raise BuildError(f"input {i} of {self} is not stored: it is absent, or packed by the tactic itself")
        return o

    def __str__(self) -> str:
        ins = ",".join("-" if o is None else str(o) for o in self.inputs)
        return f"({ins})->({','.join(map(str, self.outputs))})" + "".join(f" in-place {i}->{o}" for i, o in self.inplace)


@dataclass(frozen=True)
class Packed:
    """A packed weight: exact bytes, a key that is equal for equal contents, and a function that packs it (uint8, C-contiguous).

    `storable`: engine files may contain it, because kernels only compute with its values. Tables of indices and offsets, with which kernels
    address memory, are always derived again: a stored one could make a kernel read or write any address.
    """

    key: str
    nbytes: int
    make: Callable[[], np.ndarray]
    storable: bool = False


@dataclass(frozen=True)
class Args:
    """Addresses for one launch: a pointer per input (0: absent or packed), per output, per packed weight, and scratch (0: none)."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    packed: tuple[int, ...]
    scratch: int


class Stream(Protocol):
    """A recorder of launches: a launch list on the CPU, a graph capture on a GPU."""

    def record(self, call: Call) -> None: ...


class Kernel(Protocol):
    """A planned launch for static shapes. Created without touching operands' memory; owns the library's objects."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Bytes per input; 0 for absent and packed ones."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Bytes per output."""

    @property
    def scratch(self) -> int:
        """Bytes; the arena gives them at a 64-byte boundary."""

    @property
    def packed(self) -> tuple[Packed, ...]:
        """Packed weights, in the order of Args.packed."""

    @property
    def rtol(self) -> float:
        """Bound on ||error|| / ||reference|| and on max|error| / max|reference|."""

    @property
    def deterministic(self) -> bool:
        """True if equal inputs always give equal bits."""

    @property
    def implementation(self) -> str:
        """The library's or kernel's name of the implementation, for display."""

    def enqueue(self, args: Args, stream: Stream) -> None:
        """Records the launch with these addresses."""


class ViewKernel:
    """Base class of kernels that launch nothing: their in-place operands are parts of a larger tensor, views of it, or the same bytes (shift 0).

    Other layers may read the source later, too.
    """

    shifts: tuple[int, ...]  # per in-place pair of the signature: bytes from the start of the larger tensor to the smaller one


def view_shifts(kernel: object) -> tuple[int, ...]:
    """The shifts of a view, () for any other kernel."""
    return kernel.shifts if isinstance(kernel, ViewKernel) else ()


def iterate_shifted_pairs(kernel: object, signature: Signature) -> Iterator[tuple[int, int, int]]:
    """(input, output, shift in bytes) of each in-place pair; the shift is 0 unless the kernel is a view."""
    shifts = view_shifts(kernel) or (0,) * len(signature.inplace)
    for (i, j), shift in zip(signature.inplace, shifts, strict=True):
        yield i, j, shift


class Tactic(ABC):
    """Base class of all tactics. `ops` are the root operations that it computes ("*" for any op).

    `types` are the storage types it computes in. `version` goes into the timing key: raise it when the kernel changes.
    """

    name = ""
    backend = ""
    ops: tuple[str, ...] = ()
    version = 1
    fallback = False  # listed after all others: a tactic for coverage
    composites: tuple[str, ...] = ()  # composite kinds that it computes ("ConvSum", "Attention")
    what = ""  # for a tactic of composites only: their description, for the reason why it refuses other layers
    float8 = False  # computes on 8-bit floats
    sum_error = 0.0  # of its sums, relative to the largest one, beyond that of sums in f32
    library = ""  # the library that computes it; "" for whet's own kernels
    opt_in = False  # used only with --tacticSources=+NAME
    instead_of = ""  # an opt_in tactic that is used too where no tactic of this family (ONEDNN) can be
    channel_alignment = 1  # bytes of a pixel's channels that its kernels read at once; other numbers of channels only have slower tactics
    needs_all_shapes = False  # not selected where it refuses a shape of the profiles; other tactics are replaced at that shape, with a warning
    quantized = False  # takes only fused layers that dequantize their inputs (is_quantized)

    @abstractmethod
    def signatures(self, layer: Layer, backend: Backend) -> Sequence[Signature]:
        """The formats and storage types that it computes the layer in, the most promising first; [] for a layer that it does not take."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        return [()]

    @abstractmethod
    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        """Raises PlanRefused (with the reason) for a config that cannot run."""

    def missing_library(self) -> str | None:
        """Reason why its library cannot be loaded here: builds then leave the tactic out and say so. None if it is loaded or needs none."""
        return None

    def source_modules(self) -> tuple[str, ...]:
        """Modules whose source its kernels depend on, with those that they import from the same package; for timing keys and locks."""
        return (type(self).__module__,)

    def library_version(self) -> str:
        """Version of its library, for timing keys and locks; "" without a library."""
        return ""

    def why_not(self, layer: Layer) -> str | None:
        """Reason why this tactic does not compute the layer with any signature; None if it may."""
        if self.what:
            return None if layer.composite in self.composites else f"computes {self.what}, not {layer.composite or layer.op}"
        a = get_root_layer(layer)
        if "*" not in self.ops and a.op not in self.ops:
            return f"computes {', '.join(self.ops)}, not {a.op}"
        if "*" not in self.ops and self.quantized != is_quantized(layer):
            own, other = ("integers", "is not") if self.quantized else ("floating point", "is")
            return f"computes in {own}, the layer {other} quantized"
        return None

    def unavailable(self) -> str | None:
        """Reason why this machine cannot run the tactic (an instruction set, a compiler); None if it can."""
        return None

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Callable]]:
        """References by op name for kernels that treat NaN and infinities differently from the op's own reference; one table per variant."""
        return [{}]

    def not_strict(self, layer: Layer, implementation: str) -> str | None:
        """Reason why --strictNumerics leaves the implementation out; None if each result depends on the same values as in the op, NaN and infinities
        included."""
        ops = sorted({op for table in self.declares(layer, implementation) for op in table})
        return f"its {', '.join(ops)} may lose NaN or infinities" if ops else None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        """Reason why a new fused layer of its composites should stay unfused; None if it may be fused. Called in lowering: shapes may be symbolic.
        `permitted` are the storage types that the build may use besides a tensor's own."""
        return None


class PlanRefused(BuildError):
    """A config cannot run; the text is the reason that is recorded and shown."""


TACTICS: dict[str, Tactic] = {}


def tactic(cls: type[Tactic]) -> type[Tactic]:
    """Class decorator: registers one instance under `<backend>/<file name>`, without the family folder between them.

    `whet.tactics.cpu.onednn.onednn_conv` is `cpu/onednn_conv`. Raises BuildError when another tactic of the backend has that name.
    """
    _, _, backend, *_, module = cls.__module__.split(".")  # whet.tactics.<backend>..., whet.backends.<backend>.tactics...
    name = f"{backend}/{module}"
    if name in TACTICS:
        raise BuildError(f"two tactics are named {name}")
    instance = cls()
    instance.name, instance.backend = name, backend
    TACTICS[name] = instance
    return cls


def get_tactic(name: str) -> Tactic:
    """The tactic called `name`. Raises BuildError with the nearest name."""
    if name not in TACTICS:
        raise BuildError(
            f"there is no tactic {name}.{suggest_name(name, TACTICS)} The engine may come from a newer whet, or its pack is not installed."
        )
    return TACTICS[name]


def count_operand_bytes(t: Tensor, o: Operand | None) -> int:
    """Bytes of tensor `t` (static shape) stored as `o`; 0 for None."""
    if o is None:
        return 0
    n = format_bytes(t.type.with_dtype(o.dtype), o.format)
    assert isinstance(n, int), f"{t} is not static"
    return n


def count_stored_bytes(layer: Layer, signature: Signature) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of each input (0: absent, or packed by the tactic) and each output of a layer with static shapes."""
    ins = tuple(0 if t is None else count_operand_bytes(t, o) for t, o in zip(layer.inputs, signature.inputs, strict=True))
    return ins, tuple(count_operand_bytes(t, o) for t, o in zip(layer.outputs, signature.outputs, strict=True))
