"""Computes layers with arrays on the host, by compiled CPU kernels that are planned for the sizes they have at run time.

For layers whose sizes are known only when an engine runs: those after NonMaxSuppression or NonZero, and the bodies of If, Loop and Scan among
them. Nothing is timed: a library's tactic is the first, and formats that NumPy converts without copies between layers are. Small layers run in
NumPy, which is faster than planning a kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from whet.backends import Backend, Executable, get_backend
from whet.errors import WhetError
from whet.network import Dim, Layer, Tensor, TensorType, compute_stored_shape, from_stored, static_shape, to_stored
from whet.ops import bind_layer, get_op, has_symbols, infer_layer, run_layer
from whet.ops._cost import count_operations
from whet.tactics import Args, Kernel, Signature, Tactic, list_tactics

_LEAST_OPERATIONS = 1 << 20  # NumPy takes about a millisecond
_LEAST_ELEMENTS = 1 << 10  # of all inputs; smaller layers are not looked at
_MOST_KERNELS = 256
_MOST_VALUES = 64  # elements of an integer input whose values a kernel may depend on
_ALIGNMENT = 64  # bytes

UNEXPECTED_ERRORS = (
    KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, StopIteration, ZeroDivisionError, AssertionError,
    RecursionError,
)  # fmt: skip
"""What a tactic may raise for a layer that it does not expect: an engine file may contain anything."""

Arrays = Sequence[np.ndarray | None]


class HostLayers:
    """Computes layers, and keeps the kernels of the last sizes. For one thread at a time."""

    def __init__(self, backend: Backend | None = None):
        """`backend` is the CPU's; None: one with all threads that the process may use."""
        self._backend = backend
        self._kernels: OrderedDict[tuple, _BoundKernel | None] = OrderedDict()
        self._packed: dict[str, np.ndarray] = {}

    @property
    def kernels(self) -> int:
        """The number of kernels that are kept."""
        return sum(k is not None for k in self._kernels.values())

    def compute(self, layer: Layer, arrays: Arrays, env: Mapping[str, int]) -> list[np.ndarray]:
        """Outputs of a layer without regions, as `run_layer` gives them. Raises NetworkError for invalid values."""
        bounded = get_op(layer.op).bounded
        if bounded is None and sum(a.size for a in arrays if a is not None) < _LEAST_ELEMENTS:
            return run_layer(layer, list(arrays), env)
        try:
            form = layer if bounded is None else bounded(layer, *arrays)
        except UNEXPECTED_ERRORS:  # NumPy reports it
            form = None
        kernel = None if form is None else self._find_kernel(form, arrays, env)
        if kernel is None:
            return run_layer(layer, list(arrays), env)
        outputs = kernel.run(arrays)
        return outputs if bounded is None else [a[: int(outputs[-1])] for a in outputs[:-1]]

    def _find_kernel(self, layer: Layer, arrays: Arrays, env: Mapping[str, int]) -> _BoundKernel | None:
        bound = bind_layer(layer, env) if env and has_symbols(layer) else layer
        key = (layer.op, tuple(bound.attrs.items()), tuple(map(_describe, layer.inputs, arrays)))
        if key in self._kernels:
            self._kernels.move_to_end(key)
            return self._kernels[key]
        try:
            static = _make_static(bound, arrays)
            found = self._plan(static) if static is not None else None
        except (WhetError, *UNEXPECTED_ERRORS):  # NumPy reports it, or computes it
            found = None
        self._kernels[key] = found
        if len(self._kernels) > _MOST_KERNELS:
            self._kernels.popitem(last=False)
        return found

    def _plan(self, layer: Layer) -> _BoundKernel | None:
        """The kernel of a layer with static shapes; None if NumPy computes it."""
        if layer.op not in _ALWAYS and count_operations(layer) < _LEAST_OPERATIONS:
            return None
        if self._backend is None:
            self._backend = get_backend("cpu")
        self._backend.activate()
        for t in sorted(list_tactics("cpu"), key=lambda t: (not t.library, t.name)):
            planned = None if t.fallback or t.opt_in else _plan_kernel(t, layer, self._backend)
            if planned is not None and planned[1].deterministic:
                return _BoundKernel(layer, *planned, self._backend, self._packed)
        return None


_ALWAYS = frozenset({"DeformConv", "RoiAlign", "SelectBoxes"})
"""Ops whose operations are not counted, and that take NumPy long."""


def _describe(t: Tensor | None, a: np.ndarray | None) -> tuple | None:
    """What a kernel may depend on: the shape and type of an input, a weight, and the values of a few integers."""
    if t is None or a is None:
        return None
    if t.is_constant:
        return (id(t.weight),)  # of a kernel that is kept, which keeps the weight
    return a.shape, a.dtype, a.tobytes() if a.dtype.kind in "iu" and a.size <= _MOST_VALUES else b""


