"""NonZero: indices of nonzero elements [rank, n]. Its output shape depends on the data, so only known data are read."""

import numpy as np

from whet.ops._refused import compute_or_refuse

compute_or_refuse(
    "NonZero",
    "its output size depends on the data, but an engine needs shapes in advance; export with a mask (Where, Mul) instead",
    lambda node, x: [np.array(np.nonzero(np.atleast_1d(x)), np.int64)],
)
