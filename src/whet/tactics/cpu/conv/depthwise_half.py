"""Depthwise convolutions in f16, channels last, with any epilogue; sums in f32.

Measured: docs/notes/cpu_kernels.md (FP16 with AVX512-FP16).
"""

from __future__ import annotations

from whet.network import F16
from whet.tactics._base import tactic
from whet.tactics.cpu.conv.depthwise_bf16 import DepthwiseBf16


@tactic
class DepthwiseHalf(DepthwiseBf16):
    stored = F16
