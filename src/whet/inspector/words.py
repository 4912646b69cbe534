"""TensorRT's names of layer types, tensor formats and element types (source: TensorRT 10's engine inspector)."""

from __future__ import annotations

from whet.composites import COMPOSITES
from whet.engine.plan import Choice
from whet.network import Layer
from whet.ops import OPS
from whet.tactics import get_root_layer

TYPE = {
    "f32": "Float", "f16": "Half", "bf16": "BFloat16", "f8e4m3": "FP8", "f8e5m2": "FP8", "i8": "Int8", "i32": "Int32", "i64": "Int64",
    "bool": "Bool", "u8": "UInt8", "i4": "Int4", "f64": "Double", "i16": "Int16", "u16": "UInt16", "u32": "UInt32", "u64": "UInt64",
}  # fmt: skip
_LINEAR = {
    "f32": "Row major linear FP32", "f16": "Row major linear FP16 format", "bf16": "Row major linear BFloat16 format",
    "i8": "Row major Int8 format", "i32": "Row major linear Int32", "i64": "Row major linear Int64 format", "bool": "Row major linear BOOL",
    "u8": "Row major linear UInt8 format", "f8e4m3": "Row major linear FP8 format", "f8e5m2": "Row major linear FP8 format",
}  # fmt: skip
_CHANNEL_MAJOR = {  # type -> (TensorRT's name, multiples that have format names, True if the format without a multiple has one)
    "f32": ("FP32", (4,), True), "f16": ("FP16", (8, 4, 2), True), "bf16": ("BFloat16", (8, 4, 2), False), "i8": ("Int8", (4,), True),
    "u8": ("UInt8", (), True),
}  # fmt: skip
_POOLS = frozenset("MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool".split())
_SHUFFLES = frozenset("Reshape Transpose Flatten Squeeze Unsqueeze DepthToSpace SpaceToDepth".split())
_OTHER_TYPES = {
    "Reformat": "Reformat", "Identity": "NoOp", "Dropout": "NoOp", "Slice": "Slice", "Split": "Slice", "Resize": "Resize",
    "Upsample": "Resize", "Softmax": "SoftMax", "LogSoftmax": "SoftMax", "Concat": "Concatenation", "Gather": "Gather", "Cast": "Cast",
    "Pad": "Slice", "Expand": "Slice", "Tile": "Slice", "BatchNormalization": "Scale", "LayerNormalization": "Normalization",
    "InstanceNormalization": "Normalization", "GroupNormalization": "Normalization", "TopK": "TopK", "ArgMax": "TopK", "ArgMin": "TopK",
    "Shape": "shape_call", "ConstantOfShape": "Constant", "QuantizeLinear": "Scale", "DequantizeLinear": "Scale",
    "ConvTranspose": "CaskDeconvolutionV2", "Gemm": "CaskGemmMatrixMultiply", "MatMul": "CaskGemmMatrixMultiply", "LRN": "LRN",
    "GELU": "PointWiseV2", "LSTM": "RNNv2", "GRU": "RNNv2", "RNN": "RNNv2",
}  # fmt: skip


def get_head_op(layer: Layer) -> str:
    """The layer's op, or the composite kind of a fused layer."""
    return layer.composite or layer.op


def get_layer_type(layer: Layer, choice: Choice | None = None) -> str:
    """TensorRT's LayerType. A layer without a kernel launch (a view) is a NoOp."""
    op = get_head_op(layer)
    if choice is not None and choice.inplace and len(layer.outputs) == 1 and sum(o is not None for o in choice.inputs) == 1:
        if op in _SHUFFLES or choice.tactic.endswith("_view"):
            return "NoOp"  # tools remove NoOps, which therefore have one input and one output
    if op == "Conv":
        inner = [x.op for x in layer.regions["body"].layers] if layer.op == "Fused" else []
        if any(o in _POOLS for o in inner):
            return "CaskConvActPool"
        w = get_root_layer(layer).inputs[1]
        return "CudaDepthwiseConvolution" if w is not None and w.shape[1] == 1 and get_root_layer(layer).attrs["group"] > 1 else "CaskConvolution"
    if op in _POOLS:
        return "CaskPooling"
    if op in ("Silu", "GELU") or (op in OPS and OPS[op].pointwise and op not in _OTHER_TYPES):
        return "PointWiseV2"
    if op in _SHUFFLES:
        return "Shuffle"
    if op.startswith("Reduce"):
        return "Reduce"
    if layer.composite in COMPOSITES and layer.composite not in OPS:
        return COMPOSITES[layer.composite].layer_type
    return _OTHER_TYPES.get(op, "kgen")


def format_words(fmt: str, dtype: str, shape: tuple[int, ...]) -> str:
    """The `Format/Datatype` text. The type name alone for formats that TensorRT lacks; its tools accept that."""
    if fmt == "linear":
        return _LINEAR.get(dtype, TYPE.get(dtype, dtype))
    channels = shape[1] if len(shape) > 1 else 1
    if fmt == "nhwc" and dtype in _CHANNEL_MAJOR and len(shape) == 4:
        word, multiples, alone = _CHANNEL_MAJOR[dtype]
        for n in multiples:
            if channels % n == 0:
                return f"Channel major {word} format where channel % {n} == 0"
        if alone:
            return f"Channel major {word} format"
    if fmt == "nChw16c" and dtype == "f16":
        return "Sixteen wide channel vectorized row major FP16 format"
    return TYPE.get(dtype, dtype)


def get_type_word(dtype: str) -> str:
    """TensorRT's name of a weight type: `Half`, `Float`, ..."""
    return TYPE.get(dtype, dtype)
