"""ITensor and ILayer: whet's tensors and layers under TensorRT's names.

A layer of an `add_*` function is one or more layers of whet, computed again whenever one of its properties or inputs changes (`emit`).
A layer from ONNX is exactly one; its properties are read-only, except for name, inputs, precision and metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from whet.errors import WhetError
from whet.network import Layer, Network, Tensor, make_symbol
from whet.network.dims import lower
from whet.trt.enums import DataType, LayerType, TensorFormat, TensorLocation, from_whet, to_whet
from whet.trt.errors import NotServedError

if TYPE_CHECKING:
    from whet.trt.network import INetworkDefinition

_TYPES = {
    LayerType.CONVOLUTION: "Conv", LayerType.DECONVOLUTION: "ConvTranspose", LayerType.CAST: "Cast", LayerType.LRN: "LRN",
    LayerType.ACTIVATION: "Relu Sigmoid Tanh LeakyRelu Elu Selu Softsign Softplus Clip HardSigmoid ThresholdedRelu Gelu",
    LayerType.POOLING: "MaxPool AveragePool GlobalAveragePool GlobalMaxPool", LayerType.SCALE: "BatchNormalization",
    LayerType.SOFTMAX: "Softmax", LayerType.CONCATENATION: "Concat",
    LayerType.ELEMENTWISE: "Add Sub Mul Div Pow Max Min And Or Xor Equal Greater Less Mod",
    LayerType.UNARY: "Exp Log Sqrt Reciprocal Abs Neg Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Acosh Atanh Ceil Floor Erf Not Sign Round "
    "IsInf IsNaN",
    LayerType.PADDING: "Pad", LayerType.SHUFFLE: "Reshape Transpose Flatten",
    LayerType.SQUEEZE: "Squeeze", LayerType.UNSQUEEZE: "Unsqueeze",
    LayerType.REDUCE: "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd", LayerType.TOPK: "TopK",
    LayerType.GATHER: "Gather GatherElements GatherND", LayerType.SCATTER: "ScatterElements ScatterND", LayerType.FILL: "ConstantOfShape Range",
    LayerType.MATRIX_MULTIPLY: "MatMul Gemm", LayerType.IDENTITY: "Identity Dropout", LayerType.SLICE: "Slice Split", LayerType.SHAPE: "Shape",
    LayerType.PARAMETRIC_RELU: "PRelu", LayerType.RESIZE: "Resize", LayerType.SELECT: "Where", LayerType.QUANTIZE: "QuantizeLinear",
    LayerType.DEQUANTIZE: "DequantizeLinear", LayerType.EINSUM: "Einsum", LayerType.ONE_HOT: "OneHot", LayerType.GRID_SAMPLE: "GridSample",
    LayerType.REVERSE_SEQUENCE: "ReverseSequence", LayerType.CUMULATIVE: "CumSum",
    LayerType.NORMALIZATION: "InstanceNormalization LayerNormalization GroupNormalization",
}  # fmt: skip
_BY_OP = {op: kind for kind, ops in _TYPES.items() for op in ops.split()}


class ITensor:
    """A tensor of a network definition; equal to other views of the same tensor."""

    def __init__(self, definition: INetworkDefinition, tensor: Tensor):
        self._definition = definition
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ITensor) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    @property
    def name(self) -> str:
        """The name."""
        return self.tensor.name

    @name.setter
    def name(self, name: str) -> None:
        if name != self.tensor.name:
            self.tensor.name = self._definition.whet.fresh(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; -1 for dynamic sizes. Setting it for an input of the network computes all shapes again; invalid ones raise NetworkError."""
        return tuple(d if isinstance(d, int) else -1 for d in self.tensor.shape)

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        if not self.is_network_input:
            raise NotServedError("ITensor.shape", f"%{self.name} is not an input of the network, so its shape follows from its layer")
        before = self.tensor.type
        dims = tuple(d if d >= 0 else lower(make_symbol(f"{self.name}_{i}")) for i, d in enumerate(shape))
        try:
            self.tensor.type = before.with_shape(dims)
            self._definition.infer_types()
        except WhetError:
            self.tensor.type = before
            self._definition.infer_types()
            raise

    @property
    def dtype(self) -> DataType:
        """The element type; it follows from the layer or from add_input. Setting it for an input or output makes the engine convert it."""
        return self._definition.io_types.get(self.tensor, from_whet(self.tensor.dtype))

    @dtype.setter
    def dtype(self, dtype: DataType) -> None:
        if dtype == self.dtype:
            return
        if not (self.is_network_input or self.is_network_output):
            raise NotServedError("ITensor.dtype", f"%{self.name} is an inner tensor, so its type follows from its layer; convert it with add_cast")
        to_whet(dtype)  # UnsupportedError for a type that whet lacks
        self._definition.io_types[self.tensor] = DataType(dtype)

    @property
    def is_network_input(self) -> bool:
        """True for an input of the network."""
        return any(t is self.tensor for t in self._definition.whet.inputs)

    @property
    def is_network_output(self) -> bool:
        """True for an output of the network."""
        return any(t is self.tensor for t in self._definition.whet.outputs)

    @property
    def is_shape_tensor(self) -> bool:
        """False: values that shapes depend on are known at build time, so none is read from host memory at run time."""
        return False

    @property
    def is_execution_tensor(self) -> bool:
        """True: all tensors are computed by kernels."""
        return True

    @property
    def location(self) -> TensorLocation:
        """DEVICE; setting HOST raises NotServedError."""
        return TensorLocation.DEVICE

    @location.setter
    def location(self, location: TensorLocation) -> None:
        if location != TensorLocation.DEVICE:
            raise NotServedError("TensorLocation.HOST", "all inputs and outputs are in the backend's memory")

    @property
    def allowed_formats(self) -> int:
        """Bits of TensorFormat: LINEAR. Setting a mask without LINEAR raises NotServedError."""
        return 1 << TensorFormat.LINEAR

    @allowed_formats.setter
    def allowed_formats(self, formats: int) -> None:
        if not formats & 1 << TensorFormat.LINEAR:
            raise NotServedError("ITensor.allowed_formats", "inputs and outputs of engines are row-major (LINEAR)")

    @property
    def broadcast_across_batch(self) -> bool:
        """False: batches are explicit."""
        return False

    @property
    def dynamic_range(self) -> tuple[float, float] | None:
        """(min, max) for INT8; None if it is not set."""
        return self._definition.dynamic_ranges.get(self.tensor)

    @dynamic_range.setter
    def dynamic_range(self, range: tuple[float, float] | None) -> None:
        if range is None:
            self.reset_dynamic_range()
        else:
            self.set_dynamic_range(*range)

    def set_dynamic_range(self, min: float, max: float) -> bool:
        """Sets the range of values for INT8; False for an empty range. Quantization is symmetric, as in TensorRT."""
        if not min <= max or max == min == 0:
            return False
        self._definition.dynamic_ranges[self.tensor] = (float(min), float(max))
        return True

    def reset_dynamic_range(self) -> None:
        """Forgets the range."""
        self._definition.dynamic_ranges.pop(self.tensor, None)

    def get_dimension_name(self, index: int) -> str:
        """The name of a dynamic axis; "" for a static one."""
        dim = self.tensor.shape[index]
        return "" if isinstance(dim, int) else str(dim)

    def set_dimension_name(self, index: int, name: str) -> None:
        """Names a dynamic axis of an input; axes of one name have equal sizes."""
        dims = list(self.tensor.shape)
        if not self.is_network_input or isinstance(dims[index], int):
            raise NotServedError("ITensor.set_dimension_name", f"axis {index} of %{self.name} is not a dynamic axis of an input")
        dims[index] = lower(make_symbol(name))
        self.tensor.type = self.tensor.type.with_shape(tuple(dims))
        self._definition.infer_types()


