"""One layer in the JSON form of TensorRT's inspector, followed by additional keys."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from whet.engine import Candidate
from whet.errors import BuildError
from whet.inspector.facts import LayerFacts
from whet.inspector.sparse_layers import layer_sparsity
from whet.inspector.words import format_words, get_head_op, get_layer_type, get_type_word
from whet.network import Layer, Tensor, static_shape
from whet.tactics import find_epilogue_steps, get_root_layer, is_quantized, outer_input, remove_quantization

_ACTIVATIONS = {
    "Relu": "RELU", "Silu": "SWISH", "Swish": "SWISH", "Clip": "CLIP", "LeakyRelu": "LEAKY_RELU", "Sigmoid": "SIGMOID", "Tanh": "TANH",
    "Elu": "ELU", "Selu": "SELU", "HardSigmoid": "HARD_SIGMOID", "Softplus": "SOFTPLUS", "Gelu": "GELU_ERF",
}  # fmt: skip
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sum")
_SEPARATOR = "\x1e"  # between source nodes in Metadata


def make_layer_object(f: LayerFacts) -> dict[str, Any]:
    """The JSON object of a layer, detailed."""
    ins = [_describe_tensor(t, o) for t, o in zip(f.layer.inputs, f.choice.inputs, strict=True) if t is not None and (o or not t.is_constant)]
    outs = [_describe_tensor(t, o) for t, o in zip(f.layer.outputs, f.choice.outputs, strict=True)]
    if get_head_op(f.layer) in ("Conv", "ConvTranspose"):
        for t in (*ins, *outs):
            t["Dimensions"] += [1] * (len(t["Dimensions"]) == 3)
    keys: dict[str, Any] = {
        "Name": f.name,
        "LayerType": get_layer_type(f.layer, f.choice),
        "Inputs": ins,
        "Outputs": outs,
        **_describe_parameters(f),
        "TacticName": f.choice.implementation or f.choice.tactic,
        "TacticValue": "0x" + hashlib.sha256(f"{f.choice.tactic} {f.choice.config}".encode()).hexdigest()[:16],
        "StreamId": 0,
        "Metadata": _SEPARATOR.join(f"[ONNX Layer: {s}]" for s in f.layer.sources),
    }
    return keys | _make_additional_keys(f)


def _describe_tensor(t: Tensor, o: tuple[str, str] | None) -> dict[str, Any]:
    fmt, dtype = o or ("linear", t.dtype.name)
    shape = static_shape(t.shape)
    return {
        "Name": t.name,
        "Location": "Device",
        "Dimensions": list(shape),
        "Format/Datatype": format_words(fmt, dtype, shape),
        "Format": fmt,
        "Datatype": dtype,
    }


def _make_additional_keys(f: LayerFacts) -> dict[str, Any]:
    """Keys that TensorRT's inspector lacks: time, memory traffic, operations, bound, 2:4 sparsity, runner-up and refusals."""
    runner = f.runner_up
    sparsity = layer_sparsity(f)
    return {
        "Tactic": f.choice.tactic,
        "TacticConfig": {k: v for k, v in f.choice.config},
        "TimeMs": f.ms,
        "Bytes": f.bytes,
        "WeightBytes": f.weight_bytes,
        "FLOPs": f.flops,
        "Bound": f.bound,
        "Sparsity": None if sparsity is None else sparsity.to_json(),
        "RunnerUp": None if runner is None else _describe_candidate(f, runner),
        "ChosenAloneMs": f.chosen.ms if f.chosen else None,
        "ChosenColdWeightsMs": f.cold(f.chosen),
        "CandidatesTimed": sum(c.ms is not None for c in f.candidates),
        "Refused": [{"Tactic": c.tactic, "Formats": c.signature, "Reason": c.reason} for c in f.refused if c.signature],
    }


def _describe_candidate(f: LayerFacts, c: Candidate) -> dict[str, Any]:
    times = {"TimeMs": c.ms, "ColdWeightsMs": f.cold(c)}
    return {"Tactic": c.tactic, "TacticName": c.implementation, "Formats": c.signature, **times, "Why": c.reason}


def _describe_parameters(f: LayerFacts) -> dict[str, Any]:
    """The keys specific to the layer type."""
    op, kind = get_head_op(f.layer), get_layer_type(f.layer, f.choice)
    if kind in ("NoOp", "Constant"):
        return {}  # tools drop these by LayerType, and keep layers that have a ParameterType
    if op in ("Conv", "ConvTranspose"):
        return _describe_convolution(f)
    if op in ("Gemm", "MatMul"):
        return _describe_product(f)
    if kind == "CaskPooling":
        return _describe_pooling(get_root_layer(_dequantize(f.layer)))
    if kind == "Reformat":
        a = f.layer.attrs
        return {"ParameterType": "Reformat", "Origin": "REFORMAT" if a["source_dtype"] == a["dtype"] else "CAST"}
    if kind == "PointWiseV2":
        return _describe_pointwise(f.layer)
    if kind == "Shuffle":
        return _shuffle(f.layer)
    if kind == "Resize":
        a = f.layer.attrs
        return {
            "ParameterType": "Resize",
            "ResizeMode": f"k{str(a.get('mode', 'nearest')).upper()}",
            "ResizeScales": _read_scales(f.layer),
            "NNRounding": str(a.get("nearest_mode", "round_prefer_floor")),
            "CoordTransform": str(a.get("coordinate_transformation_mode", "half_pixel")),
        }
    return {}


