"""TensorRT's IPluginV3 as ops of whet: a registered creator becomes an op, and a plugin's `enqueue` its kernel, on host memory.

Output types and shapes come from the plugin, tactics of `get_valid_tactics` are timed like configurations of whet's own kernels, and engines name the
plugin and its version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import BackendError, NetworkError, UnsupportedError, WhetError
from whet.network import Dim, Expr, Layer, TensorType, static_shape
from whet.network.dims import ceildiv, floordiv, maximum, minimum
from whet.ops import OPTIONAL
from whet.plugins import NumpyTactic, register
from whet.runtime.memory import allocate_aligned_array
from whet.trt.enums import (
    DataType,
    DimensionOperation,
    LayerType,
    PluginCapabilityType,
    PluginFieldType,
    TensorFormat,
    TensorRTPhase,
    from_whet,
    to_whet,
)
from whet.trt.errors import NotServedError
from whet.trt.layers import Emission, ILayer, Option

DOMAIN = "tensorrt"  # of the ops; ONNX nodes may be in this domain, in ONNX's own or in trt.plugins
_OF_FIELD = {
    PluginFieldType.FLOAT16: np.float16, PluginFieldType.FLOAT32: np.float32, PluginFieldType.FLOAT64: np.float64, PluginFieldType.INT8: np.int8,
    PluginFieldType.INT16: np.int16, PluginFieldType.INT32: np.int32, PluginFieldType.INT64: np.int64,
}  # fmt: skip


class PluginField:
    """A named parameter of a plugin: an array, or bytes for CHAR."""

    def __init__(self, name: str = "", data: Any = None, type: PluginFieldType = PluginFieldType.UNKNOWN):
        self.name, self.type = name, type
        self.data = np.asarray(() if data is None else data) if not isinstance(data, bytes | str) else _make_chars(data)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.data.size)


def _make_chars(data: bytes | str) -> np.ndarray:
    return np.frombuffer(data.encode() if isinstance(data, str) else data, np.int8)


class PluginFieldCollection(list[PluginField]):
    """A list of fields."""


@dataclass
class PluginTensorDesc:
    """Shape, element type and format of an operand."""

    dims: tuple[int, ...] = ()
    type: DataType = DataType.FLOAT
    format: TensorFormat = TensorFormat.LINEAR
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    """An operand at build time; unknown sizes are -1 in `desc`."""

    desc: PluginTensorDesc = field(default_factory=PluginTensorDesc)
    min: tuple[int, ...] = ()
    max: tuple[int, ...] = ()
    opt: tuple[int, ...] = ()


class IDimensionExpr:
    """A size that is known, or computed from sizes of the inputs."""

    def __init__(self, dim: Dim):
        self.dim = dim

    def is_constant(self) -> bool:
        """True for a known size."""
        return not isinstance(self.dim, Expr)

    def get_constant_value(self) -> int:
        """The known size. Raises UnsupportedError for another."""
        if isinstance(self.dim, Expr):
            raise UnsupportedError(f"the size {self.dim} is not constant")
        return self.dim

    def is_size_tensor(self) -> bool:
        """False: no size depends on data."""
        return False


class DimsExprs(list[IDimensionExpr]):
    """The sizes of a tensor; `DimsExprs(n)` has n zeros, `DimsExprs(other)` is a copy."""

    def __init__(self, dims: int | Iterable[IDimensionExpr] = ()):
        super().__init__([IDimensionExpr(0)] * dims if isinstance(dims, int) else dims)


_OPERATIONS: dict[DimensionOperation, Callable[[Any, Any], Dim]] = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.MAX: maximum,
    DimensionOperation.MIN: minimum,
    DimensionOperation.FLOOR_DIV: floordiv,
    DimensionOperation.CEIL_DIV: ceildiv,
}


class IExprBuilder:
    """Computes sizes of outputs from those of inputs."""

    def constant(self, value: int) -> IDimensionExpr:
        """A known size."""
        return IDimensionExpr(int(value))

    def operation(self, op: DimensionOperation, first: IDimensionExpr, second: IDimensionExpr) -> IDimensionExpr:
        """A function of two sizes. Raises UnsupportedError for comparisons of unknown sizes."""
        a, b = first.dim, second.dim
        if op in _OPERATIONS:
            return IDimensionExpr(_OPERATIONS[op](a, b))
        if isinstance(a, Expr) or isinstance(b, Expr):
            raise UnsupportedError(f"{DimensionOperation(op)} of {a} and {b}: comparisons take known sizes")
        return IDimensionExpr(int(a == b if op == DimensionOperation.EQUAL else a < b))

    def declare_size_tensor(self, *_: Any) -> None:
        """Raises NotServedError."""
        raise NotServedError("IExprBuilder.declare_size_tensor", "the output shape depends on data, which engines of whet do not have")


class IPluginCapability:
    """Base of the capabilities of a plugin."""


class IPluginV3:
    """A plugin; a subclass of it and of the capabilities."""

    def get_capability_interface(self, type: PluginCapabilityType) -> Any:
        """The object with a capability."""
        return self

    def clone(self) -> IPluginV3:
        """A copy."""
        raise NotImplementedError("a subclass of IPluginV3 defines clone")


class IPluginV3OneCore(IPluginCapability):
    """The plugin's identity."""

    plugin_name = ""
    plugin_version = ""
    plugin_namespace = ""