def _make_static(layer: Layer, arrays: Arrays) -> Layer | None:
    """The layer with the shapes of its arrays; None if there is none with these arrays."""
    if any(t is not None and (a is None or not a.size or a.dtype != t.dtype.numpy) for t, a in zip(layer.inputs, arrays, strict=True)):
        return None
    tensors: dict[Tensor, Tensor] = {}
    for t, a in zip(layer.inputs, arrays, strict=True):
        if t is not None and a is not None and t not in tensors:
            tensors[t] = t if t.is_constant else _make_tensor(t, a)
    static = Layer(layer.op, layer.name, [None if t is None else tensors[t] for t in layer.inputs], layer.attrs, {}, layer.sources)
    types, _ = infer_layer(static)
    static.outputs = tuple(Tensor(f"{layer.name}.{i}", type_, static, i) for i, type_ in enumerate(types))
    return static if all(t.type.static for t in static.outputs) else None


def _make_tensor(t: Tensor, a: np.ndarray) -> Tensor:
    known = Tensor(t.name, TensorType(t.dtype, a.shape))
    if a.dtype.kind in "iu" and a.size <= _MOST_VALUES:
        values: tuple[Dim, ...] = tuple(int(v) for v in a.reshape(-1))
        known.shape_value = values
    return known


def _plan_kernel(t: Tactic, layer: Layer, backend: Backend) -> tuple[Signature, Kernel] | None:
    """A tactic's kernel for operands of the tensors' own types; None if it has none."""
    try:
        if t.missing_library() or t.why_not(layer) is not None:
            return None
        for s in sorted(t.signatures(layer, backend), key=_count_conversions):
            operands = [*zip(s.inputs, layer.inputs, strict=True), *zip(s.outputs, layer.outputs, strict=True)]
            plain = all(o is None or (t is not None and o.dtype == t.dtype) for o, t in operands)
            if plain and not s.inplace and t.refuses(layer, s, backend) is None:
                return s, t.plan(layer, s, t.configs(layer, s, backend)[0], backend)
    except (WhetError, *UNEXPECTED_ERRORS):  # PlanRefused: the next tactic
        pass
    return None


def _count_conversions(s: Signature) -> tuple[int, int]:
    """Operands in blocked formats, which are copied, and those with channels last, of which only the first of a row of layers is."""
    formats = [o.format for o in (*s.inputs, *s.outputs) if o is not None]
    return sum(f not in ("linear", "nhwc") for f in formats), formats.count("nhwc")


class _BoundKernel:
    """A planned kernel with its packed weights, scratch and launches; the operands' addresses are those of each run's arrays."""

    def __init__(self, layer: Layer, signature: Signature, kernel: Kernel, backend: Backend, packed: dict[str, np.ndarray]):
        self._layer, self._signature, self._backend, self._kernel = layer, signature, backend, kernel
        self._given: list[tuple[int, str]] = []
        self._constants: dict[int, np.ndarray] = {}
        for i, (t, o) in enumerate(zip(layer.inputs, signature.inputs, strict=True)):
            if t is not None and o is not None:
                if t.is_constant:
                    self._constants[i] = _align(to_stored(t.array(), o.format))
                else:
                    self._given.append((i, o.format))
        for p in kernel.packed:
            if p.key not in packed:
                packed[p.key] = _align(p.make())
        self._packed = [packed[p.key] for p in kernel.packed]
        self._scratch = _allocate((kernel.scratch,), np.dtype(np.uint8))
        self._recorded: tuple[list, Executable] | None = None

    def run(self, arrays: Arrays) -> list[np.ndarray]:
        """The layer's outputs, new arrays."""
        given = {i: _align(to_stored(np.asarray(arrays[i]), form)) for i, form in self._given}
        outputs = [
            _allocate(static_shape(compute_stored_shape(o.format, t.shape)), t.dtype.numpy)
            for t, o in zip(self._layer.outputs, self._signature.outputs, strict=True)
        ]
        places = {("input", i): a.ctypes.data for i, a in given.items()} | {("output", i): a.ctypes.data for i, a in enumerate(outputs)}
        if self._recorded is None:
            self._recorded = self._record(places)
        else:
            for (kind, index), address in places.items():
                for call in self._recorded[0]:
                    if call.operands is None or (kind, index) in call.operands:
                        call.set_address(kind, index, address)
        self._recorded[1].run()
        kinds = zip(outputs, self._layer.outputs, self._signature.outputs, strict=True)
        return [from_stored(a, o.format, static_shape(t.shape)) for a, t, o in kinds]

    def _record(self, places: Mapping[tuple[str, int], int]) -> tuple[list, Executable]:
        stream = self._backend.stream()
        held = {i: a.ctypes.data for i, a in self._constants.items()}
        inputs = tuple(places.get(("input", i), held.get(i, 0)) for i in range(len(self._layer.inputs)))
        outputs = tuple(places["output", i] for i in range(len(self._layer.outputs)))
        self._kernel.enqueue(Args(inputs, outputs, tuple(p.ctypes.data for p in self._packed), self._scratch.ctypes.data), stream)
        return list(stream.calls), stream.finish()


def _allocate(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array at a multiple of _ALIGNMENT."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _align(a: np.ndarray) -> np.ndarray:
    """The contiguous array at a multiple of _ALIGNMENT: itself or a copy."""
    if a.ctypes.data % _ALIGNMENT == 0:
        return a
    copy = _allocate(a.shape, a.dtype)
    np.copyto(copy, a)
    return copy
