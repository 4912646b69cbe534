"""TensorRT 10's enumerations, with its names and values. Only members whose meaning whet serves, or can refuse with a reason, are listed."""

from __future__ import annotations

from enum import IntEnum

from whet import network as types
from whet.errors import UnsupportedError
from whet.network import DType


class NamedInt(IntEnum):
    """An integer that prints as `Class.NAME`, as TensorRT's enumerations do."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class DataType(NamedInt):
    """Element types of tensors."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


_DTYPES = {
    DataType.FLOAT: "f32", DataType.HALF: "f16", DataType.INT8: "i8", DataType.INT32: "i32", DataType.BOOL: "bool", DataType.UINT8: "u8",
    DataType.FP8: "f8e4m3", DataType.BF16: "bf16", DataType.INT64: "i64", DataType.INT4: "i4",
}  # fmt: skip
_NAMES = {name: t for t, name in _DTYPES.items()}


def to_whet(dtype: DataType) -> DType:
    """whet's element type."""
    return types.DTYPES[_DTYPES[DataType(dtype)]]


def from_whet(dtype: DType) -> DataType:
    """TensorRT's element type. Raises UnsupportedError for types that TensorRT lacks (f64, u16, ...)."""
    if dtype.name not in _NAMES:
        raise UnsupportedError(f"TensorRT has no element type for {dtype}")
    return _NAMES[dtype.name]


class TensorFormat(NamedInt):
    """Memory layouts of inputs and outputs; whet's are LINEAR."""

    LINEAR = 0
    CHW2 = 1
    HWC8 = 2
    CHW4 = 3
    CHW16 = 4
    CHW32 = 5
    HWC = 8


class TensorIOMode(NamedInt):
    """The role of a tensor in an engine."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(NamedInt):
    """The memory of a tensor."""

    DEVICE = 0
    HOST = 1


class BuilderFlag(NamedInt):
    """Flags of IBuilderConfig."""

    FP16 = 0
    INT8 = 1
    DEBUG = 2
    GPU_FALLBACK = 3
    REFIT = 4
    DISABLE_TIMING_CACHE = 5
    TF32 = 7
    SPARSE_WEIGHTS = 8
    OBEY_PRECISION_CONSTRAINTS = 10
    PREFER_PRECISION_CONSTRAINTS = 11
    DIRECT_IO = 12
    VERSION_COMPATIBLE = 14
    FP8 = 17
    ERROR_ON_TIMING_CACHE_MISS = 18
    BF16 = 19
    STRIP_PLAN = 21
    WEIGHT_STREAMING = 23


class DeviceType(NamedInt):
    """Devices of layers: GPU is the backend's device; DLA is refused."""

    GPU = 0
    DLA = 1


class MemoryPoolType(NamedInt):
    """Memory pools whose size IBuilderConfig limits."""

    WORKSPACE = 0


class ProfilingVerbosity(NamedInt):
    """The information about layers that an engine keeps."""

    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class NetworkDefinitionCreationFlag(NamedInt):
    """Flags of Builder.create_network."""

    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class OnnxParserFlag(NamedInt):
    """Flags of OnnxParser; whet has its own InstanceNormalization, so the flag changes nothing."""

    NATIVE_INSTANCENORM = 0


class LayerInformationFormat(NamedInt):
    """Formats of EngineInspector."""

    ONELINE = 0
    JSON = 1


class LayerType(NamedInt):
    """Kinds of layers."""

    CONVOLUTION = 0
    CAST = 1
    ACTIVATION = 2
    POOLING = 3
    LRN = 4
    SCALE = 5
    SOFTMAX = 6
    DECONVOLUTION = 7
    CONCATENATION = 8
    ELEMENTWISE = 9
    PLUGIN = 10
    UNARY = 11
    PADDING = 12
    SHUFFLE = 13
    REDUCE = 14
    TOPK = 15
    GATHER = 16
    MATRIX_MULTIPLY = 17
    CONSTANT = 19
    IDENTITY = 20
    SLICE = 22
    SHAPE = 23
    PARAMETRIC_RELU = 24
    RESIZE = 25
    SELECT = 30
    QUANTIZE = 32
    DEQUANTIZE = 33
    EINSUM = 39
    NORMALIZATION = 45


class ActivationType(NamedInt):
    """Functions of add_activation."""

    RELU = 0
    SIGMOID = 1
    TANH = 2
    SOFTSIGN = 6
    GELU_ERF = 12


class ElementWiseOperation(NamedInt):
    """Functions of add_elementwise."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    SUB = 4
    DIV = 5
    POW = 6


class UnaryOperation(NamedInt):
    """Functions of add_unary."""

    EXP = 0
    LOG = 1
    SQRT = 2
    RECIP = 3
    ABS = 4
    NEG = 5
    SIN = 6
    COS = 7
    TAN = 8
    ERF = 17


class MatrixOperation(NamedInt):
    """How add_matrix_multiply reads an operand."""

    NONE = 0
    TRANSPOSE = 1