class IPluginV3OneBuild(IPluginCapability):
    """Types, shapes and formats. A subclass defines `get_output_data_types`, `get_output_shapes` and `supports_format_combination`."""

    num_outputs = 1

    def configure_plugin(self, inp: list[DynamicPluginTensorDesc], out: list[DynamicPluginTensorDesc]) -> None:
        """Called before the shapes are known."""

    def get_workspace_size(self, input_desc: list[DynamicPluginTensorDesc], output_desc: list[DynamicPluginTensorDesc]) -> int:
        """Bytes of memory that `enqueue` gets."""
        return 0

    def get_valid_tactics(self) -> list[int]:
        """Numbers of the ways to compute, each of which is timed."""
        return []


class IPluginV3OneRuntime(IPluginCapability):
    """The computation. A subclass defines `enqueue` and `get_fields_to_serialize`."""

    def get_fields_to_serialize(self) -> PluginFieldCollection:
        """The parameters from which the creator makes this plugin again."""
        return PluginFieldCollection()

    def on_shape_change(self, inp: list[PluginTensorDesc], out: list[PluginTensorDesc]) -> None:
        """Called with the shapes of later calls of `enqueue`."""

    def attach_to_context(self, context: Any) -> Any:
        """The plugin of an execution context: a clone."""
        return self

    def set_tactic(self, tactic: int) -> None:
        """Selects a number of `get_valid_tactics`."""


class IPluginCreatorV3One:
    """Makes plugins. A subclass sets `name`, `plugin_version`, `plugin_namespace` and `field_names`, and defines `create_plugin`."""

    name = ""
    plugin_version = "1"
    plugin_namespace = ""
    field_names = PluginFieldCollection()

    def create_plugin(self, name: str, fc: PluginFieldCollection, phase: TensorRTPhase) -> Any:
        """The plugin of a layer."""
        raise NotImplementedError("a subclass of IPluginCreatorV3One defines create_plugin")


class IPluginRegistry:
    """The creators of this process."""

    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}
        self.error_recorder: Any = None

    @property
    def all_creators(self) -> list[Any]:
        """The registered creators."""
        return list(self._creators.values())

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        """Makes an op of a creator's plugins; False for a name that is taken (whet keeps one version of each)."""
        if any(name == creator.name for name, *_ in self._creators):
            return False
        _register(creator)
        self._creators[creator.name, str(creator.plugin_version), plugin_namespace or creator.plugin_namespace] = creator
        return True

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        """A registered creator; None without one."""
        return self._creators.get((type, str(version), plugin_namespace))

    def deregister_creator(self, creator: Any) -> bool:
        """Raises NotServedError: engines may use its op."""
        raise NotServedError("IPluginRegistry.deregister_creator", "an op stays registered, because engines may use it")

    def creator_of(self, name: str) -> Any:
        """The creator of plugins with this name. Raises UnsupportedError without one."""
        found = next((c for (n, *_), c in self._creators.items() if n == name), None)
        if found is None:
            raise UnsupportedError(f"no creator of plugins {name!r} is registered: get_plugin_registry().register_creator(creator, namespace)")
        return found


