"""TensorRT 10's Python API over whet, on the CPU backend: `import whet.trt as trt`, or `whet.trt.install()` for scripts that import `tensorrt`.

Device addresses are host addresses. Names that are not served raise NotServedError with the reason; `coverage()` lists all.
"""

from __future__ import annotations

import sys
from typing import Any

from whet.trt.builder import Builder
from whet.trt.calibrator import (
    IInt8Calibrator,
    IInt8EntropyCalibrator,
    IInt8EntropyCalibrator2,
    IInt8LegacyCalibrator,
    IInt8MinMaxCalibrator,
)
from whet.trt.config import IBuilderConfig
from whet.trt.context import IExecutionContext, IOutputAllocator, IRuntimeConfig
from whet.trt.coverage import coverage
from whet.trt.device import use_backend
from whet.trt.dims import Dims, Dims2, Dims3, Dims4, DimsHW, Permutation
from whet.trt.enums import (
    ActivationType,
    AttentionNormalizationOp,
    BoundingBoxFormat,
    BuilderFlag,
    CalibrationAlgoType,
    CumulativeOperation,
    DataType,
    DeviceType,
    DimensionOperation,
    ElementWiseOperation,
    EngineCapability,
    EngineStat,
    ErrorCode,
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    FillOperation,
    GatherMode,
    HardwareCompatibilityLevel,
    InterpolationMode,
    LayerInformationFormat,
    LayerType,
    LoopOutput,
    MatrixOperation,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParserFlag,
    PaddingMode,
    PluginCapabilityType,
    PluginFieldType,
    PoolingType,
    PreviewFeature,
    ProfilingVerbosity,
    QuantizationFlag,
    ReduceOperation,
    ResizeCoordinateTransformation,
    ResizeRoundMode,
    ResizeSelector,
    RuntimePlatform,
    SampleMode,
    ScaleMode,
    ScatterMode,
    SeekPosition,
    SerializationFlag,
    TacticSource,
    TempfileControlFlag,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
    TensorRTPhase,
    TilingOptimizationLevel,
    TopKOperation,
    TripLimit,
    UnaryOperation,
    WeightsRole,
    to_whet,
)
from whet.trt.errors import NotServedError
from whet.trt.host_memory import connect_cuda_python, connect_polygraphy
from whet.trt.inspector import EngineInspector
from whet.trt.interfaces import (
    IDebugListener,
    IErrorRecorder,
    IProfiler,
    IProgressMonitor,
    IStreamReader,
    IStreamReaderV2,
    IStreamWriter,
    Profiler,
)
from whet.trt.layers import ILayer, ITensor
from whet.trt.logger import ILogger, Logger
from whet.trt.math_layers import (
    IActivationLayer,
    IAttention,
    ICumulativeLayer,
    IDequantizeLayer,
    IEinsumLayer,
    IElementWiseLayer,
    IMatrixMultiplyLayer,
    INormalizationLayer,
    IParametricReLULayer,
    IQuantizeLayer,
    IRaggedSoftMaxLayer,
    IReduceLayer,
    ISelectLayer,
    ISoftMaxLayer,
    ITopKLayer,
    IUnaryLayer,
)
from whet.trt.network import IIfConditional, ILoop, INetworkDefinition
from whet.trt.parser import OnnxParser, ParserError
from whet.trt.plugins import (
    DimsExprs,
    DynamicPluginTensorDesc,
    IDimensionExpr,
    IExprBuilder,
    IPluginCapability,
    IPluginCreatorV3One,
    IPluginRegistry,
    IPluginV3,
    IPluginV3Layer,
    IPluginV3OneBuild,
    IPluginV3OneCore,
    IPluginV3OneRuntime,
    PluginField,
    PluginFieldCollection,
    PluginTensorDesc,
    get_builder_plugin_registry,
    get_plugin_registry,
)
from whet.trt.profile import IOptimizationProfile
from whet.trt.refitter import OnnxParserRefitter, Refitter
from whet.trt.refused import REFUSED
from whet.trt.runtime import ICudaEngine, IHostMemory, ISerializationConfig, Runtime
from whet.trt.shape_layers import (
    IAssertionLayer,
    ICastLayer,
    IConcatenationLayer,
    IConstantLayer,
    IFillLayer,
    IGatherLayer,
    IIdentityLayer,
    IOneHotLayer,
    IReverseSequenceLayer,
    IScatterLayer,
    IShapeLayer,
    IShuffleLayer,
    ISliceLayer,
    ISqueezeLayer,
    IUnsqueezeLayer,
)
from whet.trt.timing_cache import ITimingCache
from whet.trt.weights import Weights
from whet.trt.window_layers import (
    IConvolutionLayer,
    IDeconvolutionLayer,
    IGridSampleLayer,
    ILRNLayer,
    IPaddingLayer,
    IPoolingLayer,
    IResizeLayer,
    IScaleLayer,
)

__version__ = "10.16.0"  # the version of TensorRT whose API this follows

float32, float16, bfloat16, fp8 = DataType.FLOAT, DataType.HALF, DataType.BF16, DataType.FP8
int8, uint8, int32, int64, int4 = DataType.INT8, DataType.UINT8, DataType.INT32, DataType.INT64, DataType.INT4
fp4 = DataType.FP4  # no tensor of whet has it

