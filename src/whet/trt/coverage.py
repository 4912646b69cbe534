"""The names of TensorRT's Python API: which are served, and why the others are not."""

from __future__ import annotations

import importlib

_CALIBRATOR = "calibrators are not connected yet; whet.builder.build_int8 calibrates"
_PLUGIN = "plugins are not connected yet"
_REFIT = "engines are not refitted in place yet; build again, tactics come from the timing cache"
_ALLOCATOR = "the backend allocates memory itself"

REFUSED: dict[str, str] = {
    "IInt8Calibrator": _CALIBRATOR, "IInt8EntropyCalibrator": _CALIBRATOR, "IInt8EntropyCalibrator2": _CALIBRATOR,
    "IInt8MinMaxCalibrator": _CALIBRATOR, "IInt8LegacyCalibrator": _CALIBRATOR,
    "IPluginV2": _PLUGIN, "IPluginV3": _PLUGIN, "IPluginCreatorV3One": _PLUGIN, "get_plugin_registry": _PLUGIN,
    "Refitter": _REFIT, "OnnxParserRefitter": _REFIT,
    "IGpuAllocator": _ALLOCATOR, "IGpuAsyncAllocator": _ALLOCATOR,
    "IProgressMonitor": "the progress of a build is not reported through this interface yet",
    "IProfiler": "layer times are not reported through this interface yet; whet.runtime.Context.profile measures them",
    "IDebugListener": "inner tensors are not reported; mark them as outputs",
    "IErrorRecorder": "errors go to the logger",
    "IStreamReaderV2": "IStreamReader is served",
    "IStreamWriter": "engines are returned as bytes",
    "IAlgorithmSelector": "TensorRT 11 removed it; `whet build --lock` repeats a selection",
    "ILoop": "loops are read from ONNX only",
}  # fmt: skip


def coverage() -> dict[str, str]:
    """Prints and returns TensorRT's names with "served" or the reason for which they are not."""
    package = importlib.import_module("whet.trt")
    table = dict.fromkeys(package.__all__, "served") | {name: f"not served: {why}" for name, why in REFUSED.items()}
    for name, state in sorted(table.items()):
        print(f"{name:36} {state}")
    return table
