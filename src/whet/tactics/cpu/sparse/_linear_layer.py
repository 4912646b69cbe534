"""A Gemm, MatMul or 1x1 convolution as rows times a constant 2:4 matrix: sizes, epilogue, declared results for NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.tactics._fused import EpilogueStep, get_root_layer, get_weight_and_bias, outer_input
from whet.tactics._matrix_product import why_not_gemm


@dataclass
class Epilogue:
    """Constants that are added per channel before anything else, the other steps ("Add", "Relu", "Silu", "Gelu"), and the input index of the
    residual that "Add" adds."""

    biases: list[Tensor] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    residual: int | None = None


def match_epilogue(layer: Layer, chain: Sequence[EpilogueStep] | None) -> Epilogue | str:
    """The epilogue, or why the kernels cannot compute it."""
    if chain is None:
        return "its fused operations do not form a chain"
    out, epilogue = layer.outputs[0].shape, Epilogue()
    axis = get_output_channel_axis(layer)
    for step in chain:
        other = step.other_tensor
        if other is None:
            name = "Silu" if step.op == "Swish" and float(step.attrs.get("alpha", 1.0)) == 1.0 else step.op
            if name not in ("Relu", "Silu", "Gelu") or (name == "Gelu" and step.attrs.get("approximate", "none") != "none"):
                return f"computes no {step.op} in its epilogue"
            epilogue.steps.append(name)
        elif step.op != "Add":
            return f"computes no {step.op} with two operands in its epilogue"
        elif other.is_constant:
            full = (1,) * (len(out) - other.type.rank) + tuple(other.shape)
            if epilogue.steps or len(full) != len(out) or any(d != (out[i] if i == axis else 1) for i, d in enumerate(full)):
                return f"an Add of a constant of shape {list(map(str, other.shape))} is not a bias"
            epilogue.biases.append(other)
        elif other.shape != out or epilogue.residual is not None:
            return "takes one residual, of the result's shape"
        else:
            epilogue.residual = step.other
            epilogue.steps.append("Add")
    return epilogue


def get_output_channel_axis(layer: Layer) -> int:
    """The axis of the output channels."""
    return 1 if get_root_layer(layer).op == "Conv" else layer.outputs[0].type.rank - 1


def why_not_linear(layer: Layer) -> str | None:
    """Why a Gemm, MatMul or Conv is no product of rows with a constant matrix, or None."""
    head = get_root_layer(layer)
    if head.op != "Conv":
        return why_not_gemm(layer)
    a = head.attrs
    if a["group"] != 1 or set(a.get("strides") or (1,)) != {1} or any(a.get("pads") or (0,)) or any(d != 1 for d in head.needs(1).shape[2:]):
        return "takes 1x1 convolutions with one group, no strides, no pads"
    if any(not layer.needs(i).is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
        return "the weights are computed at run time"
    return None


def convert_to_matrix(layer: Layer, weights: np.ndarray) -> np.ndarray:
    """Constant weights as [output channel, input]."""
    head = get_root_layer(layer)
    if head.op == "Conv":
        return weights.reshape(weights.shape[:2])
    return weights if head.op == "Gemm" and head.attrs.get("transB") else weights.T


def get_matrix_sizes(layer: Layer) -> tuple[int, int, int]:
    """Rows, inputs of a row and output channels."""
    out, axis = static_shape(layer.outputs[0].shape), get_output_channel_axis(layer)
    shape = static_shape(get_weight_and_bias(layer)[0].shape)
    return prod(out) // out[axis], prod(shape) // out[axis], out[axis]


def skip_zero_weights(
    reference: Callable[..., np.ndarray], layer: Layer, x: np.ndarray, weights: np.ndarray, *other_inputs: np.ndarray | None
) -> np.ndarray:
    """The product without the terms of zero weights: NaN and infinity in an input do not reach the outputs whose weights for it are zero."""
    odd = ~np.isfinite(x)
    y = np.array(reference(layer, np.where(odd, x.dtype.type(0), x), weights, *other_inputs))

    def find_reached(inputs: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return reference(layer, inputs.astype(x.dtype), chosen.astype(weights.dtype)) > 0.5

    up, down = (find_reached(x == s, weights > 0) | find_reached(x == -s, weights < 0) for s in (np.inf, -np.inf))
    y[up], y[down] = np.inf, -np.inf
    y[(up & down) | find_reached(np.isnan(x), weights != 0)] = np.nan
    return y