__all__ = [
    "ActivationType", "AttentionNormalizationOp", "BoundingBoxFormat", "Builder", "BuilderFlag", "CalibrationAlgoType", "CumulativeOperation",
    "DataType", "DeviceType", "DimensionOperation", "Dims", "Dims2", "Dims3", "Dims4", "DimsExprs", "DimsHW", "DynamicPluginTensorDesc",
    "ElementWiseOperation", "EngineCapability", "EngineInspector", "EngineStat", "ErrorCode", "ErrorCodeTRT", "ExecutionContextAllocationStrategy",
    "FillOperation", "GatherMode", "HardwareCompatibilityLevel", "IActivationLayer", "IAssertionLayer", "IAttention", "IBuilderConfig", "ICastLayer",
    "IConcatenationLayer", "IConstantLayer", "IConvolutionLayer", "ICudaEngine", "ICumulativeLayer", "IDebugListener", "IDeconvolutionLayer",
    "IDequantizeLayer",
    "IDimensionExpr", "IEinsumLayer", "IElementWiseLayer", "IErrorRecorder", "IExecutionContext", "IExprBuilder", "IFillLayer", "IGatherLayer",
    "IGridSampleLayer", "IHostMemory", "IIdentityLayer", "IIfConditional", "IInt8Calibrator", "IInt8EntropyCalibrator", "IInt8EntropyCalibrator2",
    "IInt8LegacyCalibrator", "IInt8MinMaxCalibrator", "ILRNLayer", "ILayer", "ILogger", "ILoop", "IMatrixMultiplyLayer", "INetworkDefinition",
    "INormalizationLayer", "IOneHotLayer", "IOptimizationProfile", "IOutputAllocator", "IPaddingLayer", "IParametricReLULayer", "IPluginCapability",
    "IPluginCreatorV3One", "IPluginRegistry", "IPluginV3", "IPluginV3Layer", "IPluginV3OneBuild", "IPluginV3OneCore", "IPluginV3OneRuntime",
    "IPoolingLayer", "IProfiler", "IProgressMonitor", "IQuantizeLayer", "IRaggedSoftMaxLayer", "IReduceLayer", "IResizeLayer",
    "IReverseSequenceLayer", "IRuntimeConfig", "IScaleLayer", "IScatterLayer", "ISelectLayer", "ISerializationConfig", "IShapeLayer", "IShuffleLayer",
    "ISliceLayer", "ISoftMaxLayer", "ISqueezeLayer", "IStreamReader", "IStreamReaderV2", "IStreamWriter", "ITensor", "ITimingCache", "ITopKLayer",
    "IUnaryLayer", "IUnsqueezeLayer", "InterpolationMode", "LayerInformationFormat", "LayerType", "Logger", "LoopOutput", "MatrixOperation",
    "MemoryPoolType", "NetworkDefinitionCreationFlag", "NotServedError", "OnnxParser", "OnnxParserFlag", "OnnxParserRefitter", "PaddingMode",
    "ParserError", "Permutation", "PluginCapabilityType", "PluginField", "PluginFieldCollection", "PluginFieldType", "PluginTensorDesc",
    "PoolingType", "PreviewFeature", "Profiler", "ProfilingVerbosity", "QuantizationFlag", "ReduceOperation", "Refitter",
    "ResizeCoordinateTransformation", "ResizeRoundMode", "ResizeSelector", "Runtime", "RuntimePlatform", "SampleMode", "ScaleMode", "ScatterMode",
    "SeekPosition", "SerializationFlag", "TacticSource", "TempfileControlFlag", "TensorFormat", "TensorIOMode", "TensorLocation", "TensorRTPhase",
    "TilingOptimizationLevel", "TopKOperation", "TripLimit", "UnaryOperation", "Weights", "WeightsRole", "connect_cuda_python", "connect_polygraphy",
    "coverage", "get_builder_plugin_registry", "get_plugin_registry", "init_libnvinfer_plugins", "install", "nptype", "use_backend", "volume",
]  # fmt: skip


def install() -> None:
    """Makes `import tensorrt` return this package in this process. Raises ImportError if another `tensorrt` is imported already."""
    module = sys.modules[__name__]
    if sys.modules.get("tensorrt", module) is not module:
        raise ImportError("NVIDIA's tensorrt is imported already: call whet.trt.install() before the first import of tensorrt")
    sys.modules["tensorrt"] = module


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    """True: whet's ops need no plugin library."""
    return True


def volume(shape: tuple[int, ...]) -> int:
    """The number of elements."""
    n = 1
    for d in shape:
        n *= d
    return n


def nptype(dtype: DataType) -> type:
    """The NumPy type of an element type."""
    return to_whet(dtype).numpy.type


def __getattr__(name: str) -> Any:
    if name == "bool":
        return DataType.BOOL  # as a global it would hide Python's bool in this module
    if name in REFUSED:
        raise NotServedError(f"tensorrt.{name}", REFUSED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; whet.trt.coverage() lists its names")


def __dir__() -> list[Any]:
    return sorted(__all__)
