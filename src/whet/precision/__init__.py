"""Network + data -> network with ranges and Q/DQ: calibration and its caches, Q/DQ insertion, sensitivity analysis, accuracy budgets.

The builder decides by timing which precision a layer runs in.
"""

from whet.precision.budget import Budget, Verdict
from whet.precision.cache import read_cache, write_cache
from whet.precision.calibrate import calibrate
from whet.precision.data import Preprocessing, calibration_data
from whet.precision.emulate import PRECISIONS, emulated
from whet.precision.histogram import Histogram
from whet.precision.insert import quantize
from whet.precision.places import Places, find_places
from whet.precision.ranges import METHODS, Range, Ranges
from whet.precision.sensitivity import Analysis, Harm, chosen_samples

__all__ = [
    "METHODS", "PRECISIONS", "Analysis", "Budget", "Harm", "Histogram", "Places", "Preprocessing", "Range", "Ranges", "Verdict", "calibrate",
    "calibration_data", "chosen_samples", "emulated", "find_places", "quantize", "read_cache", "write_cache",
]  # fmt: skip