_REGISTRY = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    """The process's registry."""
    return _REGISTRY


def get_builder_plugin_registry(capability: Any = None) -> IPluginRegistry:
    """The same."""
    return _REGISTRY


class IPluginV3Layer(ILayer):
    """A plugin on tensors."""

    layer_type = LayerType.PLUGIN_V3
    plugin = Option()

    def emit(self, e: Emission, *inputs: Any) -> Any:
        plugin = self.plugin
        core = plugin.get_capability_interface(PluginCapabilityType.CORE)
        creator = _REGISTRY.creator_of(core.plugin_name)
        fields = plugin.get_capability_interface(PluginCapabilityType.RUNTIME).get_fields_to_serialize()
        types = {f.name: f.type for f in creator.field_names}
        return e(f"{DOMAIN}.{core.plugin_name}", *inputs, **{f.name: _convert_field(f, types.get(f.name, f.type)) for f in fields})


def _convert_field(field: PluginField, type: PluginFieldType) -> Any:
    if PluginFieldType.CHAR in (type, field.type):
        return field.data.tobytes().decode()
    return tuple(field.data.ravel().tolist())


def _register(creator: Any) -> None:
    """The op of a creator's plugins. Raises UsageError for a name that is no identifier."""
    name, version = str(creator.name), str(creator.plugin_version)
    register(
        name,
        lambda layer: _get_output_types(creator, layer),
        lambda layer, *arrays: _Runner(creator, layer, None)(arrays),
        domain=DOMAIN,
        package_name=name,
        version=version,
        attrs=dict.fromkeys((*(f.name for f in creator.field_names), "plugin_version", "plugin_namespace"), OPTIONAL),
        onnx_ops=(f"{DOMAIN}.{name}", name, f"trt.plugins.{name}"),
        tactics=[_PluginV3Tactic(creator)],
    )


def _create_plugin(creator: Any, layer: Layer, phase: TensorRTPhase) -> Any:
    """The plugin of a layer, from its attributes."""
    fields = PluginFieldCollection()
    for f in creator.field_names:
        if (value := layer.attrs.get(f.name)) is not None:
            given = value if isinstance(value, str | bytes) else np.atleast_1d(np.asarray(value))
            if isinstance(given, np.ndarray):  # TensorRT's parser narrows like this, too
                default = {"i": np.int32, "f": np.float32}.get(given.dtype.kind, given.dtype)
                given = given.astype(_OF_FIELD.get(f.type, default))
            fields.append(PluginField(f.name, given, f.type))
    plugin = creator.create_plugin(layer.name, fields, phase)
    if plugin is None:
        raise NetworkError(f"the creator of {creator.name} made no plugin for '{layer.name}' with {layer.attrs}")
    return plugin


def _get_output_types(creator: Any, layer: Layer) -> list[TensorType]:
    """Types of the outputs, as the plugin gives them; checks that it takes the operands row-major in their types."""
    inputs = [_present(creator, t) for t in layer.inputs]
    build = _create_plugin(creator, layer, TensorRTPhase.BUILD).get_capability_interface(PluginCapabilityType.BUILD)
    kinds = [from_whet(t.dtype) for t in inputs]
    made = list(build.get_output_data_types(kinds))
    shapes = build.get_output_shapes([DimsExprs(map(IDimensionExpr, t.shape)) for t in inputs], [], IExprBuilder())
    types = [TensorType(to_whet(k), tuple(d.dim for d in shape)) for k, shape in zip(made, shapes, strict=True)]
    descs = [DynamicPluginTensorDesc(_make_desc(t)) for t in (*(t.type for t in inputs), *types)]
    for k, d in enumerate(descs):
        if not build.supports_format_combination(k, descs, len(inputs)):
            which = f"input {k}" if k < len(inputs) else f"output {k - len(inputs)}"
            raise UnsupportedError(f"{creator.name} '{layer.name}' does not take {which} as {d.desc.type} row-major (LINEAR), whet's only format")
    return types


