"""Error texts for unsupported nodes: the reason and the nearest workaround."""

from __future__ import annotations

from onnx import defs

from whet.errors import UnsupportedError
from whet.plugin_packages import make_advice
from whet.registry import suggest_name

DAMAGED = "The model is damaged: copy it again, or export it again."

_ORT = (
    "ONNX Runtime's own op: the model was saved after its graph optimizer (or quantizer) ran. "
    "Give the model as it was before, or save it with ORT's graph optimization level 'disable' or 'basic'"
)
_LAYOUT = (
    "ONNX Runtime's own layout for one CPU: the model was saved after its graph optimizer ran at the level 'all'. "
    "Give the model as it was before, or save it with ORT's graph optimization level 'extended'"
)
_TENSORRT = "a plugin of TensorRT, which only TensorRT has"
_NMS = "Export the model without the selection of boxes (without end2end, nms or similar options), or with ONNX's NonMaxSuppression"
_DOMAINS = {
    "com.microsoft": _ORT,
    "com.microsoft.nchwc": _LAYOUT,
    "com.microsoft.experimental": _ORT,
    "ai.onnx.ml": "a classical machine-learning op (trees, scalers, text): run it before or after the network, with ONNX Runtime",
    "ai.onnx.training": "a training op: export the model for inference",
    "ai.onnx.preview.training": "a training op: export the model for inference",
    "ai.onnx.contrib": "an op of onnxruntime-extensions (text, audio, images): run it before or after the network, with ONNX Runtime",
    "org.pytorch.aten": "PyTorch's exporter found no ONNX op: export with a newer opset (17 or more), or with dynamo=True",
    "aten": "PyTorch's exporter found no ONNX op: export with a newer opset (17 or more), or with dynamo=True",
    "prim": "PyTorch's exporter found no ONNX op: export with a newer opset (17 or more), or with dynamo=True",
}
_PLUGINS = {
    "EfficientNMS_TRT": _NMS, "EfficientNMS_ONNX_TRT": _NMS, "EfficientNMS_Explicit_TF_TRT": _NMS, "EfficientNMS_Implicit_TF_TRT": _NMS,
    "BatchedNMS_TRT": _NMS, "BatchedNMSDynamic_TRT": _NMS, "NMS_TRT": _NMS, "YoloNMS_TRT": _NMS,
}  # fmt: skip
_OPS = {
    "ImageDecoder": "decode images before the network",
    "StringNormalizer": "do the text processing before the network",
    "TfIdfVectorizer": "do the text processing before the network",
    "RegexFullMatch": "do the text processing before the network",
}


def format_op(domain: str, op: str) -> str:
    """`com.microsoft.FusedConv`, or plain `Conv`."""
    return f"{domain}.{op}" if domain else op


def make_unsupported_error(name: str, domain: str, op: str, reason: str) -> UnsupportedError:
    """The error for one node with reason and workaround."""
    return UnsupportedError(f"node '{name}' ({format_op(domain, op)}): {reason}{'' if reason.endswith(('.', '!', '?')) else '.'}")


def why_no_reader(domain: str, op: str, known, before: tuple[str, ...] = ()) -> str:
    """The reason and workaround for an op without a reader."""
    if op in _PLUGINS or (not domain and op.endswith("_TRT")):
        return f"{_TENSORRT}. {_PLUGINS.get(op, 'Export with standard ops')}.{make_advice()}"
    if domain:
        return _DOMAINS.get(
            domain,
            f"the domain {domain!r} is not ONNX's own.{make_advice()} Or export with standard ops, or with the op as an ONNX function",
        )
    if op in _OPS:
        return f"whet has no such op; {_OPS[op]}"
    cut = f" Or end the network before it, at {', '.join(repr(b) for b in before)} (onnx.utils.extract_model)." if before else ""
    if not defs.has(op):
        return f"ONNX has no op of this name.{suggest_name(op, known)} Export the model again"
    return f"whet has no such op. To add it, write src/whet/ops/{_convert_to_snake(op)}.py.{cut}"


def _convert_to_snake(op: str) -> str:
    out = ""
    for i, ch in enumerate(op):
        if ch.isupper() and i and not op[i - 1].isupper():
            out += "_"
        out += ch.lower()
    return out