@dataclass(eq=False)
class LayerState:
    """What all views of one layer share. `kind` is the class of a layer of an `add_*` function, None for a layer from ONNX."""

    definition: INetworkDefinition
    name: str
    kind: type[ILayer] | None = None
    layers: list[Layer] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    error: WhetError | None = None  # the layer is invalid as its properties are now; a build reports it
    precision: DataType | None = None
    output_types: dict[int, DataType] = field(default_factory=dict)
    metadata: str = ""


class Emission:
    """Adds the layers of one TensorRT layer to a network, from index `at` on."""

    def __init__(self, net: Network, at: int, name: str):
        self.net, self.at, self.name = net, at, name
        self.layers: list[Layer] = []

    def __call__(self, op: str, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Adds a layer; its output, or a tuple of several. Raises NetworkError."""
        name = f"{self.name}_{op.lower()}"
        layer = self.net.add_layer(op, inputs, attrs, name=name, sources=(self.name,), at=self.at + len(self.layers))
        self.layers.append(layer)
        return layer.outputs[0] if len(layer.outputs) == 1 else layer.outputs

    def constant(self, array: Any, dtype: Any = None) -> Tensor:
        """A constant tensor."""
        return self.net.constant(np.asarray(array, dtype), f"{self.name}_constant")

    def like(self, value: float, tensor: Tensor) -> Tensor:
        """A scalar constant of a tensor's type."""
        return self.constant(value, tensor.dtype.numpy)


class Option:
    """A property of a layer. Setting it computes the layer's types again; `also` names options that it sets too (padding_nd: both paddings)."""

    def __init__(self, default: Any = None, also: tuple[str, ...] = ()):
        self.default, self.also = default, also
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: ILayer | None, owner: type | None = None) -> Any:
        if layer is None:
            return self
        return layer._options().get(self.also[0] if self.also else self.name, self.default)

    def __set__(self, layer: ILayer, value: Any) -> None:
        layer._set(dict.fromkeys(self.also or (self.name,), value))


