"""Quantized Gemm and MatMul with a constant matrix on the right, exact: for CPUs without oneDNN."""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._indirect_kernel import QuantizedIndirectTactic
from whet.tactics.cpu.linear.linear_layer import LinearLayer


@tactic
class LinearQLayer(QuantizedIndirectTactic, LinearLayer):
    opt_in, instead_of = True, "ONEDNN"
