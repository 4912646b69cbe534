"""Quantized Gemm and MatMul with constant weights on Hopper's tensor cores: the quantized convolution with one pixel a row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Config, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import GpuKernel
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv._conv_config import list_configs
from whet.tactics.cuda.quantized._quantized import get_weight_bytes, list_signatures, match_parts, why_not_weighted
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic
from whet.tactics.cuda.quantized.qconv import list_product_configs, plan_product, refuses_product, why_not_float8


@tactic
class QGemm(QuantizedTactic):
    """Row-major operands, inner size in sixteens; the second matrix constant."""

    ops = ("Gemm", "MatMul")
    float8 = True

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        x, y = parts.head.needs(0), parts.head.outputs[0]
        return why_not_weighted(parts) or why_not_rows(parts) or why_not_float8(parts, (x.shape[-1], y.shape[-1]))

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        return list_signatures(parts, "linear")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        return parts if isinstance(parts, str) else refuses_product(parts, get_row_shape(parts), backend, layer.outputs[0].type.rank - 1)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        s = get_row_shape(parts)
        configs = list_configs(s.m, s.k, s.c, 1, backend.capabilities.multiprocessors, 1)
        return list_product_configs(parts, s, signature, configs, backend, layer.outputs[0].type.rank - 1)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        if isinstance(parts, str):
            raise PlanRefused(parts)
        last = layer.outputs[0].type.rank - 1
        return plan_product(layer, parts, get_row_shape(parts), signature, config, backend, lambda: filter_matrix(parts), "gemm", last)


def why_not_rows(parts: Parts) -> str | None:
    """Why a product is not of rows by a constant matrix, or None."""
    head = parts.head
    x, w = head.needs(0), head.needs(1)
    if x.type.rank < 2 or w.type.rank != 2:
        return "takes rows by one matrix"
    if head.op == "Gemm" and (head.attrs.get("transA") or head.attrs.get("alpha", 1.0) != 1.0 or head.attrs.get("beta", 1.0) != 1.0):
        return "transA, alpha and beta are for float products"
    c = head.input(2)
    if c is not None and prod(static_shape(c.shape)) != static_shape(head.outputs[0].shape)[-1]:
        return "C is not a row"
    return None


def filter_matrix(parts: Parts) -> np.ndarray:
    """The integers of the second matrix as filters [k, c, 1, 1]."""
    given = get_weight_bytes(parts.view.needs(parts.operand_indices()[1]))
    transposed = parts.head.op == "MatMul" or not parts.head.attrs.get("transB")
    return (given.T if transposed else given)[:, :, None, None]


def get_row_shape(parts: Parts) -> ConvShape:
    """The product as a 1x1 convolution over a row of pixels."""
    *rows, inner = static_shape(parts.head.needs(0).shape)
    return ConvShape(1, 1, prod(rows), inner, static_shape(parts.head.outputs[0].shape)[-1])