class ILayer:
    """A layer of a network definition. Ops without a kind in TensorRT have the type PLUGIN."""

    layer_type: ClassVar[LayerType] = LayerType.PLUGIN
    min_outputs: ClassVar[int] = 1
    _state: Any = None

    def __init__(self, state: LayerState):
        self._state = state

    def emit(self, *args: Any, **kwargs: Any) -> Any:
        """Called with an Emission and the inputs: adds the layers of whet that compute this layer, and returns its outputs.

        Raises NetworkError for invalid properties or inputs.
        """
        raise NotImplementedError

    @staticmethod
    def read_options(layer: Layer) -> dict[str, Any]:
        """The properties of a layer from ONNX."""
        return {}

    def _options(self) -> dict[str, Any]:
        return self._state.options if self._state.kind else self.read_options(self._state.layers[-1])

    def _set(self, options: dict[str, Any]) -> None:
        if not self._state.kind:
            raise NotServedError(f"{type(self).__name__}.{next(iter(options))}", f"the properties of '{self.name}' come from its ONNX node")
        self._state.options |= options
        self._state.definition.emit(self._state)

    @property
    def name(self) -> str:
        """The name."""
        return self._state.layers[-1].name

    @name.setter
    def name(self, name: str) -> None:
        self._state.name = name
        self._state.layers[-1].name = name
        if self._state.kind:
            for layer in self._state.layers:
                layer.sources = (name,)

    @property
    def metadata(self) -> str:
        """Text that the layer keeps for the user."""
        return self._state.metadata

    @metadata.setter
    def metadata(self, metadata: str) -> None:
        self._state.metadata = metadata

    @property
    def type(self) -> Any:
        """The kind of layer."""
        return self._state.kind.layer_type if self._state.kind else _BY_OP.get(self._state.layers[-1].op, LayerType.PLUGIN)

    @property
    def num_inputs(self) -> int:
        """The number of inputs; of a layer from ONNX, constants (weights) are inputs too."""
        return len(self._inputs())

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return len(self._outputs())

    def _inputs(self) -> Sequence[Tensor | None]:
        return self._state.inputs if self._state.kind else self._state.layers[-1].inputs

    def _outputs(self) -> Sequence[Tensor]:
        return self._state.outputs if self._state.kind else self._state.layers[-1].outputs

    def get_input(self, index: int) -> ITensor | None:
        """An input; None if it is omitted."""
        inputs = self._inputs()
        t = inputs[index] if index < len(inputs) else None
        return None if t is None else ITensor(self._state.definition, t)

    def set_input(self, index: int, tensor: ITensor) -> None:
        """Replaces or adds an input."""
        definition = self._state.definition
        if self._state.kind:
            inputs = self._state.inputs
            inputs.extend([None] * (index + 1 - len(inputs)))
            inputs[index] = tensor.tensor
            definition.emit(self._state)
        else:
            layer = self._state.layers[-1]
            inputs = [*layer.inputs, *[None] * (index + 1 - len(layer.inputs))]
            inputs[index] = tensor.tensor
            layer.inputs = tuple(inputs)
        definition.whet.sort()
        definition.infer_types()

    def get_output(self, index: int) -> ITensor:
        """An output."""
        return ITensor(self._state.definition, self._outputs()[index])

    @property
    def precision(self) -> DataType:
        """The type in which the layer computes: the one that was set, else that of its first output.

        A build obeys it under OBEY_PRECISION_CONSTRAINTS and PREFER_PRECISION_CONSTRAINTS.
        """
        return self._state.precision if self._state.precision is not None else self.get_output(0).dtype

    @precision.setter
    def precision(self, precision: DataType) -> None:
        self._state.precision = DataType(precision)

    @property
    def precision_is_set(self) -> bool:
        """True if a precision was set."""
        return self._state.precision is not None

    def reset_precision(self) -> None:
        """Forgets the precision."""
        self._state.precision = None

    def set_output_type(self, index: int, dtype: DataType) -> None:
        """Sets the type of an output, under the flags of `precision`."""
        self._state.output_types[index] = DataType(dtype)

    def get_output_type(self, index: int) -> DataType:
        """The type that was set for an output, else the output's type."""
        return self._state.output_types.get(index, self.get_output(index).dtype)

    def output_type_is_set(self, index: int) -> bool:
        """True if the type of an output was set."""
        return index in self._state.output_types

    def reset_output_type(self, index: int) -> None:
        """Forgets the type of an output."""
        self._state.output_types.pop(index, None)

    @property
    def num_ranks(self) -> int:
        """1: engines run on one device."""
        return 1


def get_trt_layer_type(layer: Layer) -> LayerType:
    """The kind of a layer from ONNX."""
    return _BY_OP.get(layer.op, LayerType.PLUGIN)


def list_mask_axes(mask: int) -> tuple[int, ...]:
    """The axes of a bit mask."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
