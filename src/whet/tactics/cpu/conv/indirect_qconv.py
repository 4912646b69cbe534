"""Quantized convolutions of images and lines, of all windows and groups, 8-bit channels last, exact: for CPUs without oneDNN."""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._indirect_kernel import QuantizedIndirectTactic
from whet.tactics.cpu.conv.indirect_conv import IndirectConv


@tactic
class IndirectQConv(QuantizedIndirectTactic, IndirectConv):
    takes_groups = True
