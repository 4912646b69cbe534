"""TensorRT 10.16's enumerations, with its names and values."""

from __future__ import annotations

from enum import Enum, IntEnum

from whet import network as types
from whet.errors import UnsupportedError
from whet.network import DType


class NamedInt(IntEnum):
    """An integer that prints as `Class.NAME`, as TensorRT's enumerations do."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class DataType(Enum):
    """Element types of tensors. Not integers, as in TensorRT, so that libraries do not take them for ONNX's numbers; `int()` gives the value."""

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
    FP4 = 10
    E8M0 = 11

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __str__(self) -> str:
        return f"DataType.{self.name}"

    @property
    def itemsize(self) -> float:
        """Bytes of an element; 0.5 for types of 4 bits."""
        return {"FLOAT": 4, "INT32": 4, "INT64": 8, "HALF": 2, "BF16": 2, "INT4": 0.5, "FP4": 0.5}.get(self.name, 1)


_DTYPES = {
    DataType.FLOAT: "f32", DataType.HALF: "f16", DataType.INT8: "i8", DataType.INT32: "i32", DataType.BOOL: "bool", DataType.UINT8: "u8",
    DataType.FP8: "f8e4m3", DataType.BF16: "bf16", DataType.INT64: "i64", DataType.INT4: "i4",
}  # fmt: skip
_NAMES = {name: t for t, name in _DTYPES.items()}


def to_whet(dtype: DataType) -> DType:
    """whet's element type. Raises UnsupportedError for types that whet lacks (FP4, E8M0)."""
    if dtype not in _DTYPES:
        raise UnsupportedError(f"whet has no element type for {DataType(dtype)}")
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
    DHWC8 = 6
    CDHW32 = 7
    HWC = 8
    DLA_LINEAR = 9
    DLA_HWC4 = 10
    HWC16 = 11
    DHWC = 12


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
    TF32 = 6
    SPARSE_WEIGHTS = 7
    SAFETY_SCOPE = 8
    OBEY_PRECISION_CONSTRAINTS = 9
    PREFER_PRECISION_CONSTRAINTS = 10
    DIRECT_IO = 11
    REJECT_EMPTY_ALGORITHMS = 12
    VERSION_COMPATIBLE = 13
    EXCLUDE_LEAN_RUNTIME = 14
    FP8 = 15
    ERROR_ON_TIMING_CACHE_MISS = 16
    BF16 = 17
    DISABLE_COMPILATION_CACHE = 18
    STRIP_PLAN = 19
    WEIGHTLESS = STRIP_PLAN
    REFIT_IDENTICAL = 20
    WEIGHT_STREAMING = 21
    INT4 = 22
    REFIT_INDIVIDUAL = 23
    STRICT_NANS = 24
    MONITOR_MEMORY = 25
    FP4 = 26
    EDITABLE_TIMING_CACHE = 27
    DISTRIBUTIVE_INDEPENDENCE = 28


class DeviceType(NamedInt):
    """Devices of layers: GPU is the backend's device; DLA is refused."""

    GPU = 0
    DLA = 1


class MemoryPoolType(NamedInt):
    """Memory pools whose size IBuilderConfig limits; whet has the WORKSPACE pool."""

    WORKSPACE = 0
    DLA_MANAGED_SRAM = 1
    DLA_LOCAL_DRAM = 2
    DLA_GLOBAL_DRAM = 3
    TACTIC_DRAM = 4
    TACTIC_SHARED_MEMORY = 5


class ProfilingVerbosity(NamedInt):
    """The information about layers that an engine keeps."""

    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class NetworkDefinitionCreationFlag(NamedInt):
    """Flags of Builder.create_network."""

    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1
    PREFER_JIT_PYTHON_PLUGINS = 2
    PREFER_AOT_PYTHON_PLUGINS = 3


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
    RAGGED_SOFTMAX = 18
    CONSTANT = 19
    IDENTITY = 20
    PLUGIN_V2 = 21
    SLICE = 22
    SHAPE = 23
    PARAMETRIC_RELU = 24
    RESIZE = 25
    TRIP_LIMIT = 26
    RECURRENCE = 27
    ITERATOR = 28
    LOOP_OUTPUT = 29
    SELECT = 30
    FILL = 31
    QUANTIZE = 32
    DEQUANTIZE = 33
    CONDITION = 34
    CONDITIONAL_INPUT = 35
    CONDITIONAL_OUTPUT = 36
    SCATTER = 37
    EINSUM = 38
    ASSERTION = 39
    ONE_HOT = 40
    NON_ZERO = 41
    GRID_SAMPLE = 42
    NMS = 43
    REVERSE_SEQUENCE = 44
    NORMALIZATION = 45
    PLUGIN_V3 = 46
    SQUEEZE = 47
    UNSQUEEZE = 48
    CUMULATIVE = 49
    DYNAMIC_QUANTIZE = 50
    ATTENTION_INPUT = 51
    ATTENTION_OUTPUT = 52
    ROTARY_EMBEDDING = 53
    KVCACHE_UPDATE = 54
    MOE = 55
    DIST_COLLECTIVE = 56