def _present(creator: Any, tensor: Any) -> Any:
    if tensor is None:
        raise UnsupportedError(f"{creator.name}: plugins have no absent inputs")
    return tensor


def _make_desc(type: TensorType) -> PluginTensorDesc:
    return PluginTensorDesc(tuple(d if isinstance(d, int) else -1 for d in type.shape), from_whet(type.dtype))


class _PluginV3Tactic(NumpyTactic):
    """The plugin's `enqueue` with the plugin kept between runs; its valid tactics are the tuning space."""

    def __init__(self, creator: Any):
        super().__init__("enqueue", self._never, configs=self._tactics)
        self._creator = creator

    def _never(self, *_: Any) -> None:
        raise AssertionError("plan() gives the kernel another function")

    def _tactics(self, layer: Layer) -> list[dict[str, int | str]]:
        build = _create_plugin(self._creator, layer, TensorRTPhase.BUILD).get_capability_interface(PluginCapabilityType.BUILD)
        return [{"tactic": int(t)} for t in build.get_valid_tactics()] or [{}]

    def functions(self) -> list[Any]:
        return [type(self._creator).create_plugin]

    def _compute(self, config: dict[str, int | str]) -> Any:
        runners: dict[Layer, _Runner] = {}

        def compute(layer: Layer, arrays: list[np.ndarray | None]) -> Sequence[np.ndarray]:
            if layer not in runners:
                runners[layer] = _Runner(self._creator, layer, config.get("tactic"))
            return runners[layer](arrays)

        return compute


class _Runner:
    """A plugin at static shapes, with memory for its outputs and workspace."""

    def __init__(self, creator: Any, layer: Layer, tactic: Any):
        self._where = f"{creator.name} '{layer.name}'"
        plugin = _create_plugin(creator, layer, TensorRTPhase.RUNTIME)
        self._ins = [_make_desc(_present(creator, t).type) for t in layer.inputs]
        self._outs = [_make_desc(t.type) for t in layer.outputs]
        dynamic = [[DynamicPluginTensorDesc(d, d.dims, d.dims, d.dims) for d in side] for side in (self._ins, self._outs)]
        build = plugin.get_capability_interface(PluginCapabilityType.BUILD)
        build.configure_plugin(*dynamic)
        self._workspace = allocate_aligned_array((max(int(build.get_workspace_size(*dynamic) or 0), 1),), np.dtype(np.uint8))
        runtime = plugin.get_capability_interface(PluginCapabilityType.RUNTIME)
        attached = runtime.attach_to_context(None) or plugin
        self._runtime = attached.get_capability_interface(PluginCapabilityType.RUNTIME) if isinstance(attached, IPluginV3) else attached
        self._runtime.on_shape_change(self._ins, self._outs)
        if tactic is not None:
            self._runtime.set_tactic(int(tactic))
        self._results = [allocate_aligned_array(static_shape(t.shape), t.dtype.numpy) for t in layer.outputs]

    def __call__(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        ins = [np.ascontiguousarray(a) for a in arrays if a is not None]
        addresses = [a.ctypes.data for a in ins], [a.ctypes.data for a in self._results]
        try:
            self._runtime.enqueue(self._ins, self._outs, *addresses, self._workspace.ctypes.data, 0)
        except WhetError:
            raise
        except Exception as e:  # user code may raise anything
            raise BackendError(f"{self._where}: enqueue failed: {type(e).__name__}: {e}") from e
        return list(self._results)
