"""And: logical, elementwise with broadcasting."""

import numpy as np

from whet.network import BOOL
from whet.ops._base import op
from whet.ops._binary import BOOL_SAMPLES, infer_of_type, list_binary_couples

op("And", infer_of_type(BOOL), lambda layer, a, b: np.logical_and(a, b), samples=BOOL_SAMPLES, couples=list_binary_couples, pointwise=True)
