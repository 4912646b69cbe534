"""Elementwise layers of 8-bit integers, quantized sums and products among them: dequantized, computed and quantized in registers.

For coverage: CPUs without oneDNN.
"""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.elementwise.elementwise import Elementwise


@tactic
class QuantizedElementwise(Elementwise):
    quantized = True
    opt_in, instead_of = True, "ONEDNN"
