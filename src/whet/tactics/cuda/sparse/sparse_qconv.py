"""Quantized convolution with 2:4 weights on Hopper's sparse tensor cores: u8 or i8 by i8, or e4m3; scales per channel, bias, residual, activation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._quantized import FLOAT8, Parts
from whet.tactics._two_four import why_not_two_four
from whet.tactics.cuda._device.kernel import Epilogue, GpuKernel, machine_has
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.quantized._quantized import (
    BYTES,
    Output,
    bound_quantized_result,
    compute_factors,
    fold_into_float8,
    fold_into_range,
    get_quantized_conv_shape,
    has_border,
    list_signatures,
    make_key,
    match_parts,
    match_quantized_epilogue,
    why_not_weighted,
)
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic
from whet.tactics.cuda.quantized.qconv import get_conv_channels, make_instance_types, why_not_float8
from whet.tactics.cuda.sparse._launch import Scales, Types
from whet.tactics.cuda.sparse._two_four_layer import launch_of, list_sparse_configs, pack_sparse_operands, tile_of, why_not_shape


class SparseQuantizedTactic(QuantizedTactic):
    """Quantized layers with constant weights that are 2:4 along the input channels; subclasses give weights and sizes."""

    float8 = True
    format = "linear"

    @abstractmethod
    def filters(self, parts: Parts) -> np.ndarray:
        """The weights as [output channel, input channel, height, width], int8 or float8."""

    @abstractmethod
    def shape(self, parts: Parts) -> ConvShape:
        """The sizes."""

    @abstractmethod
    def channels(self, parts: Parts) -> tuple[Any, Any]:
        """Input and output channels, possibly symbolic."""

    @abstractmethod
    def why_not_kind(self, parts: Parts) -> str | None:
        """Why the layer is none of those that the tactic computes, whatever its weights, or None."""

    @abstractmethod
    def channel_axis(self, layer: Layer) -> int:
        """The axis of the output channels."""

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        reason = self.why_not_kind(parts) or why_not_weighted(parts) or why_not_float8(parts, self.channels(parts))
        weights = parts.view.needs(parts.operand_indices()[1])
        return reason or why_not_two_four(weights, self.name, lambda: self.filters(parts))

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        return [s for s in list_signatures(parts, self.format) if s.outputs[0].dtype.bits <= 16]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        if isinstance(parts, str):
            return parts
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        return self._why_not_sizes(layer, parts, signature)

    def _why_not_sizes(self, layer: Layer, parts: Parts, signature: Signature) -> str | None:
        end = match_quantized_epilogue(parts, self.channel_axis(layer))
        if isinstance(end, str):
            return end
        shape = self.shape(parts)
        if has_border(parts, shape):
            return "takes no zero point with padding"
        types = self._types(parts, end, signature)
        if types.residual and types.residual != types.result and not {types.residual, types.result} <= {*BYTES}:
            return f"a residual of {types.residual} and results of {types.result}; takes both of one size"
        return why_not_shape(shape, types)

    def _types(self, parts: Parts, end: Epilogue, signature: Signature) -> Types:
        types8 = make_instance_types(parts, end, signature, self.shape(parts))
        return Types(types8.source, types8.result, types8.residual, types8.fold)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        end = match_quantized_epilogue(parts, self.channel_axis(layer))
        assert isinstance(end, Epilogue)
        return list_sparse_configs(self.shape(parts), self._types(parts, end, signature), end.post_ops, backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        reason = parts if isinstance(parts, str) else self._why_not_sizes(layer, parts, signature)
        if reason or isinstance(parts, str):
            raise PlanRefused(str(reason))
        end = match_quantized_epilogue(parts, self.channel_axis(layer))
        assert isinstance(end, Epilogue)
        shape, types = self.shape(parts), self._types(parts, end, signature)
        tile = tile_of(config, types, end.residual is not None)
        x, w, b = parts.operand_indices()
        bias = None if b is None else parts.view.inputs[b]
        out, per, shift, post_ops = Output.of(parts, end), 1.0, 0.0, end.post_ops
        if types.fold and types.result == FLOAT8:
            per, out, post_ops = fold_into_float8(out, end)
        elif types.fold:
            per, shift, out, post_ops = fold_into_range(out, end, types.result)

        def floats() -> tuple[np.ndarray, np.ndarray]:
            found = compute_factors(parts, end, self.filters(parts).astype(np.float32), shape, bias).times(per, shift)
            return found.bias[0], found.factor

        packed = pack_sparse_operands(
            f"{parts.view.needs(w).constant().digest}|{self.name}", tile, shape, types, lambda: self.filters(parts),
            f"{make_key(parts, end)}|{self.name} {shape} {per} {shift}", floats,
        )  # fmt: skip
        scales = Scales(out.per_step, out.zero, out.add_step, out.add_shift)

        def make(args: Args) -> list:
            return launch_of(layer, tile, shape, types, x, end, post_ops, args, backend, scales)

        rtol = bound_quantized_result(types.source == FLOAT8, shape.r * shape.s * shape.c, end.post_ops.activation, types.result)
        return GpuKernel(layer, signature, make, implementation=f"sparse wgmma {types.source} {tile}", packed=packed, rtol=rtol)


@tactic
class SparseQConv(SparseQuantizedTactic):
    """One group, two spatial axes, input channels in sixteens; no zero point together with padding."""

    ops = ("Conv",)
    format = "nhwc"

    def filters(self, parts: Parts) -> np.ndarray:
        return parts.view.needs(parts.operand_indices()[1]).array()

    def shape(self, parts: Parts) -> ConvShape:
        return get_quantized_conv_shape(parts)

    def channels(self, parts: Parts) -> tuple[Any, Any]:
        return get_conv_channels(parts)

    def why_not_kind(self, parts: Parts) -> str | None:
        images = parts.head.attrs["group"] == 1 and parts.head.needs(0).type.rank == 4
        return None if images else "takes convolutions of two spatial axes and one group"

    def channel_axis(self, layer: Layer) -> int:
        return 1
