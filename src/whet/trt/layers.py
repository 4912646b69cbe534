"""ITensor and ILayer: views of whet's tensors and layers under TensorRT's names."""

from __future__ import annotations

from whet.network import Layer, Network, Tensor
from whet.trt.enums import DataType, LayerType, TensorLocation, from_whet

_TYPES = {
    LayerType.CONVOLUTION: "Conv", LayerType.DECONVOLUTION: "ConvTranspose", LayerType.CAST: "Cast", LayerType.LRN: "LRN",
    LayerType.ACTIVATION: "Relu Sigmoid Tanh LeakyRelu Elu Selu Softsign Softplus Clip HardSigmoid ThresholdedRelu Gelu",
    LayerType.POOLING: "MaxPool AveragePool GlobalAveragePool GlobalMaxPool", LayerType.SCALE: "BatchNormalization",
    LayerType.SOFTMAX: "Softmax", LayerType.CONCATENATION: "Concat",
    LayerType.ELEMENTWISE: "Add Sub Mul Div Pow Max Min And Or Xor Equal Greater Less Mod",
    LayerType.UNARY: "Exp Log Sqrt Reciprocal Abs Neg Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Acosh Atanh Ceil Floor Erf Not Sign Round",
    LayerType.PADDING: "Pad", LayerType.SHUFFLE: "Reshape Transpose Flatten Squeeze Unsqueeze",
    LayerType.REDUCE: "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd", LayerType.TOPK: "TopK",
    LayerType.GATHER: "Gather GatherElements GatherND",
    LayerType.MATRIX_MULTIPLY: "MatMul Gemm", LayerType.IDENTITY: "Identity Dropout", LayerType.SLICE: "Slice Split", LayerType.SHAPE: "Shape",
    LayerType.PARAMETRIC_RELU: "PRelu", LayerType.RESIZE: "Resize", LayerType.SELECT: "Where", LayerType.QUANTIZE: "QuantizeLinear",
    LayerType.DEQUANTIZE: "DequantizeLinear", LayerType.EINSUM: "Einsum",
    LayerType.NORMALIZATION: "InstanceNormalization LayerNormalization GroupNormalization",
}  # fmt: skip
_BY_OP = {op: kind for kind, ops in _TYPES.items() for op in ops.split()}


class ITensor:
    """A tensor of a network definition; equal to other views of the same tensor."""

    def __init__(self, net: Network, tensor: Tensor):
        self._net = net
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
            self.tensor.name = self._net.fresh(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; -1 for dynamic sizes."""
        return tuple(d if isinstance(d, int) else -1 for d in self.tensor.shape)

    @property
    def dtype(self) -> DataType:
        """The element type."""
        return from_whet(self.tensor.dtype)

    @property
    def is_network_input(self) -> bool:
        """True for an input of the network."""
        return any(t is self.tensor for t in self._net.inputs)

    @property
    def is_network_output(self) -> bool:
        """True for an output of the network."""
        return any(t is self.tensor for t in self._net.outputs)

    is_shape_tensor = False
    is_execution_tensor = True
    location = TensorLocation.DEVICE


class ILayer:
    """A layer of a network definition. Ops without a kind in TensorRT have the type PLUGIN."""

    def __init__(self, net: Network, layer: Layer):
        self._net = net
        self._layer = layer

    @property
    def name(self) -> str:
        """The name."""
        return self._layer.name

    @name.setter
    def name(self, name: str) -> None:
        self._layer.name = name

    @property
    def type(self) -> LayerType:
        """The kind of layer."""
        return _BY_OP.get(self._layer.op, LayerType.PLUGIN)

    @property
    def num_inputs(self) -> int:
        """The number of inputs; constants (weights) are inputs."""
        return len(self._layer.inputs)

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return len(self._layer.outputs)

    def get_input(self, index: int) -> ITensor | None:
        """An input; None if it is omitted."""
        t = self._layer.inputs[index]
        return None if t is None else ITensor(self._net, t)

    def get_output(self, index: int) -> ITensor:
        """An output."""
        return ITensor(self._net, self._layer.outputs[index])


class IPoolingLayer(ILayer):
    """TensorRT's class of pooling layers; whet returns ILayer with the type POOLING."""


class IConvolutionLayer(ILayer):
    """TensorRT's class of convolutions; whet returns ILayer with the type CONVOLUTION."""


class IDeconvolutionLayer(ILayer):
    """TensorRT's class of transposed convolutions; whet returns ILayer with the type DECONVOLUTION."""


class IResizeLayer(ILayer):
    """TensorRT's class of resizes; whet returns ILayer with the type RESIZE."""


class ISliceLayer(ILayer):
    """TensorRT's class of slices; whet returns ILayer with the type SLICE."""
