"""Layers that move data or compute shapes: constants, fills, shuffles, slices, gathers and scatters, concatenation."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import I64, Expr, Layer, Tensor
from whet.ops import find_known_values
from whet.trt.enums import DataType, FillOperation, GatherMode, LayerType, SampleMode, ScatterMode, to_whet
from whet.trt.layers import Emission, ILayer, Option
from whet.trt.weights import get_array

_FAR = 2**62


class IConstantLayer(ILayer):
    """An output with the values of `weights`."""

    layer_type = LayerType.CONSTANT
    weights = Option()
    shape = Option(())

    def emit(self, e: Emission) -> Tensor:
        return e("Identity", e.constant(get_array(self.weights).reshape(tuple(self.shape))))


class IIdentityLayer(ILayer):
    """output = input."""

    layer_type = LayerType.IDENTITY

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        return e("Identity", x)


class ICastLayer(ILayer):
    """Conversion to another element type."""

    layer_type = LayerType.CAST
    to_type = Option(DataType.FLOAT)

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        return e("Cast", x, to=to_whet(self.to_type))


class IShapeLayer(ILayer):
    """The shape of the input (INT64)."""

    layer_type = LayerType.SHAPE

    def emit(self, e: Emission, x: Tensor) -> Tensor:
        return e("Shape", x)


class IConcatenationLayer(ILayer):
    """Concatenation along `axis`; by default the third last, or 0."""

    layer_type = LayerType.CONCATENATION
    axis = Option()

    def emit(self, e: Emission, *inputs: Tensor) -> Tensor:
        return e("Concat", *inputs, axis=max(inputs[0].type.rank - 3, 0) if self.axis is None else int(self.axis))

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        return {"axis": layer.attrs["axis"]}


class IShuffleLayer(ILayer):
    """A transpose, a reshape (to `reshape_dims` or input 1) and a transpose. In the reshape -1 is inferred; 0 copies the input's size."""

    layer_type = LayerType.SHUFFLE
    first_transpose = Option()
    reshape_dims = Option()
    second_transpose = Option()
    zero_is_placeholder = Option(True)

    def emit(self, e: Emission, x: Tensor, shape: Tensor | None = None) -> Tensor:
        y = x if self.first_transpose is None else e("Transpose", x, perm=tuple(self.first_transpose)[: x.type.rank])
        keeps_zeros = int(not self.zero_is_placeholder)
        if shape is not None:
            y = e("Reshape", y, e("Cast", shape, to=I64), allowzero=keeps_zeros)
        elif self.reshape_dims is not None:
            y = e("Reshape", y, shape=tuple(int(d) for d in self.reshape_dims), allowzero=keeps_zeros)
        if self.second_transpose is not None:
            y = e("Transpose", y, perm=tuple(self.second_transpose)[: y.type.rank])
        return y

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        return {"first_transpose": layer.attrs["perm"]} if layer.op == "Transpose" else {"reshape_dims": layer.output.shape}


class _MovesAxes(ILayer):
    op = ""

    def emit(self, e: Emission, x: Tensor, axes: Tensor) -> Tensor:
        return e(self.op, x, e("Cast", axes, to=I64))


class ISqueezeLayer(_MovesAxes):
    """Removes the axes of input 1, of size 1."""

    layer_type, op = LayerType.SQUEEZE, "Squeeze"


class IUnsqueezeLayer(_MovesAxes):
    """Inserts the axes of input 1, of size 1."""

    layer_type, op = LayerType.UNSQUEEZE, "Unsqueeze"