class ActivationType(NamedInt):
    """Functions of add_activation."""

    RELU = 0
    SIGMOID = 1
    TANH = 2
    LEAKY_RELU = 3
    ELU = 4
    SELU = 5
    SOFTSIGN = 6
    SOFTPLUS = 7
    CLIP = 8
    HARD_SIGMOID = 9
    SCALED_TANH = 10
    THRESHOLDED_RELU = 11
    GELU_ERF = 12
    GELU_TANH = 13


class ElementWiseOperation(NamedInt):
    """Functions of add_elementwise."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    SUB = 4
    DIV = 5
    POW = 6
    FLOOR_DIV = 7
    AND = 8
    OR = 9
    XOR = 10
    EQUAL = 11
    GREATER = 12
    LESS = 13


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
    SINH = 9
    COSH = 10
    ASIN = 11
    ACOS = 12
    ATAN = 13
    ASINH = 14
    ACOSH = 15
    ATANH = 16
    CEIL = 17
    FLOOR = 18
    ERF = 19
    NOT = 20
    SIGN = 21
    ROUND = 22
    ISINF = 23
    ISNAN = 24


class MatrixOperation(NamedInt):
    """Forms in which add_matrix_multiply reads an operand."""

    NONE = 0
    TRANSPOSE = 1
    VECTOR = 2


class PaddingMode(NamedInt):
    """Padding of convolutions and pooling: explicit with the output size rounded down or up, or computed (SAME)."""

    EXPLICIT_ROUND_DOWN = 0
    EXPLICIT_ROUND_UP = 1
    SAME_UPPER = 2
    SAME_LOWER = 3


class PoolingType(NamedInt):
    """Functions of add_pooling_nd."""

    MAX = 0
    AVERAGE = 1
    MAX_AVERAGE_BLEND = 2


class ScaleMode(NamedInt):
    """Coefficients of add_scale: one, one per channel, or one per element."""

    UNIFORM = 0
    CHANNEL = 1
    ELEMENTWISE = 2


class GatherMode(NamedInt):
    """Forms of add_gather_v2: whole entries, elements, or index tuples."""

    DEFAULT = 0
    ELEMENT = 1
    ND = 2


class ScatterMode(NamedInt):
    """Forms of add_scatter: elements or index tuples."""

    ELEMENT = 0
    ND = 1


class ReduceOperation(NamedInt):
    """Functions of add_reduce."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class SampleMode(NamedInt):
    """Values outside the input, of slices and grid samples."""

    STRICT_BOUNDS = 0
    WRAP = 1
    CLAMP = 2
    FILL = 3
    REFLECT = 4


class TopKOperation(NamedInt):
    """The largest or smallest entries of add_topk."""

    MAX = 0
    MIN = 1


class InterpolationMode(NamedInt):
    """Interpolation of resizes and grid samples."""

    NEAREST = 0
    LINEAR = 1
    CUBIC = 2


class ResizeCoordinateTransformation(NamedInt):
    """The map from output to input coordinates of a resize."""

    ALIGN_CORNERS = 0
    ASYMMETRIC = 1
    HALF_PIXEL = 2


class ResizeSelector(NamedInt):
    """The coordinate of an output axis of size 1: by the transformation, or 0."""

    FORMULA = 0
    UPPER = 1


class ResizeRoundMode(NamedInt):
    """Rounding of coordinates in a nearest resize."""

    HALF_UP = 0
    HALF_DOWN = 1
    FLOOR = 2
    CEIL = 3


class FillOperation(NamedInt):
    """Functions of add_fill."""

    LINSPACE = 0
    RANDOM_UNIFORM = 1
    RANDOM_NORMAL = 2


class BoundingBoxFormat(NamedInt):
    """Boxes of add_nms: two corners, or center and sizes."""

    CORNER_PAIRS = 0
    CENTER_SIZES = 1


class CumulativeOperation(NamedInt):
    """Functions of add_cumulative."""

    SUM = 0


class AttentionNormalizationOp(NamedInt):
    """The normalization of attention scores."""

    NONE = 0
    SOFTMAX = 1


class LoopOutput(NamedInt):
    """Outputs of a loop."""

    LAST_VALUE = 0
    CONCATENATE = 1
    REVERSE = 2


class TripLimit(NamedInt):
    """Ends of a loop."""

    COUNT = 0
    WHILE = 1


class WeightsRole(NamedInt):
    """The role of weights in a layer, for Refitter."""

    KERNEL = 0
    BIAS = 1
    SHIFT = 2
    SCALE = 3
    CONSTANT = 4
    ANY = 5


class EngineCapability(NamedInt):
    """Runtimes that an engine targets; whet has the STANDARD one."""

    STANDARD = 0
    SAFETY = 1
    DLA_STANDALONE = 2


