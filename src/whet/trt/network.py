"""INetworkDefinition: a whet Network under TensorRT's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from whet.errors import BuildError, WhetError
from whet.network import Layer, Network, Tensor, TensorType, make_symbol
from whet.network.dims import lower
from whet.ops import infer_layer
from whet.trt import math_layers as math
from whet.trt import shape_layers as shapes
from whet.trt import window_layers as windows
from whet.trt.enums import (
    ActivationType,
    AttentionNormalizationOp,
    CumulativeOperation,
    DataType,
    ElementWiseOperation,
    FillOperation,
    GatherMode,
    MatrixOperation,
    NetworkDefinitionCreationFlag,
    PoolingType,
    ReduceOperation,
    ScaleMode,
    ScatterMode,
    TopKOperation,
    UnaryOperation,
    to_whet,
)
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle
from whet.trt.layers import Emission, ILayer, ITensor, LayerState
from whet.trt.plugins import IPluginV3Layer

K = TypeVar("K", bound=ILayer)


DEBUG_PREFIX = "debug::"  # of the outputs of an engine that are debug tensors


class INetworkDefinition(Handle):
    """Layers between inputs and outputs, filled by OnnxParser or by the add functions. Iterates over its layers."""

    has_implicit_batch_dimension = False

    def __init__(self, flags: int = 0) -> None:
        self.whet = Network()
        self.flags = flags
        self.dynamic_ranges: dict[Tensor, tuple[float, float]] = {}
        self.debug_tensors: dict[Tensor, None] = {}  # those of `mark_debug`, in that order
        self.io_types: dict[Tensor, DataType] = {}  # of inputs and outputs with a type set by the caller
        self.error_recorder: Any = None
        self._states: dict[Layer, LayerState] = {}
        self._layers_added = 0

    @property
    def name(self) -> str:
        """The name."""
        return self.whet.name

    @name.setter
    def name(self, name: str) -> None:
        self.whet.name = name

    def get_flag(self, flag: NetworkDefinitionCreationFlag) -> bool:
        """True if the network was created with a flag."""
        return bool(self.flags & 1 << flag)

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
        return len(self.layer_states())

    def get_input(self, index: int) -> ITensor:
        """An input."""
        return ITensor(self, self.whet.inputs[index])

    def get_output(self, index: int) -> ITensor:
        """An output."""
        return ITensor(self, self.whet.outputs[index])

    def get_layer(self, index: int) -> ILayer:
        """A layer, as ILayer."""
        return ILayer(self.layer_states()[index])

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, index: int) -> ILayer:
        return self.get_layer(index)

    def __iter__(self) -> Iterator[ILayer]:
        return (ILayer(state) for state in self.layer_states())

    def layer_states(self) -> list[LayerState]:
        """The layers in execution order."""
        for layer in self.whet.layers:
            if layer not in self._states:
                self._states[layer] = LayerState(self, layer.name, layers=[layer])
        return list(dict.fromkeys(self._states[layer] for layer in self.whet.layers))

    def mark_output(self, tensor: ITensor) -> None:
        """Makes a tensor an output."""
        if not tensor.is_network_output:
            self.whet.mark_output(tensor.tensor)

    def unmark_output(self, tensor: ITensor) -> None:
        """Makes an output an inner tensor."""
        self.whet.outputs = [t for t in self.whet.outputs if t is not tensor.tensor]

    def mark_debug(self, tensor: ITensor) -> bool:
        """Marks a tensor for debug listeners of contexts; no fusion hides it."""
        self.debug_tensors[tensor.tensor] = None
        return True

    def unmark_debug(self, tensor: ITensor) -> bool:
        """Undoes `mark_debug`."""
        self.debug_tensors.pop(tensor.tensor, None)
        return True

    def is_debug_tensor(self, tensor: ITensor) -> bool:
        """True after `mark_debug`."""
        return tensor.tensor in self.debug_tensors

    def remove_tensor(self, tensor: ITensor) -> None:
        """Does nothing: layers without consumers are removed by the build."""

    def check(self) -> None:
        """Raises BuildError for a layer that is invalid with the properties that it has."""
        for state in self.layer_states():
            if state.error is not None:
                raise BuildError(f"layer '{state.name}': {state.error}")

    def network_to_build(self) -> Network:
        """The network of a build: `whet` itself, or a copy. The copy has conversions for inputs and outputs with a type of their own, and an output
        for each debug tensor, with DEBUG_PREFIX in its name."""
        if not self.io_types and not self.debug_tensors:
            return self.whet
        net = self.whet.clone()
        by_name = {t.name: t for t in (*net.inputs, *(t for layer in net.layers for t in layer.outputs))}
        for t in self.debug_tensors:
            shown = net.add("Identity", by_name[t.name], name=net.fresh(f"{t.name}_debug"))
            shown.name = net.fresh(DEBUG_PREFIX + t.name)
            net.mark_output(shown)
        for i, t in enumerate(self.whet.inputs):
            if t in self.io_types:
                inner = net.inputs[i]
                net.inputs[i] = given = Tensor(t.name, TensorType(to_whet(self.io_types[t]), t.shape))
                inner.name = net.fresh(f"{t.name}_inner")
                net.replace(inner, net.add_layer("Cast", (given,), {"to": t.dtype}, name=net.fresh(f"{t.name}_cast"), at=0).output)
        for i, t in enumerate(self.whet.outputs):  # before those of debug tensors
            if t in self.io_types and t not in self.whet.inputs:
                inner = net.outputs[i]
                net.outputs[i] = converted = net.add("Cast", inner, to=to_whet(self.io_types[t]), name=net.fresh(f"{t.name}_cast"))
                converted.name, inner.name = t.name, net.fresh(f"{t.name}_inner")
        return net

    # computing layers of whet

    def emit(self, state: LayerState) -> None:
        """Adds the layers of whet for a layer, in the place of those that it had; its output tensors stay the same objects."""
        net = self.whet
        again = bool(state.layers)
        at = net.layers.index(state.layers[0]) if again else len(net.layers)
        for layer in state.layers:
            net.remove(layer)
            self._states.pop(layer, None)
        kind = state.kind
        assert kind is not None
        e = Emission(net, at, state.name)
        try:
            emitted = kind(state).emit(e, *state.inputs)
            outputs = list(emitted) if isinstance(emitted, tuple) else [emitted]
            state.error = None
        except (WhetError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            if isinstance(error, NotServedError):
                raise
            state.error = error if isinstance(error, WhetError) else BuildError(f"{type(error).__name__}: {error}")
            for layer in e.layers:
                net.remove(layer)
            e = Emission(net, at, state.name)
            known = next((t for t in state.inputs if t is not None), None)
            outputs = [e("Identity", known if known is not None else e.constant(np.zeros(()))) for _ in range(max(kind.min_outputs, 1))]
        outputs = [t if t.maker in e.layers and outputs.count(t) == 1 else e("Identity", t) for t in outputs]
        if state.outputs:
            changed = any(_take(old, new) for old, new in zip(state.outputs, outputs, strict=False))
        else:
            changed = False
            for i, t in enumerate(outputs):
                t.name = net.fresh(f"{state.name}_output" + (f"_{i}" if i else ""))
            state.outputs = outputs
        state.layers = e.layers
        for layer in e.layers:
            self._states[layer] = state
        state.layers[-1].name = state.name
        if again and changed:
            self.infer_types(after=state)

    def infer_types(self, after: LayerState | None = None) -> None:
        """Computes the types of all layers again, or of those after a layer. Raises NetworkError for a layer from ONNX that becomes invalid."""
        states = self.layer_states()
        for state in states[states.index(after) + 1 if after else 0 :]:
            if state.kind is not None:
                self.emit(state)
                continue
            for layer in state.layers:
                types, values = infer_layer(layer)
                for t, type_, value in zip(layer.outputs, types, values, strict=True):
                    t.type, t.shape_value = type_, value

    def _add(self, kind: type[K], *inputs: ITensor | None, **options: Any) -> K:
        name = self.whet.fresh(f"{kind.layer_type.name.lower()}_{self._layers_added}")
        self._layers_added += 1
        given = {k: v for k, v in options.items() if v is not None}
        state = LayerState(self, name, kind, inputs=[None if t is None else t.tensor for t in inputs], options=given)
        self.emit(state)
        return kind(state)

    # inputs and layers

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        """A new input; sizes of -1 are dynamic."""
        dims = tuple(d if d >= 0 else lower(make_symbol(f"{name}_{i}")) for i, d in enumerate(shape))
        return ITensor(self, self.whet.add_input(name, TensorType(to_whet(dtype), dims)))

    def add_constant(self, shape: Sequence[int], weights: Any) -> shapes.IConstantLayer:
        """A layer whose output has the values of `weights`."""
        return self._add(shapes.IConstantLayer, shape=tuple(shape), weights=weights)

    def add_identity(self, input: ITensor) -> shapes.IIdentityLayer:
        """output = input."""
        return self._add(shapes.IIdentityLayer, input)

    def add_cast(self, input: ITensor, to_type: DataType) -> shapes.ICastLayer:
        """Conversion to another element type."""
        return self._add(shapes.ICastLayer, input, to_type=to_type)

    def add_convolution_nd(
        self, input: ITensor, num_output_maps: int, kernel_shape: Sequence[int], kernel: Any, bias: Any = None
    ) -> windows.IConvolutionLayer:
        """A convolution."""
        return self._add(windows.IConvolutionLayer, input, num_output_maps=num_output_maps, kernel_size_nd=kernel_shape, kernel=kernel, bias=bias)

    def add_deconvolution_nd(
        self, input: ITensor, num_output_maps: int, kernel_shape: Sequence[int], kernel: Any, bias: Any = None
    ) -> windows.IDeconvolutionLayer:
        """A transposed convolution."""
        return self._add(windows.IDeconvolutionLayer, input, num_output_maps=num_output_maps, kernel_size_nd=kernel_shape, kernel=kernel, bias=bias)

    def add_pooling_nd(self, input: ITensor, type: PoolingType, window_size: Sequence[int]) -> windows.IPoolingLayer:
        """Pooling; the stride is the window's size until it is set."""
        return self._add(windows.IPoolingLayer, input, type=type, window_size_nd=window_size)

    def add_activation(self, input: ITensor, type: ActivationType) -> math.IActivationLayer:
        """An activation."""
        return self._add(math.IActivationLayer, input, type=type)

    def add_lrn(self, input: ITensor, window: int, alpha: float, beta: float, k: float) -> windows.ILRNLayer:
        """Local response normalization."""
        return self._add(windows.ILRNLayer, input, window_size=window, alpha=alpha, beta=beta, k=k)

    def add_scale(self, input: ITensor, mode: ScaleMode, shift: Any = None, scale: Any = None, power: Any = None) -> windows.IScaleLayer:
        """(x * scale + shift) ** power; channels are axis 1."""
        return self._add(windows.IScaleLayer, input, mode=mode, shift=shift, scale=scale, power=power)

    def add_scale_nd(
        self, input: ITensor, mode: ScaleMode, shift: Any = None, scale: Any = None, power: Any = None, channel_axis: int = 1
    ) -> windows.IScaleLayer:
        """(x * scale + shift) ** power."""
        return self._add(windows.IScaleLayer, input, mode=mode, shift=shift, scale=scale, power=power, channel_axis=channel_axis)

    def add_softmax(self, input: ITensor) -> math.ISoftMaxLayer:
        """A softmax; set `axes`."""
        return self._add(math.ISoftMaxLayer, input)

    def add_ragged_softmax(self, input: ITensor, bounds: ITensor) -> math.IRaggedSoftMaxLayer:
        """A softmax over the first `bounds` entries of the last axis."""
        return self._add(math.IRaggedSoftMaxLayer, input, bounds)

    def add_concatenation(self, inputs: Sequence[ITensor]) -> shapes.IConcatenationLayer:
        """A concatenation; set `axis`."""
        return self._add(shapes.IConcatenationLayer, *inputs)

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: ElementWiseOperation) -> math.IElementWiseLayer:
        """A function of two tensors; sizes of 1 are broadcast."""
        return self._add(math.IElementWiseLayer, input1, input2, op=op)

    def add_unary(self, input: ITensor, op: UnaryOperation) -> math.IUnaryLayer:
        """A function of one tensor."""
        return self._add(math.IUnaryLayer, input, op=op)

    def add_padding_nd(self, input: ITensor, pre_padding: Sequence[int], post_padding: Sequence[int]) -> windows.IPaddingLayer:
        """Zeros around the last two axes."""
        return self._add(windows.IPaddingLayer, input, pre_padding_nd=pre_padding, post_padding_nd=post_padding)

    def add_shuffle(self, input: ITensor) -> shapes.IShuffleLayer:
        """Transpose, reshape, transpose; set its properties."""
        return self._add(shapes.IShuffleLayer, input)

    def add_squeeze(self, input: ITensor, axes: ITensor) -> shapes.ISqueezeLayer:
        """Removes axes of size 1."""
        return self._add(shapes.ISqueezeLayer, input, axes)

    def add_unsqueeze(self, input: ITensor, axes: ITensor) -> shapes.IUnsqueezeLayer:
        """Inserts axes of size 1."""
        return self._add(shapes.IUnsqueezeLayer, input, axes)

    def add_slice(self, input: ITensor, start: Sequence[int], shape: Sequence[int], stride: Sequence[int]) -> shapes.ISliceLayer:
        """`shape` entries from `start` on, with `stride`."""
        return self._add(shapes.ISliceLayer, input, start=tuple(start), shape=tuple(shape), stride=tuple(stride))

    def add_reduce(self, input: ITensor, op: ReduceOperation, axes: int, keep_dims: bool) -> math.IReduceLayer:
        """A reduction over the axes of a bit mask."""
        return self._add(math.IReduceLayer, input, op=op, axes=axes, keep_dims=keep_dims)

    def add_topk(self, input: ITensor, op: TopKOperation, k: int, axes: int, indices_type: DataType = DataType.INT32) -> math.ITopKLayer:
        """The `k` largest or smallest entries along the axis of a bit mask, and their indices."""
        return self._add(math.ITopKLayer, input, op=op, k=k, axes=axes, indices_type=indices_type)

    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> shapes.IGatherLayer:
        """Entries along `axis`."""
        return self._add(shapes.IGatherLayer, input, indices, axis=axis)

    def add_gather_v2(self, input: ITensor, indices: ITensor, mode: GatherMode) -> shapes.IGatherLayer:
        """Entries, elements, or entries at index tuples."""
        return self._add(shapes.IGatherLayer, input, indices, mode=mode)

    def add_scatter(self, data: ITensor, indices: ITensor, updates: ITensor, mode: ScatterMode) -> shapes.IScatterLayer:
        """Updates written at elements or index tuples."""
        return self._add(shapes.IScatterLayer, data, indices, updates, mode=mode)

    def add_matrix_multiply(self, input0: ITensor, op0: MatrixOperation, input1: ITensor, op1: MatrixOperation) -> math.IMatrixMultiplyLayer:
        """The matrix product over the last two axes."""
        return self._add(math.IMatrixMultiplyLayer, input0, input1, op0=op0, op1=op1)

    def add_parametric_relu(self, input: ITensor, slopes: ITensor) -> math.IParametricReLULayer:
        """x, or slopes * x below 0."""
        return self._add(math.IParametricReLULayer, input, slopes)

    def add_resize(self, input: ITensor) -> windows.IResizeLayer:
        """A resize; set `shape` or `scales`."""
        return self._add(windows.IResizeLayer, input)

    def add_shape(self, input: ITensor) -> shapes.IShapeLayer:
        """The shape of a tensor."""
        return self._add(shapes.IShapeLayer, input)

    def add_select(self, condition: ITensor, then_input: ITensor, else_input: ITensor) -> math.ISelectLayer:
        """Elements of `then_input` where `condition` is true, else of `else_input`."""
        return self._add(math.ISelectLayer, condition, then_input, else_input)

    def add_assertion(self, condition: ITensor, message: str) -> shapes.IAssertionLayer:
        """A check of a condition known at build time."""
        return self._add(shapes.IAssertionLayer, condition, message=message)

    def add_fill(self, shape: Sequence[int], op: FillOperation, output_type: DataType = DataType.FLOAT) -> shapes.IFillLayer:
        """A tensor of equal steps; set `alpha` and `beta`."""
        return self._add(shapes.IFillLayer, shape=tuple(shape), operation=op, to_type=output_type)

    def add_quantize(self, input: ITensor, scale: ITensor, output_type: DataType = DataType.INT8) -> math.IQuantizeLayer:
        """Quantization to INT8 or FP8."""
        return self._add(math.IQuantizeLayer, input, scale, to_type=output_type)

    def add_dequantize(self, input: ITensor, scale: ITensor, output_type: DataType = DataType.FLOAT) -> math.IDequantizeLayer:
        """x * scale."""
        return self._add(math.IDequantizeLayer, input, scale, to_type=output_type)

    def add_einsum(self, inputs: Sequence[ITensor], equation: str) -> math.IEinsumLayer:
        """Einstein summation."""
        return self._add(math.IEinsumLayer, *inputs, equation=equation)

    def add_one_hot(self, indices: ITensor, values: ITensor, depth: ITensor, axis: int) -> shapes.IOneHotLayer:
        """A new axis with one marked entry per index."""
        return self._add(shapes.IOneHotLayer, indices, values, depth, axis=axis)

    def add_grid_sample(self, input: ITensor, grid: ITensor) -> windows.IGridSampleLayer:
        """`input` sampled at the coordinates of `grid`."""
        return self._add(windows.IGridSampleLayer, input, grid)

    def add_reverse_sequence(self, input: ITensor, sequence_lens: ITensor) -> shapes.IReverseSequenceLayer:
        """The first entries of each sequence in reverse order."""
        return self._add(shapes.IReverseSequenceLayer, input, sequence_lens)

    def add_normalization(self, input: ITensor, scale: ITensor, bias: ITensor, axesMask: int) -> math.INormalizationLayer:
        """Normalization to mean 0 and variance 1 over the axes of a bit mask, then scale and bias."""
        return self._add(math.INormalizationLayer, input, scale, bias, axes=axesMask)

    def add_cumulative(self, input: ITensor, axis: ITensor, op: CumulativeOperation, exclusive: bool, reverse: bool) -> math.ICumulativeLayer:
        """Cumulative sums."""
        return self._add(math.ICumulativeLayer, input, axis, op=op, exclusive=exclusive, reverse=reverse)

    def add_attention(
        self, query: ITensor, key: ITensor, value: ITensor, norm_op: AttentionNormalizationOp, causal: bool
    ) -> math.IAttention:
        """softmax(query key^T) value; the scale is the caller's."""
        return self._add(math.IAttention, query, key, value, norm_op=norm_op, causal=causal)

    def add_plugin_v3(self, inputs: Sequence[ITensor], shape_inputs: Sequence[ITensor], plugin: Any) -> IPluginV3Layer:
        """A plugin whose creator is registered. Raises NotServedError for shape inputs."""
        if shape_inputs:
            raise NotServedError("shape_inputs", "shapes of a plugin's outputs follow from the shapes of its inputs")
        return self._add(IPluginV3Layer, *inputs, plugin=plugin)

    def add_if_conditional(self) -> IIfConditional:
        """A conditional whose two branches are both computed; the condition selects the outputs."""
        return IIfConditional(self)