def _describe_convolution(f: LayerFacts) -> dict[str, Any]:
    layer = _dequantize(f.layer)
    head = get_root_layer(layer)
    a, w = head.attrs, head.needs(1)
    r = w.type.rank - 2
    flat = int(r == 1)  # TensorRT represents 1-D convolutions as 2-D
    kernel = [int(d) for d in w.shape[2:]]
    pads = [int(p) for p in a.get("pads") or (0,) * 2 * r]
    out = head.op == "ConvTranspose"
    maps = int(w.shape[1]) * a["group"] if out else int(w.shape[0])
    weight = _find_outer_constant(layer, w)
    bias = head.input(2)
    activation, residual, dynamic = _describe_epilogue(layer)
    stored = _get_stored_type(f)
    return {
        "ParameterType": "Convolution",  # also for ConvTranspose, which tools recognize by LayerType
        "Kernel": kernel + [1] * flat,
        "PaddingMode": "kEXPLICIT_ROUND_DOWN",
        "PrePadding": pads[:r] + [0] * flat,
        "PostPadding": pads[r:] + [0] * flat,
        "Stride": [int(s) for s in a.get("strides") or (1,) * r] + [1] * flat,
        "Dilation": [int(d) for d in a.get("dilations") or (1,) * r] + [1] * flat,
        "OutMaps": maps,
        "Groups": int(a["group"]),
        "Weights": {"Type": _get_weight_type(weight, stored), "Count": _count(w)},
        "Bias": {"Type": _get_weight_type(_find_outer_constant(layer, bias) if bias is not None else None, stored), "Count": _count(bias)},
        "HasBias": int(bias is not None),
        "HasReLU": int(activation == "RELU"),
        "HasSparseWeights": int(weight is not None and has_two_of_four(weight.array(), 0 if out else 1)),
        "HasDynamicFilter": int(weight is None),
        "HasDynamicBias": int(bias is not None and _find_outer_constant(layer, bias) is None),
        "HasResidual": int(residual is not None),
        "ConvXAsActInputIdx": -1,
        "BiasAsActInputIdx": -1,
        "ResAsActInputIdx": -1,
        "Activation": activation,
        **dynamic,
    }


def _describe_product(f: LayerFacts) -> dict[str, Any]:
    layer = _dequantize(f.layer)
    head = get_root_layer(layer)
    b = head.needs(1)
    weight = _find_outer_constant(layer, b)
    activation, residual, extra = _describe_epilogue(layer)
    c = head.input(2)
    transposed = bool(head.attrs.get("transB"))
    keys: dict[str, Any] = {
        "ParameterType": "MatrixMultiply",
        "MatrixOpA": "kTRANSPOSE" if head.attrs.get("transA") else "kNONE",
        "MatrixOpB": "kTRANSPOSE" if transposed else "kNONE",
        "Alpha": float(head.attrs.get("alpha", 1.0)),
        "Beta": float(head.attrs.get("beta", 1.0)) if c is not None else 0.0,
        "HasBias": int(c is not None),
        "HasReLU": int(activation == "RELU"),
        "HasResidual": int(residual is not None),
        "HasSparseWeights": int(weight is not None and has_two_of_four(weight.array(), -1 if transposed else -2)),
        "Activation": activation,
        **extra,
    }
    if weight is not None:
        keys["Weights"] = {"Type": _get_weight_type(weight, _get_stored_type(f)), "Count": _count(b)}
    if c is not None:
        keys["Bias"] = {"Type": _get_weight_type(_find_outer_constant(layer, c), _get_stored_type(f)), "Count": _count(c)}
    return keys


def _describe_pooling(layer: Layer) -> dict[str, Any]:
    a = layer.attrs
    x = layer.needs(0)
    spatial = [int(d) for d in static_shape(x.shape)[2:]]
    whole = layer.op.startswith("Global")
    r = len(spatial)
    pads = [int(p) for p in a.get("pads") or (0,) * 2 * r]
    return {
        "ParameterType": "Pooling",
        "PoolingType": "AVERAGE" if "Average" in layer.op else "MAX",
        "WindowSize": spatial if whole else [int(k) for k in a.get("kernel_shape", spatial)],
        "AverageCountExcludesPadding": int("Average" in layer.op and not a.get("count_include_pad")),
        "PaddingMode": "kEXPLICIT_ROUND_UP" if a.get("ceil_mode") else "kEXPLICIT_ROUND_DOWN",
        "PrePadding": pads[:r],
        "PostPadding": pads[r:],
        "Stride": [1] * r if whole else [int(s) for s in a.get("strides") or (1,) * r],
        "BlendFactor": 0,
    }