class ISliceLayer(ILayer):
    """`shape` entries per axis from `start` on, with `stride`; inputs 1 to 3 replace them. CLAMP, FILL, REFLECT and WRAP read beyond the input."""

    layer_type = LayerType.SLICE
    start = Option()
    shape = Option()
    stride = Option()
    mode = Option(SampleMode.STRICT_BOUNDS)
    axes = Option()

    def emit(self, e: Emission, x: Tensor, start: Any = None, size: Any = None, stride: Any = None, fill: Any = None, axes: Any = None) -> Tensor:
        if axes is not None:
            raise UnsupportedError("a slice with axes as a tensor has no op here; set ISliceLayer.axes")
        chosen = tuple(range(x.type.rank)) if self.axes is None else tuple(self.axes)
        given = (start, size, stride)
        known: list[Any] = [o if t is None else find_known_values(t) for t, o in zip(given, (self.start, self.shape, self.stride), strict=True)]
        if all(v is not None and not any(isinstance(d, Expr) for d in v) for v in known):
            begins, sizes, steps = (tuple(map(int, v)) for v in known)
            return self._static(e, x, chosen, begins, sizes, steps, fill)
        if self.mode != SampleMode.STRICT_BOUNDS:
            raise UnsupportedError(f"a slice with computed bounds and {SampleMode(self.mode)} has no op here")
        first, count, step = (
            e.constant(o, np.int64) if t is None else e("Cast", t, to=I64) for t, o in zip(given, (self.start, self.shape, self.stride), strict=True)
        )
        end = e("Add", first, e("Mul", count, step))
        return e("Slice", x, first, end, e.constant(chosen, np.int64), step)

    def _static(self, e: Emission, x: Tensor, axes: tuple[int, ...], start: Any, size: Any, stride: Any, fill: Any) -> Tensor:
        if self.mode != SampleMode.STRICT_BOUNDS:
            return self._padded(e, x, axes, start, size, stride, fill)
        for axis, a, n, s in zip(axes, start, size, stride, strict=True):
            d = x.shape[axis]
            if isinstance(d, int) and n and not (0 <= a < d and 0 <= a + (n - 1) * s < d):
                raise NetworkError(f"the slice reads entries {a} to {a + (n - 1) * s} of axis {axis}, which has {d}")
        ends = tuple(a + n * s if a + n * s >= 0 else -_FAR for a, n, s in zip(start, size, stride, strict=True))
        return e("Slice", x, starts=start, ends=ends, axes=axes, steps=stride)

    def _padded(self, e: Emission, x: Tensor, axes: Any, start: Any, size: Any, stride: Any, fill: Any) -> Tensor:
        """Pads the axes so that the slice is inside, then slices."""
        if any(s < 1 or not isinstance(x.shape[i], int) for i, s in zip(axes, stride, strict=True)):
            raise UnsupportedError(f"a slice with {SampleMode(self.mode)} needs static axes and positive strides")
        before = [max(-a, 0) for a in start]
        after = [max(a + (n - 1) * s + 1 - x.shape[i], 0) for i, a, n, s in zip(axes, start, size, stride, strict=True)]
        mode = {SampleMode.CLAMP: "edge", SampleMode.FILL: "constant", SampleMode.REFLECT: "reflect", SampleMode.WRAP: "wrap"}[self.mode]
        value = [None, fill] if fill is not None and mode == "constant" else []
        padded = e("Pad", x, *value, pads=(*before, *after), axes=tuple(axes), mode=mode)
        starts = tuple(a + b for a, b in zip(start, before, strict=True))
        ends = tuple(a + (n - 1) * s + 1 for a, n, s in zip(starts, size, stride, strict=True))
        return e("Slice", padded, starts=starts, ends=ends, axes=tuple(axes), steps=tuple(stride))


class IGatherLayer(ILayer):
    """Entries along `axis` (DEFAULT), elements along `axis` (ELEMENT), or entries at index tuples (ND)."""

    layer_type = LayerType.GATHER
    axis = Option(0)
    mode = Option(GatherMode.DEFAULT)
    num_elementwise_dims = Option(0)

    def emit(self, e: Emission, x: Tensor, indices: Tensor) -> Tensor:
        if self.mode == GatherMode.ND:
            return e("GatherND", x, e("Cast", indices, to=I64), batch_dims=int(self.num_elementwise_dims))
        if self.mode == GatherMode.ELEMENT:
            return e("GatherElements", x, indices, axis=int(self.axis))
        if not self.num_elementwise_dims:
            return e("Gather", x, indices, axis=int(self.axis))
        if self.num_elementwise_dims == 1 and self.axis == 1:  # entries along axis 1, per batch item: index tuples of one element
            return e("GatherND", x, e("Unsqueeze", e("Cast", indices, to=I64), axes=(indices.type.rank,)), batch_dims=1)
        raise UnsupportedError("a gather with num_elementwise_dims has an op here for axis 1 only")

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        mode = {"Gather": GatherMode.DEFAULT, "GatherElements": GatherMode.ELEMENT, "GatherND": GatherMode.ND}[layer.op]
        return {"mode": mode, "axis": layer.attrs.get("axis", 0), "num_elementwise_dims": layer.attrs.get("batch_dims", 0)}


