"""Network + data -> network with ranges and Q/DQ: calibration, its caches, and the insertion of Q/DQ. Which precision pays is the builder's."""

from whet.precision.cache import read_cache, write_cache
from whet.precision.calibrate import calibrate
from whet.precision.data import Preprocessing, calibration_data
from whet.precision.histogram import Histogram
from whet.precision.insert import quantize
from whet.precision.places import Places, find_places
from whet.precision.ranges import METHODS, Range, Ranges

__all__ = [
    "METHODS", "Histogram", "Places", "Preprocessing", "Range", "Ranges", "calibrate", "calibration_data", "find_places", "quantize",
    "read_cache", "write_cache",
]  # fmt: skip
