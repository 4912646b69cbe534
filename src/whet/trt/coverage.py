"""The names of TensorRT's Python API: which are served, and why the others are not."""

from __future__ import annotations

import importlib

_PLUGIN = "TensorRT's plugins launch kernels of their own; an op of one's own is a file of whet.ops with a reference and tactics"
_ALLOCATOR = "the backend allocates memory itself"

REFUSED: dict[str, str] = {
    "IPluginV2": _PLUGIN, "IPluginV3": _PLUGIN, "IPluginCreatorV3One": _PLUGIN, "get_plugin_registry": _PLUGIN,
    "IGpuAllocator": _ALLOCATOR, "IGpuAsyncAllocator": _ALLOCATOR,
    "IDebugListener": "inner tensors are not reported; mark them as outputs",
    "IAlgorithmSelector": "TensorRT 11 removed it; `whet build --lock` repeats a selection",
    "IAttentionInputLayer": "add_attention returns the attention",
    "ILoop": "loops are read from ONNX only",
}  # fmt: skip


def coverage() -> dict[str, str]:
    """Prints and returns TensorRT's names with "served" or the reason for which they are not."""
    package = importlib.import_module("whet.trt")
    table = dict.fromkeys(package.__all__, "served") | {name: f"not served: {why}" for name, why in REFUSED.items()}
    for name, state in sorted(table.items()):
        print(f"{name:36} {state}")
    return table
