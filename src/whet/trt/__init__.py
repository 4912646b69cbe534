"""TensorRT 10's Python API over whet, on the CPU backend: `import whet.trt as trt`, or `whet.trt.install()` for scripts that import `tensorrt`.

Device addresses are host addresses. Names that are not served raise NotServedError with the reason; `coverage()` lists all.
"""

from __future__ import annotations

import sys
from typing import Any

from whet.trt.builder import Builder
from whet.trt.config import IBuilderConfig, ITimingCache
from whet.trt.context import IExecutionContext, IOutputAllocator
from whet.trt.coverage import REFUSED, coverage
from whet.trt.enums import (
    ActivationType,
    BuilderFlag,
    DataType,
    DeviceType,
    ElementWiseOperation,
    LayerInformationFormat,
    LayerType,
    MatrixOperation,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParserFlag,
    ProfilingVerbosity,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
    UnaryOperation,
    to_whet,
)
from whet.trt.errors import NotServedError
from whet.trt.host_memory import connect_polygraphy
from whet.trt.inspector import EngineInspector
from whet.trt.layers import IConvolutionLayer, IDeconvolutionLayer, ILayer, IPoolingLayer, IResizeLayer, ISliceLayer, ITensor
from whet.trt.logger import ILogger, Logger
from whet.trt.network import INetworkDefinition
from whet.trt.parser import OnnxParser, ParserError
from whet.trt.profile import IOptimizationProfile
from whet.trt.runtime import ICudaEngine, IHostMemory, IStreamReader, Runtime

__version__ = "10.16.0"  # the version of TensorRT whose API this follows

Dims = tuple
Permutation = tuple
float32, float16, bfloat16, fp8 = DataType.FLOAT, DataType.HALF, DataType.BF16, DataType.FP8
int8, uint8, int32, int64, int4 = DataType.INT8, DataType.UINT8, DataType.INT32, DataType.INT64, DataType.INT4

__all__ = [
    "ActivationType", "Builder", "BuilderFlag", "DataType", "DeviceType", "Dims", "ElementWiseOperation", "EngineInspector", "IBuilderConfig",
    "IConvolutionLayer", "ICudaEngine", "IDeconvolutionLayer", "IExecutionContext", "IHostMemory", "ILayer", "ILogger",
    "INetworkDefinition", "IOptimizationProfile", "IOutputAllocator", "IPoolingLayer", "IResizeLayer", "ISliceLayer", "IStreamReader",
    "ITensor", "ITimingCache", "LayerInformationFormat", "LayerType", "Logger", "MatrixOperation", "MemoryPoolType",
    "NetworkDefinitionCreationFlag", "NotServedError", "OnnxParser", "OnnxParserFlag", "ParserError", "Permutation", "ProfilingVerbosity",
    "Runtime", "TensorFormat", "TensorIOMode", "TensorLocation", "UnaryOperation", "connect_polygraphy", "coverage",
    "init_libnvinfer_plugins", "install", "nptype", "volume",
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