class IScatterLayer(ILayer):
    """Updates written at elements along `axis` (ELEMENT) or at index tuples (ND)."""

    layer_type = LayerType.SCATTER
    mode = Option(ScatterMode.ELEMENT)
    axis = Option(0)

    def emit(self, e: Emission, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        if self.mode == ScatterMode.ND:
            return e("ScatterND", x, e("Cast", indices, to=I64), updates)
        return e("ScatterElements", x, indices, updates, axis=int(self.axis))


class IOneHotLayer(ILayer):
    """A new axis of `depth` (input 2) with values[1] (input 1) at the index, values[0] elsewhere."""

    layer_type = LayerType.ONE_HOT
    axis = Option(-1)

    def emit(self, e: Emission, indices: Tensor, values: Tensor, depth: Tensor) -> Tensor:
        return e("OneHot", indices, depth, values, axis=int(self.axis))


class IReverseSequenceLayer(ILayer):
    """The first `lengths` entries of each sequence in reverse order."""

    layer_type = LayerType.REVERSE_SEQUENCE
    batch_axis = Option(1)
    sequence_axis = Option(0)

    def emit(self, e: Emission, x: Tensor, lengths: Tensor) -> Tensor:
        return e("ReverseSequence", x, e("Cast", lengths, to=I64), batch_axis=int(self.batch_axis), time_axis=int(self.sequence_axis))


class IFillLayer(ILayer):
    """LINSPACE: alpha + beta * index, of a shape known at build time. Inputs 0 to 2 replace shape, alpha and beta (one per axis)."""

    layer_type = LayerType.FILL
    shape = Option()
    operation = Option(FillOperation.LINSPACE)
    alpha = Option(0.0)
    beta = Option(1.0)
    to_type = Option(DataType.FLOAT)

    def emit(self, e: Emission, shape: Tensor | None = None, alpha: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
        if self.operation != FillOperation.LINSPACE:
            raise UnsupportedError(f"a fill with {FillOperation(self.operation)} has no op: engines are deterministic")
        dims: Any = tuple(self.shape or ()) if shape is None else find_known_values(shape)
        known: list[Any] = [None if t is None else t.array() if t.is_constant else find_known_values(t) for t in (alpha, beta)]
        unknown = any(t is not None and k is None for t, k in zip((alpha, beta), known, strict=True))
        if dims is None or unknown or not all(isinstance(d, int) for d in dims):
            raise UnsupportedError("a fill needs a shape, a start and a step that are known at build time")
        start = np.asarray(self.alpha if known[0] is None else known[0], np.float64)
        steps = np.asarray(self.beta if known[1] is None else known[1], np.float64).reshape(-1)
        if steps.size != len(dims):
            raise NetworkError(f"a fill of {len(dims)} axes needs as many steps, not {steps.size}")
        dtype = to_whet(self.to_type)
        values = start
        for i, (d, s) in enumerate(zip(dims, steps, strict=True)):
            values = values + (np.arange(d) * s).reshape((-1,) + (1,) * (len(dims) - 1 - i))
        return e("Identity", e.constant(np.broadcast_to(values, dims), dtype.numpy))


class IAssertionLayer(ILayer):
    """A check of a condition that is known at build time; a false one fails the build. It has no output."""

    layer_type = LayerType.ASSERTION
    min_outputs = 0
    message = Option("")

    def emit(self, e: Emission, condition: Tensor) -> tuple[()]:
        known: Any = condition.array() if condition.is_constant else find_known_values(condition)
        if known is None:
            raise UnsupportedError(f"the assertion {self.message!r} depends on data, which is not checked at run time; remove it")
        if not np.all(known):
            raise NetworkError(f"the assertion fails: {self.message}")
        e("Identity", condition)
        return ()
