"""Layers that are products of 16-bit floats with constant weights: convolutions of images, Gemm, and MatMul with a constant matrix on the right."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import Signature
from whet.tactics._fused import get_root_layer, get_weight_and_bias, outer_input
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu.conv._product_kernel import ProductKernel, Window
from whet.tactics.cpu.conv._small_float_tactic import SmallFloatTactic


class ProductTactic(SmallFloatTactic):
    """A tactic whose kernels multiply pairs of consecutive values."""

    kernel: ClassVar[type[ProductKernel]]
    least_rows = 1


class ConvProduct(ProductTactic):
    """A convolution, channels last."""

    ops = ("Conv",)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(i is None or not layer.needs(i).is_constant for t in head.inputs[1:] if t is not None for i in [outer_input(layer, t)]):
            return "the weights are computed at run time"
        a, x, w = head.attrs, head.needs(0), head.needs(1)
        if x.type.rank != 4 or a["group"] != 1 or set(a.get("dilations") or (1,)) != {1}:
            return "takes convolutions of images with one group, no dilations"
        if not x.type.static or w.shape[2] != w.shape[3] or len(set(a.get("strides") or (1,))) != 1:
            return "takes square windows, and one stride for both axes"
        window = _make_window(head)
        if window.samples * window.product_rows < self.least_rows:
            return f"takes {self.least_rows} pixels or more"
        return "takes an even number of channels" if int(w.shape[1]) % 2 else None

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> ProductKernel:
        head = get_root_layer(layer)
        window = _make_window(head)
        if window.side == window.stride == 1 and not any(head.attrs.get("pads") or (0,)):
            pixels = window.samples * window.product_rows
            return self.kernel(layer, signature, chain, pixels, *get_weight_and_bias(layer), flatten_taps, threads)
        return self.kernel(layer, signature, chain, window.product_rows, *get_weight_and_bias(layer), flatten_taps, threads, window)


class LinearProduct(ProductTactic):
    """A product of rows, row-major."""

    ops = ("Gemm", "MatMul")
    format = "linear"

    def why_not_layer(self, layer: Layer) -> str | None:
        if reason := why_not_gemm(layer):
            return reason
        *leading, inner = static_shape(get_root_layer(layer).needs(0).shape)
        if prod(leading) < self.least_rows:
            return f"takes {self.least_rows} rows or more"
        return "takes an even inner dimension" if inner % 2 else None

    def find_chain(self, layer: Layer) -> Chain | str:
        has_bias = get_root_layer(layer).input(2) is not None  # of a Gemm
        return match_chain(layer, takes_bias=not has_bias)

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> ProductKernel:
        head = get_root_layer(layer)
        to_matrix = transpose_matrix if head.op == "Gemm" and head.attrs.get("transB") else keep_matrix
        rows = prod(static_shape(head.needs(0).shape)[:-1])
        weights, bias = get_weight_and_bias(layer)
        return self.kernel(layer, signature, chain, rows, weights, bias or chain.bias, to_matrix, threads)


def _make_window(head: Layer) -> Window:
    samples, _, height, width = static_shape(head.needs(0).shape)
    rows, columns = static_shape(head.outputs[0].shape)[2:]
    pads = tuple(head.attrs.get("pads") or (0,) * 4)
    stride = int((head.attrs.get("strides") or (1,))[0])
    return Window(static_shape(head.needs(1).shape)[2], stride, (pads[0], pads[1]), samples, height, width, rows, columns)


def flatten_taps(w: np.ndarray) -> np.ndarray:
    """[tap, channel] by results, from [result, channel, row, column]."""
    return w.transpose(2, 3, 1, 0).reshape(-1, len(w))


def keep_matrix(w: np.ndarray) -> np.ndarray:
    return w


def transpose_matrix(w: np.ndarray) -> np.ndarray:
    """[inner, results] from [results, inner]."""
    return w.T
