"""And: logical, elementwise with broadcasting."""

import numpy as np

from whet.network import BOOL
from whet.ops._base import op
from whet.ops._binary import BOOL_SAMPLES, binary_couples, infer_of_type

op("And", infer_of_type(BOOL), lambda layer, a, b: np.logical_and(a, b), samples=BOOL_SAMPLES, couples=binary_couples, pointwise=True)
