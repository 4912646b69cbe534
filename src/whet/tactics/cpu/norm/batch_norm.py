"""BatchNormalization that no layer absorbs, with its epilogue, f32 channels last: a depthwise convolution of one pixel, for CPUs without oneDNN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index, outer_input
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Parts, Problem, Weights, Window, as_image


@dataclass(frozen=True)
class NormWeights(Weights):
    """A factor and a shift of each channel, from its scale (`tensor`), bias, mean and variance."""

    statistics: tuple[Tensor, ...] = ()
    epsilon: float = 0.0

    @property
    def key(self) -> str:
        return f"{super().key} {'|'.join(t.constant().digest for t in self.statistics)} {self.epsilon!r}"

    def to_matrix(self, w: np.ndarray, is_product: bool) -> np.ndarray:
        return self._compute_factors()[:, None].astype(np.float32)

    def get_biases(self) -> np.ndarray:
        assert self.bias is not None
        shift = self.bias.array().astype(np.float64) - self.statistics[0].array().astype(np.float64) * self._compute_factors()
        return shift.astype(np.float32)

    def _compute_factors(self) -> np.ndarray:
        return self.tensor.array().astype(np.float64) / np.sqrt(self.statistics[1].array().astype(np.float64) + self.epsilon)


@tactic
class BatchNorm(IndirectTactic):
    ops = ("BatchNormalization",)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        where = [outer_input(layer, t) for t in head.inputs[1:5]]
        if len(layer.outputs) != 1 or any(i is None or not layer.needs(i).is_constant for i in where):
            return "its statistics are computed at run time"
        return None if head.needs(0).type.rank in (3, 4, 5) else "takes lines, images and volumes"

    def plan_kernel(self, parts: Parts, signature: Signature, threads: int) -> IndirectKernel:
        layer, head = parts.view, get_root_layer(parts.view)
        samples, channels, *image = static_shape(layer.outputs[0].shape)
        scale, bias, *statistics = (layer.needs(i) for t in head.inputs[1:5] if (i := outer_input(layer, t)) is not None)
        sides = as_image(image)
        ones, zeros = (1,) * len(sides), (0,) * len(sides)
        problem = Problem(samples, sides, sides, 1, 1, channels, Window(ones, ones, ones, zeros))
        weights = NormWeights(scale, bias, statistics=tuple(statistics), epsilon=float(head.attrs["epsilon"]))
        return IndirectKernel(layer, signature, "channelwise", problem, parts.chain, get_source_index(layer), weights, threads)
