"""GraphWriter: writes ONNX nodes and weights with the names of PyTorch's exporter.

The module layer1.0.conv1 has the weight "layer1.0.conv1.weight" and the node "/layer1/layer1.0/conv1/Conv": a child with
a numeric name repeats its parent's. The second node of a kind in a scope gets the suffix _1, the third _2. The exporter
transposes the weight of a linear layer that becomes a MatMul, and renames it: "onnx::MatMul_7".
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

Init = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Shape = Sequence[int | str]


def make_normal_init(std: float, mean: float = 0.0) -> Init:
    """Normally distributed initial values."""
    def init(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        return values
    return init


class GraphWriter:
    """Collects one graph; builders call it, model() closes it.

    With skeleton=True weights are declared as inputs without values, which is enough for shape inference and counting.
    With `values` (a trained state: path of the weight -> array) no weight is random; a missing weight or another shape
    raises ValueError.
    """

    def __init__(self, *, batch: int | str, opset: int, seed: int = 0, skeleton: bool = False,
                 values: Mapping[str, np.ndarray] | None = None) -> None:
        self.batch, self.opset = batch, opset
        self._values = values
        self.inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {}
        self.outputs: dict[str, tuple[str, tuple[int | str, ...]]] = {}
        self.trainable: set[str] = set()
        self._seed, self._skeleton = seed, skeleton
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, onnx.TensorProto] = {}
        self._declared: dict[str, onnx.ValueInfoProto] = {}
        self._scopes: list[tuple[str, str]] = []          # (part of the node's path, part of the weight's path)
        self._used: dict[str, int] = {}
        self._rename: dict[str, str] = {}
        self._anonymous = 0

    # --- names ---

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes and weights written inside belong to the child module `name` of the current module."""
        shown = f"{self._scopes[-1][0]}.{name}" if name.isdigit() and self._scopes else name
        self._scopes.append((shown, name))
        try:
            yield
        finally:
            self._scopes.pop()

    def _node_name(self, op: str) -> str:
        base = "".join(f"/{shown}" for shown, _ in self._scopes) + f"/{op}"
        n = self._used[base] = self._used.get(base, -1) + 1
        return f"{base}_{n}" if n else base

    def _weight_name(self, name: str) -> str:
        return ".".join([part for _, part in self._scopes] + [name])

    # --- values ---

    def input(self, name: str, shape: Shape, dtype: str = "float32") -> str:
        """Declares an input of the network and returns its name. Dims are ints or names."""
        self.inputs[name] = (dtype, tuple(shape))
        return name

    def output(self, value: str, name: str, shape: Shape, dtype: str = "float32") -> None:
        """Makes `value` an output of the network under the name `name`."""
        self._rename[value] = name
        self.outputs[name] = (dtype, tuple(shape))

    def weight(self, name: str, shape: Sequence[int], init: Init, *, trainable: bool = True) -> str:
        """A float32 weight of the current module; its values depend only on the seed and its name."""
        return self._add_weight(self._weight_name(name), tuple(shape), init, trainable)

    def anonymous_weight(self, op: str, module_name: str, shape: Sequence[int], init: Init) -> str:
        """A weight renamed by the exporter's constant folding; it is seeded by its module's name."""
        self._anonymous += 1
        return self._add_weight(f"onnx::{op}_{self._anonymous}", tuple(shape), init, True, key=self._weight_name(module_name))

    def _add_weight(self, name: str, shape: tuple[int, ...], init: Init, trainable: bool, key: str | None = None) -> str:
        from onnx import TensorProto, helper, numpy_helper

        if name in self._weights or name in self._declared:
            raise ValueError(f"weight {name!r} is written twice")
        if trainable:
            self.trainable.add(name)
        if self._skeleton:
            self._declared[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        else:
            values = np.ascontiguousarray(self._value(key or name, shape, init), np.float32)
            self._weights[name] = numpy_helper.from_array(values, name)
        return name

    def _value(self, key: str, shape: tuple[int, ...], init: Init) -> np.ndarray:
        if self._values is None:
            return init(np.random.default_rng([self._seed, zlib.crc32(key.encode())]), shape)
        if key not in self._values:
            raise ValueError(f"the given values have no {key!r}")
        if self._values[key].shape != shape:
            raise ValueError(f"{key!r} has shape {self._values[key].shape} in the given values, {shape} in the network")
        return self._values[key]

    def table(self, name: str, values: np.ndarray) -> str:
        """An initializer with given values (a buffer of the module, not trained), present in skeletons too."""
        from onnx import numpy_helper

        name = self._weight_name(name)
        self._weights[name] = numpy_helper.from_array(values, name)
        return name

    def const(self, value: Any, dtype: str = "int64") -> str:
        """A Constant node, as exporters write shapes, indices and scalars of the Python code."""
        from onnx import helper, numpy_helper

        node_name = self._node_name("Constant")
        out = f"{node_name}_output_0"
        tensor = numpy_helper.from_array(np.asarray(value, dtype))
        self._nodes.append(helper.make_node("Constant", [], [out], name=node_name, value=tensor))
        return out

    # --- nodes ---

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        """A node with one output in the current scope; returns the output's name. An omitted input is ""."""
        return self.ops(kind, *inputs, outputs=1, **attrs)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attrs: Any) -> list[str]:
        """A node with several outputs in the current scope."""
        from onnx import helper

        node_name = self._node_name(kind)
        out = [f"{node_name}_output_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(kind, list(inputs), out, name=node_name, **attrs))
        return out

    def dim(self, value: str, axis: int) -> str:
        """A value's size along an axis as a scalar, read at run time: Shape, Gather."""
        return self.op("Gather", self.op("Shape", value), self.const(axis), axis=0)

    def shape(self, *sizes: int | str) -> str:
        """A shape tensor from ints and scalars of dim(): Constant, or Unsqueeze and Concat."""
        if not any(isinstance(s, str) for s in sizes):
            return self.const([int(s) for s in sizes])
        parts = [self.op("Unsqueeze", s, self.const([0])) if isinstance(s, str) else self.const([s]) for s in sizes]
        return self.op("Concat", *parts, axis=0)

    def batch_of(self, value: str) -> int | str:
        """The batch size for shape(): an int if it is fixed, else read from axis 0 of `value`."""
        return self.batch if isinstance(self.batch, int) else self.dim(value, 0)

    # --- the end ---

    def model(self, name: str) -> "onnx.ModelProto":
        """The finished model. Call it last."""
        from onnx import helper

        for node in self._nodes:
            for names in (node.input, node.output):
                for i, value in enumerate(names):
                    if value in self._rename:
                        names[i] = self._rename[value]

        def declared(values: dict[str, tuple[str, tuple[int | str, ...]]]) -> list["onnx.ValueInfoProto"]:
            return [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(t)), s)
                    for n, (t, s) in values.items()]

        graph = helper.make_graph(self._nodes, name, declared(self.inputs) + list(self._declared.values()),
                                  declared(self.outputs), list(self._weights.values()))
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(graph, producer_name="whet zoo", opset_imports=[opset],
                                 ir_version=helper.find_min_ir_version_for([opset]))