class ILoop:
    """The class of loops of `add_loop`, which is not served: there are no objects of it. Loops of ONNX models are layers."""

    name = ""


class IIfConditional:
    """A conditional: `add_output` selects between tensors of the two branches, which are both computed."""

    def __init__(self, network: INetworkDefinition):
        self._network = network
        self._condition: ITensor | None = None
        self.name = ""

    def set_condition(self, condition: ITensor) -> ITensor:
        """Sets the condition (BOOL, one element)."""
        self._condition = condition
        return condition

    def add_input(self, input: ITensor) -> shapes.IIdentityLayer:
        """A tensor that the branches read."""
        return self._network.add_identity(input)

    def add_output(self, true_subgraph_output: ITensor, false_subgraph_output: ITensor) -> math.ISelectLayer:
        """The tensor of the taken branch; both have the same shape. Raises NotServedError before `set_condition`."""
        if self._condition is None:
            raise NotServedError("IIfConditional.add_output", "the condition is set first: set_condition(tensor)")
        return self._network.add_select(self._condition, true_subgraph_output, false_subgraph_output)


def _take(old: Tensor, new: Tensor) -> bool:
    """Makes `old` the output that `new` is; True if its type or known values change."""
    maker = new.maker
    assert maker is not None
    changed = old.type != new.type or old.shape_value != new.shape_value
    maker.outputs = tuple(old if t is new else t for t in maker.outputs)
    old.type, old.shape_value, old.maker, old.index = new.type, new.shape_value, maker, new.index
    return changed
