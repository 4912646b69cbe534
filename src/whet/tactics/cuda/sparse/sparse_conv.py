"""Convolution with 2:4 weights on Hopper's sparse tensor cores, channels last, f16 or bf16, with bias, residual and activation fused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._two_four import why_not_two_four
from whet.tactics.cuda._device.kernel import Epilogue, GpuKernel, all_static, machine_has, match_epilogue
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv.conv import get_conv_shape, list_conv_signatures, why_not_conv
from whet.tactics.cuda.sparse._launch import RowTile, Types
from whet.tactics.cuda.sparse._two_four_layer import launch_of, list_sparse_configs, pack_sparse_operands, tile_of, why_not_shape


class SparseTactic(Tactic):
    """Layers of 16-bit floats with constant weights that are 2:4 along the input channels; subclasses give weights and sizes.

    An input of infinity or NaN is not multiplied by a weight of zero; a dense product gives NaN there.
    """

    @abstractmethod
    def filters(self, layer: Layer) -> np.ndarray:
        """The weights as [output channel, input channel, height, width]."""

    @abstractmethod
    def shape(self, layer: Layer) -> ConvShape:
        """The sizes."""

    @abstractmethod
    def why_not_kind(self, layer: Layer) -> str | None:
        """Why the layer is none of those that the tactic computes, whatever its weights, or None."""

    @abstractmethod
    def channel_axis(self, layer: Layer) -> int:
        """The axis of the output channels."""

    def match_epilogue(self, layer: Layer) -> Epilogue | str:
        """The epilogue, or why the kernel cannot compute it."""
        return match_epilogue(layer, find_epilogue_steps(layer), self.channel_axis(layer))

    def why_not(self, layer: Layer) -> str | None:
        reason = super().why_not(layer) or self.why_not_kind(layer)
        return reason or why_not_two_four(get_weight_and_bias(layer)[0], self.name, lambda: self.filters(layer))

    def why_not_sizes(self, layer: Layer, signature: Signature) -> str | None:
        """Why the kernels compute no layer of these sizes and with this epilogue, or None."""
        end = self.match_epilogue(layer)
        return end if isinstance(end, str) else why_not_shape(self.shape(layer), get_types(signature))

    def match_problem(self, layer: Layer, signature: Signature) -> tuple[Epilogue, ConvShape, Types]:
        """What a plan computes. Raises PlanRefused for a layer that the kernels do not compute."""
        end, reason = self.match_epilogue(layer), self.why_not_sizes(layer, signature)
        if reason or isinstance(end, str):
            raise PlanRefused(str(reason))
        return end, self.shape(layer), get_types(signature)

    def pack_operands(self, layer: Layer, signature: Signature, end: Epilogue, tile: RowTile) -> tuple[Packed, Packed, Packed]:
        """Weights and biases of a plan."""
        (weights, bias), shape, dtype = get_weight_and_bias(layer), self.shape(layer), signature.outputs[0].dtype
        return pack_sparse_operands(
            f"{weights.constant().digest}|{self.name} {dtype}",
            tile,
            shape,
            get_types(signature),
            lambda: self.filters(layer).astype(dtype.numpy),
            f"{bias.constant().digest if bias is not None else ''} {end.key} {shape.k}",
            lambda: (end.bias(bias, shape.k), None),
        )

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        return self.why_not_sizes(layer, signature)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        end = self.match_epilogue(layer)
        return [] if isinstance(end, str) else list_sparse_configs(self.shape(layer), get_types(signature), end.post_ops, backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        end, shape, types = self.match_problem(layer, signature)
        tile, x = tile_of(config, types, end.residual is not None), get_source_index(layer)

        def make(args: Args) -> list:
            return launch_of(layer, tile, shape, types, x, end, end.post_ops, args, backend)

        return GpuKernel(layer, signature, make, implementation=f"sparse wgmma {tile}", packed=self.pack_operands(layer, signature, end, tile))


def get_types(signature: Signature) -> Types:
    """The types of the kernels: input and result have one."""
    dtype = signature.outputs[0].dtype
    return Types(dtype.name, dtype.name)


@tactic
class SparseConv(SparseTactic):
    """Two spatial axes, one group; any kernel, stride, padding and dilation."""

    ops = ("Conv",)

    def why_not_kind(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        return "takes convolutions of one group" if head.attrs["group"] != 1 else why_not_conv(layer, head)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        return list_conv_signatures(layer, "nhwc") if all_static(layer) and not self.why_not(layer) else []

    def filters(self, layer: Layer) -> np.ndarray:
        return np.asarray(get_weight_and_bias(layer)[0].array(), np.float32)

    def shape(self, layer: Layer) -> ConvShape:
        return get_conv_shape(layer)

    def channel_axis(self, layer: Layer) -> int:
        return 1
