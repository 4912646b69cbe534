"""Adds ranges and Q/DQ to a network: calibration and its caches, Q/DQ insertion, sensitivity analysis, accuracy budgets.

The builder decides by timing which precision a layer runs in.
"""

from whet.precision.budget import Budget, Verdict
from whet.precision.cache import read_cache, write_cache
from whet.precision.calibrate import calibrate
from whet.precision.data import Preprocessing, calibration_data
from whet.precision.emulate import PRECISIONS, emulate_network
from whet.precision.histogram import Histogram
from whet.precision.insert import quantize
from whet.precision.quantization_sites import QuantizationSites, find_quantization_sites
from whet.precision.ranges import METHODS, Range, Ranges
from whet.precision.sensitivity import Analysis, LayerSensitivity, select_samples

__all__ = [
    "METHODS",
    "PRECISIONS",
    "Analysis",
    "Budget",
    "Histogram",
    "LayerSensitivity",
    "Preprocessing",
    "QuantizationSites",
    "Range",
    "Ranges",
    "Verdict",
    "calibrate",
    "calibration_data",
    "emulate_network",
    "find_quantization_sites",
    "quantize",
    "read_cache",
    "select_samples",
    "write_cache",
]  # fmt: skip
