"""Convolutions of images with several channels per group, f32 channels last: oneDNN multiplies one group's matrix after another.

RegNetY-800MF's 3x3 convolutions have 16 channels per group, which fill two vectors.

Measured: docs/notes/cpu_kernels.md
"""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import tactic
from whet.tactics._fused import get_root_layer
from whet.tactics.cpu.conv.indirect_conv import IndirectConv


@tactic
class GroupedConv(IndirectConv):
    opt_in, instead_of, takes_groups = False, "", True

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        weights, groups = get_root_layer(layer).needs(1).shape, get_root_layer(layer).attrs["group"]
        if groups == 1 or weights[0] == groups:
            return "takes convolutions with groups of several output channels"
        return None
