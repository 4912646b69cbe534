"""INetworkDefinition: a whet Network under TensorRT's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from whet.network import Network, Tensor, TensorType, symbol
from whet.network.dims import lower
from whet.trt.enums import ActivationType, DataType, ElementWiseOperation, MatrixOperation, UnaryOperation, to_whet
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle
from whet.trt.layers import ILayer, ITensor

_ACTIVATIONS = {"RELU": "Relu", "SIGMOID": "Sigmoid", "TANH": "Tanh", "SOFTSIGN": "Softsign", "GELU_ERF": "Gelu"}
_ELEMENTWISE = {"SUM": "Add", "PROD": "Mul", "MAX": "Max", "MIN": "Min", "SUB": "Sub", "DIV": "Div", "POW": "Pow"}


class INetworkDefinition(Handle):
    """Layers between inputs and outputs, filled by OnnxParser or by the add functions. Iterates over its layers."""

    def __init__(self) -> None:
        self.whet = Network()
        self.has_implicit_batch_dimension = False

    @property
    def name(self) -> str:
        """The name."""
        return self.whet.name

    @name.setter
    def name(self, name: str) -> None:
        self.whet.name = name

    @property
    def num_inputs(self) -> int:
        """The number of inputs."""
        return len(self.whet.inputs)

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return len(self.whet.outputs)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.whet.layers)

    def get_input(self, index: int) -> ITensor:
        """An input."""
        return ITensor(self.whet, self.whet.inputs[index])

    def get_output(self, index: int) -> ITensor:
        """An output."""
        return ITensor(self.whet, self.whet.outputs[index])

    def get_layer(self, index: int) -> ILayer:
        """A layer."""
        return ILayer(self.whet, self.whet.layers[index])

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, index: int) -> ILayer:
        return self.get_layer(index)

    def __iter__(self) -> Iterator[ILayer]:
        return (ILayer(self.whet, layer) for layer in self.whet.layers)

    def mark_output(self, tensor: ITensor) -> None:
        """Makes a tensor an output."""
        if not tensor.is_network_output:
            self.whet.mark_output(tensor.tensor)

    def unmark_output(self, tensor: ITensor) -> None:
        """Makes an output an inner tensor."""
        self.whet.outputs = [t for t in self.whet.outputs if t is not tensor.tensor]

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        """A new input; sizes of -1 are dynamic."""
        dims = tuple(d if d >= 0 else lower(symbol(f"{name}_{i}")) for i, d in enumerate(shape))
        return ITensor(self.whet, self.whet.add_input(name, TensorType(to_whet(dtype), dims)))

    def add_constant(self, shape: Sequence[int], weights: np.ndarray) -> ILayer:
        """A layer whose output has the values of `weights`."""
        return self._add("Identity", self.whet.constant(np.asarray(weights).reshape(tuple(shape))))

    def add_identity(self, input: ITensor) -> ILayer:
        """output = input."""
        return self._add("Identity", input.tensor)

    def add_cast(self, input: ITensor, to_type: DataType) -> ILayer:
        """Conversion to another element type."""
        return self._add("Cast", input.tensor, to=to_whet(to_type).name)

    def add_activation(self, input: ITensor, type: ActivationType) -> ILayer:
        """An elementwise activation."""
        return self._add(_ACTIVATIONS[ActivationType(type).name], input.tensor)

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: ElementWiseOperation) -> ILayer:
        """A function of two tensors; sizes of 1 are broadcast."""
        return self._add(_ELEMENTWISE[ElementWiseOperation(op).name], input1.tensor, input2.tensor)

    def add_unary(self, input: ITensor, op: UnaryOperation) -> ILayer:
        """A function of one tensor."""
        name = UnaryOperation(op).name
        return self._add("Reciprocal" if name == "RECIP" else name.capitalize(), input.tensor)

    def add_select(self, condition: ITensor, then_input: ITensor, else_input: ITensor) -> ILayer:
        """Elements of `then_input` where `condition` is true, else of `else_input`."""
        return self._add("Where", condition.tensor, then_input.tensor, else_input.tensor)

    def add_matrix_multiply(self, input0: ITensor, op0: MatrixOperation, input1: ITensor, op1: MatrixOperation) -> ILayer:
        """The matrix product over the last two axes."""
        a, b = (self._transposed(t.tensor) if op == MatrixOperation.TRANSPOSE else t.tensor for t, op in ((input0, op0), (input1, op1)))
        return self._add("MatMul", a, b)

    def _transposed(self, t: Tensor) -> Tensor:
        rank = len(t.shape)
        return self.whet.add_layer("Transpose", (t,), {"perm": (*range(rank - 2), rank - 1, rank - 2)}).outputs[0]

    def _add(self, op: str, *inputs: Tensor, **attrs: Any) -> ILayer:
        return ILayer(self.whet, self.whet.add_layer(op, inputs, attrs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            raise NotServedError(f"INetworkDefinition.{name}", "this layer is not built by hand yet; give the network as ONNX to OnnxParser")
        raise AttributeError(f"INetworkDefinition has no attribute {name!r}")
