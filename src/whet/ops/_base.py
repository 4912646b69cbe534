"""The definition of an op: semantics, independent of speed. One file per op in this folder; `op(...)` registers it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.forks import make_reentrant_lock
from whet.network import Dim, DType, Expr, Layer, Tensor, TensorType, check_size
from whet.plugin_packages import load_installed, make_advice
from whet.registry import load_folder, suggest_name


@dataclass(frozen=True)
class Kind:
    """Declaration of an attribute without a default: its type, and whether it is required."""

    name: str
    required: bool = False


INT, INTS, FLOAT, FLOATS, STRINGS, DTYPE = (Kind(n) for n in ("int", "ints", "float", "floats", "strings", "dtype"))
OPTIONAL = Kind("any")
NEEDS_INT, NEEDS_STRING, NEEDS_DTYPE, REQUIRED = (Kind(n, True) for n in ("int", "string", "dtype", "any"))
_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: isinstance(v, int),
    "float": lambda v: isinstance(v, int | float),
    "string": lambda v: isinstance(v, str),
    "dtype": lambda v: isinstance(v, DType),
    "ints": lambda v: isinstance(v, tuple) and all(isinstance(x, int | Expr) for x in v),
    "floats": lambda v: isinstance(v, tuple) and all(isinstance(x, int | float) for x in v),
    "strings": lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v),
    "any": lambda v: True,
}
_KIND_TEXT = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "dtype": "an element type",
    "ints": "a tuple of integers",
    "floats": "numbers in a tuple",
    "strings": "texts in a tuple",
}
_KIND_OF = {bool: "int", int: "int", float: "float", str: "string", tuple: "ints", DType: "dtype"}
MAX_VALUES = 64  # largest tensor (elements) whose values are tracked at build time
MAX_REGION_STEPS = 1 << 20  # layers of regions that one Loop, Scan or If runs, nested ones included: 10 to 20 s in NumPy
_BOUNDED = frozenset((
    "block_size", "blocksize", "dilations", "group", "kernel_shape", "output_height", "output_padding", "output_width", "sampling_ratio", "size",
    "strides",
))  # fmt: skip
_SHOWN = 8  # inputs that an error names
_LARGEST_INT = 2**31 - 1  # of the attributes in _BOUNDED: kernels compute with them in 32 bits

Infer = Callable[[Layer], "TensorType | Sequence[TensorType]"]
Kept = Mapping[tuple[Tensor, int], np.ndarray]
Reference = Callable[..., "np.ndarray | Sequence[np.ndarray]"]


@dataclass(frozen=True)
class Couple:
    """Axes that must be pruned together: unit i is `a[a_at + i*a_block :][:a_block]` along `a_axis`, likewise for `b`, for i < count.

    With `a_repeat` > 1 the pattern repeats `a_repeat` times, and a unit includes its range in each repetition: unit i is
    `a[a_at + (r*count + i)*a_block :][:a_block]` for all r < a_repeat (one head of q, k and v in a fused projection).
    `count` None means all units. Concat couples its input to a range of its output (`b_at`), Flatten a channel to H*W
    features (`b_block`). An axis that appears in no couple of its producer or a consumer must not be pruned there.
    A couple of an axis with itself may be pruned independently (a reduced axis of ReduceSum). Units of a coupled axis that no
    couple covers are free too (Pad's padding, elements dropped by Slice). Sizes in attributes and constant inputs are updated by
    the op's `recut`.
    `summed`: the op sums over these axes (products of a's and b's entries, or a's entries if b is a), so that removed entries must be
    zero in one of them.
    """

    a: Tensor
    a_axis: int
    b: Tensor
    b_axis: int
    a_at: int = 0
    b_at: int = 0
    a_block: int = 1
    b_block: int = 1
    count: int | None = None
    a_repeat: int = 1
    b_repeat: int = 1
    summed: bool = False

    def indexes(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of each unit along `a_axis` and along `b_axis`: int64 [count, indices per unit], for an `a` of static size."""
        n = self.count if self.count is not None else (int(self.a.shape[self.a_axis]) - self.a_at) // (self.a_block * self.a_repeat)
        return _compute_unit_indices(self.a_at, n, self.a_block, self.a_repeat), _compute_unit_indices(self.b_at, n, self.b_block, self.b_repeat)


def _compute_unit_indices(at: int, count: int, block: int, repeat: int) -> np.ndarray:
    return at + np.arange(repeat * count * block).reshape(repeat, count, block).transpose(1, 0, 2).reshape(count, repeat * block)


@dataclass(frozen=True)
class Sample:
    """Inputs and attributes for contract tests of an op and of all its tactics.

    An input is "f32[2,8]" (normally distributed), "const f32[4,3]" (the same, as a constant), "extreme f32[2,8]" (with NaN, infinities,
    zeros of both signs, denormals, largest values), "nonfinite f32[2,8]" (extreme without the largest values, since overflow of
    their partial sums depends on the kernel's summation order), "full i8[2,8]" (every integer), "positive f32[8]", a NumPy
    array (constant), or None (absent).
    `regions` builds the bodies of If, Loop and Fused.
    """

    inputs: Sequence[str | np.ndarray | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    regions: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Op:
    """An op: `infer(layer) -> type(s)`, `reference(layer, *arrays) -> array(s)`, samples, attributes with defaults.

    `shape_value(layer) -> [tuple of dims | None per output]` folds small integer tensors symbolically.
    `couples(layer) -> [Couple]` declares coupled axes (default: nothing may be pruned).
    `inner(layer, level) -> [Couple]` declares the couples for pruning one factor of a composite axis (heads * width, groups * channels
    per group); `level` counts factors from the innermost.
    `statistics(layer) -> [Couple]` declares axes over which the op takes a mean or a variance: they may be cut too where a changed result is
    acceptable (`groups(net, hidden=True)`).
    `means(layer) -> [Couple]` declares axes over which the op takes a mean of values that are zero where a channel is removed: pruning multiplies
    the mean of the cut network by the share of the axis that is left, which gives the mean over the original axis.
    `recut(layer, kept_indices) -> {attribute: value, input position: int array or None}` returns the changes after pruning:
    `kept[tensor, axis]` holds the sorted kept indices of each pruned axis of this layer's inputs and outputs. An attribute value
    None removes the attribute. Ops without it need no change.
    `onnx` reads a node of the ONNX op(s) `onnx_ops` (see frontends/onnx.py); None: inputs and attributes are copied.
    `to_onnx` writes the layer if that is not one node with the same attributes.
    `zeros`: a unit of an output is zero if all inputs coupled to it are; lists the added inputs (a bias), which must be coupled too.
    None: false or unknown. Not needed for pointwise ops, which are evaluated.
    `reads_sequences`: the reader also takes values that are no tensors (see _sequences.py).
    `data_sized(layer)`: its output shapes depend on the data (see _data_sized.py).
    `bounded(layer, *arrays) -> Layer | None`: a layer of an op with known sizes that computes a data-sized one for these inputs: its outputs are the
    largest one that is possible, and the number of rows (entries along axis 0) that are the result.
    `pointwise` marks an op that computes each element from the elements at the same (broadcast) index.
    """

    name: str
    infer: Infer
    reference: Reference
    samples: tuple[Sample, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    couples: Callable[[Layer], list[Couple]] | None = None
    inner: Callable[[Layer, int], list[Couple]] | None = None
    statistics: Callable[[Layer], list[Couple]] | None = None
    means: Callable[[Layer], list[Couple]] | None = None
    shape_value: Callable[[Layer], Sequence[tuple[Dim, ...] | None]] | None = None
    recut: Callable[[Layer, Kept], dict[str | int, Any]] | None = None
    onnx: Callable[..., Any] | None = None
    onnx_ops: tuple[str, ...] = ()
    to_onnx: Callable[..., Any] | None = None
    zeros: tuple[int, ...] | None = None
    pointwise: bool = False
    pure: bool = True
    reads_sequences: bool = False
    data_sized: Callable[[Layer], bool] | None = None
    bounded: Callable[..., Layer | None] | None = None


class OpRegistry(dict[str, Op]):
    """Ops by name. A built-in op's file is imported when it is looked up: `MatMul` is in mat_mul.py; 200 files take 60 ms of a process that runs an
    engine of eight ops. A name that is not found so, and every use of all names, import all files."""

    def __init__(self, package: str, folder: Path):
        super().__init__()
        self._package, self._folder = package, folder
        self._is_complete = False
        self._lock = make_reentrant_lock()

    def load_all(self) -> None:
        """Imports the files of all built-in ops."""
        with self._lock:  # another thread that looks up a name waits until all are there
            if not self._is_complete:
                load_folder(self._package, [str(self._folder)])
                self._is_complete = True

    def register(self, o: Op) -> None:
        """Adds an op. Raises NetworkError for a duplicate name."""
        if super().__contains__(o.name):
            raise NetworkError(f"op {o.name} is registered twice")
        self[o.name] = o

    def __missing__(self, name: str) -> Op:
        stem = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", str(name)).lower()
        for module in (stem, f"{stem}_"):  # `and_.py`: the word is Python's own
            if not self._is_complete and stem.isidentifier() and not stem.startswith("_") and (self._folder / f"{module}.py").is_file():
                import_module(f"{self._package}.{module}")
        if not super().__contains__(name):
            self.load_all()
        if super().__contains__(name):
            return super().__getitem__(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None  # type: ignore[arg-type]  # a key of any type is allowed here

    def get(self, name: str, default: Any = None) -> Any:
        """The op, or `default`."""
        try:
            return self[name]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        self.load_all()
        return super().__iter__()

    def __len__(self) -> int:
        self.load_all()
        return super().__len__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # dict's own has a private type
        """All names."""
        self.load_all()
        return super().keys()

    def values(self) -> ValuesView[Op]:  # type: ignore[override]  # as in keys()
        """All ops."""
        self.load_all()
        return super().values()

    def items(self) -> ItemsView[str, Op]:  # type: ignore[override]  # as in keys()
        """All names and ops."""
        self.load_all()
        return super().items()


OPS = OpRegistry(__package__, Path(__file__).parent)


def op(name: str, infer: Infer, reference: Reference, *, samples=(), onnx_ops: Sequence[str] | None = None, **options: Any) -> Op:
    """Registers an op. Raises NetworkError for a duplicate name. Samples may be (inputs, attrs) pairs."""
    registered = tuple(s if isinstance(s, Sample) else Sample(*s) for s in samples)
    o = Op(name, infer, reference, registered, onnx_ops=tuple(onnx_ops if onnx_ops is not None else (name,)), **options)
    OPS.register(o)
    return o


def get_op(name: str) -> Op:
    """The op called `name`. Raises UnsupportedError with the nearest name."""
    if name not in OPS:
        load_installed()
    if name not in OPS:
        way = make_advice() if "." in name else " To add it, register it from a package of your own (whet.register), or write src/whet/ops/<name>.py."
        raise UnsupportedError(f"unknown op {name}.{suggest_name(name, OPS)}{way}")
    return OPS[name]


@cache
def _count_inputs(reference: Reference) -> tuple[int, int | None]:
    """The fewest and the most arrays that a reference takes (None: any number): its parameters after the layer."""
    _, *parameters = inspect.signature(reference).parameters.values()
    arrays = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return sum(p.default is p.empty for p in arrays), None if variadic else len(arrays)


def infer_layer(layer: Layer) -> tuple[list[TensorType], list[tuple[Dim, ...] | None]]:
    """Output types and known values (flat, as dims) of a layer; fills in default attributes.

    Raises UnsupportedError for an unknown op, NetworkError (naming the layer) for invalid inputs or attributes.
    """
    o = get_op(layer.op)
    where = f"{layer.op} '{layer.name}'"
    _check_attributes(o, layer, where)
    least, most = (0, None) if layer.regions else _count_inputs(o.reference)  # a Loop may have no trip count
    given = ", ".join("none" if t is None else f"%{t.name}" for t in layer.inputs[:_SHOWN]) + (", ..." if len(layer.inputs) > _SHOWN else "")
    if len(layer.inputs) < least or any(t is None for t in layer.inputs[:least]):
        raise NetworkError(f"{where} needs its first {least} inputs; it has {given}")
    if most is not None and len(layer.inputs) > most:
        raise NetworkError(f"{where} takes at most {most} input{'s' if most != 1 else ''}; it has {given}")
    try:
        inferred = o.infer(layer)
        types = [inferred] if isinstance(inferred, TensorType) else list(inferred)
        if any(isinstance(d, int) and d < 0 for t in types for d in t.shape):
            raise NetworkError(f"{where} would produce {', '.join(map(str, types))} from {[str(t and t.type) for t in layer.inputs]}")
        for t in types:
            check_size(t, f"{where} would produce")
        values: list[tuple[Dim, ...] | None] = [None] * len(types)
        if o.shape_value is not None:
            values = list(o.shape_value(layer))
        if any(v is None for v in values) and not layer.regions:
            values = [v if v is not None else w for v, w in zip(values, _evaluate_known(o, layer, types), strict=True)]
    except (IndexError, AttributeError, TypeError, KeyError, ValueError, ArithmeticError, MemoryError) as e:
        raise NetworkError(f"{where} does not accept {[str(t and t.type) for t in layer.inputs]} {layer.attrs}: {e}") from e
    except NetworkError as e:
        if where in str(e):
            raise
        raise type(e)(f"{where}: {e}") from e
    return types, [v if v is None or len(v) <= MAX_VALUES else None for v in values]


def _check_attributes(o: Op, layer: Layer, where: str) -> None:
    """Raises NetworkError for unknown, missing and invalid attributes; fills in defaults, removes None, converts lists to tuples."""
    for key, value in list(layer.attrs.items()):
        if value is None:
            del layer.attrs[key]
            continue
        if key not in o.attrs:
            raise NetworkError(f"{where} has no attribute {key!r}; it has {', '.join(o.attrs) or 'none'}.{suggest_name(key, o.attrs)}")
        if isinstance(value, list | bool):
            value = layer.attrs[key] = tuple(value) if isinstance(value, list) else int(value)
        default = o.attrs[key]
        kind = default.name if isinstance(default, Kind) else _KIND_OF[type(default)]
        if not _KINDS[kind](value):
            raise NetworkError(f"{where}: the attribute {key} must be {_KIND_TEXT[kind]}, not {value!r}")
        if key in _BOUNDED and any(isinstance(v, int) and v > _LARGEST_INT for v in (value if isinstance(value, tuple) else (value,))):
            raise UnsupportedError(f"{where}: the attribute {key} is {value}; the largest value is {_LARGEST_INT}")
    for key, default in o.attrs.items():
        if key not in layer.attrs:
            if not isinstance(default, Kind):
                layer.attrs[key] = default
            elif default.required:
                raise NetworkError(f"{where} needs the attribute {key}")


def find_known_values(t: Tensor | None) -> tuple[Dim, ...] | None:
    """The elements of a small tensor, flat, as dims, if they are integers known at build time; else None."""
    if t is None:
        return None
    if t.shape_value is not None or t.weight is None:
        return t.shape_value
    a = t.weight.array
    return _to_int_values(a) if a.size <= MAX_VALUES else None


def find_known_array(t: Tensor | None) -> np.ndarray | None:
    """The values of a small tensor as an array of its shape: of its NumPy type, or of dims (objects) if some are symbolic."""
    if t is None:
        return None
    if t.weight is not None:
        return t.weight.array if t.weight.array.size <= MAX_VALUES else None
    if t.shape_value is None:
        return None
    symbolic = any(isinstance(v, Expr) for v in t.shape_value)
    a = np.empty(len(t.shape_value), object) if symbolic else np.empty(len(t.shape_value), t.dtype.numpy)
    for i, v in enumerate(t.shape_value):
        a[i] = v
    return a.reshape([d if isinstance(d, int) else -1 for d in t.shape])


def is_data_sized(layer: Layer) -> bool:
    """True if the layer's output shapes depend on the data."""
    o = OPS.get(layer.op)
    return o is not None and o.data_sized is not None and o.data_sized(layer)


def has_symbols(layer: Layer) -> bool:
    """True if an attribute depends on a dynamic dimension: the reference cannot run before run time, even on constants."""
    return any(isinstance(x, Expr) for v in layer.attrs.values() for x in (v if isinstance(v, tuple) else (v,)))


def fold_dims(layer: Layer, data: int = 2**31) -> list[tuple[Dim, ...] | None]:
    """`shape_value` of an op whose reference also works on arrays of dims (it moves, adds or multiplies): runs the reference on them.

    Only the first `data` inputs may have symbols; the others are indices and must be numbers.
    """
    arrays = [find_known_array(t) for t in layer.inputs]
    if has_symbols(layer) or any(a is None and t is not None for a, t in zip(arrays, layer.inputs, strict=True)):
        return [None]
    if any(a is not None and a.dtype == object for a in arrays[data:]):
        return [None]
    if any(a is not None and a.dtype == object for a in arrays):  # dims combine with integers only
        for i, a in enumerate(arrays):
            if a is not None and a.dtype.kind == "f":
                whole = _to_int_values(a)
                if whole is None:
                    return [None]
                arrays[i] = np.array(whole, object).reshape(a.shape)
    results = get_op(layer.op).reference(layer, *arrays)
    outs = [np.asarray(a) for a in (results if isinstance(results, list | tuple) else [results])]
    return [tuple(a.reshape(-1)) if a.dtype == object else _to_int_values(a) for a in outs]


def keep_dims(layer: Layer) -> list[tuple[Dim, ...] | None]:
    """`shape_value` of an op that preserves the elements and their order."""
    return [find_known_values(layer.inputs[0])]


def _to_int_values(a: np.ndarray) -> tuple[int, ...] | None:
    if a.dtype.kind in "iub":
        return tuple(int(v) for v in a.reshape(-1))
    if a.dtype.kind == "f" and np.all(np.isfinite(a)) and np.all(a == np.floor(a)):
        return tuple(int(v) for v in a.reshape(-1))
    return None


def _evaluate_known(o: Op, layer: Layer, types: list[TensorType]) -> list[tuple[Dim, ...] | None]:
    """Known output values of any op whose inputs are all small and known."""
    nothing: list[tuple[Dim, ...] | None] = [None] * len(types)
    arrays = []
    for t in layer.inputs:
        a = find_known_array(t)
        if t is not None and (a is None or a.dtype == object):
            return nothing
        arrays.append(a)
    if has_symbols(layer) or not all(t.is_static_up_to(MAX_VALUES) and t.dtype.kind != "string" for t in types):
        return nothing
    with np.errstate(all="ignore"):
        results = o.reference(layer, *arrays)
    return [_to_int_values(np.asarray(a)) for a in (results if isinstance(results, list | tuple) else [results])]


# Shared by infer functions and references: values that are inputs in ONNX and attributes in a lowered network.


def require_known_ints(layer: Layer, i: int, subject: str) -> tuple[Dim, ...]:
    """Values of input `i` as dims. Raises UnsupportedError if they are known only at run time."""
    values = find_known_values(layer.input(i))
    if values is None:
        raise UnsupportedError(
            f"{layer.op} '{layer.name}': its {subject} is computed from data at run time; it must be known from constants and shapes"
        )
    return values


def find_given_dims(layer: Layer, name: str, i: int) -> tuple[Dim, ...] | None:
    """Values of attribute `name` (lowered networks) or input `i` (newer opsets) as dims; None if absent.

    Raises UnsupportedError if they are known only at run time.
    """
    if layer.attrs.get(name) is not None:
        return tuple(layer.attrs[name])
    t = layer.input(i)
    if t is None:
        return None
    if t.type.rank > 1 or t.dtype.kind != "int":
        raise NetworkError(f"{layer.op} '{layer.name}' takes its {name} as i64 of rank 1, not {t.type}")
    return require_known_ints(layer, i, name)


def to_ints(value: Any) -> list[int]:
    """For references: the values named by `find_given_dims`, an array (input) or tuple (attribute), as Python integers."""
    return [int(v) for v in np.reshape(value, -1)]


def find_given_ints(layer: Layer, name: str, i: int) -> tuple[int, ...] | None:
    """`find_given_dims` without symbols. Raises UnsupportedError for a symbolic value."""
    values = find_given_dims(layer, name, i)
    if values is None:
        return None
    ints = tuple(v for v in values if not isinstance(v, Expr))
    if len(ints) < len(values):
        raise UnsupportedError(f"{layer.op} '{layer.name}': its {name} {values} must not depend on a dynamic dimension")
    return ints


def replace_given(layer: Layer, name: str, i: int, values: Sequence[Dim]) -> dict[str | int, Any]:
    """For `recut`: new values for those read by `find_given_dims`, in the same form (symbolic or computed values become an attribute)."""
    t = layer.input(i)
    if t is not None and t.is_constant and all(isinstance(v, int) for v in values):
        return {i: np.array(values, np.int64)}
    return {name: tuple(values)} if t is None else {name: tuple(values), i: None}
