"""LayerNormalization of f16 rows with constant scale and bias, computed in f32.

Not measured yet: FP16 engines of transformers on CPUs with AVX512-FP16.
"""

from __future__ import annotations

from whet.network import F16
from whet.tactics._base import tactic
from whet.tactics.cpu.norm.layer_norm_bf16 import LayerNormBf16


@tactic
class LayerNormHalf(LayerNormBf16):
    stored = F16
