"""CPU features that tests need: tests are skipped with the name of the missing feature."""

import pytest

from whet.tactics.cpu.onednn import _api as dnn

HAS_VNNI = dnn.has_isa("avx512_core_vnni")
VNNI = pytest.mark.skipif(not HAS_VNNI, reason="this CPU has no VNNI: oneDNN's 8-bit products would saturate, so quantized layers stay in float")
# : Largest weight whose products with unsigned 8-bit activations cannot saturate when two of them are added in 16 bits (CPUs without VNNI).
LARGEST_WEIGHT = 127 if HAS_VNNI else 63
