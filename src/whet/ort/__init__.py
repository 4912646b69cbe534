"""ONNX Runtime's Python API on whet's engines: `import whet.ort as ort` in place of `import onnxruntime as ort`.

    import whet.ort as ort

    session = ort.InferenceSession("model.onnx")
    (scores,) = session.run(None, {session.get_inputs()[0].name: array})

A session builds a verified engine for the shapes that it meets, on the first call if the model has dynamic shapes. Keyword arguments go to
`whet.build`: `InferenceSession("model.onnx", bf16=True, shapes={"x": ((1, 3, 224, 224), (8, 3, 224, 224), (32, 3, 224, 224))})`.
"""

from whet.ort.options import ExecutionMode, GraphOptimizationLevel, RunOptions, SessionOptions
from whet.ort.providers import get_available_providers, get_device, set_default_logger_severity
from whet.ort.session import InferenceSession, NodeArg
from whet.ort.values import IOBinding, OrtValue

__all__ = [
    "ExecutionMode", "GraphOptimizationLevel", "IOBinding", "InferenceSession", "NodeArg", "OrtValue", "RunOptions", "SessionOptions",
    "get_available_providers", "get_device", "set_default_logger_severity",
]  # fmt: skip