class TacticSource(NamedInt):
    """Libraries of kernels; of these whet has CUDNN."""

    CUBLAS = 0
    CUBLAS_LT = 1
    CUDNN = 2
    EDGE_MASK_CONVOLUTIONS = 3
    JIT_CONVOLUTIONS = 4


class PreviewFeature(NamedInt):
    """Optional features; whet has none of them."""

    PROFILE_SHARING_0806 = 0
    ALIASED_PLUGIN_IO_10_03 = 1
    RUNTIME_ACTIVATION_RESIZE_10_10 = 2
    MULTIDEVICE_RUNTIME_10_16 = 3


class QuantizationFlag(NamedInt):
    """Flags of calibration; whet calibrates before fusion."""

    CALIBRATE_BEFORE_FUSION = 0


class CalibrationAlgoType(NamedInt):
    """Methods that find ranges from calibration batches."""

    LEGACY_CALIBRATION = 0
    ENTROPY_CALIBRATION = 1
    ENTROPY_CALIBRATION_2 = 2
    MINMAX_CALIBRATION = 3


class HardwareCompatibilityLevel(NamedInt):
    """GPUs that an engine runs on; engines of whet open on others by safe tactics."""

    NONE = 0
    AMPERE_PLUS = 1
    SAME_COMPUTE_CAPABILITY = 2


class RuntimePlatform(NamedInt):
    """Operating systems that an engine runs on."""

    SAME_AS_BUILD = 0
    WINDOWS_AMD64 = 1


class TilingOptimizationLevel(NamedInt):
    """Effort of cross-layer tiling; in whet a part of a tactic's tuning space."""

    NONE = 0
    FAST = 1
    MODERATE = 2
    FULL = 3


class ExecutionContextAllocationStrategy(NamedInt):
    """Allocation of the activation memory of a context."""

    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class SerializationFlag(NamedInt):
    """Parts of a serialized engine."""

    EXCLUDE_WEIGHTS = 0
    EXCLUDE_LEAN_RUNTIME = 1
    INCLUDE_REFIT = 2


class EngineStat(NamedInt):
    """Values of ICudaEngine.get_engine_stat, in bytes."""

    TOTAL_WEIGHTS_SIZE = 0
    STRIPPED_WEIGHTS_SIZE = 1


class SeekPosition(NamedInt):
    """Origins of IStreamReaderV2.seek."""

    SET = 0
    CUR = 1
    END = 2


class TempfileControlFlag(NamedInt):
    """Permissions for temporary files."""

    ALLOW_IN_MEMORY_FILES = 0
    ALLOW_TEMPORARY_FILES = 1


class ErrorCodeTRT(NamedInt):
    """Codes of IErrorRecorder."""

    SUCCESS = 0
    UNSPECIFIED_ERROR = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_CONFIG = 4
    FAILED_ALLOCATION = 5
    FAILED_INITIALIZATION = 6
    FAILED_EXECUTION = 7
    FAILED_COMPUTATION = 8
    INVALID_STATE = 9
    UNSUPPORTED_STATE = 10


class ErrorCode(NamedInt):
    """Codes of ParserError."""

    SUCCESS = 0
    INTERNAL_ERROR = 1
    MEM_ALLOC_FAILED = 2
    MODEL_DESERIALIZE_FAILED = 3
    INVALID_VALUE = 4
    INVALID_GRAPH = 5
    INVALID_NODE = 6
    UNSUPPORTED_GRAPH = 7
    UNSUPPORTED_NODE = 8
    UNSUPPORTED_NODE_ATTR = 9
    UNSUPPORTED_NODE_INPUT = 10
    UNSUPPORTED_NODE_DATATYPE = 11
    UNSUPPORTED_NODE_DYNAMIC = 12
    UNSUPPORTED_NODE_SHAPE = 13
    REFIT_FAILED = 14


class OnnxParserFlag(NamedInt):
    """Flags of OnnxParser; whet has its own InstanceNormalization and no plugins or DLA, so they change nothing."""

    NATIVE_INSTANCENORM = 0
    ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA = 1
    REPORT_CAPABILITY_DLA = 2
    ENABLE_PLUGIN_OVERRIDE = 3
    ADJUST_FOR_DLA = 4


class PluginFieldType(NamedInt):
    """Element types of a plugin's parameters."""

    FLOAT16 = 0
    FLOAT32 = 1
    FLOAT64 = 2
    INT8 = 3
    INT16 = 4
    INT32 = 5
    CHAR = 6
    DIMS = 7
    UNKNOWN = 8
    BF16 = 9
    INT64 = 10
    FP8 = 11
    INT4 = 12
    FP4 = 13


class PluginCapabilityType(NamedInt):
    """What get_capability_interface returns the object of."""

    CORE = 0
    BUILD = 1
    RUNTIME = 2


class TensorRTPhase(NamedInt):
    """What a plugin is created for."""

    BUILD = 0
    RUNTIME = 1


class DimensionOperation(NamedInt):
    """Functions of two sizes."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    SUB = 4
    EQUAL = 5
    LESS = 6
    FLOOR_DIV = 7
    CEIL_DIV = 8