def _describe_pointwise(layer: Layer) -> dict[str, Any]:
    inner = layer.regions["body"].layers if layer.op == "Fused" else [layer]
    args = [f"arg{i}" for i in range(len(layer.inputs))]
    names = {t: args[i] for i, t in enumerate(layer.regions["body"].inputs if layer.op == "Fused" else layer.inputs) if t is not None}
    operations = []
    for k, x in enumerate(inner):
        given = ", ".join(names.get(t, t.name) for t in x.inputs if t is not None)
        operations.append(f"auto const tmp{k} = whet::{x.op}({given});")
        for t in x.outputs:
            names[t] = f"tmp{k}"
    return {
        "ParameterType": "PointWise",
        "ParameterSubType": "PointWiseExpression",
        "NbInputArgs": len(args),
        "InputArgs": args,
        "NbOutputVars": len(layer.outputs),
        "OutputVars": [names[t] for t in (layer.regions["body"].outputs if layer.op == "Fused" else layer.outputs)],
        "NbParams": 0,
        "Params": [],
        "NbLiterals": 0,
        "Literals": [],
        "NbOperations": len(operations),
        "Operations": operations,
    }


def _shuffle(layer: Layer) -> dict[str, Any]:
    x = layer.inputs[0] if layer.inputs else None
    rank = x.type.rank if x is not None else 0
    return {
        "ParameterType": "Shuffle",
        "FirstTranspose": [int(p) for p in layer.attrs.get("perm", range(rank))] if layer.op == "Transpose" else list(range(rank)),
        "SecondTranspose": list(range(layer.outputs[0].type.rank)),
        "Reshape": "nbDims=0" if layer.op == "Transpose" else f"nbDims={layer.outputs[0].type.rank}",
        "ZeroIsPlaceholder": 0,
    }


def _read_scales(layer: Layer) -> list[float]:
    x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    return [b / a if a else 0.0 for a, b in zip(x, y, strict=True)]


def _dequantize(layer: Layer) -> Layer:
    """The floating-point layer that a quantized layer implements; other layers unchanged."""
    result = remove_quantization(layer) if is_quantized(layer) else layer
    return layer if isinstance(result, str | Layer) else result.layer


def _describe_epilogue(layer: Layer) -> tuple[str, int | None, dict[str, Any]]:
    """(TensorRT's name of the activation, input index of the residual, keys with the whole epilogue)."""
    steps = find_epilogue_steps(layer)
    if not steps:
        return "NONE", None, {}
    added = [s for s in steps if s.op in ("Add", "Sum") and s.other_tensor is not None and not s.other_tensor.is_constant]
    residual = added[0].other if added else None
    acts = [_ACTIVATIONS.get(s.op, s.op.upper()) for s in steps if s.op in _ACTIVATIONS or (s.other is None and s.op not in _ARITHMETIC)]
    return (acts[-1] if acts else "NONE"), residual, {"Epilogue": [s.op for s in steps]}


def _get_weight_type(t: Tensor | None, computed: str) -> str:
    """The type of integer weights; for floating-point weights the compute type of the kernel (float for quantized layers)."""
    if t is not None and t.weight is not None and not t.weight.type.dtype.is_float:
        return get_type_word(t.weight.type.dtype.name)
    return get_type_word(computed if computed in ("f32", "f16", "bf16", "f64") else "f32")


def _get_stored_type(f: LayerFacts) -> str:
    """The compute type of the kernel: that of its first stored operand."""
    return next((o[1] for o in (*f.choice.inputs, *f.choice.outputs) if o is not None), "f32")


def _find_outer_constant(layer: Layer, inner: Tensor) -> Tensor | None:
    """The constant bound to an inner tensor of a fused layer; None if it is not constant."""
    try:
        i = outer_input(layer, inner)
    except BuildError:
        return None
    t = layer.inputs[i] if i is not None else None
    return t if t is not None and t.is_constant else None


def _count(t: Tensor | None) -> int:
    return int(np.prod(static_shape(t.shape))) if t is not None else 0


def has_two_of_four(a: np.ndarray, axis: int) -> bool:
    """True for 2:4 sparsity along the reduction axis, which TensorRT calls sparse weights: at most two nonzeros in each group of four."""
    n = a.shape[axis]
    if n % 4 or not a.size:
        return False
    moved = np.moveaxis(a, axis, -1)
    return bool((np.count_nonzero(moved.reshape(*moved.shape[:-1], n // 4, 4), axis=-1) <= 2).all())
