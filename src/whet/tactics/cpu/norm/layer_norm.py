"""LayerNormalization with constant scale and bias, in f32: compiled passes over each row for the mean, the variance and the result.

For CPUs without oneDNN.
"""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.norm.rms_norm import RmsNorm


@tactic
class LayerNorm(RmsNorm):
    ops = ("LayerNormalization",)
    opt_in, instead_of = True, "ONEDNN"
