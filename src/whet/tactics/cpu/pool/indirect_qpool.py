"""Quantized average pooling, 8-bit channels last, rescaled before rounding: for CPUs without oneDNN."""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._indirect_kernel import QuantizedIndirectTactic
from whet.tactics.cpu.pool.indirect_pool import IndirectPool


@tactic
class IndirectQPool(QuantizedIndirectTactic, IndirectPool):
    ops = ("AveragePool", "GlobalAveragePool")
